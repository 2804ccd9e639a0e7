"""Token trees: the draft tokens of a step and the parent of each."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Int

from jspec._checks import check_at_least
from jspec.axes import PAD_TOKEN


@dataclass(frozen=True)
class Tree:
    """A fixed tree of drafts, each node named by its path from the root.

    Path `(1, 0)` is the best token after the second-best first token. The root, the token that the
    request continues from, is no node. Nodes count from 0, level by level.

    Args:
      choices: the nodes' paths in any order, or the text of such a list, the form of vLLM's
        `speculative_token_tree`.

    Attributes:
      choices: the paths, sorted by depth and then by rank.

    Raises:
      TypeError: the paths are no tuples of ints. ValueError: the tree is empty, a path is empty,
        negative or given twice, a node's parent is missing, or the text is no list of tuples.

    Example:
      >>> tree = Tree([(0,), (1,), (0, 0), (0, 1), (1, 0)])
      >>> tree.num_nodes, tree.depth, tree.parents.tolist()
      (5, 2, [-1, -1, 0, 0, 1])
    """

    choices: tuple[tuple[int, ...], ...]

    def __init__(self, choices: str | Iterable[tuple[int, ...]]):
        object.__setattr__(self, "choices", _sorted_paths(choices))

    @classmethod
    def chain(cls, num_drafts: int) -> Self:
        """Returns the tree in which each draft follows the one before it."""
        check_at_least("Tree.chain", 1, num_drafts=num_drafts)
        return cls(tuple((0,) * (i + 1) for i in range(num_drafts)))

    @property
    def num_nodes(self) -> int:
        """Counts the nodes (X)."""
        return len(self.choices)

    @property
    def depth(self) -> int:
        """Counts the levels: the most drafts that can be accepted in a step."""
        return len(self.choices[-1])

    @property
    def width(self) -> int:
        """Counts the candidates that a node's children are picked from."""
        return 1 + max(path[-1] for path in self.choices)

    @cached_property
    def parents(self) -> Int[np.ndarray, "X"]:
        """The node that each node follows; PAD where that is the root."""
        index = {path: i for i, path in enumerate(self.choices)}
        return _frozen([index.get(path[:-1], PAD_TOKEN) for path in self.choices])

    @cached_property
    def ranks(self) -> Int[np.ndarray, "X"]:
        """Which of its parent's best candidates each node is; 0 is the best."""
        return _frozen([path[-1] for path in self.choices])

    @cached_property
    def depths(self) -> Int[np.ndarray, "X"]:
        """Tokens from the root to each node; 1 on the first level."""
        return _frozen([len(path) for path in self.choices])

    @property
    def num_per_level(self) -> tuple[int, ...]:
        """Counts the nodes of each level."""
        return tuple(np.bincount(self.depths)[1:].tolist())

    @property
    def cu_per_level(self) -> tuple[int, ...]:
        """Counts the nodes of each level and of those above it."""
        return tuple(np.cumsum(self.num_per_level).tolist())

    @property
    def num_children_per_level(self) -> tuple[int, ...] | None:
        """Counts the children of each node above each level; None where they differ (uneven)."""
        nodes = [*range(PAD_TOKEN, self.num_nodes)]
        counts = {node: int((self.parents == node).sum()) for node in nodes}
        levels = [{counts[PAD_TOKEN]}]
        for level in range(1, self.depth):
            levels.append({counts[i] for i in range(self.num_nodes) if self.depths[i] == level})
        if any(len(level) > 1 for level in levels):
            return None
        return tuple(level.pop() for level in levels)

    @cached_property
    def visible(self) -> Bool[np.ndarray, "X X"]:
        """Whether the second node lies on the way from the root to the first, itself included."""
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != PAD_TOKEN:
                mask[node] |= mask[parent]
        mask.setflags(write=False)
        return mask


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """A tree that follows the drafter's confidence, so that each context gets another one.

    Each level extends the `top_k` likeliest nodes of the level before by their `top_k` best tokens;
    the `num_nodes` likeliest of all candidates are verified. Likelihood is that of the whole path.

    Attributes:
      top_k: nodes extended per level, and candidates after each.
      depth: most drafts that can be accepted in a step.
      num_nodes: drafts of a request (X).

    Raises:
      ValueError: a size is below 1, or there are fewer candidates than nodes.

    Source: EAGLE-2, arXiv 2406.16858, section 4.
    """

    top_k: int
    depth: int
    num_nodes: int

    def __post_init__(self):
        check_at_least(
            "DynamicTree", 1, top_k=self.top_k, depth=self.depth, num_nodes=self.num_nodes
        )
        if self.num_nodes > self.num_candidates:
            raise ValueError(
                f"DynamicTree: `num_nodes` is {self.num_nodes}, but top_k={self.top_k} and depth="
                f"{self.depth} give {self.num_candidates} candidates. Lower num_nodes, or raise "
                "top_k or depth."
            )

    @property
    def num_candidates(self) -> int:
        """Counts the candidates that the nodes are picked from."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def width(self) -> int:
        """Counts the candidates after each node."""
        return self.top_k


def _frozen(values: list[int]) -> Int[np.ndarray, "X"]:
    array = np.array(values, np.int32)
    array.setflags(write=False)
    return array


def _sorted_paths(choices: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(choices, str):
        choices = _parse(choices)
    if not isinstance(choices, Iterable):
        raise TypeError(
            f"Tree: `choices` is {choices!r}, wanted paths such as [(0,), (1,), (0, 0)]. "
            "Pass a list of tuples."
        )
    paths = list(choices)
    for path in paths:
        if not isinstance(path, tuple) or not all(type(rank) is int for rank in path):
            raise TypeError(
                f"Tree: `choices` has {path!r}, wanted a tuple of plain ints. A node on the first "
                "level is written (0,), with the comma."
            )
        if not path or min(path) < 0:
            raise ValueError(
                f"Tree: `choices` has {path!r}, wanted ranks of at least 0, one a level. The root "
                "is no node: leave () out."
            )
    if not paths:
        raise ValueError("Tree: `choices` is empty, wanted at least one node, for example (0,).")
    known = set(paths)
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"Tree: `choices` has {twice!r} twice. Give each node once.")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(
                f"Tree: `choices` has {path!r}, but not its parent {path[:-1]!r}. Add the parent."
            )
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _parse(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"Tree: `choices` is the text {text!r}, wanted a list of tuples, for example "
            "'[(0,), (1,), (0, 0)]'. Write it as a Python literal."
        ) from error
    # "[(0)]" and "(0, 1)" parse, too: their parts are refused by name.
    return value
