"""What configs of drafters have in common: how many tokens they draft, and how these are picked."""

from dataclasses import dataclass
from typing import Any, Literal

from jspec._checks import check_at_least
from jspec.models.config import ModelConfig
from jspec.tree import DynamicTree, Tree


class _HasDecoder:
    """What follows from a config's `model`."""

    model: Any  # a ModelConfig, or what has one as `decoder`

    @property
    def decoder(self) -> ModelConfig:
        """Shape of the drafter's layers."""
        return self.model if isinstance(self.model, ModelConfig) else self.model.decoder

    @property
    def vocab_size(self) -> int:
        """Tokens of the target (V)."""
        return self.decoder.vocab_size


@dataclass(frozen=True, kw_only=True)
class DraftingConfig(_HasDecoder):
    """Chooses how much is drafted, and how a draft is picked from the drafter's logits.

    Attributes:
      num_drafts: most drafts a request gets (K).
      draft_sampling: "greedy" takes the best token; "probabilistic" draws at the temperature of the
        request and returns the distribution, which verification needs.

    Raises:
      ValueError: a size below 1, or an unknown way of sampling.
    """

    num_drafts: int
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"

    @property
    def samples(self) -> bool:
        """Whether drafts are drawn, which takes temperatures, and not the best tokens."""
        return self.draft_sampling != "greedy"

    def __post_init__(self):
        owner = type(self).__name__
        check_at_least(owner, 1, num_drafts=self.num_drafts)
        if self.draft_sampling not in ("greedy", "probabilistic"):
            raise ValueError(
                f"{owner}: `draft_sampling` is {self.draft_sampling!r}, wanted 'greedy' or "
                "'probabilistic'."
            )


@dataclass(frozen=True, kw_only=True)
class TreeDraftingConfig(DraftingConfig):
    """Chooses how much is drafted, as a chain or as a tree.

    Attributes:
      num_drafts: most drafts a request gets (K); with a tree its number of nodes, to be left out.
      tree: which guesses are made; None = a chain of the best ones.

    Raises:
      ValueError: as `DraftingConfig`; `num_drafts` is not the tree's; the tree's drafts would be
        sampled.
    """

    num_drafts: int = 0
    tree: Tree | DynamicTree | None = None

    def __post_init__(self):
        owner = type(self).__name__
        if self.tree is not None:
            if not isinstance(self.tree, (Tree, DynamicTree)):
                raise TypeError(
                    f"{owner}: `tree` is {self.tree!r}, wanted a jspec.Tree or jspec.DynamicTree. "
                    "Pass tree=jspec.Tree([(0,), (1,), (0, 0)])."
                )
            if self.num_drafts not in (0, self.tree.num_nodes):
                raise ValueError(
                    f"{owner}: `num_drafts` is {self.num_drafts}, but `tree` has "
                    f"{self.tree.num_nodes} nodes. Leave num_drafts out."
                )
            object.__setattr__(self, "num_drafts", self.tree.num_nodes)
            if self.samples:
                raise ValueError(
                    f"{owner}: `draft_sampling` is {self.draft_sampling!r}, but a tree holds the "
                    "best tokens after each node. Pass draft_sampling='greedy', or draft without a "
                    "tree (tree=None)."
                )
        super().__post_init__()


def check_width(owner: str, tree: Tree | DynamicTree | None, num_ids: int) -> None:
    """Raises ValueError if a tree wants more candidates after a node than there are draft ids."""
    if tree is not None and tree.width > num_ids:
        raise ValueError(
            f"{owner}: `tree` picks among the best {tree.width} tokens after a node, but the "
            f"drafter knows {num_ids}. Use lower ranks, or a lower top_k."
        )
