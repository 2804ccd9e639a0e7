"""EAGLE-3 heads, which fuse hidden states from several layers of the target, and P-EAGLE.

The head pairs token i + 1 with the fused hidden state at i and goes on from its own output; trained
for it (P-EAGLE), it drafts all tokens in one pass instead. Source: arXiv 2503.01840; vLLM
v1/spec_decode/eagle.py, llm_base_proposer.py.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.eagle3 import Eagle3ModelConfig, Head
from jspec.models.kv_cache import KVCache
from jspec.models.llama import HiddenId
from jspec.proposers import _draft, base
from jspec.proposers._config import TreeDraftingConfig, check_width
from jspec.proposers._draft import DraftModel
from jspec.proposers._tree import draft_tree
from jspec.proposers.base import Proposer, Reads, init_pages, refuse_axes
from jspec.proposers.loaders import eagle3 as loader
from jspec.proposers.loaders.hf_config import mask_token_of, num_drafts_of
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
            refuse_axes("eagle3 with parallel_drafting", self.decoder)
        if self.parallel_drafting and self.tree is not None:
            raise ValueError(
                "Eagle3Config: `tree` is given, but drafts in parallel know nothing of each other, "
                "so that none has children. Pass tree=None, or parallel_drafting=False."
            )
        if self.tree is not None:
            refuse_axes("eagle3 with a tree", self.decoder)
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


def draft_model(config: Eagle3Config, params: Params) -> DraftModel:
    """Binds the head to its weights, as the draft loop calls it."""
    head = weights.bind(Head, config.model, params)
    return DraftModel(
        run=head,
        logits=head.logits,
        vocab_size=config.vocab_size,
        target_ids=params.get("target_ids"),
        mask_token=config.mask_token or 0,
        mask_hidden=params.get("mask_hidden"),
    )


def propose(
    config: Eagle3Config, params: Params, memory: KVCache, batch: Batch, num_drafts: int
) -> tuple[KVCache, Drafts]:
    """Fuses the rows' hidden states, then drafts in a chain, in a tree or in one pass."""
    draft = _draft.in_parallel if config.parallel_drafting else _draft.chain
    draft = draft if config.tree is None else draft_tree
    with jax.named_scope("fuse"):
        hidden = weights.bind(Head, config.model, params).fuse(batch.hidden)  # [T, Dh] -> [T, D]
    return draft(
        draft_model(config, params),
        config,
        dataclasses.replace(batch, hidden=hidden),
        memory,
        num_drafts=num_drafts,
        shift=True,
    )


def init_params(config: Eagle3Config, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks."""
    params = base.init_params(Head, config, key, dtype, num_ids=config.model.draft_vocab_size)
    if config.parallel_drafting:
        params["mask_hidden"] = jnp.ones(config.decoder.hidden_size, dtype)
    return params


PROPOSER = Proposer(
    name="eagle3",
    Config=Eagle3Config,
    init=init_pages,
    propose=propose,
    reads=lambda config: Reads(
        hidden_layers=config.hidden_layers,
        hidden_size=config.model.input_size,
        sampling=config.samples,
        embeds_size=0 if config.parallel_drafting else config.decoder.hidden_size,
    ),
    tree=lambda config: config.tree,
    init_params=init_params,
    recognises=loader.recognises,
    load=partial(loader.load, Eagle3Config),
    rules=loader.rules,
)
