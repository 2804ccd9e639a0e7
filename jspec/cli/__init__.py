"""The command line: `python -m jspec generate`, `bench`, `inspect`, `convert` and others."""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jspec._checks import check_at_least, did_you_mean
from jspec._user_cache import keep_executables
from jspec.cli import bench, bench_drafts, convert, generate, inspection

_INTERRUPTED = 130  # exit code of shells after Ctrl-C
_EXPLAINED = (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError, MemoryError)

_COMMANDS = {
    "generate": generate,
    "bench": bench,
    "bench-drafts": bench_drafts,
    "inspect": inspection,
    "convert": convert,
}

_EPILOG = """Each command has examples: python -m jspec generate --help

exit codes: 0; 1 after an error, told in one line, or where a drafter changed a token of plain
decoding in float32 (bench, demo, generate --compare-plain); 2 where the words do not parse; 130
after Ctrl-C.
"""


def command() -> NoReturn:
    """Runs the command that this process was started with, and ends the process."""
    code = main()
    if code:
        # Python's own shutdown crashes while XLA compiles in a thread, and prints tracebacks of
        # writes that Orbax did not finish.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: words after `python -m jspec`; by default those of this process.

    Returns:
      Exit code: 0, or 1 after an error, which is printed in one line on standard error; 130 after
      Ctrl-C and 141 after the reader of a pipe has closed it, as in shells. argparse itself exits
      with 2 where the words do not parse.
    """
    if sys.stdout is None:  # Python found it closed
        sys.stdout = open(os.devnull, "w")
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in vars(arguments)]
        hint = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}".strip())
    keep_executables()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe raises here, not when Python exits
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush on exit
        return 141
    except _EXPLAINED as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        print(f"jspec: {' '.join(str(message).split())}", file=sys.stderr)
        return 1


def _show_warning(message: Warning | str, *where: Any) -> None:
    print(f"jspec: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jspec",
        description="Speculative decoding in JAX: drafts, verifies and measures the speed-up.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, epilog=module.EXAMPLES, formatter_class=parser.formatter_class
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    demo = commands.add_parser("demo", help="decode a demo suite with every n-gram drafter")
    demo.set_defaults(run=_demo)
    demo.add_argument("--max-tokens", type=int, default=64, help="tokens a prompt (default: 64)")
    demo.add_argument("--output", default="demo.png", help="picture to write (default: demo.png)")
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from jspec.demo.run import run  # needs rich and matplotlib

    output = Path(arguments.output)
    bench.check_picture("--output", output)
    check_at_least("demo", 1, max_tokens=arguments.max_tokens)
    return run(max_tokens=arguments.max_tokens, output=output)
