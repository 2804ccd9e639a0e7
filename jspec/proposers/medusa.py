"""Medusa: heads that guess the next tokens all at once from the target's last hidden state.

There is no cache and no loop: head i reads the row of the last kept token and guesses draft i, or,
in a tree, the nodes of level i. Source: arXiv 2401.10774; vLLM 0.20.0 v1/spec_decode/medusa.py.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec._checks import check_at_least, warn
from jspec.axes import PAD_TOKEN
from jspec.checkpoint import Checkpoint, Model, assemble
from jspec.checkpoint.agreement import explained
from jspec.checkpoint.sharing import own_or_shared
from jspec.checkpoint.target_ids import read_token_map
from jspec.config import CacheConfig
from jspec.models import medusa
from jspec.models.layers import Place, Rules
from jspec.models.medusa import TOKEN_MAP, HeadsConfig
from jspec.proposers import _draft
from jspec.proposers._draft import DraftingConfig, Vocabulary
from jspec.proposers.base import Drafter, Proposer, Reads
from jspec.proposers.loaders import medusa as loader
from jspec.state import Batch, Drafts, Params, pytree, static
from jspec.tree import Tree


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DraftingConfig):
    """Chooses the heads that draft, and what is drafted from them.

    Attributes:
      num_drafts: most drafts a request gets (K); at most the heads, or exactly the nodes of `tree`.
        None = as many as there are.
      model: the heads' shape; vocabulary and width are the target's.
      tree: draft these nodes; each on level i is one of the best tokens of head i. None = one token
        a head.

    Raises:
      ValueError: a size is below 1, more is drafted than there are heads, or a tree is to be
        sampled.
    """

    num_drafts: int = cast(int, None)
    model: HeadsConfig
    tree: Tree | None = None

    def __post_init__(self):
        heads, tree = self.model.num_heads, self.tree
        if tree is not None and not isinstance(tree, Tree):
            raise TypeError(
                f"MedusaConfig: `tree` is {tree!r}, wanted a jspec.Tree: a head does not know what "
                "those above it drafted. Pass tree=jspec.Tree([(0,), (1,), (0, 0)])."
            )
        if self.num_drafts is None:
            object.__setattr__(self, "num_drafts", tree.num_nodes if tree else heads)
        super().__post_init__()
        if tree is None and self.num_drafts > heads:
            raise ValueError(
                f"MedusaConfig: `num_drafts` is {self.num_drafts}, and there are {heads} heads, "
                f"each of which drafts one token. Pass num_drafts={heads} or less."
            )
        if tree is None:
            return
        if self.num_drafts != tree.num_nodes:
            raise ValueError(
                f"MedusaConfig: `num_drafts` is {self.num_drafts}, and `tree` has "
                f"{tree.num_nodes} nodes. Leave num_drafts out."
            )
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
        if self.draft_sampling != "greedy":
            raise ValueError(
                f"MedusaConfig: `draft_sampling` is {self.draft_sampling!r}, and the nodes of a "
                "`tree` are best tokens. Choose 'greedy', or draft without a tree."
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
    config: MedusaConfig, params: Params, memory: Memory, batch: Batch, columns: int
) -> tuple[Memory, Drafts]:
    """Runs the heads that `columns` drafts need on each request's last kept row."""
    assert batch.hidden is not None  # checked by the api
    hidden = _draft.take(batch.hidden, batch.last_index)  # [T, D] -> [B, D]
    guess = _one_each if config.tree is None else _nodes
    tokens, probs, depths = guess(config, params, hidden, batch, columns)
    # A draft is kept where its path still fits: a prefix, as the deeper ones come later.
    room = memory.max_model_len - 1 - _draft.next_position(batch)  # [B]
    kept = (depths[None] <= room[:, None]) & _draft.is_live(batch)[:, None]  # [B, K]
    kept = jnp.cumprod(kept & (tokens != PAD_TOKEN), axis=1, dtype=jnp.int32) > 0
    parents = None if config.tree is None else config.tree.parents[None, :columns]  # [1, K]
    memory = Memory(num_steps=memory.num_steps + 1, max_model_len=memory.max_model_len)
    return memory, Drafts(
        tokens=jnp.where(kept, tokens, PAD_TOKEN),
        num_drafts=kept.sum(axis=1, dtype=jnp.int32),
        probs=None if probs is None else jnp.where(kept[..., None], probs, 0),
        parents=None if parents is None else jnp.where(kept, parents, PAD_TOKEN),
    )


