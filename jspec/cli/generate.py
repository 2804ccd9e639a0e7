"""`python -m jspec generate`: prompts continued by a model on disk."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jspec import measure, proposers, scheduling
from jspec.checkpoint import Model
from jspec.checkpoint.tokenizer import Tokenizer
from jspec.cli import drafters
from jspec.demo.assets import fetch_smollm2
from jspec.loading import load

EXAMPLES = """examples:
  python -m jspec generate --model smollm2 --prompt "Write a haiku about rivers."
  python -m jspec generate --model path/to/folder --method ngram_gpu --num-drafts 3 \\
      --prompt "Repeat after me: one two three" --compare-plain
  python -m jspec generate --model path/to/folder --drafter path/to/head --prompt "def add("
  python -m jspec generate --model model.gguf --method none --prompt "def add(" --raw --json
"""


def add_to(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    generate = commands.add_parser(
        "generate",
        help="continue a prompt with a model on disk",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.set_defaults(run=_run)
    add = generate.add_argument
    add("--model", required=True, help="Hugging Face folder, .gguf file, or smollm2 (fetched)")
    add("--drafter", metavar="PATH", help="folder or .gguf file of a drafter with weights")
    methods = ", ".join(proposers.REGISTRY)
    add(
        "--method",
        help=f"{methods}, or none (default: what --drafter turns out to be, without it ngram)",
    )
    drafters.add_options(add)
    add("--tree", help="--drafter: token tree to draft, for example '[(0,), (1,), (0, 0)]'")
    add("--prompt", required=True, action="append", help="text; may be given several times")
    add("--raw", action="store_true", help="continue the text itself, without the chat form")
    add("--max-tokens", type=int, default=128, help="most tokens to add (default: 128)")
    add("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    add("--compare-plain", action="store_true", help="also decode without drafts, and compare")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _run(arguments: argparse.Namespace) -> int:
    method, config, params = arguments.method or "ngram", None, None
    if arguments.drafter is None:
        if arguments.tree is not None:
            raise ValueError("--tree has no effect without --drafter. Leave it out, or pass both.")
        config = drafters.without_weights(method, arguments)
    else:
        drafters.check_on_disk(arguments)
    model = open_model(arguments.model, arguments.dtype, quiet=arguments.json)
    tokenizer = open_tokenizer(model)
    if arguments.drafter is not None:
        config, params = drafters.from_disk(arguments, model)
        method = proposers.of(config).name
    encode = tokenizer.encode if arguments.raw else tokenizer.chat
    prompts = [encode(prompt) for prompt in arguments.prompt]
    sizes: dict[str, Any] = {
        "max_tokens": arguments.max_tokens,
        "cache": scheduling.limits(model, prompts, arguments.max_tokens, 1, None, 1),
    }
    show = None if arguments.json else _printer(tokenizer)
    if show and sys.stderr.isatty():
        print("compiling: up to a minute the first time, seconds later", file=sys.stderr)
    report = measure.run(model, prompts, config, params, on_tokens=show, **sizes)
    plain = None
    if config is None:
        plain = report
    elif arguments.compare_plain:
        plain = measure.run(model, prompts, **sizes)
    num_drafts = config.num_drafts if config else 0
    result = measure.summary(method, num_drafts, report, plain)
    if arguments.json:
        texts = [tokenizer.decode(generation.tokens) for generation in report.generations]
        print(json.dumps(result | {"texts": texts}))
        return 0
    print("\n")
    for name, value in result.items():
        if value is not None:
            print(f"{name.replace('_', ' '):>24}  {_pretty(value)}")
    return 0


def open_model(name: str, dtype: str, *, quiet: bool = False) -> Model:
    """Loads a model from disk, or SmolLM2 from where it is published."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is {dtype!r}, wanted float32 or bfloat16.")
    if name == "smollm2":
        return load(fetch_smollm2(progress=not quiet), dtype)
    if not name or not Path(name).exists():
        raise ValueError(
            f"--model {name!r} does not exist. Pass a Hugging Face model folder, a .gguf file, or "
            "smollm2, which is fetched."
        )
    return load(name, dtype)


def open_tokenizer(model: Model) -> Tokenizer:
    """Returns the tokenizer that came with a model."""
    if model.tokenizer_json is None:
        raise ValueError(
            "the model has no tokenizer.json, so that text cannot be encoded. Put the model's own "
            "tokenizer.json into its folder."
        )
    return Tokenizer.from_json(model.tokenizer_json, model.chat_template)


def _printer(tokenizer: Tokenizer) -> scheduling.OnTokens:
    """Streams text; accepted drafts are set off on a terminal."""
    bold, plain = ("\033[1;32m", "\033[0m") if sys.stdout.isatty() else ("", "")
    stream = tokenizer.stream()
    current = 0

    def show(index: int, tokens: list[int], num_accepted: int) -> None:
        nonlocal stream, current
        if index != current:
            print(stream.finish(), end="\n\n")
            stream, current = tokenizer.stream(), index
        accepted, rest = stream.push(tokens[:num_accepted]), stream.push(tokens[num_accepted:])
        print(f"{bold}{accepted}{plain}" if accepted else "", rest, sep="", end="", flush=True)

    return show


def _pretty(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return " ".join(map(_pretty, value))
    return str(value)
