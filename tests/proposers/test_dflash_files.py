"""What is read of a DFlash folder: layers of the target, windows, shared tables; and refusals."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.checkpoint import read
from jspec.models.dflash import AttentionMask
from jspec.proposers import dflash as proposer
from jspec.proposers.loaders import dflash
from tests.conftest import GOLDEN

FULL, SLIDES = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def target():
    return jspec.load(GOLDEN / "models" / "target_qwen3", "float32")


@pytest.fixture(scope="module")
def head():
    return read(GOLDEN / "models" / "dflash_qwen3")


def changed(checkpoint, *, settings=None, tensors=None, rename=None, files=(), **fields):
    """The checkpoint with another config.json, more tensors, or tensors of other names."""
    config = {**checkpoint.config, **fields}
    if settings is not None:
        config["dflash_config"] = {**config["dflash_config"], **settings}
    arrays = {(rename or str)(name): array for name, array in checkpoint.tensors()}
    arrays |= tensors or {}
    return checkpoint._replace(
        config=config, names=tuple(arrays), tensors=lambda: iter(arrays.items()), files=files
    )


def load(checkpoint, target, **options):
    return proposer.PROPOSER.load(checkpoint, target, dtype="float32", **options)


@pytest.mark.parametrize(
    "name, layers, num_drafts",
    [
        ("dflash_qwen3", (1, 3, 4), 7),
        ("dflash_qwen3_1layer", (3,), 4),  # its config names no layers
        ("dflash_qwen3_swa", (1, 3, 4), 5),
        ("dflash2_qwen3", (1, 3, 4), 5),
    ],
)
def test_a_recorded_folder_loads_by_its_path_alone(name, layers, num_drafts, target):
    drafter = jspec.load(GOLDEN / "models" / name, target=target)
    assert isinstance(drafter.config, jspec.DFlashConfig)
    assert drafter.config.model.hidden_layers == layers
    assert drafter.config.num_drafts == num_drafts
    assert drafter.params["embed"] is target.params["embed"]
    assert drafter.params["head"] is target.params["head"]
    fewer = jspec.load(GOLDEN / "models" / name, target=target, num_drafts=2)
    assert fewer.config.num_drafts == 2


def test_no_other_method_takes_a_recorded_folder_and_dflash_takes_no_other():
    for folder in sorted((GOLDEN / "models").iterdir()):
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            checkpoint = read(folder)
            names = [
                name
                for name, method in proposers.REGISTRY.items()
                if method.recognises(checkpoint.config, checkpoint.names)
            ]
            assert ("dflash" in names) == folder.name.startswith("dflash"), folder
            assert not folder.name.startswith("dflash") or names == ["dflash"]


@pytest.mark.parametrize(
    "config, layers",
    [
        ({"dflash_config": {"target_layer_ids": [0, 4]}}, (1, 5)),
        ({"dflash_config": {"target_layer_ids": [2, 0]}}, (3, 1)),  # in the order of the weights
        ({"target_layer_ids": [0, 4]}, (1, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5]}, (0, 5)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "dflash_config": {"target_layer_ids": [0, 1]},
            },
            (1, 2),
        ),
        ({"eagle_aux_hidden_state_layer_ids": [], "target_layer_ids": [0, 4]}, (1, 5)),
        ({"dflash_config": {"use_aux_hidden_state": False}}, ("norm",)),
        ({}, (2, 3)),
    ],
)
def test_layer_ids_of_a_config_become_hidden_states_after_these_layers(config, layers):
    assert dflash._hidden_layers(config, 2, 5) == layers


@pytest.mark.parametrize(
    "num_layers, num_target_layers, layers",
    [(1, 36, (19,)), (5, 36, (2, 10, 18, 26, 34)), (3, 28, (2, 14, 26)), (8, 48, None)],
)
def test_layers_that_a_config_does_not_name_are_spread_over_the_target(
    num_layers, num_target_layers, layers
):
    got = dflash._hidden_layers({}, num_layers, num_target_layers)
    assert len(got) == num_layers and list(got) == sorted(got)
    assert layers is None or got == layers


@pytest.mark.parametrize(
    "config, masks",
    [
        ({}, [(False, None), (False, None)]),
        ({"layer_types": [FULL, FULL], "sliding_window": 9}, [(False, None), (False, None)]),
        ({"layer_types": [SLIDES, FULL], "sliding_window": 9}, [(True, 9), (False, None)]),
        (
            {"layer_types": [SLIDES, FULL], "sliding_window": 9, "is_causal": False},
            [(False, 9), (False, None)],
        ),
        (
            {"layer_types": [SLIDES, FULL], "sliding_window": 9, "dflash_config": {"causal": True}},
            [(True, 9), (True, None)],
        ),
        ({"is_causal": True, "dflash_config": {"causal": True}}, [(True, None), (True, None)]),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            [(False, None), (True, 4)],
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 4}}, [(False, 4), (False, 4)]),
        (
            {
                "layer_types": [FULL, FULL],
                "sliding_window": 9,
                "dflash_config": {"use_swa": True, "swa_window_size": 4},
            },
            [(False, 4), (False, 4)],
        ),
        (
            {
                "layer_types": [FULL, SLIDES],
                "sliding_window": 9,
                "dflash_config": {"use_swa": True},
            },
            [(False, None), (True, 9)],
        ),
    ],
)
def test_windows_and_causality_follow_from_the_config(config, masks):
    assert dflash._masks(config, 2) == tuple(AttentionMask(*mask) for mask in masks)


def test_tensors_under_other_names_go_to_the_same_places(head, target):
    def rename(name):
        for ours, theirs in (
            ("fc.", "encoder.fc."),
            ("hidden_norm.", "encoder.output_norm_enc."),
            ("layers.0.", "midlayer."),
            ("layers.", "model.layers."),
        ):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    other = changed(head, rename=rename, architectures=["Other"], dflash_config=None)
    assert proposer.PROPOSER.recognises(other.config, other.names)
    other = other._replace(config=head.config)
    got, wanted = load(other, target).params, load(head, target).params
    np.testing.assert_array_equal(got["fc"], wanted["fc"])
    np.testing.assert_array_equal(
        got["layers"]["0"]["attention"]["qkv"], wanted["layers"]["0"]["attention"]["qkv"]
    )
    np.testing.assert_array_equal(got["hidden_norm"]["weight"], wanted["hidden_norm"]["weight"])


def test_the_speculators_format_gives_the_same_drafter(head, target):
    config = {key: head.config[key] for key in head.config if key != "dflash_config"}
    config = {
        "speculators_model_type": "dflash",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": config | {"block_size": None, "architectures": None},
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "mask_token_id": 127,
    }
    drafter = load(head._replace(config=config), target)
    plain = load(head, target).config
    assert drafter.config == dataclasses.replace(plain, num_drafts=3)
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids"):
        load(head._replace(config=config | {"aux_hidden_state_layer_ids": None}), target)


def test_tables_of_its_own_are_kept_where_they_differ(head, target):
    V, D = target.params["embed"].shape
    rng = np.random.default_rng(3)
    table = rng.standard_normal((V, D)).astype(np.float32)
    same = np.asarray(target.params["embed"]).astype(ml_dtypes.bfloat16)
    drafter = load(
        changed(head, tensors={"embed_tokens.weight": same, "lm_head.weight": table}), target
    )
    assert drafter.params["embed"] is target.params["embed"]
    np.testing.assert_array_equal(drafter.params["head"], table)


def test_a_draft_vocabulary_comes_with_its_head_and_its_ids(head, target):
    D = target.config.hidden_size
    table = np.ones((3, D), np.float32)
    given = {"lm_head.weight": table, "d2t": np.array([4, 4, 100])}
    checkpoint = changed(head, tensors=given, draft_vocab_size=3)
    drafter = load(checkpoint, target)
    assert drafter.params["target_ids"].tolist() == [4, 5, 102]
    assert drafter.config.model.draft_vocab_size == 3
    for tensors, word in (
        ({"lm_head.weight": table}, "no d2t"),
        ({"d2t": given["d2t"]}, "no lm_head.weight.*3 draft ids"),
        (given | {"d2t": np.array([4, 3, 100])}, "a token of its own"),
        (given | {"d2t": np.array([4, 4, 126])}, r"2 \+ 126 = 128, wanted"),
    ):
        with pytest.raises(ValueError, match=word):
            load(changed(head, tensors=tensors, draft_vocab_size=3), target)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"num_target_layers": 6}, "num_target_layers is 6.*trained for"),
        ({"vocab_size": 100}, "vocab_size is 100.*trained for"),
        ({"target_hidden_size": 32}, "target_hidden_size.*32.*trained for"),
        ({"settings": {"target_layer_ids": [0, 5]}}, "target_layer_ids.*from 0 to 4"),
        ({"settings": {"target_layer_ids": []}}, "target_layer_ids"),
        ({"settings": {"mask_token_id": 128}}, "mask_token.*below the vocab_size"),
        ({"settings": {"mask_token_id": None}}, "mask token"),
        ({"settings": {"attention_sink_bias": True}}, "attention_sink_bias.*another drafter"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias"),
        ({"settings": {"attention_value_scale": 0.5}}, "attention_value_scale"),
        ({"is_neox_style": False}, "is_neox_style.*wanted True"),
        ({"settings": {"output_multiplier": 0.2}}, "output_multiplier"),
        ({"settings": {"layer_ids": [1]}}, "layer_ids.*target_layer_ids"),
        ({"settings": {"markov_rank": 8}}, "markov_rank"),
        ({"settings": {"conv_kernel_size": 2}}, "conv_group_size"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, "beam"),
        ({"layer_types": [SLIDES, FULL]}, "swa_window_size"),
        ({"layer_types": [FULL]}, "num_hidden_layers is 2, and layer_types has 1"),
        ({"layer_types": [FULL, "chunked_attention"]}, "chunked_attention"),
        ({"block_size": 1}, "block_size"),
        ({"tensors": {"mask_hidden": np.zeros(4, np.float32)}}, "mask_hidden"),
        ({"tensors": {"attention_sink_bias": np.zeros(4, np.float32)}}, "unknown.*sink_bias"),
        ({"tensors": {"lm_head.weight": np.zeros((128, 4), np.float32)}}, r"wanted \[128, 64\]"),
        ({"tensors": {"embed_tokens.weight": np.zeros((9, 64), np.float32)}}, r"\[128, 64\]"),
        ({"files": ("config.json", "mask_embedding.pt")}, "mask_embedding.pt"),
        ({"settings": {"use_aux_hidden_state": False}}, "unknown: fc.weight"),
    ],
)
def test_a_folder_that_would_draft_wrongly_is_refused_by_name(change, word, head, target):
    with pytest.raises(ValueError, match=f"(?s){word}"):
        load(changed(head, **change), target)


def test_files_beside_the_weights_are_seen(tmp_path, target):
    source = GOLDEN / "models" / "dflash_qwen3"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    jspec.load(tmp_path, target=target)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="mask_embedding.pt"):
        jspec.load(tmp_path, target=target)


def test_a_drafter_of_a_wider_group_than_its_layers_is_refused(target):
    checkpoint = read(GOLDEN / "models" / "dflash2_qwen3")
    with pytest.raises(ValueError, match="conv_group_size.*divisor"):
        load(changed(checkpoint, settings={"conv_group_size": 24}), target)
    config = json.loads(json.dumps(checkpoint.config))
    del config["dflash_config"]["selector_rank"]
    with pytest.raises(ValueError, match="selector_rank"):
        load(checkpoint._replace(config=config), target)
