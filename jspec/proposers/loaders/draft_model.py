"""Draft models on disk: whole language models of their own.

Source: vLLM v1/spec_decode/draft_model.py.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from jspec.checkpoint import Checkpoint, Model, as_model
from jspec.checkpoint.agreement import model_config
from jspec.proposers.base import Drafter, refuse_axes
from jspec.proposers.loaders.hf_config import mask_token_of

_NAMES = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def recognises(hf_config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is a whole language model and nothing else."""
    return (
        hf_config.get("speculators_model_type") is None
        and {"model.embed_tokens.weight", "model.norm.weight"} <= set(names)
        and all(name.startswith(_NAMES) for name in names)
    )


def load(
    Config: Callable[..., Any],
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
      Config: makes the drafter's config.
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
    config = Config(
        num_drafts=5 if num_drafts is None else num_drafts,
        draft_sampling=draft_sampling,
        model=model,
        parallel_drafting=parallel_drafting,
        mask_token=mask_token,
    )
    with jax.default_device(next(iter(devices))):
        loaded = as_model(checkpoint, dtype, source="the draft model", config=model)
    return Drafter(config, loaded.params)
