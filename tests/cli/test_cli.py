"""The command line does what its help says, and fails in one line."""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import pytest

from jspec import cli
from jspec.cli import drafters
from jspec.runtime import benchmark
from tests.conftest import GOLDEN
from tests.support.marks import slow_ones
from tests.support.text_models import with_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

KEYS = {
    "method",
    "num_drafts",
    "prompts",
    "tokens",
    "steps",
    "tokens_per_step",
    "draft_tokens",
    "accepted_tokens",
    "acceptance_rate",
    "mean_acceptance_length",
    "acceptance_per_position",
    "tokens_per_second",
    "plain_tokens_per_second",
    "speedup",
    "identical_to_plain",
    "differing_prompts",
    "near_ties",
    "skipped_prompts",
    "texts",
}
PROMPT_KEYS = {
    *("index", "source", "sample", "seed", "prompt_tokens", "tokens", "accepted_tokens"),
    *("finish_reason", "token_ids", "text"),
}


HEAD = str(GOLDEN / "models" / "eagle3_llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("model") / "tiny", "draft_llama_small")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The model that the recorded heads were made for."""
    return with_tokenizer(tmp_path_factory.mktemp("target") / "tiny", "target_llama")


def generate(*words):
    return cli.main(["generate", *map(str, words)])


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_json_is_a_line_a_prompt_and_one_of_the_run_with_every_key(folder, capfd, method):
    words = ["--model", folder, "--method", method, "--num-drafts", 3, "--prompt", "abcabcab"]
    words += ["--prompt", "xyz", "--max-tokens", 24, "--compare-plain", "--json"]
    assert generate(*words) == 0
    *lines, result = map(json.loads, capfd.readouterr().out.splitlines())
    assert set(result) == KEYS
    assert result["method"] == method and result["num_drafts"] == 3 and result["prompts"] == 2
    assert [set(line) for line in lines] == [PROMPT_KEYS] * 2
    for i, (line, length) in enumerate(zip(lines, (8, 3), strict=True)):
        assert (line["index"], line["source"], line["sample"]) == (i, f"--prompt {i + 1}", 0)
        assert line["prompt_tokens"] == length and line["seed"] is None
        assert line["finish_reason"] == ("length" if line["tokens"] == 24 else "stop")
        assert len(line["token_ids"]) == line["tokens"]
    for key in ("tokens", "accepted_tokens"):
        assert sum(line[key] for line in lines) == result[key]
    assert [line["text"] for line in lines] == result["texts"]
    assert result["identical_to_plain"] is True
    assert result["speedup"] == pytest.approx(
        result["tokens_per_second"] / result["plain_tokens_per_second"]
    )
    assert len(result["acceptance_per_position"]) == 3
    assert len(result["texts"]) == 2


@pytest.mark.parametrize(
    "head,method,words,num_drafts",
    slow_ones(
        [
            ("eagle1_llama", "eagle", [], 5),
            ("eagle3_llama", "eagle3", ["--method", "eagle3", "--num-drafts", 3], 3),
            ("medusa_llama", "medusa", ["--num-drafts", 2], 2),
            ("medusa_llama", "medusa", ["--tree", "[(0,),(1,),(0,0)]"], 3),
            ("draft_llama_small", "draft_model", ["--num-drafts", 1], 1),
        ],
        lambda head, *_: head != "eagle3_llama",
    ),
)
def test_a_drafter_from_disk_decodes_the_same_text(target, capfd, head, method, words, num_drafts):
    words = ["--model", target, "--drafter", GOLDEN / "models" / head, *words, "--json"]
    words += ["--prompt", "abcabcab", "--max-tokens", 16, "--compare-plain", "--no-adaptive"]
    assert generate(*words) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result) == KEYS | PROMPT_KEYS  # of a single prompt, in one object
    assert result["method"] == method and result["num_drafts"] == num_drafts
    assert result["identical_to_plain"] is True
    assert result["draft_tokens"] > 0


