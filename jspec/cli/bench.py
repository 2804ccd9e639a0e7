"""`python -m jspec bench`: decodes the same prompts with every drafter, for one table."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from jspec import proposers
from jspec.checkpoint import Model
from jspec.cli import comparison, decoding, drafters, models, prompts
from jspec.cli.streaming import Progress
from jspec.demo.picture import plot_acceptance
from jspec.demo.prompts import demo_prompts
from jspec.proposers.base import Drafter
from jspec.runtime import benchmark, replay, scheduling

HELP = "decode the same prompts with every drafter, and compare"

EXAMPLES = """examples:
  python -m jspec bench --model smollm2 --max-tokens 64
  python -m jspec bench --model path/to/folder --drafter eagle3=path/to/head \\
      --suite questions.jsonl --batch-size 4 --markdown
  python -m jspec bench --model path/to/folder --methods ngram,suffix --json
"""

_COLUMNS = (
    *("method", "K", "drafts", "tokens/step", "acceptance length", "accepted % by position"),
    *("drafting ms", "verification ms", "tokens/s", "speed-up", "identical"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--model", required=True, help=models.HELP)
    add(
        "--methods",
        default="all",
        help="which, with commas between (default: all that need no weights or have a --drafter)",
    )
    add(
        "--drafter",
        action="append",
        default=[],
        metavar="METHOD=PATH",
        help=f"drafter with weights: {drafters.HELP}; may be given several times",
    )
    add("--suite", default="demo", help="demo (default), or a file of prompts as of generate")
    add("--num-prompts", type=int, help="only the first ones of the suite")
    drafters.add_options(add)
    prompts.add_encoding_options(add)
    decoding.add_options(add)
    add("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    add("--picture", metavar="FILE", help="draw the table, too: .png, .pdf or .svg")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit code."""
    if arguments.picture is not None:
        check_picture("--picture", Path(arguments.picture))
    paths = _paths(arguments.drafter)
    methods = _methods(arguments.methods, paths)
    prompts.check_encoding_options(arguments)
    bad = prompts.BadPrompts(arguments.skip_bad)
    asked = _suite(arguments, bad)
    decoding.check(arguments, len(asked))
    free = [method for method in methods if method not in paths]
    configs = {m: drafters.without_weights(m, arguments, others=free) for m in free}
    model = models.open_model(arguments.model, arguments.dtype, quiet=arguments.json)
    loaded = {m: Drafter(config, None) for m, config in configs.items()}
    for method, path in paths.items():
        loaded[method] = drafters.from_disk(path, arguments, model, method)
    tokenizer = models.open_tokenizer(model, arguments.chat_template)
    _, ids = prompts.encode(
        tokenizer,
        asked,
        bad,
        model=model.config,
        vocab_sizes=[drafter.config.vocab_size for drafter in loaded.values() if drafter.config],
        raw=arguments.raw,
        special_tokens=not arguments.no_special_tokens,
    )
    rows = _measure(arguments, model, ids, {method: loaded[method] for method in methods})
    header = {
        "device": jax.devices()[0].device_kind,
        "model": arguments.model,
        "suite": arguments.suite,
        "prompts": len(ids),
        "skipped_prompts": bad.num_skipped,
        "max_tokens": arguments.max_tokens,
        "batch_size": arguments.batch_size,
        "dtype": arguments.dtype,
    }
    setting = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in header.items()
        if name != "skipped_prompts" or value
    )
    if arguments.json:
        print(json.dumps(header | {"methods": rows}))
    elif arguments.markdown:
        print("\n".join([setting, "", *_markdown(rows)]))  # the blank line starts the table
    else:
        print("\n".join([setting, *_table(rows)]))
    if arguments.picture is not None:
        _draw(rows, Path(arguments.picture), title=f"{arguments.model}, {header['device']}")
    return comparison.exit_code(model, rows)


