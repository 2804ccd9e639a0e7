"""What `generate` prints while prompts are decoded."""

import io
import json

from jspec.cli import streaming
from jspec.cli.streaming import EndDetector, Progress, Records, Text
from jspec.text import Tokenizer
from tests.support.text_models import character_tokenizer

STOP = 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def text(budgets, titles=None):
    tokenizer = Tokenizer.from_json(character_tokenizer().to_str())
    titles = titles or [f"prompt {i}" for i in range(len(budgets))]
    return Text(tokenizer, EndDetector(budgets, [STOP]), titles)


def ids(letters):
    return [ord(letter) for letter in letters]


def test_one_prompt_is_its_text_alone(capsys):
    show = text([4])
    show(0, ids("ab"), 1)
    assert capsys.readouterr().out == "ab"  # at once
    show(0, ids("cd"), 1)
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
    assert capsys.readouterr().out == "n\x00\n\n"


def test_each_prompt_is_a_line_of_json_as_soon_as_it_ends(capsys):
    tokenizer = Tokenizer.from_json(character_tokenizer().to_str())
    begun = [{"source": "a"}, {"source": "b"}]
    records = Records(tokenizer, EndDetector([3, 3], [STOP]), begun, shown=True)
    records(0, ids("xy"), 1)
    assert capsys.readouterr().out == ""
    records(1, [*ids("z"), STOP], 0)
    second = capsys.readouterr().out
    records(0, ids("w"), 0)
    first = capsys.readouterr().out
    assert [json.loads(first), json.loads(second)] == records.records
    assert records.records == [
        {
            "source": "a",
            "tokens": 3,
            "accepted_tokens": 1,
            "finish_reason": "length",
            "token_ids": ids("xyw"),
            "text": "xyw",
        },
        {
            "source": "b",
            "tokens": 2,
            "accepted_tokens": 0,
            "finish_reason": "stop",
            "token_ids": [*ids("z"), STOP],
            "text": "z\x00",
        },
    ]


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
