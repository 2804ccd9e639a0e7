"""`python -m jspec inspect`: kind, sizes and memory of a model or drafter on disk."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from jspec import checkpoint, proposers
from jspec.checkpoint import Model, orbax
from jspec.checkpoint.agreement import model_config
from jspec.cli import drafters, models
from jspec.config import CacheConfig
from jspec.models import llama, weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.proposers.base import Drafter
from jspec.saving import config_from_json, read_description, restore
from jspec.state import Params

HELP = "tell what a folder or file is, and the memory that it will take"

EXAMPLES = """examples:
  python -m jspec inspect path/to/folder --max-requests 64 --max-model-len 8192 --dtype bfloat16
  python -m jspec inspect path/to/head --target path/to/folder
  python -m jspec inspect model.gguf --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("path", help=f"{models.HELP}; or a drafter's")
    add("--target", metavar="PATH", help="look at the path as a drafter for this model")
    add("--method", help="--target: method of the drafter (default: the one that recognises it)")
    add("--max-requests", type=int, default=8, help="requests at the same time (default: 8)")
    add("--max-model-len", type=int, help="tokens of the longest one (default: the model's own)")
    add("--page-size", type=int, default=16, help="tokens in a KV page (default: 16)")
    add("--num-pages", type=int, help="KV pages (default: enough for all requests at full length)")
    add("--dtype", help="of weights and KV pages (default: as on disk; GGUF: float32)")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit code."""
    if arguments.dtype is not None:
        models.check_dtype(arguments.dtype)
    drafters.check_method(arguments)
    path = models.find("path", arguments.path)
    dtype = models.dtype_of(path, arguments.dtype)
    result: dict[str, Any] = {"path": str(path), "form": _format(path)}
    if arguments.target is not None:
        target = _load_tables(models.find("--target", arguments.target), dtype)
        drafter = drafters.open_drafter(path, target, method=arguments.method)
        proposer = proposers.of(drafter.config)
        result |= _drafter(proposer.name, drafter.config)
        cache = _cache(arguments, target.config, target.params)
        memory = drafter_memory(drafter, target, cache, arguments.max_requests)
        result["parameters"] = _count(drafter.params)
    else:
        described, config, params = _describe(path, dtype)
        result |= described
        if config is None:
            return _print(arguments, result)
        cache = _cache(arguments, config, params)
        memory = target_memory(config, params, cache)
        result["parameters"] = _count(params)
    sizes = {"num_pages": cache.num_pages, "page_size": cache.page_size}
    sizes |= {"max_model_len": cache.max_model_len, "max_requests": arguments.max_requests}
    total = sum(memory.values()) - memory["shared"]
    result |= {"dtype": cache.dtype, **sizes, "bytes": memory | {"total": total}}
    return _print(arguments, result)


def target_memory(config: ModelConfig, params: Params, cache: CacheConfig) -> dict[str, int]:
    """Computes the memory of a target and its KV pages, from shapes; see `drafter_memory`."""
    pages = jax.eval_shape(lambda: llama.init_pages(config, cache))
    return {"weights": _bytes(params), "shared": 0, "kv_pages": _bytes(pages), "buffers": 0}


def drafter_memory(
    drafter: Drafter, target: Model, cache: CacheConfig, max_requests: int
) -> dict[str, int]:
    """Computes the memory of a drafter in addition to its target's, as of `jspec.init`.

    Args:
      drafter: from `jspec.load`.
      target: the model that it was loaded with.
      cache: sizes of its KV pages.
      max_requests: requests at the same time.

    Returns:
      Bytes of its `weights`, of arrays `shared` with the target, of `kv_pages` and other `buffers`.
    """
    config, init = drafter.config, proposers.of(drafter.config).init
    memory = jax.eval_shape(lambda p: init(config, p, cache, max_requests), drafter.params)
    of_target = {id(leaf) for leaf in jax.tree.leaves(target.params)}
    leaves = jax.tree.leaves(drafter.params)
    parts = jax.tree.leaves(memory, is_leaf=lambda part: isinstance(part, KVCache))
    return {
        "weights": _bytes([leaf for leaf in leaves if id(leaf) not in of_target]),
        "shared": _bytes([leaf for leaf in leaves if id(leaf) in of_target]),
        "kv_pages": _bytes([part for part in parts if isinstance(part, KVCache)]),
        "buffers": _bytes([part for part in parts if not isinstance(part, KVCache)]),
    }


def _describe(path: Path, dtype: str) -> tuple[dict[str, Any], ModelConfig | None, Params]:
    """Describes a path without `--target`; config and shapes of the params if it is a target."""
    if models.is_saved(path):
        config = config_from_json(read_description(path)["config"])
        if isinstance(config, ModelConfig):
            return _target(config, []), config, orbax.read_shapes(path / "params")
        return _drafter(proposers.of(config).name, config), None, None
    opened = checkpoint.read(path)
    methods = [
        proposer.name
        for proposer in proposers.REGISTRY.values()
        if proposer.recognises(opened.config, opened.names)
    ]
    if {"model.embed_tokens.weight", "model.norm.weight"} <= set(opened.names):
        config = model_config(opened)
        checkpoint.check_layers(str(path), config.num_layers, opened.names)
        return _target(config, methods), config, weights.abstract(llama.Llama, config, dtype)
    if not methods:
        raise ValueError(
            f"{path} is neither a target model nor a drafter that jspec knows: its tensors are "
            f"{', '.join(opened.names[:4]) or 'none'}. Pass another folder, or --target with "
            "--method."
        )
    names = {"architectures": opened.config.get("architectures"), "tensors": len(opened.names)}
    return {"is": "drafter", "method": " or ".join(methods), **names}, None, None


def _drafter(method: str, config: Any) -> dict[str, Any]:
    return {"is": "drafter", "method": method, "num_drafts": config.num_drafts}


def _target(config: ModelConfig, methods: list[str]) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    sizes = {name: getattr(config, name) for name in names}
    also = {"drafts_with": methods} if methods else {}
    positions = {"max_positions": config.max_positions}
    return {"is": "target", "model_type": config.model_type, **also, **sizes, **positions}


def _load_tables(path: Path, dtype: DTypeLike) -> Model:
    """Loads a target's embedding and head, which drafters share; its other params are shapes."""
    if models.is_saved(path):
        saved = restore(path)
        if not isinstance(saved, Model):
            raise ValueError(f"--target {path} holds a drafter. Pass the model that it drafts for.")
        return saved
    opened = checkpoint.read(path)
    config = model_config(opened)
    checkpoint.check_layers(str(path), config.num_layers, opened.names)
    params = weights.abstract(llama.Llama, config, dtype)
    wanted = {"model.embed_tokens.weight": "embed"}
    if not config.tie_embeddings:
        wanted["lm_head.weight"] = "head"
    shapes = {leaf: params[leaf] for leaf in wanted.values()}
    rules = {name: place for name, place in llama.rules(config).items() if name in wanted}
    found = []
    for name, tensor in opened.tensors():
        if name in wanted:
            found.append((name, tensor))
        if len(found) == len(wanted):
            break
    params |= checkpoint.assemble(shapes, rules, found)
    return Model(config, params, None, None, ())


