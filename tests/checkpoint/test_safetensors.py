"""Hugging Face folders: what loads, and how everything else is refused."""

import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec import checkpoint
from jspec.models import llama, weights
from jspec.models.config import ModelConfig


@pytest.fixture
def source(golden):
    return golden / "models" / "draft_llama_small"


@pytest.fixture
def tensors(source):
    return load_file(source / "model.safetensors")


@pytest.fixture
def config(source):
    return json.loads((source / "config.json").read_text())


@pytest.fixture
def save(tmp_path, config, tensors):
    """Writes a folder with the source's config and tensors, some of them changed."""

    def write(*, drop=(), config_changes=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | (config_changes or {})))
        kept = {name: value for name, value in tensors.items() if name not in drop}
        save_file(kept | changes, tmp_path / "model.safetensors")
        return tmp_path

    return write


def assert_same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_tensors_are_fused_and_transposed_into_place(source, tensors):
    model = jspec.load(source, "float32")
    layer = model.params["layers"]["1"]
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"].T for name in "qkv"]
    np.testing.assert_array_equal(layer["attention"]["qkv"], np.concatenate(parts, axis=1))
    np.testing.assert_array_equal(
        layer["mlp"]["down"], tensors["model.layers.1.mlp.down_proj.weight"].T
    )
    np.testing.assert_array_equal(model.params["head"], tensors["lm_head.weight"])


def test_shards_load_as_one_file_does(source, tensors, tmp_path):
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(jspec.load(tmp_path, "float32").params, jspec.load(source, "float32").params)

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors. Fetch"):
        jspec.load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        jspec.load(tmp_path)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_any_float_type_is_converted(dtype, save, tensors):
    changes = {name: value.astype(dtype) for name, value in tensors.items()}
    params = jspec.load(save(**changes), "float32").params
    assert params["embed"].dtype == "float32"
    wanted = changes["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["embed"], wanted)


def test_every_misfit_is_listed_in_one_error(save):
    folder = save(
        drop=["model.norm.weight", "lm_head.weight"],
        **{
            "model.layers.0.mlp.down_proj.weight": np.zeros((3, 5), np.float32),
            "model.layers.7.mlp.up_proj.weight": np.zeros(2, np.float32),
        },
    )
    with pytest.raises(ValueError) as error:
        jspec.load(folder)
    lines = str(error.value).splitlines()
    assert [line.strip() for line in lines[1:-1]] == [
        "wrong shape: model.layers.0.mlp.down_proj.weight [3, 5], wanted [32, 64]",
        "unknown: model.layers.7.mlp.up_proj.weight [2]",
        "missing: model.norm.weight [32]",
        "missing: lm_head.weight [128, 32]",
    ]
    assert "from the same model" in lines[-1]


def test_a_tensor_that_comes_twice_is_refused(source):
    config = ModelConfig.from_hf(source)
    pairs = list(checkpoint.read(source).tensors())
    with pytest.raises(ValueError, match=r"repeated: lm_head.weight \[128, 32\]"):
        checkpoint.assemble(
            weights.abstract(llama.Llama, config, "float32"),
            llama.rules(config),
            [*pairs, pairs[0]],
        )


def test_rotary_tables_are_skipped_and_the_head_of_a_tied_model_where_it_is_the_embedding(save):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = save(config_changes={"tie_word_embeddings": True}, **{name: np.ones(8, np.float32)})
    with pytest.warns(UserWarning, match="tie_word_embeddings True, and lm_head.weight differs"):
        model = jspec.load(folder, "float32")
    assert not model.config.tie_embeddings and "head" in model.params
    embedding = dict(checkpoint.read(folder).tensors())["model.embed_tokens.weight"]
    same = {"lm_head.weight": np.array(embedding)}
    folder = save(config_changes={"tie_word_embeddings": True}, **same, **{name: np.ones(8)})
    assert "head" not in jspec.load(folder, "float32").params


def test_a_config_of_other_sizes_is_refused_before_anything_compiles(save):
    folder = save(config_changes={"intermediate_size": 65})
    with pytest.raises(ValueError, match=r"gate_proj.weight \[64, 32\], wanted \[65, 32\]"):
        jspec.load(folder)


def test_a_draft_head_is_no_target(save):
    folder = save(config_changes={"architectures": ["LlamaForCausalLMEagle3"]})
    with pytest.raises(ValueError, match="wanted one of LlamaForCausalLM"):
        jspec.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 40, 2000, -4])
def test_a_truncated_file_is_refused(keep, save):
    file = save() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated.*Fetch the file again"):
        jspec.load(file.parent)