@pytest.mark.parametrize(
    "words,message",
    [
        (["--method", "eagle3"], "eagle3 needs weights.*--drafter PATH"),
        (["--drafter", "nowhere"], "--drafter 'nowhere' does not exist"),
        (["--drafter", HEAD, "--method", "none"], "none drafts without weights"),
        (["--drafter", HEAD, "--method", "ngram"], "ngram drafts without weights"),
        (["--drafter", HEAD, "--method", "eagel"], "Did you mean 'eagle'"),
        (["--drafter", HEAD, "--min-n", "3"], "--min-n has no effect with --drafter"),
        (["--drafter", HEAD, "--num-drafts", "0"], "num_drafts"),
        (["--drafter", HEAD, "--method", "medusa"], "medusa: .*"),
        (["--drafter", HEAD, "--method", "eagle3", "--tree", "[(0,"], "Tree.*list of tuples"),
        (["--drafter", str(GOLDEN / "models" / "e2e_llama_eagle1")], "config.json is missing"),
        (["--drafter", str(GOLDEN / "models" / "dflash_qwen3")], "target"),
        (["--method", "ngram", "--tree", "[(0,)]"], "--tree has no effect without --drafter"),
    ],
)
def test_a_drafter_that_does_not_fit_is_one_line_too(target, capfd, words, message):
    assert generate("--model", target, "--prompt", "abc", "--max-tokens", 4, *words) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jspec: ") and captured.err.count("\n") == 1
    assert re.search(message, captured.err)


def test_plain_decoding_is_a_method_too(folder, capfd):
    words = ["--model", folder, "--prompt", "abc", "--max-tokens", 8, "--json"]
    assert generate(*words, "--method", "none") == 0
    plain = json.loads(capfd.readouterr().out)
    assert plain["draft_tokens"] == 0 and plain["mean_acceptance_length"] == 1.0
    assert generate(*words) == 0
    drafted = json.loads(capfd.readouterr().out)
    assert drafted["texts"] == plain["texts"]
    assert drafted["identical_to_plain"] is None  # not asked for, so not claimed


def test_text_for_people_streams_and_then_sums_up(folder, capfd):
    assert generate("--model", folder, "--prompt", "abcabc", "--max-tokens", 16, "--raw") == 0
    out = capfd.readouterr().out
    assert "tokens per second" in out and "mean acceptance length" in out
    assert "\033[" not in out  # no colours into a pipe


