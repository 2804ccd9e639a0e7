"""The base class of drafters on the device: configuration, loading, KV pages, executables."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import torch
from jaxtyping import Array, Int32

import jspec
from jspec import proposers
from jspec.metadata import next_power_of_2
from jspec.proposers.base import Reads
from jspec.proposers.fitting import check_params
from jspec.state import Memory, Params
from torch_bridge.interop.checks import check_tensors
from torch_bridge.interop.dlpack import check_not_forked, check_preallocation, jax_device, placement
from torch_bridge.interop.layout import Layout, layout_of
from torch_bridge.interop.packing import Packer, Plan
from torch_bridge.interop.shared import torch_device
from torch_bridge.proposers import weights
from torch_bridge.proposers.settings import ConfigReader, Settings, check_supported


class DeviceProposer:
    """A drafter of jspec with the methods that vLLM's runner calls.

    Args:
      vllm_config: read by attribute; see `torch_bridge.proposers.settings`.
      device: of the tensors that `propose` gets and returns.
      runner: not used; the argument is there for vLLM's signature.

    Attributes:
      num_speculative_tokens: most drafts a request gets (K).
      block_size: slots per page; -1 until the KV cache is known.
      kv_cache_gid: group of KV pages that the drafter's block table is for; likewise.
      config: the drafter's config; None until `load_model`.

    Raises:
      ValueError: the configuration lacks something, or is of another method. NotImplementedError:
        it has an option that this drafter does not support. RuntimeError: JAX has no such device.
    """

    methods: tuple[str, ...] = ()
    has_pages = True
    _make: Any  # makes the executable of a bucket: (config, layout, *static)
    _run_empty: Any  # runs a step of a number of rows without requests
    _frames = 8  # from the warning of a compilation up to the caller of `propose`

    def __init__(self, vllm_config: Any, device: Any, runner: Any = None):
        del runner
        self._owner = owner = type(self).__name__
        self.vllm_config = vllm_config
        self._read = ConfigReader(vllm_config, owner)
        self.settings = Settings.of(self._read)
        self.method = self.settings.method
        if self.method not in self.methods:
            raise ValueError(
                f"{owner}: `speculative_config.method` is {self.method!r}, wanted "
                f"{' or '.join(map(repr, self.methods))}. Take the class of that method."
            )
        check_supported(self._read, self.has_pages)
        self.num_speculative_tokens = self.settings.num_drafts
        self.max_model_len = self.settings.max_model_len
        self.device = torch_device(device, owner)
        self.block_size = self.kv_cache_gid = -1
        self.supports_mm_inputs = False
        self.config: Any = None
        check_preallocation(self.device)
        self._jax_device = jax_device(self.device)
        self._placed = placement(self._jax_device)
        self._packer = Packer(self.device, owner)
        self._params: Params = None
        self._memory: Memory = None
        self._num_pages = 0
        self._reads = Reads()
        self._executables: dict[Any, Callable[..., Any]] = {}
        self._captured: set[Any] = set()  # executables that smaller steps may run, too
        self._compiling: Literal["no", "run", "capture"] = "no"
        self._warns = False

    @property
    def eagle3_use_aux_hidden_state(self) -> bool:
        """Whether `target_hidden_states` are those of several layers, side by side."""
        if self.config is None:
            return self.method in ("eagle3", "dflash")
        return self._reads.hidden_layers not in ((), ("norm",))

    def load_model(self, target_model: torch.nn.Module | str | PathLike[str]) -> None:
        """Loads the drafter that `speculative_config.draft_model_config.model` names.

        Args:
          target_model: the target, whose embedding and head the drafter shares where its own
            checkpoint has none or the same: a torch module (on the drafter's device, without a
            copy), or the path of a checkpoint.

        Raises:
          AttributeError: the module has no embedding. ValueError: the checkpoint is not for this
            target, or not of this method.
        """
        check_not_forked()
        path = self._read("speculative_config.draft_model_config.model")
        target = weights.target_of(target_model, self._read, self.device)
        options = self._load_options()
        with self._placed():
            drafter = jspec.load(
                path,
                target=target,
                method=self.method,
                num_drafts=self.settings.num_drafts,
                **options,
            )
        self.set_drafter(drafter.config, drafter.params)

    def set_drafter(self, config: Any, params: Params) -> None:
        """Sets a drafter that is in memory already, instead of one from disk.

        Args:
          config: of one of the methods of this class.
          params: its weights, on the drafter's device.

        Raises:
          ValueError: the config is of another method or drafts another number of tokens, or the
            params do not fit it. TypeError: they are not a nested dict of arrays.
        """
        name = proposers.of(config).name
        if name not in self.methods or config.num_drafts != self.settings.num_drafts:
            raise ValueError(
                f"{self._owner}: `config` is {name} with num_drafts {config.num_drafts}, wanted "
                f"{' or '.join(self.methods)} with {self.settings.num_drafts}. Make it with the "
                "method and num_speculative_tokens of the speculative config."
            )
        check_params(self._owner, config, params)
        self.config, self._params, self._memory = config, params, None
        self._reads = proposers.of(config).reads(config)
        self._forget_executables()

    def initialize_attn_backend(
        self, kv_cache_config: Any, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Takes the number and the size of KV pages from vLLM's KV cache configuration.

        The drafter has its own attention: no backend is made. It allocates as many pages as the
        target has, addressed by the same block tables.

        Args:
          kv_cache_config: `num_blocks` and `kv_cache_groups[0].kv_cache_spec.block_size` are read.
          kernel_block_sizes: slots per page by group, where block tables count smaller pages.

        Raises:
          ValueError: a size is missing, or pages of it do not fill the blocks.
        """
        name = "kv_cache_config"
        read = ConfigReader(kv_cache_config, self._owner, name)
        num_pages, groups = read("num_blocks"), read("kv_cache_groups")
        if not groups:
            raise ValueError(
                f"{self._owner}: `kv_cache_config.kv_cache_groups` is empty, wanted the target's "
                "group. Pass the configuration that vLLM made for the target."
            )
        read = ConfigReader(groups[0], self._owner, f"{name}.kv_cache_groups[0]")
        block_size = read("kv_cache_spec.block_size")
        page_size = kernel_block_sizes[0] if kernel_block_sizes else block_size
        if page_size < 1 or num_pages * block_size % page_size:
            raise ValueError(
                f"{self._owner}: `kernel_block_sizes` is {kernel_block_sizes}, wanted sizes that "
                f"divide the {num_pages} blocks of {block_size} slots evenly. Pass what vLLM's "
                "runner passes, or None for pages of that size."
            )
        self.kv_cache_gid = 0
        self._set_pages(num_pages * block_size // page_size, page_size)

    def initialize_cudagraph_keys(self, cudagraph_mode: Any = None) -> None:
        """Does nothing: XLA itself captures executables in command buffers."""

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Takes the KV pages from the configuration: vLLM has none of the drafter's layers."""
        self.initialize_attn_backend(kv_cache_config)

    def warmup(self) -> None:
        """Compiles steps of every size up to `max_num_batched_tokens` rows.

        For runners that do not call `dummy_run` for all sizes; no step compiles afterwards. Call it
        when weights and KV pages are known.

        Raises:
          RuntimeError: no weights are loaded. ValueError: the number of pages is not known.
        """
        self._ready()
        most = self.settings.max_rows
        for i in range((most - 1).bit_length() + 1):
            self.dummy_run(min(1 << i, most), is_graph_capturing=True)

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: Any = None,
    ) -> None:
        """Compiles steps of a number of rows; does nothing before weights and pages are known.

        With `num_speculative_tokens_per_batch_size`, also for every number of drafts in it.

        Args:
          num_tokens: rows of a step; Medusa's has one for each request.
          is_graph_capturing: smaller steps without an executable of their own use this one.
          use_cudagraphs, slot_mappings: not used.
        """
        del use_cudagraphs, slot_mappings
        if self._can_compile:
            self._ready()
            with self._dummy_run(is_graph_capturing):
                self._run_empty(num_tokens)

    @property
    def _can_compile(self) -> bool:
        """Whether weights and KV pages are known: vLLM profiles before they are."""
        num_pages = self._num_pages or self._read("cache_config.num_gpu_blocks", 0)
        return self.config is not None and (num_pages > 0 or not self.has_pages)

    def _ready(self) -> None:
        """Allocates the KV pages, at the first step that needs them.

        Raises:
          RuntimeError: no weights are loaded, or this process was forked from one that ran JAX.
        """
        check_not_forked()
        if self._memory is not None:
            return
        if self.config is None:
            raise RuntimeError(
                f"{self._owner}: no drafter is loaded. Call load_model(target_model) first."
            )
        if not self.has_pages:
            self._set_pages(1, 1)
        elif not self._num_pages:
            num_pages = self._read("cache_config.num_gpu_blocks")
            self._set_pages(num_pages, self._read("cache_config.block_size"))
        cache = jspec.CacheConfig(
            num_pages=self._num_pages,
            page_size=self.block_size,
            max_model_len=self.max_model_len,
            dtype=str(self._dtype()).removeprefix("torch."),
        )
        with self._placed():
            state = jspec.init(
                self.config, self._params, cache=cache, max_requests=self.settings.max_requests
            )
        self._params, self._memory = state.params, state.memory

    def _pack(
        self,
        tensors: Sequence[torch.Tensor],
        forms: Mapping[str, str],
        static: tuple[Any, ...] = (),
        bucket: Any = None,
    ) -> tuple[Int32[Array, "words"], Callable[..., Any]]:
        """Packs a step's tensors, which are checked where their dtypes and shapes are new.

        Args:
          tensors: of the step.
          forms: name to form of each, in their order; see `check_tensors`.
          static: what else the executable depends on.
          bucket: passed to `_bucket`.

        Returns:
          (words, executable).
        """
        return self._packer.pack_planned(
            (static, bucket), tensors, lambda: self._plan(tensors, forms, static, bucket)
        )

    def _plan(
        self,
        tensors: Sequence[torch.Tensor],
        forms: Mapping[str, str],
        static: tuple[Any, ...],
        bucket: Any,
    ) -> tuple[Plan, Callable[..., Any]]:
        """Checks tensors, and returns their plan and the executable of their bucket."""
        reads, named = self._reads, dict(zip(forms, tensors, strict=False))
        given = {name: (tensor, forms[name]) for name, tensor in named.items()}
        _, sizes = check_tensors(self._owner, given, self.device)
        if "target_hidden_states" in named:
            shape = tuple(named["target_hidden_states"].shape)
            if shape[1] != reads.hidden_size:
                raise ValueError(
                    f"{self._owner}: `target_hidden_states` has shape {shape}, wanted "
                    f"{(shape[0], reads.hidden_size)}: the target's states "
                    f"{list(reads.hidden_layers)} side by side (n = after n layers), a row for "
                    "each token."
                )
        key = layout_of(given, self._bucket(sizes, bucket)), static
        if key not in self._executables and self._compiling == "no":
            key = self._captured_for(*key, sizes) or key
        layout, static = key
        plan = self._packer.plan(layout, named, sizes)
        if key not in self._executables:
            self._warn_of_compilation(named)
            self._executables[key] = self._make(self.config, layout, *static)
        if self._compiling == "capture":
            self._captured.add(key)
        return plan, self._executables[key]

    def _bucket(self, sizes: Mapping[str, int], asked: Any) -> dict[str, int]:
        """Returns what the first axes of a step's tensors are padded to, by letter."""
        del asked  # read by classes that compile for given buckets
        return {letter: next_power_of_2(size) for letter, size in sizes.items()}

    def _captured_for(
        self, wanted: Layout, static: tuple[Any, ...], sizes: Mapping[str, int]
    ) -> Any:
        """Returns the smallest captured executable that a step fits in; None if there is none."""
        fitting = [
            (layout, drafts)
            for layout, drafts in self._captured
            if layout.fields == wanted.fields
            and drafts >= static
            and all(sizes[letter] <= most for letter, most in layout.capacity)
        ]
        return min(fitting, key=lambda key: (key[0].num_words, key[1]), default=None)

    @contextlib.contextmanager
    def _dummy_run(self, captures: bool) -> Iterator[None]:
        """Lets steps compile without a warning."""
        before, self._compiling = len(self._executables), "capture" if captures else "run"
        try:
            yield
        finally:
            self._compiling = "no"
            if len(self._executables) > before:
                # A step that used a larger executable may have one of its own now.
                self._packer.forget_plans()
                self._warns = True

    def _warn_of_compilation(self, named: Mapping[str, torch.Tensor]) -> None:
        """Warns once of a step that compiles although others were compiled ahead."""
        if not self._warns or self._compiling != "no":
            return
        self._warns = False
        shapes = ", ".join(
            f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            for name, tensor in named.items()
        )
        warnings.warn(
            f"{self._owner}: a step compiles while requests wait: {shapes}. Call warmup(), or "
            "dummy_run for that number of rows, before the first request. Later ones are not "
            "reported.",
            UserWarning,
            stacklevel=self._frames,
        )

    def _set_pages(self, num_pages: int, page_size: int) -> None:
        known = self._num_pages, self.block_size
        if self._memory is not None and (num_pages, page_size) != known:
            self._memory = None
            self._forget_executables()
        self._num_pages, self.block_size = num_pages, page_size

    def _forget_executables(self) -> None:
        self._executables.clear()
        self._packer.forget_plans()
        self._captured.clear()
        self._warns = False

    def _dtype(self) -> torch.dtype:
        dtype = self._read("model_config.dtype")
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype

    def _load_options(self) -> dict[str, Any]:
        parallel = self._read("speculative_config.parallel_drafting", None)
        if parallel is None or self.method == "dflash":  # always drafts in parallel
            return {}
        can = self.method in ("eagle3", "draft_model")
        return {"parallel_drafting": bool(parallel)} if parallel or can else {}
