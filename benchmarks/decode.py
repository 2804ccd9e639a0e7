"""Decoding on this machine's CPU: plain against transformers, n-gram drafting against plain.

"ngram" and "ngram_gpu" verify every draft; "adaptive" is "ngram" with the default draft length.

    python benchmarks/decode.py --output benchmarks/results/decode-cpu.json

Everything is measured in one run with interleaved turns, whose medians are compared. transformers
(with torch) is included where it is installed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jspec import proposers
from jspec._user_cache import cache_folder
from jspec.checkpoint import Model, read
from jspec.cli.models import open_tokenizer
from jspec.config import CacheConfig
from jspec.demo.assets import fetch_smollm2
from jspec.demo.prompts import demo_prompts
from jspec.loading import load
from jspec.runtime import benchmark

CACHE = CacheConfig(num_pages=32, page_size=16, max_model_len=512, dtype="float32")
CONTENDERS = {  # method, and further options of the loop
    "ngram": ("ngram", {"drafting": "fixed"}),
    "ngram_gpu": ("ngram_gpu", {"drafting": "fixed"}),
    "adaptive": ("ngram", {}),
}
LOOKUP = {"num_drafts": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LOAD = """
import resource, sys
import jax
jax.numpy.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from jspec.loading import load
model = load(sys.argv[1], "float32")
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(weights, before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file or smollm2")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens to add to each")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))

    path = fetch_smollm2() if arguments.model == "smollm2" else Path(arguments.model)
    results: dict[str, Any] = {"setting": setting(arguments), "load": load_memory(path)}
    print(json.dumps(results, indent=2))
    model = load(path, "float32")
    tokenizer = open_tokenizer(model)
    suite: dict[str, list[list[int]]] = {}
    for prompt in demo_prompts():
        prompts = suite.setdefault(prompt.kind, [])
        if len(prompts) < arguments.prompts:
            prompts.append(tokenizer.chat(prompt.text))
    sizes = {"max_tokens": arguments.max_tokens, "cache": CACHE}

    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        reference = Transformers(path)
        prompts = suite["chat"]
        turns = interleave(
            arguments.rounds,
            transformers=lambda: reference.tokens_per_second(prompts, arguments.max_tokens),
            jspec=lambda: benchmark.run(model, prompts, **sizes).tokens_per_second,
        )
        results["plain_against_transformers"] = compare(turns, "jspec", "transformers")
    else:
        results["plain_against_transformers"] = "not measured: transformers or torch is missing"
    print(json.dumps(results["plain_against_transformers"], indent=2), flush=True)

    for kind, prompts in suite.items():
        numbers = against_plain(model, prompts, arguments.rounds, sizes)
        results[f"{kind}_against_plain"] = numbers
        print(kind, json.dumps(numbers, indent=2), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def against_plain(model: Model, prompts, rounds: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Compares each n-gram drafter with plain decoding on one kind of prompt."""
    last: dict[str, Any] = {}

    def contender(name: str):
        config, options = None, {}
        if name != "plain":
            method, options = CONTENDERS[name]
            config = proposers.find(method).Config(**LOOKUP)

        def turn() -> float:
            last[name] = benchmark.run(model, prompts, config, **sizes, **options)
            return last[name].tokens_per_second

        return turn

    turns = interleave(rounds, **{name: contender(name) for name in ("plain", *CONTENDERS)})
    numbers = {name: compare(turns, name, "plain") for name in CONTENDERS}
    for name in CONTENDERS:
        row = benchmark.summary(name, LOOKUP["num_drafts"], last[name], last["plain"])
        for key in (
            *("tokens_per_step", "mean_acceptance_length", "acceptance_per_position"),
            "identical_to_plain",
        ):
            numbers[name][key] = row[key]
    return numbers


def interleave(rounds: int, **contenders) -> dict[str, list[float]]:
    """Interleaves the turns; the first turn of each is a warm-up and not counted."""
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, turn in contenders.items():
            speed = turn()
            if i:
                turns[name].append(speed)
    return turns


def compare(turns: dict[str, list[float]], name: str, base: str) -> dict[str, Any]:
    median = {n: statistics.median(speeds) for n, speeds in turns.items()}
    return {
        "tokens_per_second": median[name],
        f"{base}_tokens_per_second": median[base],
        "ratio": median[name] / median[base],
        "turns": {n: [round(s, 2) for s in turns[n]] for n in (name, base)},
    }


class Transformers:
    """Greedy `generate` of transformers, in float32 on the same weights and threads."""

    def __init__(self, path: Path):
        import torch
        import transformers

        torch.set_num_threads(os.cpu_count() or 1)
        checkpoint = read(path)
        config = transformers.LlamaConfig(**checkpoint.config)
        self.torch = torch
        self.model = transformers.LlamaForCausalLM(config).eval()
        weights = {name: torch.from_numpy(array.copy()) for name, array in checkpoint.tensors()}
        missing, extra = self.model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"} and not extra, (missing, extra)
        self.model.tie_weights()

    def tokens_per_second(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Times the same passes as for jspec: those that decode, without prefill."""
        seconds = num_tokens = 0.0
        with self.torch.inference_mode():
            for prompt in prompts:
                ids = self.torch.tensor([prompt])
                begin = time.perf_counter()
                self.model.generate(ids, do_sample=False, max_new_tokens=1, pad_token_id=0)
                first = time.perf_counter() - begin
                begin = time.perf_counter()
                out = self.model.generate(
                    ids, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
                )
                seconds += time.perf_counter() - begin - first
                num_tokens += out.shape[1] - len(prompt)
        return num_tokens / seconds


def load_memory(path: Path) -> dict[str, float]:
    """Measures a fresh process that loads the model."""
    command = [sys.executable, "-c", LOAD, str(path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    weights, before, peak = map(int, out.split())
    return {
        "float32_weights_mb": weights / 1e6,
        "process_before_mb": before / 1e6,
        "peak_mb": peak / 1e6,
        "peak_over_weights": peak / weights,
    }


def setting(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the machine, versions and command of the figures."""
    versions = {}
    for name in ("jax", "jaxlib", "flax", "numpy", "numba", "torch", "transformers"):
        if importlib.util.find_spec(name):
            versions[name] = importlib.metadata.version(name)
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return {
        "command": f"python benchmarks/decode.py --rounds {arguments.rounds} "
        f"--prompts {arguments.prompts} --max-tokens {arguments.max_tokens}",
        "device": f"{cpu}, {os.cpu_count()} threads",
        "python": platform.python_version(),
        "versions": versions,
        "model": "SmolLM2-135M-Instruct, float32, batch 1",
        "drafter": LOOKUP,
    }


if __name__ == "__main__":
    main()
