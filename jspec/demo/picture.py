"""A plot of acceptance by draft position."""

from collections.abc import Mapping, Sequence
from typing import Any

_MARKERS = "osD^vPX*"
_LINES = ("-", "--", "-.", ":")  # so that overlapping curves remain visible
_SHIFT = 0.09  # draft positions between two curves


def plot_acceptance(axes: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """Plots acceptance by draft position, with a small shift between the curves.

    Args:
      axes: of matplotlib.
      curves: by name: share of drafts accepted up to and including each position.
    """
    for i, (name, rates) in enumerate(curves.items()):
        shift = _SHIFT * (i - (len(curves) - 1) / 2)
        positions = [1 + position + shift for position in range(len(rates))]
        style = {"marker": _MARKERS[i % len(_MARKERS)], "linestyle": _LINES[i % len(_LINES)]}
        axes.plot(positions, rates, label=name, **style)
    axes.set(xlabel="draft position", ylabel="share accepted")
    axes.set_xticks(range(1, 1 + max(map(len, curves.values()))))
