"""`python -m jspec generate`: continues prompts with a model on disk."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from jspec import proposers
from jspec.cli import comparison, decoding, drafters, models, prompts
from jspec.cli.streaming import EndDetector, Progress, Records, Text
from jspec.runtime import benchmark, scheduling
from jspec.runtime.scheduling import OnTokens
from jspec.tree import Tree

HELP = "continue prompts with a model on disk"

EXAMPLES = """examples:
  python -m jspec generate --model smollm2 --prompt "Write a haiku about rivers."
  python -m jspec generate --model path/to/folder --method ngram_gpu --num-drafts 3 \\
      --prompt "Repeat after me: one two three" --compare-plain
  python -m jspec generate --model path/to/folder --drafter path/to/head --prompt "def add("
  python -m jspec generate --model path/to/folder --prompt-file questions.jsonl --batch-size 8
  python -m jspec generate --model path/to/folder --prompt "Once" --temperature 0.8 --top-p 0.95
  python -m jspec generate --model path/to/folder --prompt "Once" --temperature 1 --num-samples 4
  python -m jspec generate --model Qwen/Qwen3-0.6B --prompt "Hello"
  python -m jspec generate --model model.gguf --method none --prompt "def add(" --raw --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--model", required=True, help=models.HELP)
    add("--drafter", metavar="PATH", help=f"drafter with weights: {drafters.HELP}")
    methods = ", ".join(proposers.REGISTRY)
    add(
        "--method",
        help=f"{methods}, or none (default: what --drafter turns out to be, without it ngram)",
    )
    drafters.add_options(add)
    add("--tree", help="--drafter: token tree to draft, for example '[(0,), (1,), (0, 0)]'")
    prompts.add_options(add)
    prompts.add_encoding_options(add)
    decoding.add_options(add)
    add(
        "--num-samples",
        type=int,
        default=1,
        help="with --temperature: texts of each prompt, by seeds that count up (default: 1)",
    )
    add("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    add("--compare-plain", action="store_true", help="also decode without drafts, and compare")
    add(
        "--json",
        action="store_true",
        help="print JSON and nothing else: a line for each prompt as it ends, where there are "
        "several, and a last one with the figures of the run",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit code."""
    method, config, params, path = arguments.method or "ngram", None, None, None
    prompts.check_encoding_options(arguments)
    _check_samples(arguments)
    bad = prompts.BadPrompts(arguments.skip_bad)
    asked = prompts.read(arguments, bad)
    decoding.check(arguments, len(asked))
    if arguments.drafter is None:
        if arguments.tree is not None:
            raise ValueError("--tree has no effect without --drafter. Leave it out, or pass both.")
        config = drafters.without_weights(method, arguments)
    else:
        drafters.check(arguments)
        path = drafters.find("--drafter", arguments.drafter)
    if config is None and path is None:
        _check_plain(arguments)
    model = models.open_model(arguments.model, arguments.dtype, quiet=arguments.json)
    tokenizer = models.open_tokenizer(model, arguments.chat_template)
    if path is not None:
        tree = {} if arguments.tree is None else {"tree": Tree(arguments.tree)}
        config, params = drafters.from_disk(path, arguments, model, arguments.method, **tree)
        method = proposers.of(config).name
    asked, ids = prompts.encode(
        tokenizer,
        asked,
        bad,
        model=model.config,
        vocab_sizes=[] if config is None else [config.vocab_size],
        raw=arguments.raw,
        special_tokens=not arguments.no_special_tokens,
    )
    options = decoding.target_options(arguments)
    num_samples = arguments.num_samples
    ids = [prompt for prompt in ids for _ in range(num_samples)]
    if num_samples > 1:
        options["seed"] = decoding.seeds(arguments) * len(asked)
    cache = scheduling.limits(model, ids, arguments.max_tokens, arguments.batch_size, None, 1)
    options["cache"] = cache
    drafting = {} if config is None else decoding.drafting_options(arguments)
    budgets = [min(arguments.max_tokens, cache.max_model_len - len(prompt)) for prompt in ids]
    ends, records = EndDetector(budgets, model.stop_ids), None
    if arguments.json:
        fields = _first_fields(asked, ids, decoding.seeds(arguments))
        records = Records(tokenizer, ends, fields, shown=len(fields) > 1)
    shown: list[OnTokens] = [records or Text(tokenizer, ends, _titles(asked, num_samples))]
    progress = None
    if arguments.json or not sys.stdout.isatty():  # else the text itself shows the progress
        progress = Progress(method, len(ids))
        shown.insert(0, progress)
    elif sys.stderr.isatty():
        print("compiling: up to a minute the first time, seconds later", file=sys.stderr)

    def show(index: int, tokens: list[int], num_accepted: int) -> None:
        for each in shown:
            each(index, tokens, num_accepted)

    try:
        report = benchmark.run(model, ids, config, params, on_tokens=show, **options, **drafting)
    finally:
        if progress is not None:
            progress.finish()
    plain = None
    if config is None:
        plain = report
    elif arguments.compare_plain:
        plain = benchmark.run(model, ids, **options)
    num_drafts = config.num_drafts if config else 0
    result = benchmark.summary(method, num_drafts, report, plain)
    result["skipped_prompts"] = bad.num_skipped
    if not decoding.keeps_tokens(arguments):
        result["identical_to_plain"] = None  # the tokens have the same distribution only
    result |= comparison.differences(
        *(model, ids, report, plain if result["identical_to_plain"] is False else None),
        cache=cache,
        greedy=not arguments.temperature,
    )
    _print(result, records)
    return comparison.exit_code(model, [result])


def _check_plain(arguments: argparse.Namespace) -> None:
    """Raises ValueError for drafting options without a drafter."""
    given = {
        "--adaptive": arguments.adaptive,
        "--no-adaptive": arguments.adaptive is False,
        "--verification": arguments.verification,
    }
    for option, value in given.items():
        if value:
            raise ValueError(f"{option} has no effect with --method none. Leave one out.")


def _check_samples(arguments: argparse.Namespace) -> None:
    if arguments.num_samples < 1:
        raise ValueError(f"--num-samples is {arguments.num_samples}, wanted 1 or more. Raise it.")
    if arguments.num_samples > 1 and not arguments.temperature:
        raise ValueError(
            "--num-samples has no effect without --temperature: greedy decoding always gives the "
            "same text. Pass both, or leave it out."
        )


def _first_fields(
    asked: Sequence[prompts.CommandPrompt],
    ids: Sequence[Sequence[int]],
    seeds: Sequence[int | None],
) -> list[dict[str, Any]]:
    """Returns the first fields of the JSON record of each sample of each prompt."""
    samples = [(*pair, n) for pair in enumerate(asked) for n in range(len(seeds))]
    return [
        {
            "index": index,
            "source": each.place,
            "sample": n,
            "seed": seeds[n],
            "prompt_tokens": len(prompt),
        }
        for (index, each, n), prompt in zip(samples, ids, strict=True)
    ]


def _titles(asked: Sequence[prompts.CommandPrompt], num_samples: int) -> list[str]:
    titles = []
    for prompt, _ in asked:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        first = text.strip().split("\n")[0]
        title = first if len(first) <= 60 else f"{first[:60]}..."
        samples = range(1, num_samples + 1)
        titles += [f"{title} (sample {n})" for n in samples] if num_samples > 1 else [title]
    return titles


def _print(result: dict[str, Any], records: Records | None) -> None:
    """Prints the figures of a run; as JSON, with the record of a single prompt."""
    if records is None:
        for name, value in result.items():
            if value is not None:
                print(f"{name.replace('_', ' '):>24}  {_pretty(value)}")
        return
    alone = records.records[0] if len(records.records) == 1 else {}
    texts = [record["text"] for record in records.records]
    print(json.dumps(result | alone | {"texts": texts}))


def _pretty(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return comparison.join_positions(list(map(_pretty, value)))
    return str(value)
