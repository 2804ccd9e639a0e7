"""Host time of the PyTorch classes beyond the JAX call, and whether they wait for the device.

    python -m benchmarks.torch_bridge --output benchmarks/results/torch-bridge-h200.json

The step is EAGLE-3's, 64 requests that each verified 5 drafts. `propose` goes from torch tensors to
torch tensors; "beyond its JAX call" is what it takes without the call of its executable; "around
nothing" is the same with nothing called. A call is timed until it returns; on a CPU the drafts are
computed by then. All are timed in two situations:

- in a runner's step: the device runs the target (here it counts cycles for a millisecond), the host
  prepares and drafts meanwhile, and then the device is waited for, which is not timed;
- back to back: eight calls in a row while the device is busy.

Turns are interleaved; figures are medians of the turns' medians. `--smoke` runs a tiny size.
"""

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jspec
from benchmarks.ngram import setting
from benchmarks.shapes import STEPS, StepShape, command_line
from jspec.models.config import ModelConfig
from jspec.models.eagle3 import Eagle3ModelConfig
from jspec.proposers import eagle3
from torch_bridge import EagleProposer

CONTEXT = 1024  # tokens a request
CALLS = 48  # of one function: a turn
IN_A_ROW = 8
TARGET = 2_000_000  # clock cycles: about a millisecond
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_layers": 1,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}
ON_A_CPU = LLAMA_8B | {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny size: does it run?")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    shape = STEPS["b64"] if not arguments.smoke else StepShape(requests=2, max_model_len=256)
    model = LLAMA_8B if on_gpu and not arguments.smoke else ON_A_CPU
    where = {k: v for k, v in setting().items() if k != "device_lookup"}
    results: dict[str, Any] = {
        "setting": where | {"command": command_line("torch_bridge")},
        "shape": {"B": shape.requests, "T": shape.rows, "K": shape.num_drafts, **model},
    }
    with torch.inference_mode():
        step = Step(shape, model, torch.device("cuda:0" if on_gpu else "cpu"))
        results["us"] = step.compare(arguments.rounds)
        results["waits"] = step.look_for_waits() if on_gpu else "not looked for: no GPU"
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


class Step:
    """A drafter in the middle of decoding, and the tensors that a runner passes to it."""

    def __init__(self, shape: StepShape, model: dict[str, int], device: torch.device):
        B, W, T, D = shape.requests, shape.width, shape.rows, model["hidden_size"]
        self.tokens: Any = None
        self.device, self.dtype = device, torch.bfloat16 if device.type == "cuda" else torch.float32
        decoder = ModelConfig(**model)
        config = jspec.Eagle3Config(
            num_drafts=shape.num_drafts,
            model=Eagle3ModelConfig(
                decoder=decoder, draft_vocab_size=decoder.vocab_size // 4, target_size=D
            ),
            hidden_layers=(2, 16, 29),
        )
        length = min(CONTEXT if device.type == "cuda" else 64, shape.max_model_len) // 2
        pages = -(-2 * length // shape.page_size)
        self.proposer = EagleProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(
                    method="eagle3", num_speculative_tokens=shape.num_drafts
                ),
                model_config=SimpleNamespace(max_model_len=shape.max_model_len, dtype=self.dtype),
                scheduler_config=SimpleNamespace(max_num_seqs=B, max_num_batched_tokens=8 * T),
                cache_config=SimpleNamespace(num_gpu_blocks=B * pages, block_size=shape.page_size),
            ),
            device,
        )
        params = eagle3.init_params(config, jax.random.key(0), str(self.dtype).split(".")[1])
        self.proposer.set_drafter(config, params)

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)

        rng = np.random.default_rng(0)
        table = np.full((B, shape.pages), 0)
        table[:, :pages] = rng.permutation(B * pages).reshape(B, pages)
        start = torch.arange(0, T + 1, W, dtype=torch.int32)
        self.sampled = ints(rng.integers(0, decoder.vocab_size, (B, W)))
        kept = rng.integers(1, W + 1, B)
        self.sampled[torch.arange(W) >= torch.as_tensor(kept)[:, None]] = -1
        self.metadata = SimpleNamespace(
            query_start_loc=start.to(device),
            query_start_loc_cpu=start,
            seq_lens=ints(np.full(B, length)),
            num_reqs=B,
            num_actual_tokens=T,
            max_query_len=W,
            max_seq_len=length,
            block_table_tensor=ints(table),
            slot_mapping=ints(np.zeros(T), torch.int64),
        )
        self.ids = ints(rng.integers(0, decoder.vocab_size, T))
        self.positions = ints(np.tile(np.arange(length - W, length), B), torch.int64)
        self.hidden = torch.randn(T, 3 * D, device=device).to(self.dtype)
        self.discard = torch.zeros(B, dtype=torch.bool, device=device)
        self.batch = SimpleNamespace(
            num_reqs=B,
            req_ids=list(map(str, range(B))),
            vocab_size=decoder.vocab_size,
            num_tokens_no_spec=np.full(B, length),
        )
        self.requests = {name: _Request() for name in self.batch.req_ids}
        counts = np.full(B, shape.num_drafts)
        self.spec = SimpleNamespace(
            cu_num_draft_tokens=ints(np.cumsum(counts)), num_draft_tokens=counts.tolist()
        )
        self.next_ids, self.valid = self.prepare_next()
        _, self.indices, self.rejected = self.prepare_inputs()

    def prepare_next(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.proposer.prepare_next_token_ids_padded(
            self.metadata, self.sampled, self.requests, self.batch, self.discard
        )

    def prepare_inputs(self) -> Any:
        return self.proposer.prepare_inputs_padded(self.metadata, self.spec, self.valid)

    def propose(self) -> torch.Tensor:
        return self.proposer.propose(
            target_token_ids=self.ids,
            target_positions=self.positions,
            target_hidden_states=self.hidden,
            next_token_ids=self.next_ids,
            token_indices_to_sample=self.indices,
            common_attn_metadata=self.metadata,
            sampling_metadata=None,
            num_rejected_tokens_gpu=self.rejected,
        )

    def compare(self, rounds: int) -> dict[str, Any]:
        """Times `propose`, the executable in it, and what a runner calls before."""
        proposer = self.proposer
        wanted = self.propose()
        ((key, (plan, draft)),) = proposer._packer._plans.items()
        times: dict[str, list[float]] = defaultdict(list)
        arguments: list[Any] = []

        def timed(params: Any, memory: Any, words: Any) -> Any:
            if not arguments:
                arguments[:] = params, jnp.array(words, copy=True)
            begin = time.perf_counter()
            memory, tokens = self._finished(*draft(params, memory, words))
            times["its JAX call"].append(time.perf_counter() - begin)
            return memory, tokens

        def alone() -> None:
            params, words = arguments
            proposer._memory, self.tokens = self._finished(*draft(params, proposer._memory, words))

        def with_executable(executable: Any) -> Callable[[], Any]:
            def propose() -> torch.Tensor:
                proposer._packer._plans[key] = plan, executable
                return self.propose()

            return propose

        propose = with_executable(timed)
        propose()
        alone()
        found = np.asarray(self.tokens).view(np.int64)[: len(wanted)]
        np.testing.assert_array_equal(found, wanted.cpu().numpy())
        contenders = {
            "propose": propose,
            "its JAX call alone": alone,
            "propose around nothing": with_executable(lambda _, memory, __: (memory, self.tokens)),
            "DLPack's public functions, in and out": lambda: (
                jax.dlpack.from_dlpack(self.ids),
                torch.from_dlpack(self.tokens),
            ),
            "one operation of torch": lambda: self.ids.add_(0),
        }
        results = {}
        for place, turn in (("in a runner's step", self._steps), ("back to back", self._row)):
            medians: dict[str, list[float]] = defaultdict(list)
            for i in range(rounds + 1):
                for name, contender in contenders.items():
                    times.clear()
                    turn(lambda name=name, call=contender: _clock(times[name], call), times)
                    if name == "propose":
                        pairs = zip(times[name], times["its JAX call"], strict=True)
                        times["propose beyond its JAX call"] = [a - b for a, b in pairs]
                    if i:  # the first one warms up
                        for what, seconds in times.items():
                            medians[what].append(statistics.median(seconds))
            results[place] = {
                name: round(1e6 * statistics.median(us), 1) for name, us in medians.items()
            }
        proposer._packer._plans[key] = plan, draft
        return results

    def _steps(self, call: Callable[[], None], times: dict[str, list[float]]) -> None:
        """Makes a call in each of a runner's steps."""
        for _ in range(CALLS):
            self._occupy(TARGET)
            _clock(times["prepare_next_token_ids_padded"], self.prepare_next)
            _clock(times["prepare_inputs_padded"], self.prepare_inputs)
            call()
            self._wait()

    def _row(self, call: Callable[[], None], _: Any) -> None:
        """Makes calls back to back, a few at a time: no queue of the driver's fills."""
        for _ in range(CALLS // IN_A_ROW):
            self._occupy(2 * IN_A_ROW * TARGET)
            for _ in range(IN_A_ROW):
                call()
            self._wait()

    def _occupy(self, cycles: int) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(cycles)

    def _finished(self, memory: Any, tokens: Any) -> Any:
        if self.device.type == "cpu":
            tokens.block_until_ready()
        return memory, tokens

    def look_for_waits(self) -> dict[str, Any]:
        """Looks for waits in `propose`: by a trace, by torch's own check and by the clock."""
        self._wait()
        torch.cuda.set_sync_debug_mode("error")
        with jax.transfer_guard("disallow"):
            self.propose()
        torch.cuda.set_sync_debug_mode("default")
        self._wait()
        self._occupy(100 * TARGET)
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            self.propose()
        returned = time.perf_counter() - begin
        self._wait()
        done = time.perf_counter() - begin
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(5):
                    with jax.profiler.TraceAnnotation("jspec_propose"):
                        self.propose()
                self._wait()
            events = _events(Path(folder))
        return {
            "calls": IN_A_ROW,
            "returned_after_ms": round(1e3 * returned, 3),
            "done_after_ms": round(1e3 * done, 3),
            "trace": _waits(events),
        }

    def _wait(self) -> None:
        jax.block_until_ready(self.proposer._memory)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _clock(seconds: list[float], call: Callable[[], Any]) -> None:
    begin = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - begin)


class _Request:
    def get_token_id(self, index: int) -> int:
        return 1


def _events(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def _waits(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts calls that wait for the device, by name, in the thread and the time of `propose`."""
    spans = [e for e in events if e.get("name") == "jspec_propose" and "dur" in e]
    inside, calls = Counter(), Counter()
    for event in events:
        for span in spans:
            if (event.get("pid"), event.get("tid")) == (span["pid"], span["tid"]) and (
                span["ts"] <= event.get("ts", -1) <= span["ts"] + span["dur"]
            ):
                calls[event["name"]] += 1
                if "ynchronize" in event["name"]:
                    inside[event["name"]] += 1
    launches = sum(n for name, n in calls.items() if "aunch" in name)
    return {"propose_calls": len(spans), "launches_seen": launches, "waits": dict(inside)}


if __name__ == "__main__":
    main()