def _one_each(
    config: MedusaConfig, params: Params, hidden: Float[Array, "B D"], batch: Batch, columns: int
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None, Int[np.ndarray, "K"]]:
    """Picks a token of each head; returns tokens, their distributions and how deep they lie."""
    V, num_requests = config.vocab_size, hidden.shape[0]
    vocabulary = Vocabulary(V, params.get("target_ids"))
    heads = medusa.build(config.model, params)
    picked = [
        _draft.pick(vocabulary, config, heads.logits(hidden, i), batch, i) for i in range(columns)
    ]
    depths = np.arange(1, columns + 1, dtype=np.int32)
    if picked:
        tokens, probs = jax.tree.map(lambda *of_heads: jnp.stack(of_heads, axis=1), *picked)
        return tokens, probs, depths
    probs = jnp.zeros((num_requests, 0, V), jnp.float32)
    sampled = config.draft_sampling != "greedy"
    return jnp.zeros((num_requests, 0), jnp.int32), probs if sampled else None, depths


def _nodes(
    config: MedusaConfig, params: Params, hidden: Float[Array, "B D"], batch: Batch, columns: int
) -> tuple[Int[Array, "B K"], None, Int[np.ndarray, "K"]]:
    """Picks the tokens of the tree's first nodes: on level i some of the best of head i."""
    del batch
    assert config.tree is not None
    depths, ranks = config.tree.depths[:columns], config.tree.ranks[:columns]
    heads = medusa.build(config.model, params)
    vocabulary = Vocabulary(config.vocab_size, params.get("target_ids"))
    tokens = [jnp.zeros((hidden.shape[0], 0), jnp.int32)]
    for i in range(int(depths.max(initial=0))):
        wanted = ranks[depths == i + 1]
        _, best = jax.lax.top_k(heads.logits(hidden, i), int(wanted.max()) + 1)
        best = _draft.to_tokens(vocabulary, best)
        tokens.append(_draft.take(best.T, jnp.asarray(wanted)).T)  # [R, B] -> [B, nodes]
    return jnp.concatenate(tokens, axis=1), None, depths


def reads(config: MedusaConfig) -> Reads:
    """Asks for the target's hidden states after its final norm."""
    return Reads(
        hidden_layers=("norm",),
        hidden_size=config.model.hidden_size,
        sampling=config.draft_sampling == "probabilistic",
    )


