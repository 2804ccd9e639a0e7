"""jspec inside vLLM: classes for `method: custom_class`, and a switch for vLLM's own methods.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`), used or
not, so JAX is imported where a drafter is made and no sooner.
"""

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import torch_bridge

SWITCH = "JSPEC_VLLM_SWAP"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_HOME = "vllm.v1.spec_decode"
_SWAPS = {  # vLLM's module and the class in it, whose name ours has as well
    "ngram": ("ngram_proposer", "NgramProposer"),
    "ngram_gpu": ("ngram_proposer_gpu", "NgramProposerGPU"),
    "suffix": ("suffix_decoding", "SuffixDecodingProposer"),
    "eagle": ("eagle", "EagleProposer"),
    "eagle3": ("eagle", "EagleProposer"),
    "mtp": ("eagle", "EagleProposer"),
    "dflash": ("dflash", "DFlashProposer"),
    "draft_model": ("draft_model", "DraftModelProposer"),
    "medusa": ("medusa", "MedusaProposer"),
    "extract_hidden_states": ("extract_hidden_states", "ExtractHiddenStatesProposer"),
}

logger = logging.getLogger(__name__)


def register() -> None:
    """Swaps vLLM's proposers for jspec's if the environment variable JSPEC_VLLM_SWAP names any.

    Its value is `all` or a list of methods with commas between them, such as `eagle3,suffix`.
    Without it nothing of vLLM is imported or changed. A second call changes nothing more.

    Raises:
      ValueError: a method is unknown. ImportError: vLLM has no such class where its runner looked
        it up in the releases that this was written for. RuntimeError: vLLM would run its V2 runner,
        which has no proposer classes.
    """
    asked = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    if asked:
        swap(_SWAPS if asked == ["all"] else asked, skip_missing=asked == ["all"])


def swap(methods: Iterable[str], *, skip_missing: bool = False) -> tuple[str, ...]:
    """Puts jspec's classes in the place of vLLM's, where vLLM's runner looks their names up.

    Where the environment says nothing about JAX's memory, it then takes what it needs, not most of
    the GPU.

    Args:
      methods: of drafting, as vLLM names them.
      skip_missing: warn of methods whose module this vLLM does not have, instead of raising.

    Returns:
      The names that were swapped.

    Raises: as `register`.
    """
    swaps: dict[str, str] = {}
    for method in methods:
        if method not in _SWAPS:
            raise ValueError(
                f"{SWITCH}: {method!r} is no method that can be swapped, wanted all, or some of "
                f"{', '.join(_SWAPS)} with commas between them."
            )
        swaps.setdefault(_SWAPS[method][1], method)
    runner = _import(_RUNNER)
    _check_runner()
    places: list[tuple[ModuleType, str]] = []
    for name, method in swaps.items():
        module, _ = _SWAPS[method]
        if skip_missing and not _exists(f"{_HOME}.{module}"):
            logger.warning("%s: this vLLM has no %s.%s: not swapped.", SWITCH, _HOME, module)
            continue
        is_lazy = name == "NgramProposer"  # which the runner imports wherever it needs it
        if is_lazy:
            places.append((_import(f"{_HOME}.{module}"), name))
        if not is_lazy or hasattr(runner, name):
            places.append((runner, name))
    for place, name in places:  # all of them, before anything changes
        if not isinstance(getattr(place, name, None), type):
            raise ImportError(
                f"{SWITCH}: {place.__name__} has no class {name}, so that {swaps[name]!r} cannot "
                "be swapped in this release of vLLM. Take it out of the variable, or install a "
                "release that docs/pytorch.md names."
            )
    fractions = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    if not any(os.environ.get(name) for name in fractions):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for place, name in places:
        setattr(place, name, getattr(torch_bridge, name))
    swapped = tuple(dict.fromkeys(name for _, name in places))
    logger.info("%s: jspec drafts in the place of vLLM's %s.", SWITCH, ", ".join(swapped))
    return swapped


