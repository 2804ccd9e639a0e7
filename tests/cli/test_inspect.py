"""`inspect` names what a path is, and its bytes are those that are allocated."""

import json

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec import cli
from jspec.models.kv_cache import KVCache, init_cache
from tests.conftest import GOLDEN

pytestmark = pytest.mark.usefixtures("own_cache")

MODELS = GOLDEN / "models"
SIZES = {"num_pages": 7, "page_size": 4, "max_model_len": 24, "dtype": "float32"}
WORDS = ["--num-pages", "7", "--page-size", "4", "--max-model-len", "24", "--max-requests", "3"]
NO_MEMORY = dict.fromkeys(("weights", "shared", "kv_pages", "buffers"), 0)
HEADS = [
    ("eagle1_llama", "target_llama"),
    ("eagle3_llama", "target_llama"),
    ("eagle3_llama_fullvocab", "target_llama"),
    ("peagle_llama", "target_llama"),
    ("medusa_llama", "target_llama"),
    ("medusa_llama_vllm", "target_llama"),
    ("draft_llama_small", "target_llama"),
    ("dflash_qwen3", "target_qwen3"),
    ("mimo_mtp", "mimo_mtp"),
]


def inspect(capfd, *words):
    assert cli.main(["inspect", *map(str, words), "--json"]) == 0, capfd.readouterr().err
    return json.loads(capfd.readouterr().out)


def nbytes(tree, *, but=()):
    leaves = jax.tree.leaves(tree)
    return sum(leaf.nbytes for leaf in leaves if not any(leaf is other for other in but))


@pytest.mark.parametrize("head,of", HEADS)
def test_the_bytes_of_a_recorded_drafter_are_those_that_init_holds(head, of, capfd):
    target = jspec.load(MODELS / of, "float32")
    method = ["--method", "mtp"] if head == "mimo_mtp" else []
    options = {"method": "mtp"} if head == "mimo_mtp" else {}
    drafter = jspec.load(MODELS / head, target=target, **options)
    cache = jspec.CacheConfig(**SIZES)
    state = jspec.init(drafter.config, drafter.params, cache=cache, max_requests=3)

    words = ["--target", MODELS / of, *WORDS, *method, "--dtype", "float32"]
    result = inspect(capfd, MODELS / head, *words)

    of_target = jax.tree.leaves(target.params)
    whole, own = nbytes(state.params), nbytes(drafter.params, but=of_target)
    assert result["bytes"]["weights"] == own
    assert result["bytes"]["shared"] == whole - own
    assert result["bytes"]["kv_pages"] + result["bytes"]["buffers"] == nbytes(state.memory)
    assert result["bytes"]["total"] == own + nbytes(state.memory)
    if isinstance(state.memory, KVCache):
        assert result["bytes"]["buffers"] == 0
    assert result["method"] == jspec.proposers.of(drafter.config).name
    assert result["num_drafts"] == drafter.config.num_drafts


@pytest.mark.parametrize(
    "name,dtype",
    [
        *(("target_llama", "bfloat16"), ("target_llama_rope3", "float32")),
        *(("eagle3_llama_aux", "float32"), ("dflash_qwen3", "bfloat16")),
    ],
)
def test_a_folder_keeps_its_dtype(name, dtype, capfd):
    of = "target_qwen3" if name.startswith("dflash") else "target_llama"
    words = [] if name.startswith("target") else ["--target", MODELS / of]
    as_it_is = inspect(capfd, MODELS / name, *words, *WORDS)
    assert as_it_is["dtype"] == dtype
    assert as_it_is == inspect(capfd, MODELS / name, *words, *WORDS, "--dtype", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["target_llama", "target_qwen2_bias", "target_qwen3_tied"])
