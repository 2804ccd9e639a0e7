"""The commands in documents and help texts parse."""

import argparse
import re
import shlex

import pytest

from jspec import cli
from jspec.cli import bench, bench_drafts, convert, generate, inspection
from tests.test_docs import PAGES, ROOT

TEXTS = {page.name: page.read_text() for page in PAGES} | {
    module.__name__: module.EXAMPLES
    for module in (generate, bench, bench_drafts, inspection, convert)
}
PAGE = (ROOT / "docs" / "command-line.md").read_text()


def shown(text):
    """Lists the words of each command line in a text."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^ .*python -m jspec (.+)$", joined, re.MULTILINE)
    return [[word for word in shlex.split(line, comments=True)] for line in lines]


def commands():
    actions = cli._parser()._actions
    return next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if shown(text)])
def test_every_command_that_is_shown_parses(name):
    for words in shown(TEXTS[name]):
        if "--help" not in words:
            cli._parser().parse_args(words)


def test_every_command_and_option_is_on_the_page():
    for name, parser in commands().items():
        assert f"`{name}`" in PAGE
        assert parser.epilog or name == "demo", f"{name} has no examples"
        for action in parser._actions:
            for option in action.option_strings:
                if option not in ("-h", "--help"):
                    assert option in PAGE, f"{name} {option}"


def test_help_has_examples_and_exit_codes(capsys):
    for words, wanted in (([], "exit codes"), (["bench"], "--suite questions.jsonl")):
        with pytest.raises(SystemExit, match="0"):
            cli.main([*words, "--help"])
        assert wanted in capsys.readouterr().out
