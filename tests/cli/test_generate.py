"""`generate` with files of prompts, in batches, sampled, adaptive, and from saved folders."""

import json

import pytest

import jspec
from jspec import cli
from tests.support.text_models import with_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("model") / "tiny", "draft_llama_small")


@pytest.fixture(scope="module")
def saved(folder):
    """The model as `convert` writes it, and itself as a draft model."""
    home = folder.parent
    model = jspec.load(folder, "float32")
    drafter = jspec.load(folder, target=model, num_drafts=2)
    jspec.save(home / "model", model)
    jspec.save(home / "draft", drafter, target=model)
    return home / "model", home / "draft"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    chat = [{"role": "user", "content": "xyxyx"}]
    file.write_text(f'{{"prompt": "abcabc"}}\n{json.dumps({"messages": chat})}\n')
    return file


def lines(capfd, *words):
    words = ["generate", *map(str, words), "--max-tokens", "10", "--json"]
    assert cli.main(words) == 0, capfd.readouterr().err
    return list(map(json.loads, capfd.readouterr().out.splitlines()))


def texts(capfd, *words):
    return lines(capfd, *words)[-1]


def test_a_batch_has_the_texts_of_one_prompt_at_a_time(folder, file, capfd):
    words = ["--model", folder, "--prompt-file", file, "--prompt", "q", "--num-drafts", 2]
    together = texts(capfd, *words, "--batch-size", 2, "--compare-plain")
    assert together["prompts"] == 3 and together["identical_to_plain"] is True
    alone = texts(capfd, "--model", folder, "--prompt-file", file, "--prompt", "q", "--method=none")
    assert together["texts"] == alone["texts"]


def test_sampled_text_depends_on_the_seed_and_not_on_the_drafts(folder, file, capfd):
    words = ["--model", folder, "--prompt-file", file, "--temperature", 1.5, "--top-p", 0.9]
    plain, again, other = (
        texts(capfd, *words, "--seed", seed, "--method", method)["texts"]
        for seed, method in ((1, "none"), (1, "suffix"), (2, "none"))
    )
    assert plain == again != other


def test_samples_of_a_prompt_are_those_of_its_seeds(folder, capfd):
    words = ["--model", folder, "--temperature", 1.5, "--seed", 3, "--num-drafts", 2]
    asked = ["--prompt", "abcabc", "--prompt", "xyxyx"]
    *samples, result = lines(capfd, *words, *asked, "--num-samples", 3, "--batch-size", 2)
    samples.sort(key=lambda line: (line["index"], line["sample"]))  # they come as they end
    shown = [(line["index"], line["sample"], line["seed"]) for line in samples]
    assert shown == [(i, n, 3 + n) for i in range(2) for n in range(3)]
    assert result["prompts"] == 6
    assert result["texts"] == [line["text"] for line in samples]
    assert len(set(result["texts"])) == 6
    words[5] = 4  # the seed
    alone = texts(capfd, *words, "--prompt", "xyxyx")
    assert alone["text"] == samples[4]["text"] and alone["seed"] == 4


def test_samples_for_people_are_numbered(folder, capfd):
    words = ["--model", folder, "--prompt", "ab", "--temperature", 1, "--num-samples", 2]
    assert cli.main(["generate", *map(str, words), "--max-tokens", "2"]) == 0
    out = capfd.readouterr().out
    assert "[1] ab (sample 1)" in out and "[2] ab (sample 2)" in out


def test_a_suite_with_bad_rows_is_refused_or_decoded_without_them(folder, tmp_path, capfd):
    suite = tmp_path / "s.jsonl"
    rows = [{"prompt": "ok"}, {"text": 1}, {"prompt": "ab" * 300}, {"prompt": ""}, {"prompt": "b"}]
    suite.write_text("\n".join(map(json.dumps, rows)))
    words = ["--model", folder, "--raw", "--prompt-file", suite, "--num-drafts", 2]
    assert cli.main(["generate", *map(str, words), "--max-tokens", "10"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"jspec: {suite}, line 2 is ")
    words.append("--skip-bad")
    words = ["generate", *map(str, words), "--max-tokens", "10", "--json"]
    assert cli.main(words) == 0
    out, err = capfd.readouterr()
    *prompts, result = map(json.loads, out.splitlines())
    assert [line["source"] for line in prompts] == [f"{suite}, line {n}" for n in (1, 5)]
    assert (result["prompts"], result["skipped_prompts"]) == (2, 3)
    assert [f"{suite}, line {n}" in err for n in (1, 2, 3, 4, 5)] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_positions_past_the_twelfth_are_not_printed_for_people(folder, capfd):
    words = ["--model", folder, "--prompt", "ab", "--num-drafts", 20, "--max-tokens", 4]
    assert cli.main(["generate", *map(str, words)]) == 0
    line = next(x for x in capfd.readouterr().out.splitlines() if "per position" in x)
    assert len(line.split()) == 3 + 12 + 1 and line.endswith(" ...")


@pytest.mark.slow
def test_chance_is_not_compared_token_by_token(folder, file, capfd):
    words = ["--model", folder, "--prompt-file", file, "--temperature", 1.5, "--num-drafts", 2]
    words += ["--drafter", folder, "--draft-sampling", "probabilistic", "--no-adaptive"]
    result = texts(capfd, *words, "--verification", "block", "--compare-plain")
    assert result["identical_to_plain"] is None and result["speedup"] > 0
    # The drafter is its own target: what it draws is kept, but where rounding refuses it.
    assert result["acceptance_rate"] > 0.9


@pytest.mark.parametrize("choice", ["--adaptive", "--no-adaptive"])
def test_adaptive_drafting_keeps_the_text(choice, folder, file, capfd):
    words = ["--model", folder, "--prompt-file", file, "--num-drafts", 2, choice]
    result = texts(capfd, *words, "--drafter", folder, "--compare-plain")
    assert result["identical_to_plain"] is True
    if choice == "--no-adaptive":
        assert result["draft_tokens"] > 0


@pytest.mark.slow
def test_saved_folders_stand_for_what_they_were_made_from(folder, saved, capfd):
    model, draft = saved
    words = ["--prompt", "abcabc"]
    wanted = texts(capfd, *words, "--model", folder, "--method", "none")["texts"]
    result = texts(capfd, *words, "--model", model, "--drafter", draft, "--compare-plain")
    assert result["texts"] == wanted and result["identical_to_plain"] is True
    assert (result["method"], result["num_drafts"]) == ("draft_model", 2)


@pytest.mark.parametrize(
    "words,message",
    [
        (["--num-drafts", "3"], "keeps the options that it was saved with"),
        (["--method", "medusa"], "is of method draft_model, not medusa"),
    ],
)
def test_a_saved_drafter_is_not_changed(words, message, saved, capfd):
    model, draft = map(str, saved)
    asked = ["--prompt", "a", "--model", model, "--drafter", draft, *words]
    assert cli.main(["generate", *asked]) == 1
    assert message in capfd.readouterr().err


def test_a_saved_drafter_is_no_model(saved, capfd):
    model, draft = map(str, saved)
    assert cli.main(["generate", "--prompt", "a", "--model", draft]) == 1
    assert "Pass the model that it drafts for" in capfd.readouterr().err
    asked = ["--prompt", "a", "--model", model, "--drafter", model]
    assert cli.main(["generate", *asked]) == 1
    assert "holds a target model" in capfd.readouterr().err
