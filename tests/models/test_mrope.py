"""Rotation by three axes and by YaRN, and positions of three axes through a step."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import metadata, proposers
from jspec.models.config import ModelConfig
from jspec.models.layers import rope_axes, rope_frequencies, rope_scale, rope_table
from jspec.models.rope import RopeConfig
from jspec.pallas.eagle_step import eagle_step
from jspec.proposers import _draft
from jspec.proposers import mtp as mtp_proposer
from jspec.proposers.base import refuse_axes
from jspec.proposers.draft_model import DraftModelConfig
from jspec.proposers.eagle3 import Eagle3Config
from tests.support.counting import backend_compiles
from tests.support.steps import Row, make_step
from tests.support.toy_loop import Recording

MROPE = RopeConfig(mrope_section=(2, 1, 1))
INTERLEAVED = RopeConfig(mrope_section=(2, 1, 1), mrope_interleaved=True)
HF = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sections", [(2, 3, 3), (4, 2, 2), (0, 4, 4), (3, 3, 2)])
def test_each_frequency_turns_by_the_axis_of_its_section(sections, interleaved, rng):
    rope = RopeConfig(theta=50.0, mrope_section=sections, mrope_interleaved=interleaved)
    positions = rng.integers(0, 40, (3, 5)).astype(np.int32)
    cos, sin = rope_table(rope, 16, positions)
    a, b, c = sections
    for i in range(8):
        if interleaved:
            row = 1 if i % 3 == 1 and i < 3 * b else 2 if i % 3 == 2 and i < 3 * c else 0
        else:
            row = 0 if i < a else 1 if i < a + b else 2
        angle = positions[row] * 50.0 ** (-2 * i / 16)
        np.testing.assert_allclose(cos[:, i], np.cos(angle), atol=1e-5)
        np.testing.assert_allclose(sin[:, i], np.sin(angle), atol=1e-5)


@pytest.mark.parametrize("rope", [MROPE, INTERLEAVED, RopeConfig()])
def test_equal_axes_turn_as_one_position_does(rope):
    positions = np.array([0, 3, 7, 41], np.int32)
    one = rope_table(dataclasses.replace(rope, mrope_section=None), 8, positions)
    three = rope_table(rope, 8, np.stack([positions] * 3))
    np.testing.assert_array_equal(three, one)


def test_a_rope_without_sections_turns_by_the_first_axis():
    positions = np.array([[0, 3, 7], [9, 9, 9], [5, 5, 5]], np.int32)
    three, one = (rope_table(RopeConfig(), 8, at) for at in (positions, positions[0]))
    np.testing.assert_array_equal(three, one)
    assert rope_axes(RopeConfig(), 8).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("theta, original", [(1e4, 4096), (1e6, 32768), (150.0, 8)])
def test_yarn_follows_the_published_rule(theta, original, truncate):
    d, factor = 64, 4.0
    hf = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "truncate": truncate,
    }
    rope = RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": hf})

    def dim(beta):
        return d * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low, high = dim(32), dim(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    wanted = []
    for i in range(d // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)
        inverse = theta ** (-2 * i / d)
        wanted.append(inverse / factor * ramp + inverse * (1 - ramp))
    np.testing.assert_allclose(rope_frequencies(rope, d), wanted, rtol=2e-5)
    scale = 0.1 * math.log(factor) + 1
    cos, sin = rope_table(rope, d, np.array([0, 5], np.int32))
    np.testing.assert_allclose(cos[1], np.cos(5 * np.array(wanted)) * scale, atol=1e-4)
    np.testing.assert_allclose(sin[1], np.sin(5 * np.array(wanted)) * scale, atol=1e-4)
    np.testing.assert_allclose(cos[0], scale, rtol=1e-6)


def test_yarn_scales_by_what_the_config_says():
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_len=64)
    usual = 0.1 * math.log(4) + 1
    assert rope_scale(yarn) == pytest.approx(usual)
    assert rope_scale(dataclasses.replace(yarn, attn_factor=2.0)) == pytest.approx(2 * usual)
    assert rope_scale(dataclasses.replace(yarn, attention_factor=1.5)) == 1.5
    assert rope_scale(dataclasses.replace(yarn, factor=1.0)) == 1.0
    slow = dataclasses.replace(yarn, beta_slow=0.5)
    assert not np.array_equal(rope_frequencies(yarn, 64), rope_frequencies(slow, 64))
    with pytest.raises(ValueError, match="beta_fast is 0, wanted a number above 0"):
        dataclasses.replace(yarn, beta_fast=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "mrope", "mrope_section": [4, 2, 2]},
        {"rope_type": "default", "type": "mrope", "mrope_section": [4, 2, 2]},
        {"rope_type": "default", "mrope_section": [4, 2, 2]},
        {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 1e4},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_sections_are_read_in_every_published_form(rope, key):
    config = ModelConfig.from_hf(HF | {key: rope})
    assert config.rope.mrope_section == (4, 2, 2)
    assert config.rope.kind == "default"
    assert config.rope.mrope_interleaved == ("mrope_interleaved" in rope)
    hash(config)  # static in jit


@pytest.mark.parametrize(
    "rope, match",
    [
        ({"type": "mrope"}, "needs .'mrope_section'."),
        ({"mrope_section": [4, 2]}, "three counts"),
        ({"mrope_section": [4, 2, "2"]}, "three counts"),
        ({"mrope_section": 8}, "three counts"),
        ({"mrope_section": [4, 2, 3]}, "9 frequencies, wanted 8 together"),
        ({"rope_type": "yarn", "factor": 2.0}, "needs .'original_max_position_embeddings'."),
        ({"rope_type": "linear", "factor": 2.0, "extrapolation_factor": 0.5}, "wanted 1.0"),
        ({"rope_type": "dynamic"}, "default, linear, llama3, yarn, mrope"),
    ],
)
def test_a_rope_that_does_not_fit_is_refused_by_name(rope, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig.from_hf(HF | {"rope_scaling": rope})


def mrope_model(**changes):
    return ModelConfig.tiny(rope=MROPE, **changes)  # heads of 8: four frequencies


def test_methods_with_rows_of_their_own_refuse_three_axes_at_construction():
    model = ModelConfig.tiny(rope=MROPE, model_type="qwen2")
    with pytest.raises(NotImplementedError, match="draft_model: model type 'qwen2' .*M-RoPE"):
        DraftModelConfig(num_drafts=2, model=model)
    with pytest.raises(NotImplementedError, match="eagle3, mtp"):
        refuse_axes("draft_model", ModelConfig.tiny(), model)
    for name in ("eagle3", "dflash"):
        config = proposers.find(name).Config.tiny()
        head = dataclasses.replace(
            config.model,
            decoder=dataclasses.replace(
                config.model.decoder, rope=dataclasses.replace(MROPE, mrope_section=(1, 1, 2))
            ),
        )
        changes = {"parallel_drafting": True} if isinstance(config, Eagle3Config) else {}
        with pytest.raises(NotImplementedError, match=f"{name}.* model type .*M-RoPE"):
            dataclasses.replace(config, model=head, **changes)
    jspec.MTPConfig(num_drafts=2, model=model, hidden_layer=1)


@pytest.mark.parametrize(
    "method, model, head, options",
    [
        ("eagle", "target_llama", "eagle1_llama", {"tree": jspec.Tree([(0,), (0, 0)])}),
        ("eagle3", "target_llama", "eagle3_llama", {"tree": jspec.Tree([(0,), (0, 0)])}),
        ("eagle3", "target_llama", "peagle_llama", {"parallel_drafting": True}),
        ("dflash", "target_qwen3", "dflash_qwen3", {}),
        ("draft_model", "target_llama", "draft_llama_small", {}),
    ],
)
def test_methods_with_rows_of_their_own_refuse_a_target_with_three_axes(
    golden, method, model, head, options
):
    target = jspec.load(golden / "models" / model, "float32")
    rope = RopeConfig(mrope_section=(target.config.head_dim // 2, 0, 0))
    target = target._replace(config=dataclasses.replace(target.config, rope=rope))
    with pytest.raises(NotImplementedError, match=f"{method}.*M-RoPE.*Draft with a chain"):
        jspec.load(golden / "models" / head, target=target, **options)


def test_xd_rope_is_refused_by_method_and_model(golden, tmp_path):
    rope = {"type": "xdrope", "xdrope_section": [4, 4, 4, 4], "alpha": 1000.0}
    with pytest.raises(NotImplementedError, match="'qwen2' has XD-RoPE"):
        ModelConfig.from_hf(HF | {"rope_scaling": rope})
    folder = golden / "models" / "mimo_mtp"
    target = jspec.load(folder, "float32")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    text = (folder / "config.json").read_text()
    text = text.replace('"rope_scaling": null', '"rope_scaling": {"xdrope_section": [1, 1, 1, 1]}')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NotImplementedError, match="method 'mtp' .* model type 'mimo'.*suffix"):
        jspec.load(tmp_path, target=target)


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_one_step_at_the_limit_advances_the_index(impl):
    """C32, the op: it runs on the place in the request, whatever the axes are."""
    table = np.array([[5, 3], [4, 2]], np.int32)
    positions, slots, lengths = eagle_step(
        np.array([7, 3], np.int32),
        table,
        np.array([8, 4], np.int32),
        page_size=4,
        max_model_len=8,
        impl=impl,
    )
    assert positions.tolist() == [0, 4]
    assert slots.tolist() == [-1, 8]
    assert lengths.tolist() == [1, 5]


def axes_step(rows, axes, config, *, num_rows):
    """A step whose positions are given as three axes."""
    reads = mtp_proposer.PROPOSER.reads(config)
    scheduled, verified = make_step(
        rows,
        num_requests=len(rows) + 1,
        num_rows=num_rows,
        width=config.num_drafts + 1,
        pages_per_request=4,
        reads=reads,
    )
    full = np.full((3, num_rows), 77_000, np.int32)
    full[:, : len(axes)] = np.asarray(axes, np.int32).T
    return dataclasses.replace(scheduled, token_index=scheduled.positions, positions=full), verified


def views_of_chain(rows, axes, *, max_model_len, steps, num_rows=12):
    """The views that the draft loop runs a model over, and its drafts."""
    config = mtp_config(num_drafts=steps)
    step = axes_step(rows, axes, config, num_rows=num_rows)
    batch = jspec.prepare(*jax.tree.map(jnp.asarray, step))
    views = []

    def run(token_ids, hidden, view, cache, embeds):
        views.append(view)
        return hidden, hidden, cache

    with jax.disable_jit():
        _, drafts = _draft.chain(
            _draft.DraftModel(run=run, logits=lambda out: out, vocab_size=32),
            config,
            batch,
            Recording(record=None, page_size=4, max_model_len=max_model_len),
            num_drafts=steps,
            shift=True,
        )
    return views, drafts


def mtp_config(num_modules=1, num_drafts=3, **changes):
    model = mrope_model(num_layers=num_modules)
    return jspec.MTPConfig(num_drafts=num_drafts, model=model, hidden_layer=1, **changes)


def test_the_loop_at_the_limit_writes_nothing_and_drafts_nothing():
    """C32, the loop: text only, at positions (7, 7, 7) and (3, 3, 3) of 8."""
    rows = [
        Row(slot=0, context=[1, 2, 3, 4, 5, 6, 7, 8], kept=[9], start=7),
        Row(slot=1, context=[1, 2, 3, 4], kept=[5], start=3),
    ]
    views, drafts = views_of_chain(rows, [[7] * 3, [3] * 3], max_model_len=8, steps=2)
    loop = views[1]
    # Past the limit the model sees the last position there is, and the row has no slot.
    assert loop.axes.T.tolist()[:2] == [[7, 7, 7], [4, 4, 4]]
    assert loop.positions.tolist()[:2] == [7, 4]
    assert loop.slots.tolist()[:2] == [-1, 4 * 4 + 4]
    assert loop.seq_lens.tolist()[:2] == [1, 5]
    assert drafts.num_drafts.tolist() == [0, 2, 0]


def test_the_axes_advance_beside_the_place_in_the_request():
    """Behind an image the text's positions lie below its place in the request, or above it."""
    rows = [
        Row(slot=0, context=[1, 2, 3, 4, 5, 6], kept=[9], start=4),
        Row(slot=1, context=[1, 2, 3], drafts=[4, 5], kept=[4, 7], start=2),
    ]
    axes = [[1, 2, 3], [2, 3, 4], [30, 31, 2], [31, 32, 3], [99, 99, 99]]
    views, _ = views_of_chain(rows, axes, max_model_len=16, steps=3)
    first, *loop = views
    assert first.axes.T.tolist()[:5] == axes  # rejected rows too; nothing is cut to the limit
    assert first.positions.tolist()[:5] == [4, 5, 2, 3, 4]
    for t, view in enumerate(loop, start=1):
        assert view.axes.T.tolist()[:2] == [[2 + t, 3 + t, 4 + t], [31 + t, 32 + t, 3 + t]]
        assert view.positions.tolist()[:2] == [5 + t, 3 + t]
        assert view.slots.tolist()[:2] == [5 + t, 16 + 3 + t]