class CustomNgram:
    """N-gram lookup for vLLM's `method: custom_class`; see `torch_bridge.ngram.NgramProposer`.

    vLLM sets `prompt_lookup_min` and `prompt_lookup_max` to 0 for this method, so both are read
    from `additional_config`: {"jspec": {"prompt_lookup_min": 2, "prompt_lookup_max": 4}}.

    Args:
      vllm_config: read by attribute.

    Raises:
      ValueError: `additional_config["jspec"]` has another key, or a size does not fit.
    """

    def __init__(self, vllm_config: Any):
        names = ("prompt_lookup_min", "prompt_lookup_max")
        options = dict.fromkeys(names) | _options(vllm_config, type(self).__name__, names)
        speculative = _Overlay(vllm_config.speculative_config, method="ngram", **options)
        self._proposer = torch_bridge.NgramProposer(
            _Overlay(vllm_config, speculative_config=speculative)
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there are no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts the next tokens of each request; see `torch_bridge.ngram.NgramProposer`."""
        return self._proposer.propose(
            sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings
        )


class CustomSuffix:
    """Suffix decoding for vLLM's `method: custom_class`; see `SuffixDecodingProposer`.

    vLLM hands over rows without ids, and rows move. A row belongs to the request whose whole text
    of the last step it continues: exactly, no token more or fewer. Two requests with the same text
    may change places, which changes no draft. A request whose tokens of a step were not handed
    over, or that comes back after preemption, counts as a new one with all its text as the prompt.

    Args:
      vllm_config: read by attribute; the sizes are `suffix_decoding_max_tree_depth`,
        `..._max_cached_requests`, `..._max_spec_factor` and `..._min_token_prob` of its
        `speculative_config`.

    Raises:
      ValueError: a value is missing or out of range.
    """

    def __init__(self, vllm_config: Any):
        _options(vllm_config, type(self).__name__, ())
        self._proposer = torch_bridge.SuffixDecodingProposer(vllm_config)
        self._rows: list[_Request] = []
        self._num_started = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there are no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Adds the sampled tokens to what the requests said, and drafts.

        Args:
          sampled_token_ids: what each request sampled in this step; one without drafts nothing.
          num_tokens_no_spec: int [at least B] known tokens of each row, the sampled ones included.
          token_ids_cpu: int32 [at least B, S] known tokens.
          slot_mappings: not read.

        Returns:
          A list of drafts for each request.
        """
        num_rows = len(sampled_token_ids)
        lengths = np.asarray(num_tokens_no_spec)[:num_rows]
        tokens = np.asarray(token_ids_cpu)[:num_rows]
        num_known = lengths - np.array([len(row) for row in sampled_token_ids], lengths.dtype)
        self._rows = self._follow(tokens, num_known)
        for request, row, length in zip(self._rows, tokens, lengths, strict=True):
            request.extend(row[:length])
        names = [request.name for request in self._rows]
        input_batch = SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            num_prompt_tokens=num_known,
            num_tokens_no_spec=lengths,
            token_ids_cpu=tokens,
        )
        return self._proposer.propose(input_batch, sampled_token_ids, slot_mappings)

    def _follow(self, tokens: np.ndarray, num_known: np.ndarray) -> list["_Request"]:
        """Finds the request of each row: the same row's if it fits, or else any with its text."""
        texts = [row[: max(n, 0)] for row, n in zip(tokens, num_known, strict=True)]
        stays = [
            i < len(self._rows) and np.array_equal(self._rows[i].text, text)
            for i, text in enumerate(texts)
        ]
        moved: dict[bytes, list[_Request]] = {}
        if not all(stays):
            for i, request in enumerate(self._rows):
                if i >= len(texts) or not stays[i]:
                    moved.setdefault(request.text.tobytes(), []).append(request)
        found = []
        for i, text in enumerate(texts):
            same_text = [] if stays[i] else moved.get(text.tobytes(), [])
            if stays[i]:
                found.append(self._rows[i])
            elif same_text:
                found.append(same_text.pop())
            else:
                self._num_started += 1
                found.append(_Request(f"jspec-{self._num_started}", text.copy(), len(text)))
        return found


@dataclass
class _Request:
    """A request as far as it is known: its tokens are the first ones of memory that grows."""

    name: str
    memory: np.ndarray
    length: int

    @property
    def text(self) -> np.ndarray:
        return self.memory[: self.length]

    def extend(self, text: np.ndarray) -> None:
        """Takes the text's new tokens over; the caller writes to its own memory later."""
        if len(text) > len(self.memory):
            memory = np.empty(2 * len(text), text.dtype)
            memory[: self.length] = self.text
            self.memory = memory
        self.memory[self.length : len(text)] = text[self.length :]
        self.length = len(text)


class _Overlay:
    """An object's attributes, some of them replaced."""

    def __init__(self, config: Any, **attributes: Any):
        vars(self).update(attributes)
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _options(vllm_config: Any, owner: str, names: tuple[str, ...]) -> dict[str, Any]:
    extra = getattr(vllm_config, "additional_config", None)
    options = extra.get("jspec", {}) if isinstance(extra, dict) else {}
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(
            f"{owner}: `additional_config['jspec']` has {', '.join(unknown)}, wanted "
            f"{' and '.join(names) if names else 'nothing'}. Take it out."
        )
    return options


def _check_runner() -> None:
    """Refuses vLLM's V2 runner, which drafts without any of the classes that are swapped."""
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    chosen = getattr(_import("vllm.envs"), variable, False)
    if chosen is not False:
        raise RuntimeError(
            f"{SWITCH}: {variable} is {chosen}, so that vLLM may run its V2 runner, which has no "
            f"proposer classes. Set {variable}=0 beside {SWITCH}."
        )


def _exists(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return False
        raise
    return True


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ImportError(
            f"{SWITCH}: there is no module {error.name} in this vLLM, or no vLLM. Unset the "
            "variable, or install a release that docs/pytorch.md names."
        ) from error
