"""Drafters from disk: which method a folder is, what is shared with the target, what is refused."""

import inspect
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jspec
from jspec import checkpoint, proposers
from jspec.checkpoint import sharing
from jspec.checkpoint.sharing import own_or_shared
from tests.conftest import GOLDEN
from tests.support import heads
from tests.support.counting import backend_compiles
from tests.support.heads import target as recorded_target

FOLDERS = {
    "dflash2_qwen3": ("dflash", "target_qwen3", 5),
    "dflash_qwen3": ("dflash", "target_qwen3", 7),
    "draft_llama_small": ("draft_model", "target_llama", 5),
    "eagle1_llama": ("eagle", "target_llama", 5),
    "eagle1_llama_fcbias": ("eagle", "target_llama", 5),
    "eagle3_llama": ("eagle3", "target_llama", 5),
    "eagle3_llama_aux": ("eagle3", "target_llama", 5),
    "eagle3_llama_fullvocab": ("eagle3", "target_llama", 5),
    "eagle3_llama_v31": ("eagle3", "target_llama", 5),
    "medusa_llama": ("medusa", "target_llama", 4),
    "medusa_llama_vllm": ("medusa", "target_llama", 3),
    "mimo_mtp": ("mtp", "mimo_mtp", 1),
    "peagle_llama": ("eagle3", "target_llama", 5),
}
"""Recorded folder -> method, target, drafts by default."""

# Method -> folder, name of the embedding and of the head (None: there never is one), beginning of
# the names of tensors that it cannot do without.
TABLES = {
    "dflash": ("dflash_qwen3", "embed_tokens.weight", "lm_head.weight", "layers.1."),
    "eagle": ("eagle1_llama", "embed_tokens.weight", None, "layers.0."),
    "eagle3": ("eagle3_llama_fullvocab", "embed_tokens.weight", "lm_head.weight", "midlayer."),
    "medusa": ("medusa_llama_vllm", None, "lm_head.weight", "blocks.2.layers.0.bias"),
    "mtp": ("mimo_mtp", "model.embed_tokens.weight", "lm_head.weight", "model.mtp_layers.0."),
}
SHARES = [
    (method, leaf, name)
    for method, (_, *names, _) in TABLES.items()
    for leaf, name in zip(("embed", "head"), names, strict=True)
    if name
]


def target_of(method):
    return recorded_target(FOLDERS[TABLES[method][0]][1])


def load(folder, **options):
    return jspec.load(folder, target=recorded_target(FOLDERS[folder.name][1]), **options)


@pytest.fixture
def write(tmp_path):
    """Writes a method's recorded folder with some tensors and options changed, all in float32."""

    def changed(method, *, drop=(), config=None, **tensors):
        stored = checkpoint.read(GOLDEN / "models" / TABLES[method][0])
        floats = {
            name: np.asarray(tensor).astype(np.float32)
            for name, tensor in stored.tensors()
            # One head for all, as where Medusa's share one, is what there is to share.
            if not name.startswith((*drop, "lm_heads."))
        }
        folder = tmp_path / TABLES[method][0]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(stored.config | (config or {})))
        save_file(floats | tensors, folder / "model.safetensors")
        return folder

    return changed


def address(array):
    return array.unsafe_buffer_pointer()


def test_every_method_with_weights_is_tested_here():
    loadable = {p.name for p in proposers.REGISTRY.values() if p.load and p.init_params}
    assert loadable == {method for method, _, _ in FOLDERS.values()}
    assert loadable == {*TABLES, "draft_model"}  # which shares nothing


@pytest.mark.parametrize("name", FOLDERS)
def test_the_method_of_a_recorded_folder_is_recognised(name):
    method, of_target, num_drafts = FOLDERS[name]
    drafter = load(GOLDEN / "models" / name)
    assert proposers.of(drafter.config).name == method
    assert drafter.config.num_drafts == num_drafts
    assert drafter.config.vocab_size == recorded_target(of_target).config.vocab_size
    again = load(GOLDEN / "models" / name, num_drafts=1)
    assert again.config.num_drafts == 1


@pytest.mark.parametrize("name", ["draft_llama_small", "mimo_mtp"])
def test_a_recorded_folder_that_is_a_whole_model_loads_as_a_target_too(name):
    assert isinstance(jspec.load(GOLDEN / "models" / name, "float32"), checkpoint.Model)


@pytest.mark.parametrize("name", sorted(FOLDERS.keys() - {"draft_llama_small", "mimo_mtp"}))
def test_a_recorded_folder_of_a_head_asks_for_its_target(name):
    with pytest.raises(ValueError, match=f"is a drafter .{FOLDERS[name][0]}.*pass target=model"):
        jspec.load(GOLDEN / "models" / name)


