"""Reads vLLM's configuration by attribute, without importing vLLM."""

import functools
import operator
import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

import jspec
from jspec._checks import check_at_least

_MISSING = object()


@dataclass(frozen=True)
class ConfigReader:
    """Reads values of a configuration object by attribute names.

    Attributes:
      config: of vLLM's form.
      owner: who reads it, for messages.
      name: of the configuration, for messages.
    """

    config: Any
    owner: str
    name: str = "vllm_config"

    def __call__(self, path: str, default: Any = _MISSING) -> Any:
        """Reads `a.b.c` of the configuration.

        Args:
          path: attribute names, with dots between them.
          default: where an attribute is missing or None.

        Raises:
          ValueError: it is missing, and there is no default.
        """
        value = self.config
        for name in path.split("."):
            value = getattr(value, name, None)
            if value is None:
                break
        if value is not None:
            return value
        if default is _MISSING:
            raise ValueError(
                f"{self.owner}: `{self.name}.{path}` is missing. Set it, as vLLM does; any object "
                "with these attributes will do."
            )
        return default


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes and choices of every drafter.

    Attributes:
      method: of drafting, None where the configuration does not say.
      num_drafts: most drafts a request gets (K).
      max_model_len: most tokens of a request.
      max_requests: most requests in a step.
      max_rows: most rows in a step.
    """

    method: str | None
    num_drafts: int
    max_model_len: int
    max_requests: int
    max_rows: int

    @classmethod
    def of(cls, read: ConfigReader) -> "Settings":
        """Reads a VllmConfig.

        Raises:
          ValueError: a size is missing or below 1.
        """
        sizes = {
            "num_speculative_tokens": read("speculative_config.num_speculative_tokens"),
            "max_model_len": read("model_config.max_model_len"),
            "max_num_seqs": read("scheduler_config.max_num_seqs", 128),
            "max_num_batched_tokens": read("scheduler_config.max_num_batched_tokens", 2048),
        }
        check_at_least(read.owner, 1, **sizes)
        fields = "num_drafts", "max_model_len", "max_requests", "max_rows"
        method = read("speculative_config.method", None)
        return cls(method=method, **dict(zip(fields, sizes.values(), strict=True)))


def refuse_context_parallelism(owner: str, name: str) -> NoReturn:
    """Raises NotImplementedError: pages are split over ranks, and a drafter's are not."""
    raise NotImplementedError(
        f"{owner}: `{name}` says that the KV cache is split over ranks, and the drafter has pages "
        "of its own for whole requests. Run without decode and prefill context parallelism, or "
        "draft with a method without pages (ngram, suffix)."
    )


def check_supported(read: ConfigReader, has_pages: bool) -> None:
    """Refuses options that the drafter would ignore."""
    owner = read.owner
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if has_pages and read(f"parallel_config.{name}", 1) > 1:
            refuse_context_parallelism(owner, f"parallel_config.{name}")
    tree = read("speculative_config.speculative_token_tree", None)
    if tree is not None and jspec.Tree(tree).depth < jspec.Tree(tree).num_nodes:
        raise NotImplementedError(
            f"{owner}: `speculative_token_tree` is {tree!r:.60}, and a runner verifies drafts as "
            "one chain. Leave it out, or decode trees with jspec.generate."
        )
    if read("speculative_config.use_heterogeneous_vocab", False):
        raise NotImplementedError(
            f"{owner}: use_heterogeneous_vocab is set, and jspec's draft models share the target's "
            "vocabulary. Leave it out, with a draft model of the target's tokenizer."
        )
    sampling = read("speculative_config.draft_sample_method", "greedy")
    if sampling != "greedy":
        warnings.warn(
            f"{owner}: draft_sample_method is {sampling!r}, and the bridge drafts greedily. "
            "Verification stays exact; take_last_draft_probs returns None.",
            RuntimeWarning,
            stacklevel=4,
        )


def count_first(method: Any) -> Any:
    """Lets a method take `num_speculative_tokens` as first argument, as vLLM 0.33 passes it."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if args and isinstance(args[0], Integral):
            kwargs["num_speculative_tokens"], args = args[0], args[1:]
        return method(self, *args, **kwargs)

    return call


def drafts_of_step(owner: str, asked: int | None, most: int) -> int:
    """Returns K of a step: the number that the caller passes, or else the configured one.

    Raises:
      TypeError: it is no integer. ValueError: it is below 0 or above the configured number.
    """
    if asked is None:
        return most
    try:
        asked = operator.index(asked)
    except TypeError as error:
        raise TypeError(
            f"{owner}: `num_speculative_tokens` is {asked!r}, wanted an int from 0 to {most}. Pass "
            "a whole number."
        ) from error
    if not 0 <= asked <= most:
        raise ValueError(
            f"{owner}: `num_speculative_tokens` is {asked}, wanted 0 to {most}, which the "
            "speculative config says. Raise it there."
        )
    return asked
