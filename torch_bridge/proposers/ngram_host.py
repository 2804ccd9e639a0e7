"""N-gram lookup for PyTorch runners, on the host.

Source: vLLM v1/spec_decode/ngram_proposer.py.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import int32, int64

from jspec._numba import entry
from jspec.proposers import ngram
from torch_bridge.proposers.settings import ConfigReader, Settings, count_first, drafts_of_step


class Lookup:
    """The configuration of drafters with n-gram lookup, which have no weights."""

    def __init__(self, vllm_config: Any):
        read = ConfigReader(vllm_config, type(self).__name__)
        self.settings = Settings.of(read)
        self.k, self.max_model_len = self.settings.num_drafts, self.settings.max_model_len
        names = ("prompt_lookup_min", "prompt_lookup_max")
        given = {name: read(f"speculative_config.{name}", None) for name in names}
        self.min_n, self.max_n = ngram.NgramConfig(num_drafts=self.k, **given).bounds

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there are no weights."""


class NgramProposer(Lookup):
    """Drafts what followed the earliest of the longest earlier matches, on the host.

    JAX does not run, so it works in forked workers. Construction compiles.

    Args:
      vllm_config: read by attribute: `prompt_lookup_min` and `prompt_lookup_max` (either takes the
        value of the other, and both are 5 by default) and `num_speculative_tokens` of its
        `speculative_config`, and `model_config.max_model_len`.

    Attributes:
      min_n: shortest suffix that may match, in tokens.
      max_n: longest suffix that is compared, in tokens.
      k: most drafts a request gets.
      max_model_len: most tokens of a request.

    Raises:
      ValueError: a size is missing or below 1, or the minimum is above the maximum.
    """

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config)
        _search.compile(_SEARCH_TYPES)

    @count_first
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray | torch.Tensor,
        token_ids_cpu: np.ndarray | torch.Tensor,
        slot_mappings: Any = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> list[list[int]]:
        """Drafts the next tokens of each request.

        Args:
          sampled_token_ids: what each request sampled in this step; one without drafts nothing.
          num_tokens_no_spec: int [at least B] known tokens of each row, the sampled ones included.
          token_ids_cpu: int32 [at least B, S] known tokens; not copied where it is contiguous.
          slot_mappings: not read.
          num_speculative_tokens: K of this step, by default the configured one.

        Returns:
          A list of drafts for each request. With n known tokens there are at most
          `max_model_len - n`.

        Raises:
          TypeError, ValueError: an argument is invalid; the message names it.

        Source: vLLM v1/spec_decode/ngram_proposer.py, NgramProposer.propose.
        """
        del slot_mappings
        owner = type(self).__name__
        num_drafts = drafts_of_step(owner, num_speculative_tokens, self.k)
        table = _on_host(owner, "token_ids_cpu", token_ids_cpu, 2, ("int32",))
        num_tokens = _on_host(owner, "num_tokens_no_spec", num_tokens_no_spec, 1, _LENGTHS)
        B = len(sampled_token_ids)
        for name, array in (("token_ids_cpu", table), ("num_tokens_no_spec", num_tokens)):
            if len(array) < B:
                raise ValueError(
                    f"{owner}: `{name}` has {len(array)} rows, and `sampled_token_ids` {B}. Pass "
                    "the arrays of the same batch."
                )
        skipped = np.array([len(sampled) == 0 for sampled in sampled_token_ids], bool)
        lengths = num_tokens[:B]
        lengths = np.where(skipped | (lengths >= self.max_model_len), 0, lengths)
        if np.any((lengths < 0) | (lengths > table.shape[1])):
            raise ValueError(
                f"{owner}: `num_tokens_no_spec` is {num_tokens[:B]}, wanted 0 to {table.shape[1]}, "
                f"the width of `token_ids_cpu`. Pass the number of known tokens of each row."
            )
        history = np.ascontiguousarray(table[:B]).view()
        history.flags.writeable = False  # one numba type for all arrays, so one compilation
        tokens, counts = np.empty((B, num_drafts), np.int32), np.zeros(B, np.int32)
        limits = self.min_n, self.max_n, self.max_model_len
        _search(history, lengths.astype(np.int32), *limits, tokens, counts)
        rows = zip(tokens.tolist(), counts.tolist(), strict=True)
        return [row[:count] for row, count in rows]


_LENGTHS = ("int32", "int64")


def _on_host(owner: str, name: str, array: Any, ndim: int, dtypes: tuple[str, ...]) -> np.ndarray:
    """Returns a numpy array, or a tensor on the CPU as one, without a copy."""
    if isinstance(array, torch.Tensor) and array.device.type == "cpu":
        array = array.detach().numpy()
    if isinstance(array, np.ndarray) and array.ndim == ndim and str(array.dtype) in dtypes:
        return array
    came = getattr(array, "dtype", type(array).__name__), getattr(array, "device", "")
    shape = tuple(getattr(array, "shape", ()))
    raise TypeError(
        f"{owner}: `{name}` is {came[0]} {shape} {came[1]}, wanted {' or '.join(dtypes)} of "
        f"{ndim} dimensions on the CPU: a numpy array or a torch tensor. Pass the runner's own "
        "host array."
    )


_match_end = ngram._match_end
_SEARCH_TYPES = (
    numba.types.Array(int32, 2, "C", readonly=True),
    *(int32[::1], int64, int64, int64, int32[:, ::1], int32[::1]),
)


# Not jspec's search, which ends a draft at a negative id. On one thread, as in vLLM: a thread pool
# does not work after a fork.
@entry(ngram)
def _search(
    history,  # [B, S]
    lengths,  # [B]; 0 drafts nothing
    min_n,
    max_n,
    max_model_len,
    tokens,  # [B, K] out
    counts,  # [B] out
):
    for b in range(lengths.size):
        room = min(tokens.shape[1], max_model_len - lengths[b])
        if room <= 0 or lengths[b] == 0:
            continue
        known = history[b]
        start = _match_end(known, lengths[b], min_n, max_n)
        if start >= 0:
            counts[b] = min(room, lengths[b] - start)
            tokens[b, : counts[b]] = known[start : start + counts[b]]