@pytest.mark.parametrize("method,leaf,name", SHARES)
def test_a_table_that_the_checkpoint_lacks_is_the_targets_own_buffer(method, leaf, name, write):
    drafter = load(write(method, drop=[name]))
    target = target_of(method)
    assert drafter.params[leaf] is target.params[leaf]
    assert address(drafter.params[leaf]) == address(target.params[leaf])


@pytest.mark.parametrize("method,leaf,name", SHARES)
def test_a_table_equal_to_the_targets_is_the_targets_own_buffer(method, leaf, name, write):
    target = target_of(method)
    drafter = load(write(method, **{name: np.asarray(target.params[leaf])}))
    assert drafter.params[leaf] is target.params[leaf]
    assert address(drafter.params[leaf]) == address(target.params[leaf])


@pytest.mark.parametrize("method,leaf,name", SHARES)
def test_a_table_that_differs_in_one_number_is_kept(method, leaf, name, write):
    target = target_of(method)
    own = np.array(target.params[leaf])
    own[-1, -1] += 1
    drafter = load(write(method, **{name: own}))
    np.testing.assert_array_equal(drafter.params[leaf], own)
    assert address(drafter.params[leaf]) != address(target.params[leaf])


def test_an_eagle_head_is_always_scored_by_its_target(write):
    drafter = load(write("eagle"))
    head = target_of("eagle").params["head"]
    assert drafter.params["head"] is head and address(drafter.params["head"]) == address(head)


@pytest.mark.parametrize("method", TABLES)
def test_a_shared_embedding_is_not_allocated_again(method, write):
    _, embed, head, _ = TABLES[method]
    target = target_of(method)
    folder = write(method, drop=[head] if head else [])
    load(folder)  # what the first load leaves behind
    before = {id(array) for array in jax.live_arrays()}
    drafter = load(folder)
    new = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    own = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(drafter.params)
        if not any(leaf is table for table in jax.tree.leaves(target.params))
    )
    assert new == own


@pytest.mark.parametrize("method", TABLES)
def test_tensors_that_do_not_fit_are_listed_at_once_and_before_any_compile(method, write):
    prefix = TABLES[method][-1]
    stored = checkpoint.read(GOLDEN / "models" / TABLES[method][0])
    missing = {n: list(t.shape) for n, t in stored.tensors() if n.startswith(prefix)}
    extra = {"layers.9.mlp.up_proj.weight": np.zeros((3, 5), np.float32)}
    if method == "mtp":  # other tensors are the target's
        extra = {f"model.mtp_layers.9.{name}": x for name, x in extra.items()}
    folder = write(method, drop=[prefix], **extra)
    with backend_compiles() as compiled, pytest.raises(ValueError) as error:
        load(folder, method=method)
    assert not compiled
    message = str(error.value)
    for name, shape in missing.items():
        assert f"missing: {name.replace('midlayer', 'layers.0')} {shape}" in message
    for name in extra:
        assert f"unknown: {name} [3, 5]" in message


def test_names_are_those_of_the_tensors(golden):
    for folder in (golden / "models" / "eagle1_llama", golden / "models" / "target_qwen3"):
        stored = checkpoint.read(folder)
        assert list(stored.names) == [name for name, _ in stored.tensors()]


# What is refused.

HEAD = GOLDEN / "models" / "eagle1_llama"


