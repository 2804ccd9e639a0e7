"""Medusa: heads that predict the next tokens all at once from the target's last hidden state.

There is no cache and no loop: head i reads the row of the last kept token and predicts draft i, or,
in a tree, the nodes of level i. Source: arXiv 2401.10774; vLLM 0.20.0 v1/spec_decode/medusa.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.config import CacheConfig
from jspec.models import weights
from jspec.models.medusa import HeadsConfig, Medusa
from jspec.proposers import _draft
from jspec.proposers._config import TreeDraftingConfig
from jspec.proposers._draft import Vocabulary
from jspec.proposers.base import Proposer, Reads, init_params
from jspec.proposers.loaders import medusa as loader
from jspec.state import Batch, Drafts, Params, pytree, static
from jspec.tree import DynamicTree, Tree


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(TreeDraftingConfig):
    """Chooses the heads that draft, and what is drafted from them.

    Attributes:
      num_drafts: most drafts a request gets (K); at most the heads, or exactly the nodes of `tree`.
        None = as many as there are.
      model: the heads' shape; vocabulary and width are the target's.
      tree: draft these nodes; each on level i is one of the best tokens of head i. None = one token
        a head.

    Raises:
      ValueError: as `TreeDraftingConfig`; more is drafted than there are heads.
    """

    num_drafts: int = cast(int, None)
    model: HeadsConfig
    tree: Tree | None = None

    def __post_init__(self):
        heads, tree = self.model.num_heads, self.tree
        if isinstance(tree, DynamicTree):
            raise TypeError(
                f"MedusaConfig: `tree` is {tree!r}, wanted a jspec.Tree: a head does not know what "
                "those above it drafted. Pass tree=jspec.Tree([(0,), (1,), (0, 0)])."
            )
        if self.num_drafts is None:
            object.__setattr__(self, "num_drafts", 0 if tree else heads)
        super().__post_init__()
        if tree is None:
            if self.num_drafts > heads:
                raise ValueError(
                    f"MedusaConfig: `num_drafts` is {self.num_drafts}, and there are {heads} "
                    f"heads, each of which drafts one token. Pass num_drafts={heads} or less."
                )
            return
        if tree.depth > heads:
            raise ValueError(
                f"MedusaConfig: `tree` has {tree.depth} levels, and there are {heads} heads, one a "
                "level. Leave the deeper nodes out."
            )
        if tree.width > self.model.num_ids:
            raise ValueError(
                f"MedusaConfig: `tree` asks for the {tree.width} best tokens of a head that has "
                f"{self.model.num_ids}. Lower the ranks in the tree."
            )

    @property
    def vocab_size(self) -> int:
        """Tokens of the target (V)."""
        return self.model.vocab_size

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=HeadsConfig.tiny())


@pytree
class Memory:
    """Nothing of a request is kept.

    Attributes:
      num_steps: calls so far: the one leaf by which a state that was used is known from a new one.
      max_model_len: most tokens of a request.
    """

    num_steps: Int[Array, ""]
    max_model_len: int = static()


def init(config: MedusaConfig, params: Params, cache: CacheConfig, max_requests: int) -> Memory:
    """Makes the memory; no page of the cache is used."""
    del config, params, max_requests
    return Memory(num_steps=jnp.zeros((), jnp.int32), max_model_len=cache.max_model_len)


def propose(
    config: MedusaConfig, params: Params, memory: Memory, batch: Batch, num_drafts: int
) -> tuple[Memory, Drafts]:
    """Runs the heads that `num_drafts` drafts need on each request's last kept row."""
    assert batch.hidden is not None  # checked by the api
    vocabulary = Vocabulary(config.vocab_size, params.get("target_ids"))
    max_model_len = memory.max_model_len
    memory = Memory(num_steps=memory.num_steps + 1, max_model_len=max_model_len)
    if num_drafts == 0:
        return memory, _draft.no_drafts(vocabulary, config, batch, tree=config.tree)
    heads = weights.bind(Medusa, config.model, params)
    hidden = _draft.take(batch.hidden, batch.last_index)  # [T, D] -> [B, D]
    if config.tree is not None:
        tokens = _nodes(config.tree, heads, vocabulary, hidden, num_drafts)
        depths, parents = (x[None, :num_drafts] for x in (config.tree.depths, config.tree.parents))
        return memory, _draft.truncate(
            batch, tokens, None, max_model_len, depths=depths, parents=parents
        )
    logits = [heads.logits(hidden, i) for i in range(num_drafts)]
    picked = [_draft.pick(vocabulary, config, x, batch, i) for i, x in enumerate(logits)]
    tokens, probs = jax.tree.map(lambda *of_heads: jnp.stack(of_heads, axis=1), *picked)
    return memory, _draft.truncate(batch, tokens, probs, max_model_len)


def _nodes(
    tree: Tree, heads: Medusa, vocabulary: Vocabulary, hidden: Float[Array, "B D"], num_drafts: int
) -> Int[Array, "B K"]:
    """Picks the tokens of the tree's first nodes: on level i some of the best of head i."""
    depths, ranks, tokens = tree.depths[:num_drafts], tree.ranks[:num_drafts], []
    for i in range(int(depths.max())):
        wanted = ranks[depths == i + 1]
        _, best = jax.lax.top_k(heads.logits(hidden, i), int(wanted.max()) + 1)
        best = _draft.to_tokens(vocabulary, best)
        tokens.append(_draft.take(best.T, jnp.asarray(wanted)).T)  # [R, B] -> [B, nodes]
    return jnp.concatenate(tokens, axis=1)


PROPOSER = Proposer(
    name="medusa",
    Config=MedusaConfig,
    init=init,
    propose=propose,
    reads=lambda config: Reads(
        hidden_layers=("norm",), hidden_size=config.model.hidden_size, sampling=config.samples
    ),
    init_params=lambda config, key, dtype: init_params(
        Medusa, config, key, dtype, num_ids=config.model.num_ids
    ),
    recognises=loader.recognises,
    load=partial(loader.load, MedusaConfig),
    rules=loader.rules,
    tree=lambda config: config.tree,
)
