"""EAGLE-1 and EAGLE-2 heads: the target's next hidden state, drafted token by token.

The head pairs token i + 1 with the target's hidden state at i, and goes on from its own output.
Source: arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2, the same weights); vLLM
v1/spec_decode/eagle.py.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jax import Array
from jax.typing import DTypeLike

from jspec._checks import warn
from jspec.checkpoint import Checkpoint, Model, assemble, check_layers
from jspec.checkpoint.agreement import by_tensors, decoder_reasons, explained
from jspec.checkpoint.sharing import own_or_shared
from jspec.config import CacheConfig
from jspec.models import eagle, llama
from jspec.models.eagle import EagleModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import Place
from jspec.models.options import flag
from jspec.proposers import _draft
from jspec.proposers._draft import DraftModel
from jspec.proposers._tree import TreeDraftingConfig, check_width, draft_tree
from jspec.proposers.base import Drafter, Proposer, Reads, refuse_axes
from jspec.proposers.loaders.hf_config import architectures
from jspec.state import Batch, Drafts, Params
from jspec.tree import DynamicTree, Tree


@dataclass(frozen=True, kw_only=True)
class EagleConfig(TreeDraftingConfig):
    """Chooses the head that drafts, and whether it drafts a chain or a tree.

    Attributes:
      model: its shape; vocabulary and width are the target's.

    Raises:
      ValueError: as `TreeDraftingConfig`; the tree wants more candidates than there are tokens.
      NotImplementedError: a tree for positions of three axes (M-RoPE).
    """

    model: EagleModelConfig

    def __post_init__(self):
        super().__post_init__()
        check_width("EagleConfig", self.tree, self.vocab_size)
        if self.tree is not None:
            refuse_axes("eagle with a tree", self.model)

    @property
    def vocab_size(self) -> int:
        """Tokens of the target (V)."""
        return self.model.vocab_size

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=EagleModelConfig.tiny(fc_bias=True))


def init(config: EagleConfig, params: Params, cache: CacheConfig, max_requests: int) -> KVCache:
    """Allocates the head's own KV pages, one for each of the target's."""
    del params, max_requests
    return llama.init_pages(config.model, cache)


def draft_model(config: EagleConfig, params: Params) -> DraftModel:
    """Binds the head to its weights, as the draft loop calls it."""
    model = eagle.build(config.model, params)

    def run(token_ids, hidden, view, cache, embeds):
        out, cache = model(token_ids, hidden, view, cache, embeds)
        return out, out, cache

    return DraftModel(run=run, logits=model.logits, vocab_size=config.vocab_size)


def propose(
    config: EagleConfig, params: Params, memory: KVCache, batch: Batch, columns: int
) -> tuple[KVCache, Drafts]:
    """Runs the step's rows with their hidden states, then one drafted token or level at a time."""
    draft = _draft.chain if config.tree is None else draft_tree
    return draft(
        draft_model(config, params),
        config,
        batch,
        memory,
        page_size=memory.page_size,
        max_model_len=memory.max_model_len,
        steps=columns,
        shift=True,
    )


def reads(config: EagleConfig) -> Reads:
    """Asks for the target's hidden states after its final norm."""
    return Reads(
        hidden_layers=("norm",),
        hidden_size=config.model.hidden_size,
        sampling=config.draft_sampling == "probabilistic",
        embeds_size=config.model.hidden_size,
    )


