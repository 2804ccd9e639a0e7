"""vLLM plug-in: classes for `method: custom_class`, and a switch that swaps vLLM's own drafters.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`), also
without a setting for jspec, so JAX is only imported where a drafter is made.
"""

import functools
import importlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import torch_bridge

SWITCH = "JSPEC_VLLM_SWAP"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_WORKER = "vllm.v1.worker.worker_base"
_HOME = "vllm.v1.spec_decode"
_SWAPS = {  # vLLM's module and class; jspec's class has the same name
    "ngram": ("ngram_proposer", "NgramProposer"),
    "ngram_gpu": ("ngram_proposer_gpu", "NgramProposerGPU"),
    "suffix": ("suffix_decoding", "SuffixDecodingProposer"),
    "eagle": ("eagle", "EagleProposer"),
    "eagle3": ("eagle", "EagleProposer"),
    "mtp": ("eagle", "EagleProposer"),
    "dflash": ("dflash", "DFlashProposer"),
    "draft_model": ("draft_model", "DraftModelProposer"),
    "medusa": ("medusa", "MedusaProposer"),
    "extract_hidden_states": ("extract_hidden_states", "ExtractHiddenStatesProposer"),
}

logger = logging.getLogger("vllm.jspec")  # vLLM shows its own logger and those below it


def register() -> None:
    """Makes vLLM's workers draft with jspec for the methods in the variable JSPEC_VLLM_SWAP.

    Its value is `all` or a list of methods with commas between them, such as `eagle3,suffix`.
    Without it nothing of vLLM is imported or changed. A second call changes nothing more.

    The class of the engine's method is swapped when a worker makes its runner, not now: on a CPU
    vLLM 0.32 searches all imported modules for its kernels before that, and fails on numba's.

    Raises:
      ValueError: a method is unknown. ImportError: there is no vLLM, or its workers have another
        base class.
    """
    if not _asked():
        return
    _, worker = _find(_WORKER, "WorkerBase")
    make = worker.__init__
    if hasattr(make, "_swaps_for_jspec"):
        return

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _prepare(self)

    setattr(init, "_swaps_for_jspec", True)  # noqa: B010
    worker.__init__ = init


def _asked() -> list[str]:
    """Reads the methods that the variable names."""
    names = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    if names == ["all"]:
        return list(_SWAPS)
    # vLLM calls the MTP heads of all models `mtp` after it has read their own names.
    methods = ["mtp" if name.endswith("_mtp") else name for name in names]
    for name, method in zip(names, methods, strict=True):
        if method not in _SWAPS:
            raise ValueError(
                f"{SWITCH}: {name!r} is no method that can be swapped, wanted all, or some of "
                f"{', '.join(_SWAPS)} with commas between them."
            )
    return methods


def _prepare(worker: Any) -> None:
    """Swaps before a worker makes its runner, and compiles when the KV pages are known."""
    init_device, compile_model = worker.init_device, worker.compile_or_warm_up_model
    swapped: _Swapped | None = None

    def init_device_with_jspec() -> None:
        nonlocal swapped
        swapped = _swap(worker)
        init_device()
        if swapped:
            _check_swap(*swapped, _drafter_of(worker))

    def compile_model_and_drafter() -> Any:
        times = compile_model()
        drafter = _drafter_of(worker)
        if swapped and isinstance(drafter, swapped[-1]) and hasattr(drafter, "warmup"):
            start = time.perf_counter()
            drafter.warmup()
            logger.info("jspec compiled its drafting in %.1f s.", time.perf_counter() - start)
        return times

    worker.init_device = init_device_with_jspec
    worker.compile_or_warm_up_model = compile_model_and_drafter


def _drafter_of(worker: Any) -> Any:
    """Returns the runner's drafter; only the last rank of a pipeline has one."""
    return getattr(worker.model_runner, "drafter", None)


_Swapped = tuple[ModuleType, type, type]  # a module, vLLM's class in it, the class in its place


