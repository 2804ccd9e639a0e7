"""vLLM's modules as a plug-in meets them: names, signatures and the order of a worker's start.

Read off vllm/v1/worker/{worker_base,gpu_worker,cpu_worker,gpu_model_runner}.py,
vllm/v1/spec_decode, vllm/logger.py and vllm/triton_utils/dispatcher.py of 0.20.0 and 0.32.0, and of
0.33.0 what it has no more. Nothing of jspec or torch is imported here.
"""

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

Release = Literal["0.20", "0.32", "0.33"]
HOMES = {
    "ngram_proposer": "NgramProposer",
    "ngram_proposer_gpu": "NgramProposerGPU",
    "suffix_decoding": "SuffixDecodingProposer",
    "eagle": "EagleProposer",
    "dflash": "DFlashProposer",
    "draft_model": "DraftModelProposer",
    "medusa": "MedusaProposer",
    "extract_hidden_states": "ExtractHiddenStatesProposer",
}


class _Proposer:
    """Takes the arguments of any of vLLM's proposers."""

    eagle3_use_aux_hidden_state = True

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs


def vllm_modules(release: Release, make_runner: Callable[..., Any]) -> dict[str, ModuleType]:
    """Makes the modules of a release.

    Args:
      release: whose layout it is.
      make_runner: stands in for `GPUModelRunner`, with its arguments and then a function that
        looks a proposer class up where the runner does.

    Returns:
      Modules by name, for `sys.modules`.
    """
    made: dict[str, Any] = {}

    def module(name: str, **values: Any) -> Any:
        made[name] = ModuleType(name)
        vars(made[name]).update(values)
        return made[name]

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.spec_decode"):
        module(name, __path__=[])
    envs = module("vllm.envs", VLLM_USE_V2_MODEL_RUNNER=False if release == "0.20" else None)
    runner = module("vllm.v1.worker.gpu_model_runner")
    for home, name in HOMES.items():
        if (home, release) == ("medusa", "0.33"):
            continue
        cls = type(name, (_Proposer,), {"__module__": f"vllm.v1.spec_decode.{home}"})
        module(f"vllm.v1.spec_decode.{home}", **{name: cls})
        if home != "ngram_proposer":  # the runner imports this one in its methods
            setattr(runner, name, cls)
    if release != "0.20":
        runner.Step3p5MTPProposer = type("Step3p5MTPProposer", (runner.EagleProposer,), {})

    def look_up(name: str) -> type:
        home = made["vllm.v1.spec_decode.ngram_proposer"]
        return getattr(home if name == "NgramProposer" else runner, name)

    runner.GPUModelRunner = lambda vllm_config, device: make_runner(vllm_config, device, look_up)
    base = module("vllm.v1.worker.worker_base", WorkerBase=_worker_base())
    worker = _worker(base.WorkerBase, envs, release)
    module("vllm.v1.worker.gpu_worker", Worker=worker)
    module("vllm.v1.worker.cpu_worker", CPUWorker=_cpu_worker(worker, runner))
    return made


def _worker_base() -> type:
    class WorkerBase:
        def __init__(
            self,
            vllm_config: Any,
            local_rank: int,
            rank: int,
            distributed_init_method: str,
            is_driver_worker: bool = False,
        ) -> None:
            self.vllm_config = vllm_config
            self.speculative_config = vllm_config.speculative_config
            self.model_runner = None

        def compile_or_warm_up_model(self) -> Any:
            raise NotImplementedError

        def init_device(self) -> None:
            raise NotImplementedError

    return WorkerBase


def _worker(base: type, envs: ModuleType, release: Release) -> type:
    class Worker(base):
        def __init__(
            self,
            vllm_config: Any,
            local_rank: int,
            rank: int,
            distributed_init_method: str,
            is_driver_worker: bool = False,
        ):
            super().__init__(
                vllm_config=vllm_config,
                local_rank=local_rank,
                rank=rank,
                distributed_init_method=distributed_init_method,
                is_driver_worker=is_driver_worker,
            )
            if release == "0.20":
                self.use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER
            else:
                self.use_v2_model_runner = vllm_config.use_v2_model_runner

    return Worker


def _cpu_worker(base: type, runner: ModuleType) -> type:
    class CPUWorker(base):
        def __init__(
            self,
            vllm_config: Any,
            local_rank: int,
            rank: int,
            distributed_init_method: str,
            is_driver_worker: bool = False,
        ):
            super().__init__(
                vllm_config,
                local_rank,
                rank,
                distributed_init_method,
                is_driver_worker=is_driver_worker,
            )

        def init_device(self):
            if self.use_v2_model_runner:  # which has no drafter of these classes
                self.model_runner = SimpleNamespace()
            else:
                self.model_runner = runner.GPUModelRunner(self.vllm_config, "cpu")

        def compile_or_warm_up_model(self):  # an eager CPU worker compiles nothing
            return SimpleNamespace(language_model=0.0, encoder=0.0)

    return CPUWorker


def start_worker(vllm_config: Any) -> Any:
    """Makes a worker and its runner as `WorkerWrapperBase` does, after the plug-ins are loaded."""
    cls = sys.modules["vllm.v1.worker.cpu_worker"].CPUWorker
    worker = cls(
        vllm_config=vllm_config,
        local_rank=0,
        rank=0,
        distributed_init_method="tcp://127.0.0.1:1",
        is_driver_worker=True,
    )
    worker.init_device()
    return worker


def rebind_kernels() -> None:
    """Looks at every value of every imported module, as 0.32 does before it makes a CPU worker."""
    for module in list(sys.modules.values()):
        for value in list((getattr(module, "__dict__", None) or {}).values()):
            if hasattr(value, "__dict__"):
                vars(value).get("kernel")


def configure_logging(stream: Any) -> None:
    """Sets up logging as vLLM does by default: its own logger alone."""
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.INFO)
    logger = logging.getLogger("vllm")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
