"""Medusa checkpoints: layouts, output matrices, truncated vocabularies, and what is refused."""

import json
import shutil
import warnings

import jax
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.checkpoint import read
from jspec.proposers.medusa import PROPOSER, MedusaConfig
from tests.conftest import GOLDEN
from tests.support import heads
from tests.support.medusa_heads import (
    NAMES,
    TOLERANCE,
    D,
    V,
    draft,
    drawn,
    load_stored,
    load_target,
    logits,
)

pytestmark = pytest.mark.any_device


@pytest.fixture
def target():
    return load_target()


def test_the_two_recorded_file_formats_hold_the_same_tensors(tmp_path, target):
    pytest.importorskip("torch")
    from torch_bridge.convert import convert_medusa

    folder = GOLDEN / "models" / "medusa_llama"
    for name in ("config.json", "medusa_lm_head.pt"):
        shutil.copy(folder / name, tmp_path)
    with pytest.raises(FileNotFoundError, match="only medusa_lm_head.pt.*jspec convert"):
        read(tmp_path)
    assert convert_medusa(tmp_path) == tmp_path / "medusa_lm_head.safetensors"
    ours, published = dict(read(tmp_path).tensors()), dict(read(folder).tensors())
    assert ours.keys() == published.keys()
    for name, tensor in published.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor)
    path = convert_medusa(tmp_path / "medusa_lm_head.pt")
    assert jspec.load(tmp_path, "float32", target=target).config.num_drafts == 4
    assert path.stat().st_size > 0


def test_what_is_no_file_of_tensors_is_not_converted(tmp_path):
    torch = pytest.importorskip("torch")
    from torch_bridge.convert import convert_medusa

    with pytest.raises(FileNotFoundError, match="medusa_lm_head.pt is missing.*folder"):
        convert_medusa(tmp_path)
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.1.weight": print}, file)  # code: unpickling it would run what it names
    with pytest.raises(ValueError, match="no file of tensors alone"):
        convert_medusa(tmp_path)
    torch.save([torch.zeros(2)], file)
    with pytest.raises(ValueError, match="no dict of named tensors.*state_dict"):
        convert_medusa(tmp_path)
    assert not (tmp_path / "medusa_lm_head.safetensors").exists()


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_both_layouts_of_the_same_heads_load_alike(rng, target, num_layers, prefix):
    vllm = drawn(rng, num_layers=num_layers, bias=True)
    original = {}
    for name, tensor in vllm.items():
        if name.startswith("blocks."):
            _, i, _, j, kind = name.split(".")
            original[f"{prefix}{i}.{j}.linear.{kind}"] = tensor
        else:
            original[f"{prefix}{name.split('.')[1]}.{num_layers}.weight"] = tensor
    of_vllm = load_stored({prefix + name: tensor for name, tensor in vllm.items()}, target)
    of_original = load_stored(original, target)
    assert of_vllm.config == of_original.config
    jax.tree.map(np.testing.assert_array_equal, of_vllm.params, of_original.params)
    # A second way to write the same: x + silu(W x + b), layer by layer.
    hidden = rng.standard_normal((3, D)).astype(np.float32)
    x = hidden.astype(np.float64)
    for j in range(num_layers):
        out = x @ vllm[f"blocks.1.layers.{j}.weight"].T + vllm[f"blocks.1.layers.{j}.bias"]
        x = x + out / (1 + np.exp(-out))
    wanted = x @ vllm["lm_heads.1.weight"].T
    np.testing.assert_allclose(logits(of_vllm, hidden, 1), wanted, **TOLERANCE)