def damaged(entry):
    header = json.dumps({"x": entry} if isinstance(entry, dict) else entry).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    "content,match",
    [
        (b"\x02\0\0\0\0\0\0\0\xff\xff", "invalid UTF-8"),
        (damaged([1, 2]), "invalid JSON"),
        (damaged({"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}), "'x'.*Convert the"),
        (damaged({"dtype": "NF4", "shape": [8], "data_offsets": [0, 8]}), "`NF4`"),
        (damaged({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}), "invalid shape"),
        (damaged({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}), "not fully covered"),
        (damaged({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}), "invalid type"),
        (damaged({"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}), "invalid type"),
        (damaged({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}), "invalid value"),
        (damaged({"dtype": "F32", "shape": [2**40] * 2, "data_offsets": [0, 8]}), "overflow"),
        (damaged({"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}), "invalid type"),
        (damaged({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}), "invalid value"),
        (b"\xa0\x86\x01\0\0\0\0\0" + b"[" * 100_000, "invalid JSON"),
    ],
)
def test_a_damaged_file_is_refused(content, match, save):
    folder = save()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors.*{match}") as error:
        jspec.load(folder)
    assert "\n" not in str(error.value)


ENTRY = '"{}": {{"dtype": "F32", "shape": [2], "data_offsets": [{}, {}]}}'


@pytest.mark.parametrize(
    "entries",
    [
        [ENTRY.format("x", 0, 8), ENTRY.format("x", 8, 16)],  # which of them is x?
        [ENTRY.format("x", 0, 8), ENTRY.format("y", 4, 12)],
        [ENTRY.format("x", 0, 8), ENTRY.format("y", 12, 20)],
    ],
    ids=["one name twice", "overlapping", "with a gap"],
)
def test_tensors_lie_side_by_side(entries, save):
    header = f"{{{', '.join(entries)}}}".encode()
    folder = save()
    content = len(header).to_bytes(8, "little") + header + bytes(20)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="invalid offset.*Fetch the file again"):
        jspec.load(folder)


def test_every_element_type_and_shape_is_read_as_it_was_written(tmp_path, source, rng):
    kinds = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
    kinds += (np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_)
    written = {np.dtype(kind).name: rng.integers(0, 2, (3, 5)).astype(kind) for kind in kinds}
    written |= {"none": np.zeros((0, 4), np.float32), "one": np.array(3, np.float32)}
    written |= {"naïve \n 名": np.arange(7, dtype=np.int8)}
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(written, tmp_path / "model.safetensors")
    opened = checkpoint.read(tmp_path)
    read = dict(opened.tensors())
    assert set(opened.names) == written.keys() == read.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        np.testing.assert_array_equal(read[name], tensor)


def test_what_was_read_outlives_its_file(save, tensors):
    folder = save()
    read = dict(checkpoint.read(folder).tensors())
    (folder / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)


def test_missing_files_are_named(tmp_path, config):
    with pytest.raises(FileNotFoundError, match="does not exist. Pass a Hugging Face"):
        jspec.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        jspec.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="only pytorch_model.bin.*jspec convert"):
        jspec.load(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "odd.bin")
    with pytest.raises(FileNotFoundError, match="odd.bin. Save the model in safetensors"):
        jspec.load(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a .gguf file"):
        jspec.load(tmp_path / "config.json")


@pytest.mark.parametrize("text,match", [("{", "is not JSON"), ("[1]", "holds a list")])
def test_a_broken_config_is_refused(text, match, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        jspec.load(tmp_path)


def test_the_tokenizer_and_the_stop_ids_come_along(save):
    folder = save(config_changes={"eos_token_id": 2})
    plain = jspec.load(folder)
    assert (plain.tokenizer_json, plain.chat_template, plain.stop_ids) == (None, None, (2,))

    (folder / "tokenizer.json").write_text('{"model": "é"}', encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    config = {"bos_token": "a", "chat_template": "b"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = jspec.load(folder)
    assert (model.tokenizer_json, model.chat_template) == ('{"model": "é"}', "b")
    assert model.stop_ids == (2, 7) and model.tokenizer_config == {"bos_token": "a"}

    (folder / "chat_template.jinja").write_text("c")
    assert jspec.load(folder).chat_template == "c"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_loading_holds_the_weights_once(tmp_path, source):
    config = {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = ModelConfig.from_hf(config)
    rng = np.random.default_rng(0)
    template = weights.abstract(llama.Llama, shapes, "float32")
    tensors = {}
    for name, place in llama.rules(shapes).items():
        leaf = template
        for key in place.path:
            leaf = leaf[key]
        start, end = place.columns or (0, leaf.shape[-1])
        shape = (*leaf.shape[:-1], end - start)
        tensors[name] = rng.random(shape[::-1] if place.transpose else shape, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(template))
    script = (
        "import sys, jspec\n"
        "def peak():\n"
        "    fields = dict(line.split(':') for line in open('/proc/self/status'))\n"
        "    return 1024 * int(fields['VmHWM'].split()[0])\n"
        "jspec.load(sys.argv[1], 'float32')\n"  # what the first load needs besides weights
        "before = peak()\n"
        "model = jspec.load(sys.argv[2], 'float32')\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # The weights, a tensor, a leaf and what the allocator keeps; a second copy would be 2.
    assert int(done.stdout) < 1.7 * size


@pytest.mark.parametrize("weight_map", [None, {"x": None}, {"x": ["model.safetensors"]}])
def test_an_index_that_names_no_files_is_refused(weight_map, save):
    folder = save()
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="has no weight_map.*Fetch the file again"):
        jspec.load(folder)


@pytest.mark.parametrize(
    "name,content,match",
    [
        ("generation_config.json", '{"eos_token_id": {}}', "eos_token_id"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is 3, wanted a text"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template is .3."),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer.json", b"\xff", "tokenizer.json is no text"),
    ],
)
def test_a_damaged_file_beside_the_weights_is_named(name, content, match, save):
    folder = save()
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match):
        jspec.load(folder)


@pytest.mark.parametrize("architectures", [3, "LlamaForCausalLM", [["x"]]])
def test_architectures_that_are_no_list_of_names_are_refused(architectures, save):
    with pytest.raises(ValueError, match="architectures .* are not supported"):
        jspec.load(save(config_changes={"architectures": architectures}))


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp32"])
def test_weights_are_floats_of_known_types(dtype, save):
    with pytest.raises(ValueError, match="load: `dtype` is .*bfloat16, float16, float32"):
        jspec.load(save(), dtype)