def init_params(config: MedusaConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks."""
    return medusa.init_params(config.model, key, dtype)


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells Medusa heads by their tensors, or by what config.json says."""
    if medusa.count_layers([medusa.short_name(name) for name in names]):
        return True
    return config.get("model_type") == "medusa" or config.get("architectures") == ["MedusaModel"]


def load(
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    tree: Tree | None = None,
) -> Drafter:
    """Loads heads in the layout of FasterDecoding's Medusa or of vLLM.

    Heads that no draft needs are not read. Where the checkpoint has no output matrix, the target's
    serves all heads.

    Args:
      checkpoint: its folder.
      target: the model that the heads were trained for.
      dtype: of the heads' weights.
      num_drafts: most drafts a request gets (K), by default one of each head in config.json.
      draft_sampling: as in `MedusaConfig`.
      tree: as in `MedusaConfig`.

    Raises:
      ValueError: the heads are for a target of another size, there are fewer than drafts, the map
        of a truncated vocabulary is missing or no map, or tensors are missing or unknown (all are
        listed).
    """
    if num_drafts is not None:
        check_at_least("medusa", 1, num_drafts=num_drafts)
    names = [medusa.short_name(name) for name in checkpoint.names]
    model = loader.heads_config(checkpoint, target, num_drafts=num_drafts, tree=tree)
    order = _token_map(checkpoint, model)
    template = medusa.abstract_params(model, dtype)
    shares = model.shared_head and not any(medusa.is_head(n, model.num_layers) for n in names)
    if shares:
        del template["head"]

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in zip(names, (t for _, t in checkpoint.tensors()), strict=True):
            if order is not None and medusa.is_head(name, model.num_layers):
                tensor = _truncated(tensor, *order, vocab_size=model.vocab_size)
            yield name, tensor

    with explained(lambda: loader.reasons(checkpoint, model)):
        params = assemble(template, medusa.rules(model, names), tensors())
    of_target = target.params["embed" if target.config.tie_embeddings else "head"]
    if order is not None:
        params["target_ids"] = jnp.asarray(order[0])
        of_target = _draft.take(of_target, params["target_ids"]) if shares else of_target
    if model.shared_head:
        own = None if shares else np.asarray(params["head"])
        params["head"] = own_or_shared(own, of_target, dtype)
    config = MedusaConfig(
        num_drafts=cast(int, num_drafts), model=model, draft_sampling=draft_sampling, tree=tree
    )
    return Drafter(config, params)


def _token_map(
    checkpoint: Checkpoint, model: HeadsConfig
) -> tuple[Int[np.ndarray, "Vd"], Int[np.ndarray, "Vd"]] | None:
    """Returns the target's ids of a truncated vocabulary, ascending, and the row of each.

    Ascending, so that among equal logits the lowest of the target's ids wins.
    """
    stored = dict(checkpoint.tensors())
    ids = next((np.asarray(stored[n]) for n in stored if medusa.short_name(n) == TOKEN_MAP), None)
    size = model.draft_vocab_size
    if size is None:
        if ids is not None and not np.array_equal(ids, np.arange(model.vocab_size)):
            warn(
                f"medusa: {TOKEN_MAP!r} of {len(ids)} ids is not read: config.json has no "
                "truncated_vocab_size below the target's vocabulary. Set it, or remove the table."
            )
        return None
    if ids is None:
        raise ValueError(
            f"medusa: truncated_vocab_size is {size}, below the target's {model.vocab_size}, and "
            f"the checkpoint has no {TOKEN_MAP!r} that says which tokens they are. Add it to the "
            "checkpoint: the target's id of each row, [truncated_vocab_size]."
        )
    found = read_token_map("medusa", TOKEN_MAP, ids, num_ids=size, vocab_size=model.vocab_size)
    return found.ids, np.arange(size) if found.order is None else found.order


def _truncated(
    head: np.ndarray, ids: np.ndarray, rows: np.ndarray, *, vocab_size: int
) -> np.ndarray:
    """Reads the rows of a head that the map names; a head of the whole vocabulary is cut.

    One of another shape comes back as it is, to be refused by name.
    """
    if head.ndim != 2:
        return head
    if len(head) == len(ids):
        return head[rows]
    return head[ids] if len(head) == vocab_size else head


def rules(config: MedusaConfig, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint is in the params, by its full name."""
    table = medusa.rules(config.model, [medusa.short_name(name) for name in names])
    table[TOKEN_MAP] = Place(("target_ids",))
    return {name: table.get(medusa.short_name(name)) for name in names}


PROPOSER = Proposer(
    name="medusa",
    Config=MedusaConfig,
    init=init,
    propose=propose,
    reads=reads,
    init_params=init_params,
    recognises=recognises,
    load=load,
    rules=rules,
    tree=lambda config: config.tree,
)