@pytest.mark.parametrize(
    "options,kind,match",
    [
        ({"method": "eagel"}, KeyError, "Did you mean 'eagle'"),
        ({"method": "ngram"}, ValueError, "no weights.*NgramConfig.*Methods with weights.*eagle"),
        ({"draft_samplin": "greedy"}, TypeError, "Did you mean draft_sampling"),
        (
            {"mask_token": 3},
            TypeError,
            "no option mask_token.*options here: dtype, method, num_drafts",
        ),
        ({"num_draftz": 3}, TypeError, "no option num_draftz. Did you mean num_drafts"),
        ({"methd": "eagle"}, TypeError, "Did you mean method"),
        ({"num_drafts": 0}, ValueError, "num_drafts.*at least 1"),
        ({"dtype": "int8"}, ValueError, "dtype.*bfloat16"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, kind, match):
    with pytest.raises(kind, match=match):
        jspec.load(HEAD, target=recorded_target(), **options)


@pytest.mark.parametrize("options", [{"method": "eagle"}, {"num_drafts": 3}, {"tree": "x"}])
def test_options_of_a_drafter_want_a_target(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is a drafter's.*target=model"):
        jspec.load(HEAD, **options)


def test_a_path_is_no_target():
    with pytest.raises(TypeError, match="`target` is a str, wanted a Model"):
        jspec.load(HEAD, target="target_llama")


def test_a_folder_of_no_method_says_what_it_has(write):
    folder = write(
        "eagle",
        drop=["layers.", "fc.", "embed_tokens"],
        config={"speculators_model_type": "hass"},
        odd=np.zeros(3, np.float32),
    )
    with pytest.raises(ValueError) as error:
        load(folder)
    message = str(error.value)
    assert "LlamaForCausalLM" in message and "tensors are odd" in message
    assert "'speculators_model_type': 'hass'" in message
    assert "eagle3" in message and "pass method=" in message


@pytest.mark.parametrize("architectures", [3, "LlamaForCausalLM", [["x"]]])
def test_architectures_of_a_drafter_are_names(architectures, write):
    folder = write("eagle", config={"architectures": architectures})
    with pytest.raises(ValueError, match="architectures .*wanted a list of names"):
        load(folder)
    with pytest.raises(ValueError, match="architectures .*wanted a list of names"):
        jspec.load(folder)


def test_a_folder_of_two_methods_wants_one_named(write):
    both = {"blocks.0.layers.0.weight": np.zeros((64, 64), np.float32)}
    folder = write("eagle", **both)
    with pytest.raises(ValueError, match="may be of method eagle or medusa. Pass method="):
        load(folder)
    with pytest.raises(ValueError, match="unknown: blocks.0.layers.0.weight"):
        load(folder, method="eagle")


@pytest.mark.parametrize("method", [p.name for p in proposers.REGISTRY.values() if p.load])
def test_every_option_of_a_load_is_named(method):
    parameters = inspect.signature(proposers.find(method).load).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert {"dtype", "num_drafts"} <= set(names)
    assert len(names) == len(parameters) - 2  # checkpoint, target


# One buffer for two tables.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block_bytes", [1 << 25, 1000, 1])
def test_equal_tables_are_one_whatever_the_blocks(dtype, block_bytes, rng, monkeypatch):
    monkeypatch.setattr(sharing, "_BLOCK_BYTES", block_bytes)
    own = rng.standard_normal((37, 16), np.float32)
    shared = jnp.asarray(own.astype(jnp.dtype(dtype)))
    assert own_or_shared(own, shared, dtype) is shared
    assert own_or_shared(None, shared, dtype) is shared
    for row in (0, 36):
        other = own.copy()
        other[row, 3] += 1
        kept = own_or_shared(other, shared, dtype)
        assert kept.dtype == shared.dtype and kept.sharding == shared.sharding
        np.testing.assert_array_equal(kept, other.astype(shared.dtype))


def test_bits_count_not_values():
    shared = jnp.array([[0.0, jnp.nan]], jnp.float32)
    assert own_or_shared(np.array([[0.0, np.nan]], np.float32), shared, np.float32) is shared
    assert own_or_shared(np.array([[-0.0, np.nan]], np.float32), shared, np.float32) is not shared


@pytest.mark.parametrize("shape", [(4, 16), (37, 8), (0, 16), (37 * 16,)])
def test_a_table_of_another_shape_is_kept(shape, rng):
    shared = jnp.zeros((37, 16), jnp.bfloat16)
    kept = own_or_shared(np.zeros(shape, ml_dtypes.bfloat16), shared, np.float32)
    assert kept.shape == shape and kept.dtype == np.float32  # the drafter's


@pytest.mark.parametrize(
    "method, name, tensor",
    [
        ("eagle", "eagle1_llama", "fc.weight"),
        ("eagle", "eagle1_llama", "embed_tokens.weight"),
        ("eagle3", "eagle3_llama", "midlayer.mlp.up_proj.weight"),
        ("eagle3", "eagle3_llama", "lm_head.weight"),
        ("draft_model", "draft_llama_small", "model.norm.weight"),
        ("medusa", "medusa_llama", "0.0.linear.weight"),
        ("medusa", "medusa_llama_vllm_trunc", "lm_head.weight"),
    ],
)
def test_quantized_weights_are_refused_not_read_as_numbers(method, name, tensor):
    shape = dict(heads.checkpoint(name).tensors())[tensor].shape
    given = heads.checkpoint(name, **{tensor: np.ones(shape, np.int8)})
    with pytest.raises(ValueError, match="(?s)int8, wanted floats.*(quantized|same model)"):
        proposers.find(method).load(given, heads.target(), dtype="float32")
