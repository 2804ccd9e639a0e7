"""`python -m jspec demo`: SmolLM2 decodes the suite with and without drafts."""

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jspec import proposers
from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.demo.assets import fetch_smollm2
from jspec.demo.picture import plot_acceptance
from jspec.demo.prompts import Prompt, demo_prompts
from jspec.loading import load
from jspec.runtime import benchmark
from jspec.runtime.decode import Report
from jspec.text import Tokenizer

NUM_DRAFTS = 7
METHODS = ("ngram", "ngram_gpu")
NUM_PROMPTS = {"copy": 4, "humaneval": 3, "chat": 2}  # of the suite: about a minute on two cores
CACHE = CacheConfig(num_pages=32, page_size=16, max_model_len=512, dtype="float32")


def run(*, max_tokens: int, output: Path) -> int:
    """Decodes the suite, prints a table, writes a picture.

    Args:
      max_tokens: most tokens to add to each prompt.
      output: path of the picture.

    Returns:
      Exit code: 0 if every drafter gave the tokens of plain decoding, else 1.
    """
    console = Console()
    begin = time.perf_counter()
    model = load(fetch_smollm2(), "float32")
    assert model.tokenizer_json is not None  # read_gguf rebuilds it or raises
    tokenizer = Tokenizer.from_json(
        model.tokenizer_json, model.chat_template, model.tokenizer_config
    )
    suite: dict[str, list[Prompt]] = {kind: [] for kind in NUM_PROMPTS}
    for prompt in demo_prompts():
        if len(suite[prompt.kind]) < NUM_PROMPTS[prompt.kind]:
            suite[prompt.kind].append(prompt)
    console.print(
        f"SmolLM2-135M-Instruct, float32: loaded in {time.perf_counter() - begin:.1f} s. "
        "The first run compiles."
    )

    results = []
    for kind, prompts in suite.items():
        ids = [tokenizer.chat(prompt.text) for prompt in prompts]
        if not results:
            _show_one(console, model, tokenizer, prompts[0], ids[0], max_tokens)
        plain = benchmark.run(model, ids, max_tokens=max_tokens, cache=CACHE)
        results.append(benchmark.summary("none", 0, plain, plain) | {"kind": kind})
        for method in METHODS:
            report = _draft(model, ids, method, max_tokens)
            row = benchmark.summary(method, NUM_DRAFTS, report, plain)
            results.append(row | {"kind": kind})
            console.print(f"{kind}: {len(ids)} prompts with {method} done", style="dim")

    console.print(_table(results))
    _picture(results, output)
    same = all(row["identical_to_plain"] for row in results)
    console.print(f"{time.perf_counter() - begin:.0f} s in all; picture: {output}")
    console.print(f"identical to plain decoding: {'yes' if same else 'no'}")
    return 0 if same else 1


def _draft(model: Model, ids: list[list[int]], method: str, max_tokens: int, **kwargs) -> Report:
    Config = proposers.find(method).Config
    config = Config(num_drafts=NUM_DRAFTS, prompt_lookup_min=2, prompt_lookup_max=4)
    sizes = {"max_tokens": max_tokens, "cache": CACHE}
    return benchmark.run(model, ids, config, **sizes, **kwargs)


def _show_one(
    console: Console,
    model: Model,
    tokenizer: Tokenizer,
    prompt: Prompt,
    ids: list[int],
    max_tokens: int,
) -> None:
    """Streams one continuation, with accepted drafts underlined."""
    stream = tokenizer.stream()

    def show(index: int, tokens: list[int], num_accepted: int) -> None:
        accepted, rest = stream.push(tokens[:num_accepted]), stream.push(tokens[num_accepted:])
        console.print(_marked(accepted, rest), end="", soft_wrap=True)

    console.rule(f"{prompt.name}: drafts that the model accepted are underlined")
    console.print(Text(prompt.text.splitlines()[0], style="dim"))
    _draft(model, [ids], METHODS[0], max_tokens, on_tokens=show)
    console.print(stream.finish())
    console.rule()


def _marked(accepted: str, rest: str) -> Text:
    return Text.assemble((accepted, "bold green underline"), rest)


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(
        title=f"greedy decoding, at most {NUM_DRAFTS} drafts, n-grams of 4 down to 2",
        caption="drafts that were not expected to pay are not verified\n"
        "mean length: tokens/step of the steps with drafts",
        box=box.SIMPLE_HEAD,  # with these margins it fits into 80 columns
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("prompts", "method"):
        table.add_column(name)
    for name in (
        *("tokens\n/s", "speed-up", "tokens\n/step", "mean\nlength", "accepted %\nby position"),
    ):
        table.add_column(name, justify="right")
    table.add_column("identical", justify="right")
    for row in results:
        drafted = row["method"] != "none"
        table.add_row(
            row["kind"],
            row["method"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup'] or 1:.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            " ".join(f"{100 * rate:.0f}" for rate in row["acceptance_per_position"]) or "-",
            ("yes" if row["identical_to_plain"] else "no") if drafted else "-",
            end_section=row["method"] == METHODS[-1],
        )
    return table


def _picture(results: list[dict[str, Any]], output: Path) -> None:
    """Draws acceptance by position and tokens a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(row["kind"] for row in results))
    ngram = {row["kind"]: row for row in results if row["method"] == "ngram"}
    plot_acceptance(left, {kind: ngram[kind]["acceptance_per_position"] for kind in kinds})
    left.set(ylim=(0, 1.2), title="Drafts of ngram")
    left.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    left.legend(loc="upper center", ncols=len(kinds))  # above the data, as 1.2 leaves room
    methods = ("none", *METHODS)
    width = 0.84 / len(methods)
    for i, method in enumerate(methods):
        speeds = [row["tokens_per_second"] for row in results if row["method"] == method]
        middle = width * (i - (len(methods) - 1) / 2)
        bars = right.bar(
            [x + middle for x in range(len(kinds))],
            speeds,
            0.93 * width,
            label=method,
            color=f"C{len(kinds) + i}" if i else "silver",  # other colours than in the left half
        )
        right.bar_label(bars, fmt="%.0f")
    right.set_xticks(range(len(kinds)), kinds)
    right.set(ylabel="tokens per second", title="SmolLM2-135M, float32, this machine's CPU")
    right.margins(y=0.25)
    right.legend(loc="upper center", ncols=len(methods))
    figure.savefig(output, dpi=120)