def _swap(worker: Any) -> _Swapped | None:
    """Replaces vLLM's class of the engine's method where the runner looks it up.

    Returns:
      What was swapped, None where the variable does not name the engine's method.

    Raises:
      RuntimeError: vLLM chose its V2 runner. ImportError: the class is not where the supported
        releases have it.
    """
    method = getattr(worker.vllm_config.speculative_config, "method", None)
    if method not in _asked():
        logger.warning(
            "%s=%s swaps nothing: the method of this engine is %s.",
            *(SWITCH, os.environ.get(SWITCH, ""), method),
        )
        return None
    if getattr(worker, "use_v2_model_runner", False):
        raise RuntimeError(
            f"{SWITCH}: vLLM chose its V2 runner, which has no proposer classes. Set "
            f"VLLM_USE_V2_MODEL_RUNNER=0 beside {SWITCH}."
        )
    home, name = _SWAPS[method]
    # The runner imports this class inside functions.
    place, theirs = _find(f"{_HOME}.{home}" if name == "NgramProposer" else _RUNNER, name)
    fractions = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    if not any(os.environ.get(fraction) for fraction in fractions):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jspec._user_cache import keep_executables  # imports JAX

    keep_executables()
    ours = getattr(torch_bridge, name)
    setattr(place, name, ours)
    return place, theirs, ours


def _check_swap(place: ModuleType, theirs: type, ours: type, drafter: Any) -> None:
    """Logs a swap, or undoes it if the runner made a drafter of another class."""
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in (theirs, ours, type(drafter))]
    if drafter is None or isinstance(drafter, ours):
        if theirs is not ours:
            logger.info("%s: %s is replaced by %s.", SWITCH, *names[:2])
        return
    setattr(place, theirs.__name__, theirs)
    logger.warning(
        "%s: %s drafts, for which jspec has no class. Nothing is swapped.", SWITCH, names[2]
    )


class _Custom:
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there are no weights."""


class CustomNgram(_Custom):
    """N-gram lookup for vLLM's `method: custom_class`; see `torch_bridge.NgramProposer`.

    vLLM sets `prompt_lookup_min` and `prompt_lookup_max` to 0 for this method, so both are read
    from `additional_config`: {"jspec": {"prompt_lookup_min": 2, "prompt_lookup_max": 4}}.

    Args:
      vllm_config: read by attribute.

    Raises:
      ValueError: `additional_config["jspec"]` has another key, or a size does not fit.
    """

    def __init__(self, vllm_config: Any):
        names = ("prompt_lookup_min", "prompt_lookup_max")
        options = dict.fromkeys(names) | _options(vllm_config, type(self).__name__, names)
        count = getattr(vllm_config.speculative_config, "num_speculative_tokens", None)
        config = SimpleNamespace(
            model_config=vllm_config.model_config,
            speculative_config=SimpleNamespace(num_speculative_tokens=count, **options),
        )
        self._proposer = torch_bridge.NgramProposer(config)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts the next tokens of each request; see `torch_bridge.NgramProposer`."""
        return self._proposer.propose(
            sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings
        )


