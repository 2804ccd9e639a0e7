"""`bench` runs every drafter over the same prompts and shows figures of each."""

import json
import re

import numpy as np
import pytest

from jspec import REGISTRY, cli
from jspec.cli import bench
from jspec.demo.picture import plot_acceptance
from jspec.runtime import benchmark, replay
from tests.conftest import GOLDEN
from tests.support.marks import slow_ones
from tests.support.text_models import with_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

HEAD = GOLDEN / "models" / "draft_llama_small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("bench") / "tiny", "draft_llama_small")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    file = tmp_path_factory.mktemp("suite") / "suite.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("abcabcab", "xyxyx", "q")))
    return file


def run(*words):
    return cli.main(["bench", *map(str, words)])


@pytest.mark.parametrize("sampled", slow_ones([False, True], lambda sampled: not sampled))
def test_every_method_gets_a_row_with_every_number(folder, suite, tmp_path, capfd, sampled):
    picture = tmp_path / "bench.png"
    words = ["--model", folder, "--suite", suite, "--drafter", f"draft_model={HEAD}"]
    words += ["--num-drafts", 2, "--max-tokens", 10, "--batch-size", 2, "--raw", "--no-adaptive"]
    words += ["--methods", "suffix,draft_model", "--picture", picture, "--json"]
    if sampled:
        words += ["--temperature", 0.7, "--seed", 5]
    assert run(*words) == 0, capfd.readouterr().err
    result = json.loads(capfd.readouterr().out)
    assert result["prompts"] == 3 and result["batch_size"] == 2
    plain, suffix, draft = result["methods"]
    assert [row["method"] for row in (plain, suffix, draft)] == ["none", "suffix", "draft_model"]
    assert plain["draft_tokens"] == 0 and plain["identical_to_plain"] is None
    for row in (plain, suffix, draft):
        assert row["tokens"] == plain["tokens"] > 0
        assert row["verify_ms"] > 0 and row["draft_ms"] > 0
        assert row["tokens_per_step"] == row["tokens"] / row["steps"]
    for row in (suffix, draft):
        assert row["identical_to_plain"] is True
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / plain["tokens_per_second"]
        )
        assert len(row["acceptance_per_position"]) == 2
    if not sampled:  # the drafter is its own target: it is always right
        assert draft["acceptance_rate"] == 1.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_methods_are_those_without_weights_and_those_with_a_drafter():
    assert bench._methods("all", {}) == replay.model_free()
    assert bench._methods("all", {"medusa": "x"}) == [*replay.model_free(), "medusa"]
    assert bench._methods("suffix,ngram,suffix", {}) == ["suffix", "ngram"]
    assert set(replay.model_free()) == {"ngram", "ngram_gpu", "suffix"} <= REGISTRY.keys()


ROW = {
    "num_drafts": 2,
    "draft_tokens": 10,
    "tokens_per_step": 1.25,
    "mean_acceptance_length": 1.5,
    "acceptance_per_position": [0.5, 0.0],
    "tokens_per_second": 20.0,
    "speedup": 2.0,
    "identical_to_plain": True,
    "differing_prompts": None,
    "near_ties": None,
    "draft_ms": 0.25,
    "verify_ms": 3.0,
}
ROWS = [
    ROW
    | {
        "method": "none",
        "num_drafts": 0,
        "acceptance_per_position": [],
        "tokens_per_second": 10.0,
        "speedup": None,
        "identical_to_plain": None,
    },
    ROW | {"method": "ngram"},
    ROW | {"method": "suffix", "identical_to_plain": False, "draft_ms": None, "verify_ms": None},
]


@pytest.mark.parametrize("form,words", [("text", []), ("markdown", ["--markdown"])])
def test_the_table_has_a_line_for_each_and_a_difference_is_exit_code_1(
    form, words, folder, suite, capfd, monkeypatch
):
    monkeypatch.setattr(bench, "_measure", lambda *args: ROWS)
    assert run("--model", folder, "--suite", suite, *words) == 1
    lines = capfd.readouterr().out.splitlines()
    assert re.match(r"device .+, model .+, batch size 1, ", lines[0])
    if form == "markdown":
        assert lines[1] == "" and lines[3] == f"| --- |{10 * ' ---: |'}"
        assert lines[2].startswith("| method | K | drafts | tokens/step | acceptance length |")
        assert lines[4].startswith("| none |")
        row = "| ngram | 2 | 10 | 1.25 | 1.50 | 50 0 | 0.25 | 3.00 | 20.0 | 2.00 | yes |"
        assert lines[5] == row
        assert lines[6].endswith("| - | - | 20.0 | 2.00 | NO |")
    else:
        assert len({len(line) for line in lines[1:]}) == 1
        assert lines[2].startswith("none ")
        assert lines[3].split() == "ngram 2 10 1.25 1.50 50 0 0.25 3.00 20.0 2.00 yes".split()


