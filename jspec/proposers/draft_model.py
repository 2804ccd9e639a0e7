"""An independent, smaller model of the same vocabulary that drafts token by token, or all at once.

It reads tokens alone: the first pass runs the accepted tokens and the next one at their own
positions. A model that was trained for it (PARD) drafts in that pass, from mask tokens after the
next one. Source: vLLM v1/spec_decode/draft_model.py; arXiv 2211.17192, 2504.18583 (PARD).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import Array
from jax.typing import DTypeLike

from jspec._checks import check_at_least
from jspec.checkpoint import Checkpoint, Model, as_model
from jspec.checkpoint.agreement import model_config
from jspec.config import CacheConfig
from jspec.models import llama
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.proposers import _draft
from jspec.proposers._draft import DraftingConfig, DraftModel
from jspec.proposers.base import Drafter, Proposer, Reads, refuse_axes
from jspec.proposers.loaders.hf_config import mask_token_of
from jspec.state import Batch, Drafts, Params


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DraftingConfig):
    """Chooses the model that drafts.

    Attributes:
      model: its shape; its vocabulary is the target's.
      parallel_drafting: drafts all tokens in one pass, from mask tokens.
      mask_token: id of a mask token; goes with `parallel_drafting`.

    Raises:
      ValueError: as DraftingConfig; the mask token is missing, is not one of the vocabulary, or has
        no use.
    """

    model: ModelConfig
    parallel_drafting: bool = False
    mask_token: int | None = None

    def __post_init__(self):
        super().__post_init__()
        refuse_axes("draft_model", self.model)
        if not self.parallel_drafting:
            if self.mask_token is not None:
                raise ValueError(
                    f"DraftModelConfig: `mask_token` is {self.mask_token}, which has no effect one "
                    "token after the other. Leave it out, or pass parallel_drafting=True."
                )
            return
        if self.mask_token is None:
            raise ValueError(
                "DraftModelConfig: `mask_token` is None, and parallel_drafting needs the id that "
                "the model was trained with. Pass mask_token=, or draft one token after the other."
            )
        check_at_least("DraftModelConfig", 0, mask_token=self.mask_token)
        if self.mask_token >= self.vocab_size:
            raise ValueError(
                f"DraftModelConfig: `mask_token` is {self.mask_token}, wanted an id below the "
                f"vocabulary of {self.vocab_size}: the model has no embedding for it. Take it from "
                "the model's own config.json."
            )

    @property
    def vocab_size(self) -> int:
        """Tokens of drafter and target (V)."""
        return self.model.vocab_size

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=ModelConfig.tiny())


def init(
    config: DraftModelConfig, params: Params, cache: CacheConfig, max_requests: int
) -> KVCache:
    """Allocates the drafter's own KV pages, one for each of the target's."""
    del params, max_requests
    return llama.init_pages(config.model, cache)


def propose(
    config: DraftModelConfig, params: Params, memory: KVCache, batch: Batch, columns: int
) -> tuple[KVCache, Drafts]:
    """Runs the step's accepted tokens and the next one, then one drafted token at a time.

    In parallel, mask tokens follow the next one in the same pass, and that is all.
    """
    model = llama.build(config.model, params)

    def run(token_ids, hidden, view, cache, embeds):
        states, cache = model(token_ids, view, cache, embeds)
        return states["norm"], None, cache

    draft = _draft.in_parallel if config.parallel_drafting else _draft.chain
    return draft(
        DraftModel(
            run=run,
            logits=model.logits,
            vocab_size=config.vocab_size,
            mask_token=config.mask_token or 0,
        ),
        config,
        batch,
        memory,
        page_size=memory.page_size,
        max_model_len=memory.max_model_len,
        steps=columns,
        shift=False,
    )


def reads(config: DraftModelConfig) -> Reads:
    """Says what it reads of a step: tokens, and temperatures where it samples."""
    return Reads(sampling=config.draft_sampling == "probabilistic")


def init_params(config: DraftModelConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks."""
    return llama.init_params(config.model, key, dtype)


_NAMES = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def recognises(hf_config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is a whole language model and nothing else."""
    return (
        hf_config.get("speculators_model_type") is None
        and {"model.embed_tokens.weight", "model.norm.weight"} <= set(names)
        and all(name.startswith(_NAMES) for name in names)
    )


def load(
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    parallel_drafting: bool | None = None,
    mask_token: int | None = None,
    tensor_parallel_size: int | None = None,
    draft_tensor_parallel_size: int | None = None,
) -> Drafter:
    """Loads a draft model; it shares nothing with the target.

    Args:
      checkpoint: of a Llama, Qwen2 or Qwen3 model: a folder or a GGUF file.
      target: the model that it drafts for.
      dtype: of the weights in memory.
      num_drafts: most drafts a request gets, by default 5.
      draft_sampling: see DraftingConfig.
      parallel_drafting: see DraftModelConfig; by default where config.json has a `pard_token`.
      mask_token: by default the one that config.json names, see `mask_token_of`.
      tensor_parallel_size: devices that the target lies on; other values than that are refused.
      draft_tensor_parallel_size: the same of the drafter, which has to follow the target.

    Raises:
      ValueError: the vocabularies or the parallel sizes differ, an option has no effect or does not
        fit, or config.json and tensors do not fit the supported models.
    """
    devices = target.params["embed"].devices()
    if tensor_parallel_size is None:
        tensor_parallel_size = len(devices)
    if draft_tensor_parallel_size not in (None, tensor_parallel_size):
        raise ValueError(
            f"draft_model: `draft_tensor_parallel_size` is {draft_tensor_parallel_size}, the "
            f"target's `tensor_parallel_size` {tensor_parallel_size}. Leave both out: the drafter "
            "goes where the target is."
        )
    if tensor_parallel_size != len(devices):
        raise ValueError(
            f"draft_model: `tensor_parallel_size` is {tensor_parallel_size}, and the target lies "
            f"on {len(devices)} device(s). Leave it out: the drafter goes where the target is."
        )
    refuse_axes("draft_model", target.config)
    model = model_config(checkpoint)
    if model.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"draft_model: the drafter's vocab_size is {model.vocab_size} tokens, the "
            f"target's {target.config.vocab_size}. Take a draft model with the target's tokenizer."
        )
    if parallel_drafting is None:
        parallel_drafting = checkpoint.config.get("pard_token") is not None
    if parallel_drafting and mask_token is None:
        mask_token = mask_token_of(checkpoint.config, model.vocab_size)
    config = DraftModelConfig(
        num_drafts=5 if num_drafts is None else num_drafts,
        draft_sampling=draft_sampling,
        model=model,
        parallel_drafting=parallel_drafting,
        mask_token=mask_token,
    )
    with jax.default_device(next(iter(devices))):
        loaded = as_model(checkpoint, dtype, source="the draft model", config=model)
    return Drafter(config, loaded.params)


PROPOSER = Proposer(
    name="draft_model",
    Config=DraftModelConfig,
    init=init,
    propose=propose,
    reads=reads,
    init_params=init_params,
    recognises=recognises,
    load=load,
    rules=lambda config, names: llama.rules(config.model),
)
