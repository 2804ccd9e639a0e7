"""Strict settings for every test: no silent promotion, checked shapes, a warning is an error."""

import gc
import itertools
import os
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
RECORDED_TEXT = ROOT / "tests" / "recorded_text"

# Annotations become checks before jspec is imported. Left out: pytrees (jspec.state, the KV cache),
# which JAX rebuilds around placeholders that are no arrays; what config.json and users say, of any
# type until it is checked; compiled host loops.
_CHECKED = (
    *("metadata", "metrics", "pallas", "runtime.target"),
    *(
        f"models.{name}"
        for name in ("dflash", "dflash2", "eagle", "eagle3", "hidden_cache", "layers")
    ),
    *(f"models.{name}" for name in ("llama", "medusa", "mtp", "weights")),
    *("proposers._draft", "proposers._in_turn"),
    *("verification.greedy", "verification.rejection", "verification.sampling"),
)
install_import_hook([f"jspec.{name}" for name in _CHECKED], "beartype.beartype")

# Tests run one to a core, and most of what they compile is small: threads only cost time there.
_XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{_XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"

gc.set_threshold(50_000)  # tracing makes many objects that stay: collecting finds little

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JSPEC_TEST_CACHE", str(ROOT / ".cache" / "jax")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# Most of the time goes into compiling for the CPU; `make test-all` compiles in full.
jax.config.update("jax_disable_most_optimizations", "JSPEC_TEST_QUICK" in os.environ)

settings.register_profile("jspec", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("jspec")

os.environ["HF_HUB_OFFLINE"] = "1"  # a name that leads nowhere is not looked for on the hub


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if jax.default_backend() == "gpu" and item.get_closest_marker("any_device"):
            item.add_marker(pytest.mark.gpu)


_tests = itertools.count()


@pytest.fixture(autouse=True)
def memory_maps():
    """Lets executables go before their memory maps reach the limit of a process (65,530)."""
    yield
    maps = Path("/proc/self/maps")
    if next(_tests) % 10 == 9 and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def quick_compilation():
    """For tests of whole loops, where compiling takes longest."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def own_cache(monkeypatch, tmp_path_factory):
    """Keeps what commands store out of the user's cache folder."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def jax_cache(monkeypatch, tmp_path):
    """Lets a test set JAX's cache folder, and puts the tests' own back."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    yield lambda folder: jax.config.update(names[0], folder)
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed: each test draws the same numbers in every run."""
    return np.random.default_rng(20240229)


@pytest.fixture
def as_users_run_it():
    """Switches the tests' own shape checks off, which would speak before the op does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded inputs and outputs of the reference software."""
    return GOLDEN
