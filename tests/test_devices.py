"""All arrays stay on the target's device, whichever device that is."""

import os
import subprocess
import sys

_SCRIPT = """
import jax, jspec
from jspec.checkpoint import Model
from jspec.models import llama

first, second = jax.devices()
config = jspec.ModelConfig.tiny()
params = llama.init_params(config, jax.random.key(0), "float32")
drafter = jspec.NgramGPUConfig(num_drafts=2, prompt_lookup_min=1)
cache = jspec.CacheConfig(num_pages=4, max_model_len=32, dtype="float32")

with jax.default_device(second):
    state = jspec.init(drafter, cache=cache, max_requests=1)
assert state.memory.history.devices() == {second}

model = Model(config, jax.device_put(params, second), None, None, ())
drafted = jspec.generate(model, [[1, 2, 1, 2]], drafter, max_tokens=4, cache=cache)
plain = jspec.generate_plain(model, [[1, 2, 1, 2]], max_tokens=4, cache=cache)
assert drafted.generations == plain.generations
print("second device: as plain decoding")
"""


def test_a_target_on_the_second_device_is_drafted_for_there():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "second device: as plain decoding\n", done.stderr