@pytest.mark.parametrize(
    "words, message",
    [
        (["--method", "ngrm"], "ngram"),
        (["--num-drafts", "0"], "num_drafts"),
        (["--min-n", "4", "--max-n", "2"], "4.*2"),
        (["--method", "suffix", "--min-n", "4"], "--min-n has no effect with --method suffix"),
        (["--method", "ngram", "--min-prob", "0.5"], "--min-prob has no effect.*--max-n"),
        (
            ["--method", "none", "--num-drafts", "3"],
            "--num-drafts has no effect.*none. Leave it out.$",
        ),
        (["--num-drafts", "10000"], "num_drafts. is 10000.*at most 64 tokens.*Lower num_drafts"),
        (["--method", "suffix", "--min-prob", "2"], "min_token_prob"),
        (["--method", "suffix", "--warm-start", "no", "--model", "nowhere"], "'no' is no file"),
        (["--prompt", "", "--raw"], "--prompt 2: the prompt is empty.*BOS"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--dtype", "int8"], "float32 or bfloat16"),
        (["--model", "nowhere/model"], "nowhere/model"),
        (["--prompt", "a" * 600], "--prompt 2: the prompt has 600 tokens.*512.*--skip-bad"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(folder, capfd, words, message):
    base = ["--model", str(folder), "--prompt", "abc", "--max-tokens", "4"]
    assert generate(*base, *words) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jspec: ") and captured.err.count("\n") == 1
    assert re.search(message, captured.err)


@pytest.mark.parametrize(
    "words,bounds",
    [([], (2, 4)), (["--min-n", 7], (7, 7)), (["--max-n", 1], (1, 1)), (["--min-n", 3], (3, 4))],
)
def test_a_default_bound_of_n_grams_gives_way_to_the_one_that_is_passed(words, bounds):
    words = ["generate", "--model", "m", *map(str, words)]
    for method in ("ngram", "ngram_gpu"):
        config = drafters.without_weights(method, cli._parser().parse_args(words))
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds


def test_a_model_without_a_tokenizer_says_where_it_belongs(capfd):
    assert generate("--model", GOLDEN / "models" / "draft_llama_small", "--prompt", "a") == 1
    assert "tokenizer.json" in capfd.readouterr().err


@pytest.mark.parametrize("is_file", [True, False])
def test_executables_are_kept_where_the_cache_folder_can_be_made(
    is_file, folder, tmp_path, jax_cache
):
    if is_file:
        (tmp_path / "cache").touch()
    jax_cache(None)
    assert generate("--model", folder, "--prompt", "abc", "--max-tokens", 4) == 0
    kept = None if is_file else str(tmp_path / "cache" / "compiled")
    assert jax.config.values["jax_compilation_cache_dir"] == kept


def test_a_cache_that_jax_has_already_is_kept(folder, tmp_path, jax_cache):
    jax_cache(str(tmp_path / "mine"))
    assert generate("--model", folder, "--prompt", "abc", "--max-tokens", 4) == 0
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")


def test_ctrl_c_ends_quietly(folder, capfd, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "run", interrupted)
    assert generate("--model", folder, "--prompt", "abc") == 130
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_in_the_middle_of_a_text_ends_the_process_quietly(folder):
    words = [*("--model", folder, "--prompt", "abc", "--max-tokens", "500"), "--raw"]
    words += ["--method", "none"]  # the slowest: it ends by the signal, not by itself
    words = [sys.executable, "-u", "-m", "jspec", "generate", *map(str, words)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.read(1)  # it decodes
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, b"")
    assert b"tokens per second" not in out


@pytest.mark.parametrize("exit_code,out", [(130, b"text\n"), (1, b"text\n"), (0, b"text\ndone\n")])
def test_after_ctrl_c_and_errors_the_process_ends_at_once(exit_code, out):
    code = "import atexit; from jspec import cli; atexit.register(print, 'done'); print('text');"
    code += f"cli.main = lambda: {exit_code}; cli.command()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (exit_code, out, b"")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_reader_that_leaves_ends_it_quietly(folder, capfd, monkeypatch, words):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert generate("--model", folder, "--prompt", "abc", "--max-tokens", 4, *words) == 141
    assert capfd.readouterr().err == ""


def test_closed_output_is_no_error(folder, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)  # what Python makes of `>&-`
    assert generate("--model", folder, "--prompt", "abc", "--max-tokens", 4) == 0
    sys.stdout.close()


@pytest.mark.parametrize("output", ["nowhere/demo.png", "demo.txt", "folder.png"])
def test_the_demo_refuses_a_picture_that_it_could_not_write(capfd, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert cli.main(["demo", "--output", output]) == 1
    assert "in a folder that exists" in capfd.readouterr().err


def test_the_demo_checks_its_options_before_it_fetches(capfd, monkeypatch):
    from jspec.demo import run

    monkeypatch.setattr(run, "fetch_smollm2", None)
    assert cli.main(["demo", "--max-tokens", "0"]) == 1
    assert "max_tokens=1 or more" in capfd.readouterr().err


def test_the_demo_marks_accepted_drafts_alone():
    from jspec.demo.run import _marked

    text = _marked("one two", " three")
    assert text.plain == "one two three" and text.style == ""
    assert [(span.start, span.end) for span in text.spans] == [(0, 7)]


def test_the_demo_compares_every_method_and_draws(folder, tmp_path, monkeypatch, capfd):
    from jspec.demo import run
    from jspec.demo.prompts import Prompt

    monkeypatch.setattr(run, "fetch_smollm2", lambda: folder)
    prompts = [Prompt("copy", "one", "abcabcabc"), Prompt("chat", "two", "hello")]
    monkeypatch.setattr(run, "demo_prompts", lambda: prompts)
    picture = tmp_path / "demo.png"
    assert cli.main(["demo", "--max-tokens", "8", "--output", str(picture)]) == 0
    lines = capfd.readouterr().out.strip().splitlines()
    assert lines[-1] == "identical to plain decoding: yes"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sum("ngram_gpu" in line for line in lines) >= 2
    assert not any("…" in line for line in lines)  # the table fits into 80 columns