def test_a_checkpoint_without_output_matrix_uses_the_targets_own_buffer(rng, target):
    tensors = drawn(rng, heads="none")
    drafter = load_stored(tensors, target)
    assert drafter.params["head"] is target.params["head"]
    own = np.array(target.params["head"])
    same = load_stored(tensors | {"lm_head.weight": own}, target)
    assert same.params["head"] is target.params["head"]
    other = own.copy()
    other[3, 5] += 1
    drafter = load_stored(tensors | {"lm_head.weight": other}, target)
    np.testing.assert_array_equal(drafter.params["head"], other)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_original_lm_head_is_one_matrix_for_all_heads(rng, target, name):
    tensors = drawn(rng, heads="none")
    tensors[name] = rng.standard_normal((V, D)).astype(np.float32)
    if name == "lm_heads.0.weight":  # copies of it are not read
        tensors["lm_heads.1.weight"] = tensors[name]
    drafter = load_stored(tensors, target, {"original_lm_head": True})
    np.testing.assert_array_equal(drafter.params["head"], tensors[name])
    assert "head" not in drafter.params["heads"]["0"]
    tensors["lm_heads.1.weight"] = tensors[name] + 1
    with pytest.warns(UserWarning, match="original_lm_head True.* 2 output matrices that differ"):
        drafter = load_stored(tensors, target, {"original_lm_head": True})
    np.testing.assert_array_equal(drafter.params["head"], tensors[name])


def test_a_token_map_of_a_vocabulary_that_is_not_truncated_is_not_read_in_silence(rng, target):
    tensors = drawn(rng) | {"token_map": np.arange(V)}
    assert "target_ids" not in load_stored(tensors, target).params
    tensors["token_map"] = rng.permutation(V)
    with pytest.warns(UserWarning, match="'token_map' of 128 ids is not read.*truncated_vocab_siz"):
        assert "target_ids" not in load_stored(tensors, target).params


def test_a_truncated_vocabulary_drafts_the_targets_ids(rng, target):
    """Rows follow the map, which need not be sorted; whole heads are cut to it."""
    ids = rng.permutation(V)[:20]
    tensors = drawn(rng, rows=20) | {"token_map": ids}
    config = {"truncated_vocab_size": 20}
    drafter = load_stored(tensors, target, config)
    assert drafter.params["target_ids"].tolist() == sorted(ids)
    hidden = rng.standard_normal((4, D)).astype(np.float32)
    got = logits(drafter, hidden, 1)
    whole = dict(tensors)
    for i in range(2):
        whole[f"lm_heads.{i}.weight"] = rng.standard_normal((V, D)).astype(np.float32)
        whole[f"lm_heads.{i}.weight"][ids] = tensors[f"lm_heads.{i}.weight"]
    np.testing.assert_array_equal(logits(load_stored(whole, target, config), hidden, 1), got)
    assert draft(drafter, hidden).tokens[:, 1].tolist() == got.argmax(-1).tolist()
    # With the target's matrix for want of one, its rows are taken.
    shared = drawn(rng, heads="none") | {"token_map": ids}
    drafter = load_stored(shared, target, config)
    rows = np.asarray(target.params["head"])[np.sort(ids)]
    np.testing.assert_array_equal(drafter.params["head"], rows)