def init_params(config: EagleConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks."""
    return eagle.init_params(config.model, key, dtype)


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells an EAGLE-1 head from other heads: by `architectures`, and by tensor names.

    The config of a published head is a plain Llama's.
    """
    if any(part in name for name in names for part in _OF_OTHERS):
        return False
    named = architectures(config)
    if any("Eagle3" in name for name in named):
        return False
    return "fc.weight" in names or any(name.startswith("Eagle") for name in named)


def load(
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    tree: Tree | DynamicTree | None = None,
) -> Drafter:
    """Loads a head in the layout of SafeAILab's EAGLE; embedding and head are the target's.

    Args:
      checkpoint: its folder; an embedding of its own is kept where it differs from the target's.
      target: the model that the head was trained for.
      dtype: of the head's weights.
      num_drafts: most drafts a request gets (K), by default 5.
      draft_sampling: as in `EagleConfig`.
      tree: guesses to make in place of a chain.

    Raises:
      ValueError: the head is for a target of another size, or has tensors that EAGLE-1 has not, or
        lacks some (all are listed).
    """
    if tree is not None:
        refuse_axes("eagle with a tree", target.config)
    hf = by_tensors(checkpoint.config, checkpoint.names)
    model = EagleModelConfig.from_hf({**hf, "architectures": None})
    fc_bias = _fc_bias(hf, checkpoint.names)
    model = dataclasses.replace(model, fc_bias=fc_bias, tie_embeddings=False)
    _check_fits(model, target, checkpoint.names)
    check_layers("eagle", model.num_layers, checkpoint.names)
    own = next((tensor for name, tensor in checkpoint.tensors() if name == _EMBED), None)
    if own is not None and own.shape != (model.vocab_size, model.hidden_size):
        raise ValueError(
            f"eagle: {_EMBED} is {list(own.shape)}, wanted {[model.vocab_size, model.hidden_size]} "
            "by config.json. Take weights and config.json from the same head."
        )
    template = eagle.abstract_params(model, dtype)
    del template["embed"], template["head"]
    others = (item for item in checkpoint.tensors() if item[0] != _EMBED)
    with explained(lambda: decoder_reasons(hf, model, checkpoint)):
        params = assemble(template, eagle.rules(model), others)
    params["embed"] = own_or_shared(own, target.params["embed"], dtype)
    params["head"] = target.params["embed" if target.config.tie_embeddings else "head"]
    if num_drafts is None:
        num_drafts = 5 if tree is None else tree.num_nodes
    config = EagleConfig(
        num_drafts=num_drafts,
        tree=tree,
        draft_sampling=draft_sampling,
        model=model,
    )
    return Drafter(config, params)


_EMBED = "embed_tokens.weight"

_OF_OTHERS = ("midlayer.", "hidden_norm", "d2t", "mask_hidden")
"""Parts of tensor names that EAGLE-3 and DFlash heads have and EAGLE-1 heads have not."""

_NO_PLACE = {
    "layers.0.input_layernorm.weight": "the first layer of an EAGLE-1 head reads its input as it "
    "is. Remove the tensor, or load the head by the method that it was trained for",
    "lm_head.weight": "an EAGLE-1 head is scored by its target's lm_head. Remove the tensor, or "
    "load a head that brings its own by the method that it was trained for (eagle3)",
}


def _fc_bias(hf: Mapping[str, Any], names: Collection[str]) -> bool:
    """Returns whether the fusing projection has a bias: the tensors say it, and `bias` may."""
    has_bias = "fc.bias" in names
    if flag(hf, "bias", has_bias) != has_bias:
        warn(
            f"config.json says bias {hf['bias']}, and the head has {'an' if has_bias else 'no'} "
            "fc.bias. The tensors count. Correct bias in config.json."
        )
    return has_bias


def _check_fits(model: EagleModelConfig, target: Model, names: Collection[str]) -> None:
    for field in ("hidden_size", "vocab_size"):
        got, wanted = getattr(model, field), getattr(target.config, field)
        if got != wanted:
            raise ValueError(
                f"eagle: the head's {field} is {got}, the target's {wanted}. Load the head that "
                "was trained for this target, or the target that this head was trained for."
            )
    for name, why in _NO_PLACE.items():
        if name in names:
            raise ValueError(f"eagle: the checkpoint has {name}, but {why}.")


PROPOSER = Proposer(
    name="eagle",
    Config=EagleConfig,
    init=init,
    propose=propose,
    reads=reads,
    tree=lambda config: config.tree,
    init_params=init_params,
    recognises=recognises,
    load=load,
    rules=lambda config, names: eagle.rules(config.model) | {_EMBED: Place(("embed",))},
)
