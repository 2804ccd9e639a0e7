"""EAGLE-3 heads, which fuse hidden states from several layers of the target, and P-EAGLE.

The head pairs token i + 1 with the fused hidden state at i and goes on from its own output; trained
for it (P-EAGLE), it drafts all tokens in one pass instead. Source: arXiv 2503.01840; vLLM
v1/spec_decode/eagle.py, llm_base_proposer.py.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jspec.checkpoint import Checkpoint, Model, assemble, check_layers
from jspec.checkpoint.agreement import explained
from jspec.checkpoint.assemble import is_float
from jspec.checkpoint.sharing import own_or_shared
from jspec.checkpoint.target_ids import read_d2t
from jspec.config import CacheConfig
from jspec.models import eagle3, llama
from jspec.models.config import ModelConfig
from jspec.models.eagle3 import Eagle3ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import Place
from jspec.models.llama import HiddenId
from jspec.proposers import _draft
from jspec.proposers._draft import DraftModel
from jspec.proposers._tree import TreeDraftingConfig, check_width, draft_tree
from jspec.proposers.base import Drafter, Proposer, Reads, refuse_axes
from jspec.proposers.loaders import eagle3 as loader
from jspec.proposers.loaders.hf_config import architectures, mask_token_of, num_drafts_of
from jspec.state import Batch, Drafts, Params
from jspec.tree import DynamicTree, Tree


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(TreeDraftingConfig):
    """Chooses the head that drafts, and whether it drafts a chain or a tree.

    Attributes:
      model: its shape.
      hidden_layers: hidden states of the target that it reads, lowest layer first.
      parallel_drafting: all drafts come out of one pass (P-EAGLE).
      mask_token: id of the rows that are drafted in parallel.

    Raises:
      ValueError: the layers are not as many as the head fuses, parallel drafting lacks a mask
        token of the vocabulary, or a tree does not go with the head.
    """

    model: Eagle3ModelConfig
    hidden_layers: tuple[HiddenId, ...]
    parallel_drafting: bool = False
    mask_token: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.parallel_drafting:
            refuse_axes("eagle3 with parallel_drafting", self.model.decoder)
        if self.parallel_drafting and self.tree is not None:
            raise ValueError(
                "Eagle3Config: `tree` is given, but drafts in parallel know nothing of each other, "
                "so that none has children. Pass tree=None, or parallel_drafting=False."
            )
        if self.tree is not None:
            refuse_axes("eagle3 with a tree", self.model.decoder)
            check_width("Eagle3Config", self.tree, self.model.draft_vocab_size)
        count = max(self.model.num_fused, 1)
        if len(self.hidden_layers) != count:
            raise ValueError(
                f"Eagle3Config: `hidden_layers` is {self.hidden_layers}, wanted {count}, as many "
                "as the head reads. Pass one id for each; ('norm',) for a head that fuses none."
            )
        if self.parallel_drafting and self.mask_token not in range(self.vocab_size):
            raise ValueError(
                f"Eagle3Config: `mask_token` is {self.mask_token}, wanted an id below vocab_size = "
                f"{self.vocab_size}. Pass the one that the head was trained with, or "
                "parallel_drafting=False."
            )

    @property
    def vocab_size(self) -> int:
        """Tokens of the target (V)."""
        return self.model.decoder.vocab_size

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        tensors: Collection[str],
        *,
        num_layers: int,
        num_drafts: int | None = None,
        draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
        parallel_drafting: bool | None = None,
        tree: Tree | DynamicTree | None = None,
    ) -> Self:
        """Reads a head's config.json, of the plain or the speculators form.

        Args:
          config: its content.
          tensors: names in the checkpoint.
          num_layers: layers of the target (L).
          num_drafts, draft_sampling, parallel_drafting, tree: as `load`.

        Raises:
          ValueError: a size is missing, or a value is not supported.
        """
        hf = loader.plain(config)
        layers = loader.hidden_layers(hf, num_layers)
        parallel = "mask_hidden" in tensors if parallel_drafting is None else parallel_drafting
        if num_drafts is None:
            num_drafts = num_drafts_of(hf) if tree is None else tree.num_nodes
        num_fused = 0 if layers == ("norm",) else len(layers)
        model = loader.model_config(hf, tensors, num_fused=num_fused)
        return cls(
            num_drafts=num_drafts,
            tree=tree,
            draft_sampling=draft_sampling,
            model=model,
            hidden_layers=layers,
            parallel_drafting=parallel,
            mask_token=mask_token_of(hf, model.decoder.vocab_size) if parallel else None,
        )

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        decoder = ModelConfig.tiny()
        model = Eagle3ModelConfig(decoder=decoder, draft_vocab_size=40, target_size=24)
        return cls(num_drafts=3, model=model, hidden_layers=(0, 1, 2))


def init(config: Eagle3Config, params: Params, cache: CacheConfig, max_requests: int) -> KVCache:
    """Allocates the head's own KV pages, one for each of the target's."""
    del params, max_requests
    return llama.init_pages(config.model.decoder, cache)


def draft_model(config: Eagle3Config, params: Params) -> DraftModel:
    """Binds the head to its weights, as the draft loop calls it."""
    head = _head(config, params)
    return DraftModel(
        run=head,
        logits=head.logits,
        vocab_size=config.vocab_size,
        target_ids=params.get("target_ids"),
        mask_token=config.mask_token or 0,
        mask_hidden=params.get("mask_hidden"),
    )


def propose(
    config: Eagle3Config, params: Params, memory: KVCache, batch: Batch, columns: int
) -> tuple[KVCache, Drafts]:
    """Fuses the rows' hidden states, then drafts in a chain, in a tree or in one pass."""
    draft = _draft.in_parallel if config.parallel_drafting else _draft.chain
    draft = draft if config.tree is None else draft_tree
    with jax.named_scope("fuse"):
        hidden = _head(config, params).fuse(batch.hidden)  # [T, Dh] -> [T, D]
    return draft(
        draft_model(config, params),
        config,
        dataclasses.replace(batch, hidden=hidden),
        memory,
        page_size=memory.page_size,
        max_model_len=memory.max_model_len,
        steps=columns,
        shift=True,
    )