def test_cells_have_ties_and_the_first_positions():
    row = ROW | {"method": "x", "identical_to_plain": False, "differing_prompts": 3, "near_ties": 2}
    assert bench._cells(row)[-1] == "NO, 2 of 3 by ties"
    row |= {"near_ties": 0, "acceptance_per_position": [0.5] * 13}
    assert bench._cells(row)[-1] == "NO"
    assert bench._cells(row)[5] == " ".join(["50"] * 12) + " ..."


def test_a_bad_row_of_a_suite_is_named_or_skipped(folder, tmp_path, capfd, monkeypatch):
    seen = []
    monkeypatch.setattr(
        bench, "_measure", lambda arguments, model, ids, *_: seen.append(ids) or ROWS[:2]
    )
    suite = tmp_path / "S.JSONL"
    suite.write_text('{"prompt": "a"}\n{"prompt": 3}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    words = ["--model", folder, "--suite", suite, "--num-prompts", 2]
    assert run(*words) == 1
    assert f"{suite}, line 2 is " in capfd.readouterr().err
    assert run(*words, "--skip-bad") == 0
    assert seen == [[[97], [98]]]
    assert "prompts 2, skipped prompts 1, " in capfd.readouterr().out


def test_equal_curves_of_a_picture_are_both_seen():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    names = ["ngram", "ngram_gpu", "suffix", "eagle3"]
    plot_acceptance(figure.subplots(), dict.fromkeys(names, [0.8, 0.8, 0.3, 0.0, 0.0]))
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    seen = [
        (abs(pixels - np.array(to_rgb(f"C{i}"))) < 0.01).all(axis=-1).sum()
        for i in range(len(names))
    ]
    assert min(seen) > max(seen) / 4


def test_drafts_verified_by_chance_are_not_called_identical(folder, suite, capfd, monkeypatch):
    words = ["--model", folder, "--suite", suite, "--methods", "suffix", "--num-drafts", 2]
    words += ["--max-tokens", 6, "--temperature", 2.0, "--verification", "rejection", "--json"]
    monkeypatch.setattr(
        benchmark, "step_times", lambda *args, **options: dict(draft_ms=None, verify_ms=None)
    )
    assert run(*words) == 0
    rows = json.loads(capfd.readouterr().out)["methods"]
    assert [row["identical_to_plain"] for row in rows] == [None, None]


@pytest.mark.parametrize(
    "words,message",
    [
        (["--methods", "eagle3"], "eagle3, which needs weights. Pass --drafter eagle3=PATH"),
        (["--methods", "ngrm"], "Did you mean 'ngram'"),
        (["--drafter", "eagle3"], "wanted METHOD=PATH"),
        (["--drafter", "ngram=x"], "ngram has no weights"),
        (["--drafter", "eagle3=nowhere"], "--drafter eagle3: 'nowhere' does not exist"),
        (["--drafter", f"medusa={HEAD}", "--methods", "ngram"], "Add it to --methods"),
        (["--drafter", f"medusa={HEAD}", "--drafter", f"medusa={HEAD}"], "medusa twice"),
        (["--num-drafts", "10000"], "num_drafts. is 10000.*Lower num_drafts"),
        (["--suite", "nowhere"], "nowhere is no file"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--picture", "x.gif"], "--picture is x.gif.*.png"),
        (["--methods", "suffix", "--min-n", "2"], "--min-n has no effect"),
        (["--top-k", "2"], "without --temperature"),
        (["--model", "nowhere"], "--model 'nowhere' does not exist"),
    ],
)
def test_an_error_is_one_line(words, message, folder, suite, capfd):
    assert run("--model", folder, "--suite", suite, *words) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(message, captured.err)