def check_picture(option: str, output: Path) -> None:
    """Raises ValueError or ImportError if a picture cannot be written."""
    fits = output.suffix in (".png", ".pdf", ".svg") and not output.is_dir()
    if not fits or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise ValueError(
            f"{option} is {output}, wanted a file that ends in .png, .pdf or .svg in a folder that "
            "exists and can be written. Pass another one."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{option} needs matplotlib. Run: pip install 'jspec-decode[demo]'")


def _paths(words: list[str]) -> dict[str, Path]:
    """Parses `--drafter METHOD=PATH`; drafters of the hub may be fetched."""
    paths: dict[str, Path] = {}
    for word in words:
        method, equals, path = word.partition("=")
        if not equals:
            raise ValueError(f"--drafter is {word!r}, wanted METHOD=PATH. Write the method, too.")
        if proposers.find(method).load is None:
            raise ValueError(f"--drafter {word}: {method} has no weights. Leave it out.")
        if method in paths:
            raise ValueError(f"--drafter has {method} twice. Leave one out.")
        paths[method] = drafters.find(f"--drafter {method}:", path)
    return paths


def _methods(words: str, paths: dict[str, Path]) -> list[str]:
    if words == "all":
        return [*replay.model_free(), *paths]
    methods = list(dict.fromkeys(words.split(",")))
    for method in methods:
        if not proposers.find(method).model_free and method not in paths:
            raise ValueError(
                f"--methods has {method}, which needs weights. Pass --drafter {method}=PATH."
            )
    unused = paths.keys() - set(methods)
    if unused:
        raise ValueError(
            f"--drafter has {', '.join(unused)}, and --methods has not. Add it to --methods, or "
            "leave --methods out."
        )
    return methods


def _suite(arguments: argparse.Namespace, bad: prompts.BadPrompts) -> list[prompts.CommandPrompt]:
    if arguments.num_prompts is not None and arguments.num_prompts < 1:
        raise ValueError(f"--num-prompts is {arguments.num_prompts}, wanted 1 or more. Raise it.")
    if arguments.suite == "demo":
        texts = demo_prompts(progress=not arguments.json)
        texts = texts[: arguments.num_prompts]
        return [prompts.CommandPrompt(prompt.text, f"demo, {prompt.name}") for prompt in texts]
    return prompts.read_file(
        arguments.suite, bad, arguments.prompt_format, most=arguments.num_prompts
    )


def _measure(
    arguments: argparse.Namespace,
    model: Model,
    ids: list[list[int]],
    loaded: dict[str, Drafter],
) -> list[dict[str, Any]]:
    """Runs every drafter, plain decoding first; returns a row for each."""
    options: dict[str, Any] = decoding.target_options(arguments)
    configs = [drafter.config for drafter in loaded.values() if drafter.config]
    chains = [c.num_drafts for c in configs if proposers.of(c).tree(c) is None]
    options["cache"] = scheduling.limits(
        *(model, ids, arguments.max_tokens, arguments.batch_size, None, 1),
        num_drafts=max(chains, default=0),
    )
    rows, plain = [], None
    for method, drafter in {"none": Drafter(None, None), **loaded}.items():
        drafting = {} if drafter.config is None else decoding.drafting_options(arguments)
        progress = Progress(method, len(ids))
        try:
            report = benchmark.run(model, ids, *drafter, on_tokens=progress, **options, **drafting)
            first = ids[: arguments.batch_size]
            latencies = benchmark.step_times(model, first, *drafter, **options, **drafting)
        finally:
            progress.finish()
        if not sys.stderr.isatty():  # no progress line is shown there
            speed = f"{report.tokens_per_second:.1f} tokens/s"
            print(f"{method}: {len(ids)} prompts, {speed}", file=sys.stderr, flush=True)
        plain = plain or report
        num_drafts = drafter.config.num_drafts if drafter.config else 0
        row = benchmark.summary(method, num_drafts, report, plain) | latencies
        if method == "none" or not decoding.keeps_tokens(arguments):
            row["identical_to_plain"] = None
        row |= comparison.differences(
            *(model, ids, report, plain if row["identical_to_plain"] is False else None),
            cache=options["cache"],
            greedy=not arguments.temperature,
        )
        rows.append(row)
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    def number(name: str, digits: int = 2) -> str:
        return "-" if row[name] is None else f"{row[name]:.{digits}f}"

    same = {True: "yes", False: "NO", None: "-"}[row["identical_to_plain"]]
    if row["near_ties"]:
        same += f", {row['near_ties']} of {row['differing_prompts']} by ties"
    drafts = row["num_drafts"] > 0
    return [
        row["method"],
        str(row["num_drafts"]),
        str(row["draft_tokens"]),
        number("tokens_per_step"),
        number("mean_acceptance_length"),
        comparison.join_positions([f"{100 * rate:.0f}" for rate in row["acceptance_per_position"]])
        or "-",
        number("draft_ms") if drafts else "-",
        number("verify_ms"),
        number("tokens_per_second", 1),
        number("speedup"),
        same,
    ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [list(_COLUMNS), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *rest = widths
    return ["  ".join([line[0].ljust(first), *(map(str.rjust, line[1:], rest))]) for line in lines]


def _markdown(rows: list[dict[str, Any]]) -> list[str]:
    lines = [list(_COLUMNS), ["---", *["---:"] * (len(_COLUMNS) - 1)], *map(_cells, rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _draw(rows: list[dict[str, Any]], output: Path, *, title: str) -> None:
    """Draws acceptance by position and tokens a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    drafted = rows[1:]
    plot_acceptance(left, {row["method"]: row["acceptance_per_position"] for row in drafted})
    left.set(ylim=(0, 1.05))
    left.legend()
    names = [row["method"] for row in rows]
    colors = ["silver", *(f"C{i}" for i in range(len(drafted)))]
    bars = right.barh(names, [row["tokens_per_second"] for row in rows], color=colors)
    right.bar_label(bars, fmt="%.0f", padding=3)
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set(xlabel="tokens per second")
    figure.suptitle(title)
    figure.savefig(output, dpi=120)