ROWS = [
    Row(slot=1, context=[5, 6, 7, 8, 9], kept=[3], start=0),
    Row(slot=0, context=[4, 4, 2], kept=[8], start=0),
]
CACHE = jspec.CacheConfig(num_pages=16, page_size=4, max_model_len=16, dtype="float32")


def admitted(config):
    params = mtp_proposer.PROPOSER.init_params(config, jax.random.key(1), "float32")
    state = jspec.init(config, params, cache=CACHE, max_requests=3)
    for row in ROWS:
        state = jspec.admit(state, row.slot, row.context)
    return state


def drafts_with(config, axes):
    state = admitted(config)
    scheduled, verified = axes_step(ROWS, axes, config, num_rows=11)
    if config.draft_sampling == "probabilistic":
        scheduled = dataclasses.replace(
            scheduled, temperature=np.ones(3, np.float32), seed=np.zeros(3, np.int32)
        )
    if axes is TEXT and config.model.rope.mrope_section is None:
        scheduled = dataclasses.replace(
            scheduled, positions=scheduled.token_index, token_index=None
        )
    _, drafts = jspec.step(state, scheduled, verified)
    return jax.tree.map(np.asarray, drafts)


TEXT = [[i] * 3 for i in (0, 1, 2, 3, 4, 0, 1, 2)]
IMAGE = [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [3, 3, 3], *[[i] * 3 for i in range(3)]]