class CustomSuffix(_Custom):
    """Suffix decoding for vLLM's `method: custom_class`; see `SuffixDecodingProposer`.

    vLLM passes rows without ids, and rows move. A row belongs to the request whose complete text of
    the last step it continues. Two requests with the same text may be swapped, which changes no
    draft. A request whose tokens of a step were not passed, or that is resumed after preemption,
    counts as a new one with all its text as the prompt.

    Args:
      vllm_config: read by attribute; the sizes are `suffix_decoding_max_tree_depth`,
        `..._max_cached_requests`, `..._max_spec_factor` and `..._min_token_prob` of its
        `speculative_config`.

    Raises:
      ValueError: a value is missing or out of range.
    """

    def __init__(self, vllm_config: Any):
        _options(vllm_config, type(self).__name__, ())
        self._proposer = torch_bridge.SuffixDecodingProposer(vllm_config)
        self._rows: list[_Request] = []
        self._num_started = 0

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Adds the sampled tokens to the requests' tokens, and drafts.

        Args:
          sampled_token_ids: what each request sampled in this step; one without drafts nothing.
          num_tokens_no_spec: int [at least B] known tokens of each row, the sampled ones included.
          token_ids_cpu: int32 [at least B, S] known tokens.
          slot_mappings: not read.

        Returns:
          A list of drafts for each request.
        """
        num_rows = len(sampled_token_ids)
        lengths = np.asarray(num_tokens_no_spec)[:num_rows]
        tokens = np.asarray(token_ids_cpu)[:num_rows]
        num_known = lengths - np.array([len(row) for row in sampled_token_ids], lengths.dtype)
        self._rows = self._follow(tokens, num_known)
        for request, row, length in zip(self._rows, tokens, lengths, strict=True):
            request.extend(row[:length])
        names = [request.name for request in self._rows]
        input_batch = SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            num_prompt_tokens=num_known,
            num_tokens_no_spec=lengths,
            token_ids_cpu=tokens,
        )
        return self._proposer.propose(input_batch, sampled_token_ids, slot_mappings)

    def _follow(self, tokens: np.ndarray, num_known: np.ndarray) -> list["_Request"]:
        """Finds the request of each row: its own if it has the text, or else any that has it."""
        texts = [row[: max(n, 0)] for row, n in zip(tokens, num_known, strict=True)]
        stays = [
            i < len(self._rows) and np.array_equal(self._rows[i].text, text)
            for i, text in enumerate(texts)
        ]
        moved: dict[bytes, list[_Request]] = {}
        if not all(stays):
            for i, request in enumerate(self._rows):
                if i >= len(texts) or not stays[i]:
                    moved.setdefault(request.text.tobytes(), []).append(request)
        found = []
        for i, text in enumerate(texts):
            same_text = [] if stays[i] else moved.get(text.tobytes(), [])
            if stays[i]:
                found.append(self._rows[i])
            elif same_text:
                found.append(same_text.pop())
            else:
                self._num_started += 1
                found.append(_Request(f"jspec-{self._num_started}", text.copy(), len(text)))
        return found


@dataclass
class _Request:
    """A request and its known tokens, which are stored at the start of memory that grows."""

    name: str
    memory: np.ndarray
    length: int

    @property
    def text(self) -> np.ndarray:
        return self.memory[: self.length]

    def extend(self, text: np.ndarray) -> None:
        """Copies the new tokens of a text, whose memory the caller rewrites later."""
        if len(text) > len(self.memory):
            memory = np.empty(2 * len(text), text.dtype)
            memory[: self.length] = self.text
            self.memory = memory
        self.memory[self.length : len(text)] = text[self.length :]
        self.length = len(text)


def _options(vllm_config: Any, owner: str, names: tuple[str, ...]) -> dict[str, Any]:
    extra = getattr(vllm_config, "additional_config", None)
    options = extra.get("jspec", {}) if isinstance(extra, dict) else {}
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(
            f"{owner}: `additional_config['jspec']` has {', '.join(unknown)}, wanted "
            f"{' and '.join(names) if names else 'nothing'}. Take it out."
        )
    return options


def _find(path: str, name: str) -> tuple[ModuleType, type]:
    """Imports a module of vLLM's, and returns it with its class of a name."""
    missing, cause = f"{path} has no class {name}", None
    try:
        module = importlib.import_module(path)
        found = getattr(module, name, None)
        if isinstance(found, type):
            return module, found
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        missing, cause = f"there is no module {error.name}", error
    raise ImportError(
        f"{SWITCH}: {missing} in this vLLM, or no vLLM. Unset the variable, or install a release "
        "that docs/pytorch.md names."
    ) from cause