def test_the_bytes_of_a_recorded_target_are_those_of_its_arrays(name, dtype, capfd):
    model = jspec.load(MODELS / name, dtype)
    config = model.config
    pages = init_cache(
        jspec.CacheConfig(**SIZES | {"dtype": dtype}),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    result = inspect(capfd, MODELS / name, *WORDS, "--dtype", dtype)
    assert result["is"] == "target"
    assert result["bytes"]["weights"] == nbytes(model.params)
    assert result["bytes"]["kv_pages"] == nbytes(pages)
    assert result["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert result["form"] == "Hugging Face folder"


def test_pages_reach_for_all_requests_at_full_length_by_default(capfd):
    result = inspect(capfd, MODELS / "target_llama", "--max-requests", 3)
    assert result["max_model_len"] == 512
    assert result["num_pages"] == 3 * 512 // 16


@pytest.mark.parametrize("head,method", [("eagle3_llama", "eagle3"), ("medusa_llama", "medusa")])
def test_a_drafter_without_its_target_is_named_alone(head, method, capfd):
    result = inspect(capfd, MODELS / head)
    assert (result["is"], result["method"]) == ("drafter", method)
    assert "bytes" not in result
    assert cli.main(["inspect", str(MODELS / head)]) == 0
    assert "pass --target" in capfd.readouterr().out


def test_a_model_that_drafts_says_so(capfd):
    assert "mtp" in inspect(capfd, MODELS / "mimo_mtp")["drafts_with"]


def test_a_saved_folder_is_read_by_its_shapes(tmp_path, capfd):
    target = jspec.load(MODELS / "target_llama", "bfloat16")
    drafter = jspec.load(MODELS / "eagle3_llama", target=target)
    jspec.save(tmp_path / "model", target)
    jspec.save(tmp_path / "head", drafter, target=target)
    words = ["--dtype", "bfloat16", *WORDS]
    saved = inspect(capfd, tmp_path / "model", *words)
    assert saved.pop("form") == "folder of jspec.save"
    loaded = inspect(capfd, MODELS / "target_llama", *words)
    assert saved["bytes"] == loaded["bytes"]
    head = inspect(capfd, tmp_path / "head", "--target", tmp_path / "model", *words)
    again = inspect(capfd, MODELS / "eagle3_llama", "--target", MODELS / "target_llama", *words)
    assert head["bytes"] == again["bytes"]
    assert inspect(capfd, tmp_path / "head")["method"] == "eagle3"
    assert inspect(capfd, tmp_path / "model", *WORDS)["bytes"] == loaded["bytes"]  # its own dtype


def test_nothing_but_two_tables_of_the_target_is_loaded(capfd, monkeypatch):
    from jspec.cli import inspection

    seen = []
    monkeypatch.setattr(
        inspection, "drafter_memory", lambda drafter, target, *_: seen.append(target) or NO_MEMORY
    )
    inspect(capfd, MODELS / "eagle3_llama", "--target", MODELS / "target_llama", *WORDS)
    arrays = [leaf for leaf in jax.tree.leaves(seen[0].params) if isinstance(leaf, jnp.ndarray)]
    assert len(arrays) == 2
    assert len(jax.tree.leaves(seen[0].params)) > 2


@pytest.mark.parametrize(
    "text,message",
    [
        ("{}", "format None, wanted 1. Restore it"),
        ('{"format": 1}', "no config. Save the model or drafter again"),
        ('{"format": 1, "config": {}}', "config class None is unknown"),
    ],
)
def test_a_saved_folder_without_a_config_says_so(text, message, tmp_path, capfd):
    (tmp_path / "jspec.json").write_text(text)
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert message in capfd.readouterr().err
    with pytest.raises(ValueError, match=message):
        jspec.restore(tmp_path)


@pytest.mark.parametrize(
    "words,message",
    [
        (["nowhere"], "does not exist"),
        ([MODELS / "target_llama", "--max-model-len", "513"], "above the 512 positions"),
        ([MODELS / "target_llama", "--max-requests", "0"], "--max-requests"),
        ([MODELS / "target_llama", "--page-size", "0"], "page_size"),
        ([MODELS / "target_llama", "--dtype", "int8"], "float32 or bfloat16"),
        ([MODELS / "target_llama", "--method", "eagle"], "no effect without --target"),
        (
            [MODELS / "eagle3_llama", "--target", MODELS / "draft_llama_small"],
            "target that it was trained for",
        ),
    ],
)
def test_an_error_is_one_line(words, message, capfd):
    assert cli.main(["inspect", *map(str, words)]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err
