"""What people see while prompts are decoded."""

import io

from jspec.checkpoint.tokenizer import Tokenizer
from jspec.cli import streaming
from jspec.cli.streaming import Progress, Text
from tests.text_models import character_tokenizer

STOP = 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def text(budgets, titles=None):
    tokenizer = Tokenizer.from_json(character_tokenizer().to_str())
    return Text(tokenizer, budgets, [STOP], titles or [f"prompt {i}" for i in range(len(budgets))])


def ids(letters):
    return [ord(letter) for letter in letters]


def test_one_prompt_is_its_text_alone(capsys):
    show = text([4])
    show(0, ids("ab"), 1)
    assert capsys.readouterr().out == "ab"  # at once
    show(0, ids("cd"), 1)
    show.finish()
    assert capsys.readouterr().out == "cd\n\n"


def test_prompts_decoded_together_are_shown_one_after_the_other(capsys):
    show = text([3, 2, 4])
    show(0, ids("a"), 0)
    show(1, ids("xy"), 1)  # has ended, and waits
    show(2, ids("m"), 0)
    assert capsys.readouterr().out == "[1] prompt 0\na"
    show(0, ids("bc"), 1)
    assert capsys.readouterr().out == "bc\n\n[2] prompt 1\nxy\n\n[3] prompt 2\nm"
    show(2, [*ids("n"), STOP], 0)
    show.finish()
    assert capsys.readouterr().out == "n\x00\n\n"


def test_a_prompt_without_a_token_ends_too(capsys):
    show = text([0, 1])
    show(1, ids("z"), 0)
    show.finish()
    assert capsys.readouterr().out == "[1] prompt 0\n\n\n[2] prompt 1\nz\n\n"


def test_accepted_drafts_are_set_off_on_a_terminal(monkeypatch):
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    show = text([4])
    show(0, ids("abc"), 2)
    assert out.getvalue() == "\033[1;32mab\033[0mc"


def test_the_progress_line_counts_and_goes_away(monkeypatch):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(streaming, "_INTERVAL", 0)
    progress = Progress("ngram", 4)
    now = 100.0
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: now)
    progress(0, [1, 2], 1)
    assert "tokens/s" not in err.getvalue(), "the first tokens have no time of their own"
    now += 2
    progress(0, [3], 1)
    progress(1, [1], 0)
    last = err.getvalue().split("\r\033[K")[-1]
    assert last == (
        "ngram: [##########          ] prompt 2/4, 4 tokens, 2 accepted drafts, 1.0 tokens/s"
    )
    progress.finish()
    assert err.getvalue().endswith("\r\033[K")


def test_there_is_no_progress_line_in_a_file(monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    progress = Progress("ngram", 1)
    progress(0, [1], 0)
    progress.finish()
    assert err.getvalue() == ""
