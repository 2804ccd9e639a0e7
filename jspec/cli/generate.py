"""`python -m jspec generate`: prompts continued by a model on disk."""

import argparse
import json
import sys
from typing import Any

from jspec import measure, proposers, scheduling
from jspec.cli import decoding, drafters, models, prompts
from jspec.cli.streaming import Progress, Text

EXAMPLES = """examples:
  python -m jspec generate --model smollm2 --prompt "Write a haiku about rivers."
  python -m jspec generate --model path/to/folder --method ngram_gpu --num-drafts 3 \\
      --prompt "Repeat after me: one two three" --compare-plain
  python -m jspec generate --model path/to/folder --drafter path/to/head --prompt "def add("
  python -m jspec generate --model path/to/folder --prompt-file questions.jsonl --batch-size 8
  python -m jspec generate --model path/to/folder --prompt "Once" --temperature 0.8 --top-p 0.95
  python -m jspec generate --model model.gguf --method none --prompt "def add(" --raw --json
"""


def add_to(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    generate = commands.add_parser(
        "generate",
        help="continue prompts with a model on disk",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.set_defaults(run=_run)
    add = generate.add_argument
    add("--model", required=True, help="model folder, .gguf file, or smollm2 (fetched)")
    add("--drafter", metavar="PATH", help="folder or .gguf file of a drafter with weights")
    methods = ", ".join(proposers.REGISTRY)
    add(
        "--method",
        help=f"{methods}, or none (default: what --drafter turns out to be, without it ngram)",
    )
    drafters.add_options(add)
    add("--tree", help="--drafter: token tree to draft, for example '[(0,), (1,), (0, 0)]'")
    prompts.add_options(add)
    add("--raw", action="store_true", help="continue the text itself, without the chat form")
    decoding.add_options(add)
    add("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    add("--compare-plain", action="store_true", help="also decode without drafts, and compare")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _run(arguments: argparse.Namespace) -> int:
    method, config, params = arguments.method or "ngram", None, None
    asked = prompts.read(arguments)
    decoding.check(arguments, len(asked))
    if arguments.drafter is None:
        if arguments.tree is not None:
            raise ValueError("--tree has no effect without --drafter. Leave it out, or pass both.")
        config = drafters.without_weights(method, arguments)
    else:
        drafters.check_on_disk(arguments)
    if config is None and arguments.drafter is None:
        _check_plain(arguments)
    model = models.open_model(arguments.model, arguments.dtype, quiet=arguments.json)
    tokenizer = models.open_tokenizer(model)
    if arguments.drafter is not None:
        config, params = drafters.from_disk(arguments, model)
        method = proposers.of(config).name
    ids = prompts.encode(tokenizer, asked, raw=arguments.raw)
    options = decoding.of_target(arguments)
    cache = scheduling.limits(model, ids, arguments.max_tokens, arguments.batch_size, None, 1)
    options["cache"] = cache
    drafting = {} if config is None else decoding.of_drafting(arguments)
    text, progress = None, None
    if not arguments.json:
        budgets = [min(arguments.max_tokens, cache.max_model_len - len(p)) for p in ids]
        text = Text(tokenizer, budgets, model.stop_ids, [_title(prompt) for prompt in asked])
    if text is None or not sys.stdout.isatty():  # else the text itself shows how far it got
        progress = Progress(method, len(ids))
    elif sys.stderr.isatty():
        print("compiling: up to a minute the first time, seconds later", file=sys.stderr)

    def show(index: int, tokens: list[int], num_accepted: int) -> None:
        for each in (progress, text):
            if each is not None:
                each(index, tokens, num_accepted)

    try:
        report = measure.run(model, ids, config, params, on_tokens=show, **options, **drafting)
    finally:
        if progress is not None:
            progress.finish()
    if text is not None:
        text.finish()
    plain = None
    if config is None:
        plain = report
    elif arguments.compare_plain:
        plain = measure.run(model, ids, **options)
    num_drafts = config.num_drafts if config else 0
    result = measure.summary(method, num_drafts, report, plain)
    if not decoding.keeps_tokens(arguments):
        result["identical_to_plain"] = None  # they share a distribution, which no run can show
    if arguments.json:
        texts = [tokenizer.decode(generation.tokens) for generation in report.generations]
        print(json.dumps(result | {"texts": texts}))
        return 0
    for name, value in result.items():
        if value is not None:
            print(f"{name.replace('_', ' '):>24}  {_pretty(value)}")
    return 0


def _check_plain(arguments: argparse.Namespace) -> None:
    """Refuses options of drafting where nothing drafts."""
    given = {
        "--adaptive": arguments.adaptive,
        "--no-adaptive": arguments.adaptive is False,
        "--verification": arguments.verification,
    }
    for option, value in given.items():
        if value:
            raise ValueError(f"{option} has no effect with --method none. Leave one out.")


def _title(prompt: prompts.Prompt) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    first = text.strip().split("\n")[0]
    return first if len(first) <= 60 else f"{first[:60]}..."


def _pretty(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return " ".join(map(_pretty, value))
    return str(value)