@pytest.mark.parametrize("num_modules", [1, 2])
def test_text_drafts_as_with_one_axis_and_an_image_differs(num_modules):
    config = mtp_config(num_modules, draft_sampling="probabilistic")
    plain = dataclasses.replace(config, model=ModelConfig.tiny(num_layers=num_modules))
    wanted = drafts_with(plain, TEXT)
    got = drafts_with(config, TEXT)
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    np.testing.assert_allclose(got.probs, wanted.probs, atol=1e-6)
    image = drafts_with(config, IMAGE)
    assert np.abs(image.probs[0] - wanted.probs[0]).max() > 1e-4
    np.testing.assert_allclose(image.probs[1], wanted.probs[1], atol=1e-6)  # has no image


def test_a_target_is_turned_by_the_axes_of_its_step():
    config = mtp_config()
    scheduled, _ = axes_step(ROWS, IMAGE, config, num_rows=11)
    view = metadata.paged_view(jax.tree.map(jnp.asarray, scheduled), page_size=4, max_model_len=16)
    assert view.rope_positions.T.tolist()[:8] == IMAGE
    assert view.positions.tolist()[:8] == [0, 1, 2, 3, 4, 0, 1, 2]
    with pytest.raises(ValueError, match="token_index"):
        jspec.prepare(
            dataclasses.replace(scheduled, token_index=None),
            jspec.Verified(tokens=np.zeros((3, 4), np.int32)),
        )


def test_a_bucket_of_three_axes_and_embeddings_never_compiles_again():
    config = mtp_config()
    state = admitted(config)
    jspec.warmup(state, jspec.Buckets(requests=(3,), tokens=(11,), axes=3, embeds=True))
    scheduled, verified = axes_step(ROWS, IMAGE, config, num_rows=11)
    embeds, mask = np.zeros((11, 32), np.float32), np.ones(11, bool)
    with backend_compiles() as compiled:
        state, _ = jspec.step(state, scheduled, verified)
        scheduled = dataclasses.replace(scheduled, embeds=embeds, embeds_mask=mask)
        state, _ = jspec.step(state, scheduled, verified)
    assert not compiled
    with pytest.raises(ValueError, match="`axes` is 2, wanted 1, or 3"):
        jspec.Buckets(requests=(3,), tokens=(11,), axes=2)
    state = jspec.init(jspec.NgramGPUConfig(num_drafts=2), cache=CACHE, max_requests=3)
    with pytest.raises(ValueError, match="`embeds` is True.*embeds=False"):
        jspec.warmup(state, jspec.Buckets(requests=(3,), tokens=(11,), embeds=True))
