"""benchmarks/ops.py: one run measures everything, and a failure loses only its own cells."""

import functools
import json
import sys

import jax

from benchmarks import ops


def test_the_benchmark_reports_a_failing_implementation_beside_the_others(tmp_path, monkeypatch):
    output = tmp_path / "ops.json"
    argv = ["--smoke", "--ops", "sample_index", "--limit", "60", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["ops", *argv])
    monkeypatch.setattr(ops, "ANY_IMPLS", ("xla", "triton"))
    ops.main()
    roads = json.loads(output.read_text())["ops"]["sample_index"]
    assert roads["xla"]["cells"]["b1"]["same_as_xla"]
    assert "NotImplementedError" in roads["triton"]["error"]


def test_a_program_without_gpu_launches_counts_as_not_traced():
    call, args = ops.case("sample_index", ops.STEPS["b1"])
    counts = ops.launches(jax.jit(ops.chain(functools.partial(call, impl="xla"), 2)), args)
    assert counts == {"graphs": 0, "kernels": 0}
    assert ops.describe(counts) == "not traced"
    assert ops.describe({"graphs": 1, "kernels": 0}) == "inside"
    assert ops.describe({"graphs": 2, "kernels": 3}) == "split (2 graphs)"
    assert ops.describe({"graphs": 0, "kernels": 9}) == "outside (9 launches)"
