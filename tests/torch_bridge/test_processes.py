"""Forked processes, several devices, and limits of GPU memory."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch_bridge.interop.dlpack import check_preallocation

_FORK = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")  # Python and JAX warn of forks
import jax, jax.numpy as jnp, torch
from torch_bridge.interop.dlpack import jax_device, to_jax, to_torch
from torch_bridge.interop.layout import Field, Layout
from torch_bridge.interop.packing import Packer

tensor = torch.arange(3, dtype=torch.int32)
layout = Layout((Field("ids", "B"),), (("B", 4),))
add = jax.jit(lambda words: words + 1)
if sys.argv[1] == "after":
    packer = Packer(torch.device("cpu"), "owner")
    plan = packer.plan(layout, {"ids": tensor}, {"B": 3})
    array = add(packer.pack(plan, [tensor]))
    calls = {
        "to_jax": lambda: to_jax(tensor),
        "to_jax of numpy": lambda: to_jax(tensor.numpy()),
        "to_torch": lambda: to_torch(array),
        "jax_device": lambda: jax_device(torch.device("cpu")),
        "Packer": lambda: Packer(torch.device("cpu"), "owner"),
        "pack": lambda: add(packer.pack(plan, [tensor])),
    }
else:
    def step():
        packer = Packer(torch.device("cpu"), "owner")
        plan = packer.plan(layout, {"ids": tensor}, {"B": 3})
        assert to_torch(add(packer.pack(plan, [tensor]))).tolist()[:4] == [4, 1, 2, 3]
    calls = {"step": step}

def call_all():
    signal.alarm(60)  # where JAX hangs, the process ends
    for name, call in calls.items():
        try:
            call()
            print(name, "worked")
        except RuntimeError as error:
            print(name, "refused" if "'spawn'" in str(error) else error)

if (child := os.fork()) == 0:
    if sys.argv[2] == "grandchild" and (grandchild := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    call_all()
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("generation", ["child", "grandchild"])
def test_a_process_forked_from_one_that_ran_jax_is_told_so(generation):
    lines = _run(_FORK, "after", generation).splitlines()
    assert len(lines) == 6 and all(line.endswith(" refused") for line in lines), lines


@pytest.mark.parametrize("generation", ["child", "grandchild"])
def test_a_process_forked_from_one_that_ran_no_jax_works(generation):
    assert _run(_FORK, "before", generation).splitlines() == ["step worked"]


def _run(script: str, *args: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_VARIABLES = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "FALSE"},  # jaxlib takes this for true
        {"XLA_PYTHON_CLIENT_PREALLOCATE": ""},
        {"XLA_CLIENT_MEM_FRACTION": ""},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"},
    ],
    ids=str,
)
def test_a_gpu_that_jax_would_take_whole_is_warned_of(environment, monkeypatch):
    _set(monkeypatch, environment)
    with pytest.warns(RuntimeWarning, match="XLA_PYTHON_CLIENT_PREALLOCATE=false"):
        check_preallocation(torch.device("cuda", 0))
    check_preallocation(torch.device("cpu"))  # warnings are errors here


@pytest.mark.parametrize(
    "environment",
    [
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "False"},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "0"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".25"},
        {"XLA_CLIENT_MEM_FRACTION": "0.25"},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "Platform"},
    ],
    ids=str,
)
def test_a_gpu_whose_share_was_set_is_not_warned_of(environment, monkeypatch):
    _set(monkeypatch, environment)
    check_preallocation(torch.device("cuda", 0))  # warnings are errors here


def _set(monkeypatch, environment):
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)


def test_an_array_on_several_devices_is_refused_and_the_others_are_found():
    _run(
        """
import jax, numpy as np, pytest, torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch_bridge.interop.dlpack import jax_device, to_torch
mesh = Mesh(np.array(jax.devices()), ("x",))
spread = jax.device_put(np.arange(4), NamedSharding(mesh, PartitionSpec("x")))
with pytest.raises(ValueError, match="`array` lies on 2 devices, wanted one. Gather"):
    to_torch(spread)
second = jax.devices()[1]
assert to_torch(jax.device_put(np.arange(4), second)).tolist() == [0, 1, 2, 3]
assert jax_device(torch.device("cpu", 1)) == second
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
