"""Models by their name on the hub, from a cache that the tests make; nothing is fetched."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import jspec
from jspec import checkpoint, cli
from jspec.checkpoint import hub
from tests.conftest import GOLDEN
from tests.support.text_models import with_tokenizer

OLD, NEW = "a" * 40, "b" * 40


def put(cache: Path, name: str, source: Path, commit: str, ref: str | None = None) -> Path:
    """Adds a snapshot to a cache, as the hub's own package lays it out; returns its folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for file in (path for path in source.rglob("*") if path.is_file()):
        blob = folder / "blobs" / f"{commit[0]}-{file.name}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blob)
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(blob, link.parent))
    if ref is not None:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and an empty folder to work in."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


@pytest.fixture
def online(monkeypatch):
    """Lets models be fetched, by a function of the tests; lists what was asked for."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetched = []

    def fetch(name, revision):
        fetched.append((name, revision))
        return str(put(hub.cache_folder(), name, GOLDEN / "models" / "target_llama", NEW, "main"))

    monkeypatch.setattr(hub, "fetch", fetch)
    return fetched


def test_target_and_drafter_load_by_their_names(cache):
    put(cache, "some/target", GOLDEN / "models" / "target_llama", NEW, "main")
    put(cache, "some/Head-1.0", GOLDEN / "models" / "eagle3_llama", OLD, "main")
    model = jspec.load("some/target", "float32")
    drafter = jspec.load("some/Head-1.0", target=model)
    assert type(drafter.config) is jspec.Eagle3Config


def test_what_is_on_disk_comes_first(cache):
    put(cache, "some/target", GOLDEN / "models" / "target_llama", NEW, "main")
    assert checkpoint.resolve("some/target") != Path("some/target")
    shutil.copytree(GOLDEN / "models" / "target_qwen3", "some/target")
    assert checkpoint.resolve("some/target") == Path("some/target")
    assert jspec.load("some/target", "float32").config.model_type == "qwen3"


def test_a_link_to_nothing_is_not_taken_for_a_name_of_the_hub(cache):
    put(cache, "some/target", GOLDEN / "models" / "target_llama", NEW, "main")
    Path("some").mkdir()
    Path("some/target").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match="some/target is a link to gone"):
        jspec.load("some/target")


@pytest.mark.parametrize(
    "revision,commit", [("main", NEW), ("v1", OLD), ("refs/pr/1", OLD), (OLD, OLD), (None, NEW)]
)
def test_a_revision_is_a_ref_or_a_commit(cache, revision, commit):
    source = GOLDEN / "models" / "target_llama"
    put(cache, "some/target", source, NEW, "main")
    put(cache, "some/target", source, OLD, "v1")
    ref = cache / "models--some--target" / "refs" / "refs" / "pr" / "1"
    ref.parent.mkdir(parents=True)
    ref.write_text(OLD)
    found = checkpoint.resolve("some/target" + (f"@{revision}" if revision else ""))
    assert found == cache / "models--some--target" / "snapshots" / commit


def test_a_revision_that_is_not_there_is_named(cache):
    put(cache, "some/target", GOLDEN / "models" / "target_llama", NEW, "main")
    with pytest.raises(FileNotFoundError) as error:
        checkpoint.resolve("some/target@v2")
    assert "no snapshot of revision v2" in str(error.value)
    assert str(error.value).endswith("hf download some/target --revision v2")


@pytest.mark.parametrize(
    "names,folder",
    [
        ({"HF_HUB_CACHE": "~/own"}, "own"),
        ({"HUGGINGFACE_HUB_CACHE": "$HOME/own"}, "own"),
        ({"HF_HOME": "~/hf"}, "hf/hub"),
        ({"XDG_CACHE_HOME": "~/caches"}, "caches/huggingface/hub"),
        ({}, ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hub_s_programs_keep_it(names, folder, monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == tmp_path / folder


def test_a_name_that_leads_nowhere_is_explained_as_path_and_as_model(cache):
    with pytest.raises(FileNotFoundError) as error:
        jspec.load("some/target")
    assert str(error.value) == (
        "load 'some/target' does not exist: as a path nothing is there; as a model, none of that "
        f"name is in the Hugging Face hub's cache ({cache}), and HF_HUB_OFFLINE is set, so that it "
        "was not fetched. Correct the path, or fetch the model: hf download some/target"
    )


@pytest.mark.parametrize("name", ["./some/target", "a/b/c", "some", "some/target.gguf", "../x/y"])
def test_other_paths_are_no_names(name, cache, online):
    assert checkpoint.resolve(name) == Path(name)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        jspec.load(name)
    assert not online


def test_a_model_that_is_not_in_the_cache_is_fetched_once(cache, online):
    assert checkpoint.resolve("some/target").name == NEW
    assert checkpoint.resolve("some/target").name == NEW
    checkpoint.resolve("some/target@v2")
    assert online == [("some/target", None), ("some/target", "v2")]


def test_a_misspelt_path_is_not_fetched(cache, online):
    Path("models").mkdir()
    with pytest.raises(FileNotFoundError, match="models is a folder here, so .* not fetched"):
        checkpoint.resolve("models/lama")
    assert not online


def test_a_failed_download_is_one_line(cache, online, monkeypatch):
    def fail(name, revision):
        raise OSError("401 Client Error.\n\nRepository Not Found")

    monkeypatch.setattr(hub, "fetch", fail)
    with pytest.raises(FileNotFoundError, match=r"failed \(401 Client Error.\).*hf download"):
        checkpoint.resolve("some/target")


def test_without_the_hub_s_package_the_extra_is_named(cache, online, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"jspec-decode\[hub\].*hf download some/target"):
        checkpoint.resolve("some/target")
    put(cache, "some/target", GOLDEN / "models" / "target_llama", NEW, "main")
    assert checkpoint.resolve("some/target").name == NEW
    assert not online


@pytest.mark.parametrize("lacking", ["model.safetensors", "config.json", "blob", "shard"])
def test_a_snapshot_that_lacks_files_is_fetched_or_said(lacking, cache, online, monkeypatch):
    snapshot = put(cache, "some/target", GOLDEN / "models" / "target_llama", OLD, "main")
    weights = snapshot / "model.safetensors"
    if lacking == "blob":
        weights.resolve().unlink()
    elif lacking == "shard":
        weights.unlink()
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (snapshot / lacking).unlink()
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "yes")
        named = {"blob": "is a link to", "shard": "model-00001-of-00002"}.get(lacking, lacking)
        with pytest.raises(FileNotFoundError, match=f"is not whole .*{named}.*hf download"):
            checkpoint.resolve("some/target")
    assert checkpoint.resolve("some/target").name == NEW
    assert online == [("some/target", None)]


def test_only_what_is_read_is_fetched_and_pickles_where_there_is_nothing_else(monkeypatch, cache):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    held = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
        "pytorch_model.bin",
    ]
    held += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tf_model.h5"]
    held += ["consolidated.safetensors", "original/params.json", "onnx/model.onnx"]
    held += ["additional_chat_templates/tool.jinja"]
    asked = []

    def snapshot_download(name, *, revision, cache_dir, allow_patterns, ignore_patterns):
        chosen = filter_repo_objects(
            held, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked.append((name, revision, cache_dir, sorted(chosen)))
        for file in asked[-1][-1]:
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            (cache / file).touch()
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    hub.fetch("some/target", "v1")
    wanted = [held[11], "chat_template.jinja", "config.json", held[5], held[6], "tokenizer.json"]
    assert asked == [("some/target", "v1", cache, wanted)]
    shutil.rmtree(cache)
    held = ["config.json", "pytorch_model.bin", "training_args.bin", "optimizer.pt"]
    hub.fetch("some/old", None)
    assert [chosen for *_, chosen in asked[1:]] == [["config.json"], held[:2]]


def test_the_hub_s_package_finds_the_cache_that_these_tests_make(cache):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    snapshot = put(cache, "some/target", GOLDEN / "models" / "target_llama", NEW, "main")
    found = huggingface_hub.snapshot_download("some/target", cache_dir=cache, local_files_only=True)
    assert Path(found) == snapshot == checkpoint.resolve("some/target")


def test_every_command_takes_names(cache, own_cache, capfd, tmp_path):
    tiny = with_tokenizer(tmp_path / "tiny", "draft_llama_small")
    snapshot = put(cache, "some/tiny", tiny, NEW, "main")
    words = ["generate", "--model", "some/tiny", "--drafter", "some/tiny@main"]
    assert cli.main([*words, "--prompt", "a" * 600]) == 1
    err = capfd.readouterr().err
    assert "the prompt has 600 tokens" in err  # which is seen once both are loaded
    assert f"jspec: --model some/tiny is {snapshot}\n" in err
    assert f"jspec: --drafter some/tiny@main is {snapshot}\n" in err
    assert cli.main(["inspect", "some/tiny", "--target", "some/tiny", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["path"] == str(snapshot)
    assert cli.main(["convert", "some/tiny", "saved"]) == 0
    assert Path("saved/jspec.json").is_file()


@pytest.mark.parametrize(
    "words,option",
    [
        (["generate", "--prompt", "a", "--model", "no/such"], "--model"),
        (["generate", "--prompt", "a", "--model", "x", "--drafter", "no/such"], "--drafter"),
        (["bench", "--model", "x", "--drafter", "eagle3=no/such"], "--drafter eagle3:"),
        (["inspect", "no/such"], "path"),
        (["inspect", "no/such", "--target", "no/such"], "path"),
        (["convert", "no/such", "saved"], "source"),
    ],
)
def test_every_command_names_the_option_whose_model_is_nowhere(
    words, option, cache, own_cache, capfd
):
    assert cli.main(words) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(
        f"^jspec: {option} 'no/such' does not exist: as a path.*hf download no/such", err
    )
