"""Strict settings for every test: no silent promotion, checked shapes, a warning is an error."""

import os
from pathlib import Path

import jax
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
# Most of the time goes into compiling. The newest JAX compiles in full (see .ci/test-newest).
jax.config.update("jax_disable_most_optimizations", "JSPEC_TEST_QUICK" in os.environ)

settings.register_profile("jspec", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("jspec")

GOLDEN = Path(__file__).parent / "golden"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        for item in items:
            if item.get_closest_marker("any_device"):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed: each test draws the same numbers in every run."""
    return np.random.default_rng(20240229)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded inputs and outputs of the reference software."""
    return GOLDEN
