"""The target's embedding and head, for drafters to share."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import torch

from jspec import checkpoint as checkpoints
from jspec.checkpoint import Model
from jspec.checkpoint.agreement import model_config
from jspec.models.config import ModelConfig
from torch_bridge.interop.dlpack import jax_device, to_jax
from torch_bridge.interop.shared import alias
from torch_bridge.proposers.settings import ConfigReader

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def target_of(
    target: torch.nn.Module | str | PathLike[str],
    read: ConfigReader,
    device: torch.device,
) -> Model:
    """Returns the parts of a target that a drafter is loaded with: config, embedding and head.

    Args:
      target: a module of vLLM's or transformers' form, whose tables JAX reads without a copy,
        or the path of a checkpoint.
      read: reads vLLM's configuration: `model_config.hf_config` is the target's config.json, and
        `model_config.dtype` the dtype that a checkpoint is read as.
      device: of the drafter. Tables elsewhere are copied to it.

    Raises:
      AttributeError: the module has no such table. TypeError: `target` is neither, or a table is
        not of floats, as with quantisation. ValueError: a table is a part of one, as with
        tensor parallelism.
    """
    owner = read.owner
    if not isinstance(target, torch.nn.Module | str | PathLike):
        raise TypeError(
            f"{owner}: `target_model` is a {type(target).__name__}, wanted a torch module or a "
            "path. Pass the target's module, or the path of its checkpoint."
        )
    if not isinstance(target, torch.nn.Module):
        return _from_disk(target, read, device)
    config = ModelConfig.from_hf(_as_dict(read("model_config.hf_config")))
    language_model = getattr(target, "get_language_model", lambda: target)()
    inner = getattr(language_model, "model", None)
    embedding = getattr(inner, "embed_tokens", None)
    embedding = getattr(inner, "embedding", None) if embedding is None else embedding
    modules = {"embed": (embedding, "model.embed_tokens or model.embedding")}
    if not config.tie_embeddings:
        modules["head"] = getattr(language_model, "lm_head", None), "lm_head"
    params = {}
    for name, (module, wanted) in modules.items():
        if module is None:
            raise AttributeError(
                f"{owner}: `target_model` is a {type(target).__name__} without {wanted}. Pass the "
                "target's module, or the path of its checkpoint."
            )
        params[name] = _share(name, getattr(module, "weight", None), config, device, owner)
    return Model(config, params, None, None, ())


def target_has_axes(read: ConfigReader) -> bool:
    """Whether the target's positions have three axes (M-RoPE), as far as the configuration says.

    `model_config.uses_mrope`, or else `model_config.hf_config`, is read.
    """
    uses_mrope = read("model_config.uses_mrope", None)
    if uses_mrope is not None:
        return bool(uses_mrope)
    hf_config = _as_dict(read("model_config.hf_config", {}))
    configs = [hf_config, _as_dict(hf_config.get("text_config") or {})]
    ropes = [c.get(name) for c in configs for name in ("rope_parameters", "rope_scaling")]
    return any(isinstance(rope, Mapping) and "mrope_section" in rope for rope in ropes)


def _share(
    name: str, table: Any, config: ModelConfig, device: torch.device, owner: str
) -> jax.Array:
    if not isinstance(table, torch.Tensor) or table.dtype not in _FLOATS or table.is_meta:
        got = f"{table.dtype} on {table.device}" if isinstance(table, torch.Tensor) else "missing"
        raise TypeError(
            f"{owner}: the weight of the target's {name} is {got}, wanted bfloat16, float16 or "
            "float32, in memory. Pass the path of the target's checkpoint where the module holds "
            "it in another form (quantised, or on another pipeline rank)."
        )
    V, D = config.vocab_size, config.hidden_size
    if table.shape[0] < V or table.shape[1:] != (D,):
        raise ValueError(
            f"{owner}: the target's {name} has shape {tuple(table.shape)}, wanted at least "
            f"{V} rows of {D}. Pass the path of the target's checkpoint where the module holds a "
            "part of the table (tensor parallelism)."
        )
    table = table.detach()[:V]  # rows after the vocabulary are padding
    if table.device != device:
        return to_jax(table.to(device), name=name)
    # Weights of a mapped file may lie where JAX cannot read them on a CPU: then they are copied.
    return alias(table) if device.type == "cuda" else to_jax(table, name=name)


def _from_disk(path: str | PathLike[str], read: ConfigReader, device: torch.device) -> Model:
    checkpoint = checkpoints.read(path)
    config = model_config(checkpoint)
    dtype = str(read("model_config.dtype")).removeprefix("torch.")
    wanted = {_EMBED: "embed"} if config.tie_embeddings else {_EMBED: "embed", _HEAD: "head"}
    params = {
        wanted[name]: jax.device_put(tensor.astype(dtype), jax_device(device))
        for name, tensor in checkpoint.tensors()
        if name in wanted
    }
    missing = [name for name, leaf in wanted.items() if leaf not in params]
    if missing:
        raise ValueError(
            f"{read.owner}: {path} has no {' and no '.join(missing)}. Pass the path of a complete "
            "checkpoint of the target."
        )
    return Model(config, params, None, None, ())


def _as_dict(hf_config: Any) -> Mapping[str, Any]:
    if isinstance(hf_config, Mapping):
        return hf_config
    return hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