def _cache(arguments: argparse.Namespace, config: ModelConfig, params: Params) -> CacheConfig:
    longest = arguments.max_model_len
    if longest is not None and longest > config.max_positions:
        raise ValueError(
            f"--max-model-len is {longest}, above the {config.max_positions} positions that the "
            "model was made for. Lower it."
        )
    if arguments.max_requests < 1:
        raise ValueError(f"--max-requests is {arguments.max_requests}, wanted 1 or more. Raise it.")
    dtype = arguments.dtype or params["embed"].dtype.name
    sizes = {"page_size": arguments.page_size, "dtype": dtype}
    sizes["max_model_len"] = config.max_positions if longest is None else longest
    per_request = CacheConfig(num_pages=1, **sizes).pages_per_request
    num_pages = arguments.num_pages
    if num_pages is None:
        num_pages = per_request * arguments.max_requests
    return CacheConfig(num_pages=num_pages, **sizes)


def _format(path: Path) -> str:
    if models.is_saved(path):
        return "folder of jspec.save"
    return "Hugging Face folder" if path.is_dir() else "GGUF file"


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count(params: Params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _print(arguments: argparse.Namespace, result: dict[str, Any]) -> int:
    if arguments.json:
        print(json.dumps(result))
        return 0
    sizes = result.pop("bytes", {})
    for name, value in result.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name.replace('_', ' '):>18}  {text}")
    for name, value in sizes.items():
        if not value:
            continue
        print(f"{name.replace('_', ' '):>18}  {value / 2**20:12,.1f} MiB  ({value:,} bytes)")
    if not sizes:
        print("pass --target with the model that it drafts for to see the memory that it takes")
    return 0
