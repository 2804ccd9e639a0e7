"""The switch of the plug-in for vLLM's own methods, with modules laid out as vLLM's."""

import io
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import jax

from tests.support.torch_runs import DEVICE, config_for, run
from tests.support.torch_stand_in import StandInRunner, ours
from tests.support.vllm_layout import HOMES, configure_logging, start_worker, vllm_modules
from torch_bridge import vllm_plugin

RELEASES = ["0.20", "0.32", "0.33"]
CLASSES = {
    "ngram": "NgramProposer",
    "ngram_gpu": "NgramProposerGPU",
    "suffix": "SuffixDecodingProposer",
    "eagle": "EagleProposer",
    "eagle3": "EagleProposer",
    "mtp": "EagleProposer",
    "dflash": "DFlashProposer",
    "draft_model": "DraftModelProposer",
    "medusa": "MedusaProposer",
    "extract_hidden_states": "ExtractHiddenStatesProposer",
}


class Vllm:
    """A release's modules, and what its log shows."""

    def __init__(self, release):
        self.release, self.stream = release, io.StringIO()
        self.modules = vllm_modules(release, self.make_runner)
        self.runner = self.modules["vllm.v1.worker.gpu_model_runner"]

    def make_runner(self, vllm_config, device, look_up):
        if vllm_config.speculative_config is None:
            return SimpleNamespace()
        calls = "0.20" if self.release == "0.20" else "0.33"
        vocab_size = vllm_config.model_config.hf_config.vocab_size
        return StandInRunner(vllm_config, DEVICE, vocab_size, look_up=look_up, release=calls)

    def look_up(self, name):
        home = self.modules["vllm.v1.spec_decode.ngram_proposer"]
        return getattr(home if name == "NgramProposer" else self.runner, name)

    def start(self, method, *, config=None, v2=False, **speculative):
        """Loads the plug-in, more than once as vLLM may, and starts a worker."""
        if config is None:
            config = config_for(method, **speculative)
        config.use_v2_model_runner = v2  # a property of 0.32's
        vllm_plugin.register()
        vllm_plugin.register()
        return start_worker(config)

    @property
    def log(self):
        return self.stream.getvalue().splitlines()


