"""Strict settings for every test: no silent promotion, checked shapes, a warning is an error."""

import gc
import itertools
import os
import re
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Annotations become checks before jspec is imported. Pytrees are left out (jspec.state, and the
# cache): JAX rebuilds them around placeholders that are no arrays.
_CHECKED = ("metadata", "verify", "metrics", "pallas", "models")
install_import_hook([f"jspec.{name}" for name in _CHECKED], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JSPEC_TEST_CACHE", str(Path(__file__).parent.parent / ".cache" / "jax")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# Most of the time goes into compiling for the CPU; `make test-all` compiles in full.
jax.config.update("jax_disable_most_optimizations", "JSPEC_TEST_QUICK" in os.environ)

settings.register_profile("jspec", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("jspec")

os.environ["HF_HUB_OFFLINE"] = "1"  # a name that leads nowhere is not looked for on the hub

GOLDEN = Path(__file__).parent / "golden"


# Further cases of what a quicker test shows already: `make test-all` runs them, too.
_SLOW = re.compile(
    r"""
    test_contract(_boundary)?\.py .* ((sampled|parallel) \] | \[ eagle \])
    | test_tree_contract\.py
    | test_peagle\.py::test_the_contract
    | test_lossless\.py::test_greedy .* \[ ([12]- | .*-[12]\])
    | test_lossless\.py::test_neighbours .* \[ (?!eagle3|mtp)
    | test_lossless\.py::test_a_draft_model .* \[ [128] \]
    | test_sampled_decode\.py::test_ (neighbours | a_drafter_that_is | texts | timed)
    | test_sampled_decode\.py::test_matched .* \[ (ngram|draft_model) \]
    | test_tree_decode\.py::test_ (each_step | a_chain .* \[eagle3 | greedy .* \[(eagle3|medusa))
    | test_adaptive_decode\.py::test_random .* \[ (ngram_gpu|suffix|tree) \]
    | test_adaptive_decode\.py::test_drafts_kept .* \[ block \]
    | test_adaptive_decode\.py::test_a_loop_measures .* \[ (eagle|tree) \]
    | test_chi_square\.py::test_texts .* 0\.7
    | test_transcripts\.py .* tokens
    | test_orbax\.py::test_every_recorded .* \[ (?!eagle3_llama\])
    | test_cli_convert\.py::test_a_recorded_ (model|drafter) .* \[ (?!target_qwen3\]|eagle3_llama-)
    | test_sampled_decode\.py::test_a_warmed
    | test_adaptive_decode\.py::test_ (random .* \[eagle | steps_without)
    | test_accepted_tokens\.py::test_tokens .* \[ (adaptive|sampled)
    | test_cli_generate\.py::test_ (chance | saved_folders)
    | test_cli_bench\.py::test_every_method .* False
    | test_cli\.py::test_a_drafter_from_disk .* \[ (?!eagle3)
    | test_eagle3\.py::test_the_target_gives .* \[ (?!eagle3_llama\])
    | test_draft_loop\.py .* without_jit
    | test_mtp_in_turn\.py::test_modules .* \[ (1-3|3-8) \]
    """,
    re.VERBOSE,
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if _SLOW.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
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
