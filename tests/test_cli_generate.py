"""`generate` with files of prompts, in batches, sampled, adaptive, and from saved folders."""

import json

import pytest

import jspec
from jspec import cli
from tests.text_models import with_tokenizer


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


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(cli, "_keep_compiled", lambda folder: None)  # the tests have a cache


def texts(capfd, *words):
    words = ["generate", *map(str, words), "--max-tokens", "10", "--json"]
    assert cli.main(words) == 0, capfd.readouterr().err
    return json.loads(capfd.readouterr().out)


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


def test_chance_is_not_compared_token_by_token(folder, file, capfd):
    words = ["--model", folder, "--prompt-file", file, "--temperature", 1.5, "--num-drafts", 2]
    words += ["--drafter", folder, "--draft-sampling", "probabilistic", "--no-adaptive"]
    result = texts(capfd, *words, "--verification", "block", "--compare-plain")
    assert result["identical_to_plain"] is None and result["speedup"] > 0
    # The drafter is its own target: what it draws is kept, all but the drafts past a text's end.
    assert result["acceptance_rate"] > 0.9


@pytest.mark.parametrize("words", [["--adaptive"], ["--no-adaptive"]])
def test_adaptive_drafting_keeps_the_text(words, folder, file, capfd):
    words = ["--model", folder, "--prompt-file", file, "--num-drafts", 2, *words]
    result = texts(capfd, *words, "--compare-plain")
    assert result["identical_to_plain"] is True
    if "--no-adaptive" in words:
        assert result["draft_tokens"] > 0


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