@pytest.fixture
def vllm(request, monkeypatch):
    found = Vllm(getattr(request, "param", "0.32"))
    for name, module in found.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    logger = logging.getLogger("vllm")
    before = logger.handlers, logger.propagate, logger.level
    configure_logging(found.stream)
    for name in (vllm_plugin.SWITCH, "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # so that it is gone after the test
        monkeypatch.delenv(name)
    yield found
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def each_release(test):
    return pytest.mark.parametrize("vllm", RELEASES, indirect=True)(test)


def options(method):
    """What vLLM's configuration has beside the method."""
    if method in ("ngram", "ngram_gpu"):
        return {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {"num_drafts": 1} if method == "extract_hidden_states" else {}


@each_release
def test_without_the_variable_nothing_changes(vllm, monkeypatch):
    for value in ("", " , "):
        monkeypatch.setenv(vllm_plugin.SWITCH, value)
        worker = vllm.start("eagle3")
        assert type(worker.model_runner.drafter) is vllm.runner.EagleProposer
        assert type(worker).init_device is worker.init_device.__func__
    assert vllm.log == [] and "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


def test_without_the_variable_vllm_is_not_imported(monkeypatch):
    monkeypatch.delenv(vllm_plugin.SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import raises
    vllm_plugin.register()


@each_release
@pytest.mark.parametrize("method", CLASSES)
def test_a_worker_swaps_the_class_of_its_method_and_says_so_once(method, vllm, monkeypatch):
    if (method, vllm.release) == ("medusa", "0.33"):
        pytest.skip("0.33 has no Medusa")
    name = CLASSES[method]
    theirs = {other: getattr(vllm.runner, other, None) for other in HOMES.values()}
    monkeypatch.setenv(vllm_plugin.SWITCH, f"dflash, {method}")
    for _ in range(2):
        worker = vllm.start(method, **options(method))
        assert type(worker.model_runner.drafter) is ours(name)
    assert vllm.look_up(name) is ours(name)
    others = {other: getattr(vllm.runner, other, None) for other in HOMES.values() if other != name}
    assert others == {other: theirs[other] for other in others}
    (line,) = vllm.log
    home = next(home for home, cls in HOMES.items() if cls == name)
    module = ours(name).__module__
    assert line == (
        f"JSPEC_VLLM_SWAP: vllm.v1.spec_decode.{home}.{name} is replaced by {module}.{name}."
    )
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.any_device
@pytest.mark.parametrize("vllm", ["0.20", "0.32"], indirect=True)
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_an_eager_worker_has_compiled_before_its_first_request(method, vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "all")
    engine = run(
        method,
        release="0.20" if vllm.release == "0.20" else "0.33",
        capture_sizes=(),  # an eager worker runs no drafter before requests come
        start_worker=lambda config: vllm.start(method, config=config),
    )
    assert type(engine.runner.drafter) is ours(CLASSES[method])
    assert not [name for name in engine.compiled if "jspec_bridge" in name]
    assert ("jspec compiled its drafting" in vllm.log[-1]) == (method == "eagle3")


_SPAWNED = """
import sys
from types import SimpleNamespace
from tests.support.vllm_layout import configure_logging, rebind_kernels, start_worker, vllm_modules

def make_runner(vllm_config, device, look_up):
    return SimpleNamespace(drafter=look_up("NgramProposer")(vllm_config))

sys.modules.update(vllm_modules("0.32", make_runner))
configure_logging(sys.stdout)
from torch_bridge.vllm_plugin import register

register()
register()
rebind_kernels()
assert not {"jax", "numba", "llvmlite", "torch"} & set(sys.modules)
config = SimpleNamespace(
    speculative_config=SimpleNamespace(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4
    ),
    model_config=SimpleNamespace(max_model_len=64),
    use_v2_model_runner=False,
)
worker = start_worker(config)
print(type(worker.model_runner.drafter).__module__)
"""


def test_a_worker_process_imports_nothing_heavy_before_it_makes_its_runner():
    """vLLM 0.32 looks through all modules there, and fails at those of llvmlite."""
    done = subprocess.run(
        [sys.executable, "-c", _SPAWNED],
        env=os.environ | {vllm_plugin.SWITCH: "ngram"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log, module = done.stdout.splitlines()
    assert "NgramProposer is replaced by torch_bridge.proposers.ngram_host.NgramProposer" in log
    assert module == "torch_bridge.proposers.ngram_host"


@pytest.mark.parametrize("value", ["suffix", "all"])
@pytest.mark.parametrize("method", [None, "custom_class", "dspark"])
def test_an_engine_of_another_method_is_left_alone_with_a_warning(method, value, vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, value)
    config = config_for(method or "eagle")
    if method is None:
        config.speculative_config = None
    drafter = object()
    monkeypatch.setattr(vllm, "make_runner", None)
    vllm.runner.GPUModelRunner = lambda *args: SimpleNamespace(drafter=drafter)
    worker = vllm.start(method, config=config)
    assert worker.model_runner.drafter is drafter
    worker.compile_or_warm_up_model()
    (line,) = vllm.log
    assert line == f"JSPEC_VLLM_SWAP={value} swaps nothing: the method of this engine is {method}."
    assert vllm.runner.EagleProposer is not ours("EagleProposer")


def test_a_class_that_only_vllm_has_stays_with_its_base(vllm, monkeypatch):
    """vLLM checks it as an instance of the base, which therefore must be vLLM's as well."""
    monkeypatch.setenv(vllm_plugin.SWITCH, "step3p5_mtp")  # which vLLM turns into mtp
    theirs, base = vllm.runner.Step3p5MTPProposer, vllm.runner.EagleProposer
    vllm.runner.GPUModelRunner = lambda *args: SimpleNamespace(drafter=theirs())
    worker = vllm.start("mtp")
    worker.compile_or_warm_up_model()
    assert isinstance(worker.model_runner.drafter, vllm.runner.EagleProposer)
    assert vllm.runner.EagleProposer is base
    (line,) = vllm.log
    assert "Step3p5MTPProposer drafts, for which jspec has no class. Nothing is swapped" in line


def test_a_rank_without_drafter_is_fine(vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "eagle")
    vllm.runner.GPUModelRunner = lambda *args: SimpleNamespace()
    worker = vllm.start("eagle")
    assert worker.compile_or_warm_up_model() is not None


@each_release
def test_the_v2_runner_is_refused_with_the_variable_that_avoids_it(vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "eagle3")
    vllm.modules["vllm.envs"].VLLM_USE_V2_MODEL_RUNNER = True
    with pytest.raises(RuntimeError, match="Set VLLM_USE_V2_MODEL_RUNNER=0 beside"):
        vllm.start("eagle3", v2=True)
    assert vllm.runner.EagleProposer is not ours("EagleProposer")


def test_a_choice_that_changes_the_drafts_is_refused_or_warned_of(vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "all")
    with pytest.raises(NotImplementedError, match="use_heterogeneous_vocab .* Leave it out"):
        vllm.start("draft_model", use_heterogeneous_vocab=True)
    with pytest.warns(RuntimeWarning, match="drafts greedily"):
        vllm.start("eagle", draft_sample_method="probabilistic")


def test_a_share_of_the_memory_that_was_chosen_is_kept(vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "suffix")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    vllm.start("suffix")
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


def test_executables_are_kept_in_the_users_cache_folder(vllm, monkeypatch, tmp_path, jax_cache):
    monkeypatch.setenv(vllm_plugin.SWITCH, "eagle")
    jax_cache(None)
    vllm.start("eagle")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "compiled")
    assert (tmp_path / "cache" / "compiled").is_dir()


def test_a_cache_that_jax_has_already_is_kept(vllm, monkeypatch, tmp_path, jax_cache):
    monkeypatch.setenv(vllm_plugin.SWITCH, "eagle")
    jax_cache(str(tmp_path / "mine"))
    vllm.start("eagle")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_cannot_be_made_goes_unused(vllm, monkeypatch, tmp_path, jax_cache):
    monkeypatch.setenv(vllm_plugin.SWITCH, "eagle")
    (tmp_path / "cache").write_text("a file")
    jax_cache(None)
    vllm.start("eagle")
    assert jax.config.jax_compilation_cache_dir is None


def test_a_name_that_vllm_moved_is_an_error(vllm, monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "all")
    del vllm.runner.EagleProposer
    with pytest.raises(ImportError, match="gpu_model_runner has no class EagleProposer"):
        vllm.start("eagle")
    del vllm.modules["vllm.v1.spec_decode.ngram_proposer"].NgramProposer
    with pytest.raises(ImportError, match="ngram_proposer has no class NgramProposer"):
        vllm.start("ngram", **options("ngram"))
    monkeypatch.setitem(sys.modules, "vllm.v1.spec_decode.ngram_proposer", None)
    with pytest.raises(ImportError, match="no module vllm.v1.spec_decode.ngram_proposer"):
        vllm.start("ngram", **options("ngram"))


def test_a_value_that_names_no_method_is_an_error(vllm, monkeypatch):
    for value in ("eagle5", "eagle3,all", "eagle3,custom_class"):
        monkeypatch.setenv(vllm_plugin.SWITCH, value)
        wrong = value.split(",")[-1]
        with pytest.raises(ValueError, match=f"'{wrong}' is no method .* wanted all, or some of"):
            vllm_plugin.register()


def test_the_variable_without_vllm_is_an_error(monkeypatch):
    monkeypatch.setenv(vllm_plugin.SWITCH, "eagle3")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="or no vLLM"):
        vllm_plugin.register()
