"""Small helpers under the names that vLLM's users import."""

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import SupportsIndex


def next_power_of_2(n: SupportsIndex) -> int:
    """Returns the smallest power of two that is at least `n`; 1 where `n` is below 1.

    Raises:
      TypeError: `n` is no integer.

    Source: vLLM v1/spec_decode/utils.py, next_power_of_2.
    """
    return 1 << max(operator.index(n) - 1, 0).bit_length()


def unconditional_to_conditional_rates(rates: Sequence[float]) -> list[float]:
    """Turns "all kept up to here" into "kept, given that all before were".

    In: [0.8, 0.4, 0.0, 0.0]. Out: [0.8, 0.5, 0.0, 0.0].

    Args:
      rates: acceptance rate of each position, 0 to 1, as `SpecDecodingStats` counts them.

    Raises:
      ValueError: a rate is no number from 0 to 1.

    Source: vLLM v1/spec_decode/utils.py, unconditional_to_conditional_rates.
    """
    for position, rate in enumerate(rates):
        if not 0 <= rate <= 1:
            raise ValueError(
                f"unconditional_to_conditional_rates: `rates[{position}]` is {rate}, wanted a "
                "share from 0 to 1. Divide a percentage by 100."
            )
    return [rate / before if before > 0 else 0.0 for before, rate in pairwise([1.0, *rates])]