def test_a_truncated_vocabulary_without_a_proper_map_is_refused(rng, target):
    tensors, config = drawn(rng, rows=4), {"truncated_vocab_size": 4}
    with pytest.raises(ValueError, match="has no 'token_map'"):
        load_stored(tensors, target, config)
    for wrong in ([1, 2, 3], [1, 2, 3, 3], [1, 2, 3, V], [-1, 2, 3, 4]):
        with pytest.raises(ValueError, match="'token_map' .*wanted 4 different ids"):
            load_stored(tensors | {"token_map": np.array(wrong)}, target, config)
    for size in (0, -1, 2.5, V + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            load_stored(tensors, target, {"truncated_vocab_size": size})
    # A vocabulary that is not truncated needs no map and reads none.
    whole = drawn(rng) | {"token_map": np.arange(4)}
    with pytest.warns(UserWarning, match="'token_map' of 4 ids is not read"):
        assert "target_ids" not in load_stored(whole, target, {"truncated_vocab_size": V}).params


@pytest.mark.parametrize(
    "config, num_drafts",
    [
        ({}, 3),
        ({"num_heads": 2}, 2),
        ({"medusa_num_heads": 1, "medusa_num_layers": 1}, 1),
        ({"my_num_of_heads": 2, "num_of_layers": 1}, 2),
        ({"num_attention_heads": 32, "num_hidden_layers": 1, "num_heads": 2}, 2),
        ({"num_heads": 32, "num_hidden_layers": 24, "medusa_num_heads": 3, "medusa_num_layers": 1},
         3),
    ],
)  # fmt: skip
def test_the_number_of_heads_has_many_names(rng, target, config, num_drafts):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        drafter = load_stored(drawn(rng, num_heads=3), target, config)
    assert len(told) == (num_drafts < 3)
    assert all("and the checkpoint has 3 heads" in str(warning.message) for warning in told)
    assert drafter.config.num_drafts == drafter.config.model.num_heads == num_drafts


def test_two_numbers_that_may_be_that_of_heads_are_refused(rng, target):
    config = {"num_attention_heads": 32, "num_key_value_heads": 8}
    with pytest.raises(ValueError, match="num_attention_heads = 32.*Add medusa_num_heads"):
        load_stored(drawn(rng), target, config)
    with pytest.raises(ValueError, match="medusa_num_heads.*2.5"):
        load_stored(drawn(rng), target, {"medusa_num_heads": 2.5})


def test_tensors_that_do_not_fit_are_listed_together(rng, target):
    tensors = drawn(rng, bias=True)
    tensors["blocks.0.norm.weight"] = np.zeros(D, np.float32)
    tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][:5]
    del tensors["blocks.1.layers.0.bias"]
    with pytest.raises(ValueError) as caught:
        load_stored(tensors, target)
    for problem in (
        "unknown: blocks.0.norm.weight [64]",
        "wrong shape: lm_heads.0.weight [5, 64], wanted [128, 64]",
        "missing: blocks.1.layers.0.bias [64]",
    ):
        assert problem in str(caught.value)
    two_layers = {"num_hidden_layers": 2}
    with pytest.raises(ValueError, match=r"missing: blocks.0.layers.1.weight \[64, 64\]"):
        load_stored(drawn(rng), target, two_layers)
    with pytest.raises(ValueError, match=r"missing: blocks.0.layers.0.bias \[64\]"):
        load_stored(drawn(rng), target, {"medusa_fc_bias": True})


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_heads_of_another_target_are_refused(rng, target, field):
    with pytest.raises(ValueError, match=f"{field} is 999, the target's .*trained for"):
        load_stored(drawn(rng), target, {field: 999})


def test_the_method_is_recognised_by_config_or_tensors():
    folder = GOLDEN / "models"
    for name in NAMES:
        checkpoint = read(folder / name)
        assert PROPOSER.recognises({}, checkpoint.names)
        found = [p.name for p in proposers.REGISTRY.values()
                 if p.recognises(checkpoint.config, checkpoint.names)]  # fmt: skip
        assert found == ["medusa"]
    assert PROPOSER.recognises({"model_type": "medusa"}, ())
    assert PROPOSER.recognises({"architectures": ["MedusaModel"]}, ())
    for name in ("target_llama", "eagle1_llama"):
        checkpoint = read(folder / name)
        assert not PROPOSER.recognises(checkpoint.config, checkpoint.names)


def test_a_scale_of_the_logits_counts(rng, target):
    tensors, hidden = drawn(rng), rng.standard_normal((2, D)).astype(np.float32)
    plain = logits(load_stored(tensors, target), hidden, 0)
    scaled = logits(load_stored(tensors, target, {"logit_scale": 0.5}), hidden, 0)
    np.testing.assert_allclose(scaled, plain * 0.5, rtol=1e-6)


def test_a_folder_is_loaded_by_path_alone(target, tmp_path):
    drafter = jspec.load(GOLDEN / "models" / "medusa_llama_vllm_trunc", target=target)
    assert isinstance(drafter.config, MedusaConfig) and drafter.config.num_drafts == 3
    assert drafter.params["target_ids"].shape == (80,)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 4}))
    with pytest.raises(FileNotFoundError, match="neither model.safetensors"):
        jspec.load(tmp_path, target=target)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"token_map": np.full(80, 0.5, np.float32)},
            "'token_map' is float32.*wanted 80 different",
        ),
        ({"lm_head.weight": np.zeros((), np.float32)}, r"wrong shape: lm_head.weight \[\], wanted"),
    ],
)
def test_a_truncated_vocabulary_that_is_no_table_is_refused(changes, words):
    given = heads.checkpoint("medusa_llama_vllm_trunc", **changes)
    with pytest.raises(ValueError, match="(?s)" + words):
        PROPOSER.load(given, heads.target(), dtype="float32")
