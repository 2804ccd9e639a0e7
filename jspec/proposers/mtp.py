"""The multi-token-prediction modules that a target brings with it (MTP), as MiMo has them.

A module pairs token i + 1 with the target's hidden state at i, and goes on from its own output;
several modules draft in turn. Source: arXiv 2412.19437 section 2.2; vLLM
model_executor/models/mimo_mtp.py.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jax import Array
from jax.typing import DTypeLike

from jspec._checks import check_at_least
from jspec.checkpoint import Checkpoint, Model, assemble, check_layers
from jspec.checkpoint.agreement import decoder_reasons, explained
from jspec.checkpoint.sharing import own_or_shared
from jspec.config import CacheConfig
from jspec.models import llama, mtp
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import Place
from jspec.models.llama import HiddenId
from jspec.proposers import _draft, _in_turn
from jspec.proposers._draft import DraftingConfig, DraftModel
from jspec.proposers.base import Drafter, Proposer, Reads
from jspec.proposers.loaders.hf_config import architectures
from jspec.state import Batch, Drafts, Params

Memory: TypeAlias = KVCache | _in_turn.Memory
"""Keys and values; with several modules, what they pass on from step to step, too."""


@dataclass(frozen=True, kw_only=True)
class MTPConfig(DraftingConfig):
    """Chooses the modules that draft.

    Attributes:
      model: shape of a module's decoder layer; `num_layers` counts the modules, and vocabulary and
        width are the target's.
      hidden_layer: the hidden state of the target that they read: residual stream after that many
        layers, or "norm" = after the final norm.
    """

    model: ModelConfig
    hidden_layer: HiddenId

    @property
    def vocab_size(self) -> int:
        """Tokens of the target (V)."""
        return self.model.vocab_size

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford: two modules, so that they draft in turn."""
        return cls(num_drafts=4, model=ModelConfig.tiny(num_layers=2), hidden_layer=2)


def init(config: MTPConfig, params: Params, cache: CacheConfig, max_requests: int) -> Memory:
    """Allocates the modules' own KV pages, one for each of the target's."""
    model = config.model
    pages = llama.init_pages(model, cache)
    if model.num_layers == 1:
        return pages
    return _in_turn.init(
        pages,
        max_requests=max_requests,
        hidden_size=model.hidden_size,
        dtype=params["modules"]["0"]["input_proj"].dtype,
    )


def forget(config: MTPConfig, memory: Memory, slot: Array, *prompt: Array) -> Memory:
    """Empties a request's row."""
    del config, prompt
    return memory if isinstance(memory, KVCache) else _in_turn.forget(memory, slot)


def draft_models(config: MTPConfig, params: Params) -> list[DraftModel]:
    """Binds each module to its weights, as the draft loop calls it."""
    model = mtp.build(config.model, params)

    def bound(index: int) -> DraftModel:
        def run(token_ids, hidden, view, cache, embeds):
            out, cache = model(index, token_ids, hidden, view, cache, embeds)
            return out, out, cache

        return DraftModel(run=run, logits=model.logits, vocab_size=config.vocab_size)

    return [bound(index) for index in range(config.model.num_layers)]


def propose(
    config: MTPConfig, params: Params, memory: Memory, batch: Batch, columns: int
) -> tuple[Memory, Drafts]:
    """Runs the step's rows with their hidden states, then one drafted token at a time."""
    models = draft_models(config, params)
    if not isinstance(memory, KVCache):
        return _in_turn.in_turn(models, config, batch, memory, steps=columns)
    return _draft.chain(
        models[0],
        config,
        batch,
        memory,
        page_size=memory.page_size,
        max_model_len=memory.max_model_len,
        steps=columns,
        shift=True,
    )


def reads(config: MTPConfig) -> Reads:
    """Asks for the hidden state that the modules were trained on."""
    return Reads(
        hidden_layers=(config.hidden_layer,),
        hidden_size=config.model.hidden_size,
        sampling=config.draft_sampling == "probabilistic",
        embeds_size=config.model.hidden_size,
    )


