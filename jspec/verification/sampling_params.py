"""Sampling parameters: checked once a call, then gathered for the requests of each step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.state import Scheduled


class SamplingParams(NamedTuple):
    """Sampling parameters of each prompt; None where no prompt sets any.

    Attributes:
      temperature: float32; 0 is greedy.
      seed: int32; a prompt's tokens depend on it and on their positions alone.
      top_k, top_p, min_p: see `jspec.verification.sampling.constrain`.
    """

    temperature: np.ndarray
    seed: np.ndarray
    top_k: np.ndarray | None
    top_p: np.ndarray | None
    min_p: np.ndarray | None

    def join(self, scheduled: Scheduled, prompt_index: Sequence[int]) -> Scheduled:
        """Returns a step with the numbers of its requests.

        Args:
          scheduled: on the host.
          prompt_index: of each live request, in the order of `scheduled`.
        """
        num_padded = len(scheduled.request_slot) - len(prompt_index)

        def take(x: np.ndarray | None) -> np.ndarray | None:
            return None if x is None else np.pad(x[list(prompt_index)], (0, num_padded))

        return dataclasses.replace(scheduled, **{k: take(x) for k, x in self._asdict().items()})


def sampling_params(
    owner: str,
    num_prompts: int,
    *,
    temperature: Any = None,
    seed: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
) -> SamplingParams | None:
    """Checks sampling arguments and broadcasts them: one number for all prompts, or one for each.

    Args:
      owner: function that the arguments were passed to.
      num_prompts: prompts of the call.
      temperature: at least 0; None = greedy, as 0 is (see `jspec.verification.sampling.draw`).
      seed: any int32; by default 0.
      top_k: at least 1; 0 or -1 = all.
      top_p: above 0, at most 1.
      min_p: 0..1.

    Returns:
      The numbers, None where everything is greedy.

    Raises:
      ValueError: a number is out of range, a list has another length than the prompts, or a
        parameter is given without a temperature.
    """
    others = {"seed": seed, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if temperature is None:
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"{owner}: `{name}` is {value!r} and `temperature` None, which is greedy "
                    "decoding: there is nothing to choose from. Pass a temperature."
                )
        return None

    def read(name: str, value: Any) -> Any:
        if value is None:
            return None
        dtype, least, most, hint = _RANGES[name]
        is_int = np.issubdtype(dtype, np.integer)
        kind, wanted, form = ("iu", "an int", "d") if is_int else ("iuf", "a number", "g")
        try:
            array = np.asarray(value)
        except ValueError:  # lists of unequal lengths
            array = np.asarray(value, object)
        # Ints beyond int64 are objects, and an empty list is of floats.
        is_valid = array.dtype.kind in kind or all(type(number) is int for number in array.flat)
        if array.ndim > 1 or not is_valid:
            raise ValueError(
                f"{owner}: `{name}` is {value!r}, wanted {wanted} for all prompts, or "
                "a list of one for each."
            )
        if array.ndim and len(array) != num_prompts:
            raise ValueError(
                f"{owner}: `{name}` has {len(array)} entries, but there are {num_prompts} prompts. "
                "Pass one for each, or a single number."
            )
        numbers = array.reshape(-1)
        bad = numbers[~((numbers >= least) & (numbers <= most))]
        if bad.size:
            raise ValueError(
                f"{owner}: `{name}` is {bad[0]}, wanted {wanted} from {least:{form}} to "
                f"{most:{form}}. {hint}"
            )
        return np.broadcast_to(array.astype(dtype), num_prompts)

    given = {"temperature": temperature, **others, "seed": 0 if seed is None else seed}
    return SamplingParams(**{name: read(name, value) for name, value in given.items()})


_INT32 = np.iinfo(np.int32)
_TINY, _MOST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
_RANGES = {
    "temperature": (np.float32, 0, _MOST, "0 is greedy."),
    "seed": (np.int32, _INT32.min, _INT32.max, "Take the lowest 32 bits of it."),
    "top_k": (np.int32, -1, _INT32.max, "0 and -1 keep every token."),
    "top_p": (np.float32, _TINY, 1, "1 keeps every token; for the best one alone pass top_k=1."),
    "min_p": (np.float32, 0, 1, "0 keeps every token."),
}
"""Dtype, least and highest value, and a hint for messages."""