def reads(config: Eagle3Config) -> Reads:
    """Asks for the target's hidden states that the head fuses."""
    return Reads(
        hidden_layers=config.hidden_layers,
        hidden_size=config.model.input_size,
        sampling=config.draft_sampling == "probabilistic",
        embeds_size=0 if config.parallel_drafting else config.model.decoder.hidden_size,
    )


def init_params(config: Eagle3Config, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks; the draft ids lie evenly in V."""
    params = eagle3.init_params(config.model, key, dtype)
    V, Vd = config.vocab_size, config.model.draft_vocab_size
    if Vd < V:
        params["target_ids"] = jnp.asarray(np.arange(Vd) * V // Vd, jnp.int32)
    if config.parallel_drafting:
        params["mask_hidden"] = jnp.ones(config.model.decoder.hidden_size, dtype)
    return params


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells an EAGLE-3 or P-EAGLE head by `architectures`, or else by its first layer."""
    named = [name.lower() for name in architectures(config)]
    return (
        any("eagle3" in name or "peagle" in name for name in named)
        or config.get("speculators_model_type") in ("eagle3", "peagle")
        or not {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}.isdisjoint(names)
    )


def load(
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    parallel_drafting: bool | None = None,
    tree: Tree | DynamicTree | None = None,
) -> Drafter:
    """Loads a head of any published layout: SafeAILab's, SpecForge's, speculators'.

    Args:
      checkpoint: its folder. Embedding and lm_head are the target's where it has none or the same.
      target: the model that the head was trained for.
      dtype: of the head's weights.
      num_drafts: most drafts a request gets (K), by default config.json's, or else 5.
      draft_sampling: as in `Eagle3Config`.
      parallel_drafting: whether to draft all tokens in one pass; by default if the checkpoint was
        trained for it, which its `mask_hidden` shows.
      tree: guesses to make in place of a chain.

    Raises:
      ValueError: the head is for another target, an option is not supported, or a tensor is
        missing or does not fit (all are listed).
    """
    config = Eagle3Config.from_hf(
        checkpoint.config,
        checkpoint.names,
        num_layers=target.config.num_layers,
        num_drafts=num_drafts,
        draft_sampling=draft_sampling,
        parallel_drafting=parallel_drafting,
        tree=tree,
    )
    if config.parallel_drafting:
        refuse_axes("eagle3 with parallel_drafting", target.config)
    if tree is not None:
        refuse_axes("eagle3 with a tree", target.config)
    model = config.model
    loader.warn_of_unused(checkpoint, model, asked=parallel_drafting is not None)
    check_layers("eagle3", model.decoder.num_layers, checkpoint.names)
    apart = {name: tensor for name, tensor in checkpoint.tensors() if name in _APART}
    _check_fits(config, target, apart)
    template = eagle3.abstract_params(model, dtype)
    rules = eagle3.rules(model, checkpoint.names)
    for name, leaf in ((_EMBED, "embed"), (_HEAD, "head")):
        if name not in apart or apart[name].shape == template[leaf].shape:
            rules[name] = None
            del template[leaf]  # the others stay, to be listed as misshapen
    with explained(lambda: loader.reasons(model, checkpoint)):
        params = assemble(template, rules, checkpoint.tensors())
    params["embed"] = own_or_shared(apart.get(_EMBED), target.params["embed"], dtype)
    shared_head = target.params["embed" if target.config.tie_embeddings else "head"]
    own_head = apart.get(_HEAD)
    if "d2t" in apart or "t2d" in apart:
        ids, order = read_d2t(
            "eagle3",
            apart.get("d2t"),
            apart.get("t2d"),
            num_ids=model.draft_vocab_size,
            vocab_size=config.vocab_size,
        )
        if order is not None:
            own_head = np.asarray(shared_head if own_head is None else own_head)[order]
        if len(ids) < config.vocab_size:
            params["target_ids"] = jnp.asarray(ids)
    params["head"] = own_or_shared(own_head, shared_head, dtype)
    if config.parallel_drafting:
        raw = np.asarray(apart["mask_hidden"]).reshape(1, -1)
        params["mask_hidden"] = _head(config, params).fuse(raw)[0]  # [1, Dh] -> [D]
    return Drafter(config, params)


_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
_APART = (_EMBED, _HEAD, "d2t", "t2d", "mask_hidden")
"""Tensors that are shared, sorted or fused before they become params."""


def _head(config: Eagle3Config, params: Params) -> eagle3.Head:
    extra = ("target_ids", "mask_hidden")
    return eagle3.build(config.model, {k: v for k, v in params.items() if k not in extra})


def _check_fits(config: Eagle3Config, target: Model, apart: Mapping[str, np.ndarray]) -> None:
    """Refuses a head for another target, and one without a tensor that nothing stands in for."""
    model, wanted = config.model, target.config
    V, Vd, D = config.vocab_size, model.draft_vocab_size, model.decoder.hidden_size
    for field, ours, theirs in (
        ("target_hidden_size", model.target_size, wanted.hidden_size),
        ("vocab_size", V, wanted.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"eagle3: the head's {field} is {ours}, the target's {theirs}. Load the head that "
                "was trained for this target, or the target that this head was trained for."
            )
    missing = {
        "d2t": Vd < V and f"maps its {Vd} draft ids to the target's {V}, by draft_vocab_size",
        _EMBED: D != wanted.hidden_size
        and f"has its width {D}, where the target's embedding has {wanted.hidden_size}",
        _HEAD: (Vd, D) != (V, wanted.hidden_size)
        and f"scores its {Vd} draft ids from width {D}, where the target's has shape "
        f"{[V, wanted.hidden_size]}",
        "mask_hidden": config.parallel_drafting and "drafting in parallel starts from",
    }
    for name, why in missing.items():
        if why and name not in apart:
            raise ValueError(
                f"eagle3: the checkpoint has no {name}, which {why}. Load a complete checkpoint"
                + (", or pass parallel_drafting=False." if name == "mask_hidden" else ".")
            )
    if not config.parallel_drafting:
        return
    mask = apart["mask_hidden"]
    if mask.size != model.input_size or not is_float(mask):
        raise ValueError(
            f"eagle3: mask_hidden is {mask.dtype} {list(mask.shape)}, wanted {model.input_size} "
            f"floats, as wide as what the head reads of the target ({config.hidden_layers}, by "
            "use_aux_hidden_state and eagle_aux_hidden_state_layer_ids). Take weights and "
            "config.json from the same head."
        )


PROPOSER = Proposer(
    name="eagle3",
    Config=Eagle3Config,
    init=init,
    propose=propose,
    reads=reads,
    tree=lambda config: config.tree,
    init_params=init_params,
    recognises=recognises,
    load=load,
    rules=lambda config, names: eagle3.rules(config.model, names) | {"d2t": Place(("target_ids",))},
)