def init_params(config: MTPConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks."""
    return mtp.init_params(config.model, key, dtype)


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells a checkpoint with MTP modules, of any architecture, by its tensor names."""
    del config
    return any(name.startswith("mtp.") or any(m in name for m in _OF_MODULES) for name in names)


def load(
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    hidden_layer: HiddenId | None = None,
) -> Drafter:
    """Loads MiMo's modules; embedding and head are the target's.

    Args:
      checkpoint: the target's own folder, or one with the modules alone.
      target: the model that they were trained with.
      dtype: of the modules' weights.
      num_drafts: most drafts a request gets (K), by default one for each module.
      draft_sampling: as in `MTPConfig`.
      hidden_layer: as in `MTPConfig`, by default the residual stream before the final norm.

    Raises:
      ValueError: the modules are of another architecture or for a target of another size, or
        tensors are missing or unknown (all are listed).
    """
    config = checkpoint.config
    _check_architecture(config)
    num_modules: Any = config.get("num_nextn_predict_layers")
    check_at_least("mtp: config.json", 1, num_nextn_predict_layers=num_modules)
    shape = {"model_type": "mimo", "num_hidden_layers": num_modules, "layer_types": None}
    shape["architectures"] = None
    model = ModelConfig.from_hf({**config, **shape})
    model = dataclasses.replace(model, tie_embeddings=False)
    _check_fits(model, target)
    check_layers("mtp", num_modules, checkpoint.names, "num_nextn_predict_layers")
    if hidden_layer is None:
        hidden_layer = target.config.num_layers
    if hidden_layer != "norm" and hidden_layer not in range(target.config.num_layers + 1):
        raise ValueError(
            f"mtp: `hidden_layer` is {hidden_layer!r}, wanted 0 (the target's embedding) to "
            f"{target.config.num_layers} (its last layer) or 'norm'."
        )
    tables = {name: x for name, x in checkpoint.tensors() if name in _SHARED}
    for name, table in tables.items():
        if table.shape != (model.vocab_size, model.hidden_size):
            raise ValueError(
                f"mtp: {name} is {list(table.shape)}, wanted "
                f"{[model.vocab_size, model.hidden_size]} by config.json. Take weights and "
                "config.json from the same model."
            )
    template = mtp.abstract_params(model, dtype)
    del template["embed"], template["head"]
    names = [name for name in checkpoint.names if _OF_MODULES[0] in name]

    def reasons() -> list[str]:
        key, pattern = "num_nextn_predict_layers", r"mtp_layers\.(\d+)\."
        return decoder_reasons(
            config, model, checkpoint, layers_key=key, layers=pattern, names=names
        )

    own = ((name, x) for name, x in checkpoint.tensors() if name in names)
    with explained(reasons):
        params = assemble(template, mtp.rules(model), own)
    head = target.params["embed" if target.config.tie_embeddings else "head"]
    params["embed"] = own_or_shared(tables.get(_SHARED[0]), target.params["embed"], dtype)
    params["head"] = own_or_shared(tables.get(_SHARED[1]), head, dtype)
    drafter = MTPConfig(
        num_drafts=num_modules if num_drafts is None else num_drafts,
        draft_sampling=draft_sampling,
        model=model,
        hidden_layer=hidden_layer,
    )
    return Drafter(drafter, params)


_SHARED = ("model.embed_tokens.weight", "lm_head.weight")

_OF_MODULES = ("mtp_layers.", "mtp_block.", "mtp_linear_proj.", ".eh_proj.")
"""Parts of tensor names that MTP modules have; the first is MiMo's."""

_ARCHITECTURES = ("MiMoForCausalLM", "MiMoMTPModel")


def _check_architecture(config: Mapping[str, Any]) -> None:
    named = architectures(config)
    if config.get("model_type") in ("mimo", "mimo_mtp") and set(named) <= set(_ARCHITECTURES):
        return
    raise ValueError(
        f"mtp: architectures {named} of model_type {config.get('model_type')!r} are not "
        f"supported, wanted {' or '.join(_ARCHITECTURES)} of model_type 'mimo'. Draft with another "
        "method, for example ngram or suffix."
    )


def _check_fits(model: ModelConfig, target: Model) -> None:
    for field in ("hidden_size", "vocab_size"):
        got, wanted = getattr(model, field), getattr(target.config, field)
        if got != wanted:
            raise ValueError(
                f"mtp: the modules' {field} is {got}, the target's {wanted}. Load the modules that "
                "were trained with this target, or the target that they were trained with."
            )


PROPOSER = Proposer(
    name="mtp",
    Config=MTPConfig,
    init=init,
    propose=propose,
    admit=forget,
    release=forget,
    reads=reads,
    init_params=init_params,
    recognises=recognises,
    load=load,
    rules=lambda config, names: (
        mtp.rules(config.model) | {_SHARED[0]: Place(("embed",)), _SHARED[1]: Place(("head",))}
    ),
)
