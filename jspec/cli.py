"""The command line: `python -m jspec generate`, `bench-drafts` and `demo`."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from jspec import measure, proposers, replay, scheduling
from jspec.checkpoint import Model, load
from jspec.checkpoint.tokenizer import Tokenizer
from jspec.demo.assets import cache_folder, fetch_smollm2

_EXAMPLES = """examples:
  python -m jspec generate --model smollm2 --prompt "Write a haiku about rivers."
  python -m jspec generate --model path/to/folder --method ngram_gpu --num-drafts 3 \\
      --prompt "Repeat after me: one two three" --compare-plain
  python -m jspec generate --model model.gguf --method none --prompt "def add(" --raw --json
  python -m jspec bench-drafts requests.jsonl
"""


_INTERRUPTED = 130  # as a shell counts Ctrl-C
_EXPLAINED = (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError, MemoryError)


def command() -> NoReturn:
    """Runs the command that this process was started with, and ends the process."""
    code = main()
    if code == _INTERRUPTED:  # Python's way out crashes where XLA still compiles in a thread
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: words after `python -m jspec`; by default those of this process.

    Returns:
      Exit code: 0, or 1 after an error, which is printed in one line on standard error; as a shell
      counts signals, 130 after Ctrl-C and 141 where the reader of a pipe has left. argparse itself
      exits with 2 where the words do not parse.
    """
    arguments = _parser().parse_args(argv)
    _keep_compiled(cache_folder() / "compiled")
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()  # a pipe that was closed shows here, not when Python exits
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left, on exit
        return 141
    except _EXPLAINED as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        print(f"jspec: {' '.join(str(message).split())}", file=sys.stderr)
        return 1


def _keep_compiled(folder: Path) -> None:
    """Lets later runs start without compiling, where the folder can be written."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):  # JAX would warn at each executable
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jspec",
        description="Speculative decoding in JAX: drafts, verifies, and tells what it earned.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser(
        "generate",
        help="continue a prompt with a model on disk",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("--model", required=True, help="Hugging Face folder, .gguf file, or smollm2 (fetched)")
    methods = ", ".join(proposers.REGISTRY)
    add("--method", default="ngram", help=f"{methods}, or none (default: ngram)")
    _add_drafter_options(add)
    add("--prompt", required=True, action="append", help="text; may be given several times")
    add("--raw", action="store_true", help="continue the text itself, without the chat form")
    add("--max-tokens", type=int, default=128, help="most tokens to add (default: 128)")
    add("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")
    add("--compare-plain", action="store_true", help="also decode without drafts, and compare")
    add("--json", action="store_true", help="print one JSON object and nothing else")

    bench = commands.add_parser(
        "bench-drafts", help="replay recorded requests through every drafter without weights"
    )
    bench.set_defaults(run=_bench_drafts)
    add = bench.add_argument
    add("file", help='JSON lines: {"prompt": [ids], "output": [ids], "segment": "chat"}')
    add("--method", action="append", help="replay this one; may be given several times")
    _add_drafter_options(add)
    add("--max-requests", type=int, default=8, help="requests at the same time (default: 8)")
    add("--json", action="store_true", help="print one JSON object and nothing else")

    demo = commands.add_parser("demo", help="decode a demo suite with every n-gram drafter")
    demo.set_defaults(run=_demo)
    demo.add_argument("--max-tokens", type=int, default=64, help="tokens a prompt (default: 64)")
    demo.add_argument("--output", default="demo.png", help="picture to write (default: demo.png)")
    return parser


def _add_drafter_options(add: Callable[..., Any]) -> None:
    add("--num-drafts", type=int, metavar="K", help="drafts per step (default: 5)")
    add("--min-n", type=int, help="ngram: shortest n-gram to look up (default: 2)")
    add("--max-n", type=int, help="ngram: longest n-gram to look up (default: 4)")
    add("--min-prob", type=float, help="suffix: least probability of a draft (default: 0.1)")
    add("--spec-factor", type=float, help="suffix: drafts per matched token (default: 1.0)")
    add("--warm-start", metavar="FILE", help="suffix: cache of responses to start from")


def _generate(arguments: argparse.Namespace) -> int:
    config = _drafter(arguments.method, arguments)
    model = open_model(arguments.model, arguments.dtype, quiet=arguments.json)
    tokenizer = open_tokenizer(model)
    encode = tokenizer.encode if arguments.raw else tokenizer.chat
    prompts = [encode(prompt) for prompt in arguments.prompt]
    sizes: dict[str, Any] = {
        "max_tokens": arguments.max_tokens,
        "cache": scheduling.limits(model, prompts, arguments.max_tokens, 1, None, 1),
    }
    show = None if arguments.json else _printer(tokenizer)
    if show and sys.stderr.isatty():
        print("compiling: up to a minute the first time, seconds later", file=sys.stderr)
    report = measure.run(model, prompts, config, on_tokens=show, **sizes)
    plain = None
    if config is None:
        plain = report
    elif arguments.compare_plain:
        plain = measure.run(model, prompts, **sizes)
    num_drafts = config.num_drafts if config else 0
    result = measure.summary(arguments.method, num_drafts, report, plain)
    if arguments.json:
        texts = [tokenizer.decode(generation.tokens) for generation in report.generations]
        print(json.dumps(result | {"texts": texts}))
        return 0
    print("\n")
    for name, value in result.items():
        if value is not None:
            print(f"{name.replace('_', ' '):>24}  {_pretty(value)}")
    return 0


def _bench_drafts(arguments: argparse.Namespace) -> int:
    methods = [_check_model_free(method) for method in arguments.method or replay.model_free()]
    configs = {method: _drafter(method, arguments, others=methods) for method in methods}
    if not Path(arguments.file).is_file():
        raise ValueError(f"{arguments.file} is no file: records are read once for each drafter.")
    longest = max((r.num_tokens for r in replay.read_records(arguments.file)), default=0)
    if not longest:
        raise ValueError(f"{arguments.file} holds no request, wanted one a line.")
    by_method = {
        method: replay.replay(
            replay.read_records(arguments.file),
            config,
            max_model_len=longest,
            max_requests=arguments.max_requests,
        )
        for method, config in configs.items()
    }
    segments = next(iter(by_method.values()))
    if arguments.json:
        numbers = {name: _segment(name, by_method) for name in segments}
        print(json.dumps({"device": jax.devices()[0].device_kind, "segments": numbers}))
        return 0
    for name in segments:
        _print_segment(name, _segment(name, by_method))
    return 0


def _check_model_free(method: str) -> str:
    if not proposers.find(method).model_free:
        raise ValueError(
            f"--method {method} needs weights; without are {', '.join(replay.model_free())}. "
            "Run python -m jspec generate to measure it."
        )
    return method


def _segment(name: str, by_method: dict[str, dict[str, replay.Tally]]) -> dict[str, Any]:
    """Gathers what every drafter earned in a segment."""
    tallies = {method: segments[name] for method, segments in by_method.items()}
    any_tally = next(iter(tallies.values()))
    return {
        "requests": any_tally.num_requests,
        "tokens": any_tally.num_tokens,
        "winner": replay.winner(tallies),
        "drafters": {
            method: {
                "acceptance_length": tally.acceptance_length,
                "acceptance_rate": tally.acceptance_rate,
                "drafted_share": tally.drafted_share,
                "draft_us_per_token": tally.draft_us_per_token,
            }
            for method, tally in tallies.items()
        },
    }


def _print_segment(name: str, numbers: dict[str, Any]) -> None:
    print(f"{name}: {numbers['requests']} requests, {numbers['tokens']} tokens after their first")
    print(
        f"  {'':14}{'tokens a step':>15}{'steps with drafts':>19}{'accepted':>10}{'us a token':>12}"
    )
    for method, row in numbers["drafters"].items():
        print(
            f"  {method:14}{row['acceptance_length']:15.2f}{row['drafted_share']:19.0%}"
            f"{row['acceptance_rate']:10.0%}{row['draft_us_per_token']:12.1f}"
        )
    print(f"  winner: {numbers['winner'] or 'none, no draft was ever accepted'}\n")


def _demo(arguments: argparse.Namespace) -> int:
    from jspec.demo.run import run  # needs rich and matplotlib

    output = Path(arguments.output)
    if not output.parent.is_dir() or output.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(
            f"--output is {output}, wanted a file that ends in .png, .pdf or .svg in a folder that "
            "exists."
        )
    return run(max_tokens=arguments.max_tokens, output=output)


# Options that set a field of a drafter's config; what they are where they are left out, None =
# the config's own default.
_OPTIONS: dict[str, tuple[str, Any]] = {
    "num_drafts": ("num_drafts", 5),
    "min_n": ("prompt_lookup_min", 2),
    "max_n": ("prompt_lookup_max", 4),
    "min_prob": ("min_token_prob", None),
    "spec_factor": ("max_spec_factor", None),
    "warm_start": ("warm_start", None),
}


def _drafter(method: str, arguments: argparse.Namespace, others: Sequence[str] = ()) -> Any:
    """Builds a drafter's config, None for plain decoding: before anything is loaded.

    Raises:
      ValueError: an option was given that has no effect on this method, nor on one of `others`.
    """
    options = _options_of(method)
    effective = options.union(*map(_options_of, others))
    given = {option: getattr(arguments, option) for option in _OPTIONS}
    for option, value in given.items():
        if value is not None and option not in effective:
            known = ", ".join(_spell(o) for o in _OPTIONS if o in options) or "none"
            raise ValueError(
                f"{_spell(option)} has no effect with --method {method}. Leave it out; this "
                f"method's options: {known}."
            )
    if method == "none":
        return None
    fields = {}
    for option in options:
        field, default = _OPTIONS[option]
        value = default if given[option] is None else given[option]
        if value is not None:
            fields[field] = value
    return proposers.find(method).Config(**fields)


def _options_of(method: str) -> set[str]:
    if method == "none":
        return set()
    fields = {field.name for field in dataclasses.fields(proposers.find(method).Config)}
    return {option for option, (field, _) in _OPTIONS.items() if field in fields}


def _spell(option: str) -> str:
    return f"--{option.replace('_', '-')}"


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
