"""Every public argument of the loop, of `load` and of `init` is named when its type is wrong."""

import re

import numpy as np
import pytest

import jspec
from tests.conftest import GOLDEN

CONFIG = jspec.NgramConfig(num_drafts=2)
CACHE = jspec.CacheConfig(num_pages=8, max_model_len=64, dtype="float32")


@pytest.fixture(scope="module")
def model():
    return jspec.load(GOLDEN / "models" / "draft_llama_small", "float32")


def raises_naming(name, call, *arguments, **options):
    with pytest.raises((TypeError, ValueError, KeyError)) as raised:
        call(*arguments, **options)
    text = str(raised.value.args[0])
    assert re.match(rf"(\w+: )?`?{name}\b", text), text
    assert "\n" not in text


BAD_OF_BOTH = [
    ("prompts", 5),
    ("prompts", None),
    ("prompts", "text"),
    ("prompts", [5]),
    ("prompts", ["text"]),
    ("prompts", [[1.5]]),
    ("prompts", [None]),
    ("max_tokens", "8"),
    ("max_tokens", 0),
    ("cache", 64),
    ("cache", {"num_pages": 8}),
    ("chunk_size", None),
    ("stop_ids", 5),
    ("stop_ids", "ab"),
    ("stop_ids", ["a"]),
    ("stop_ids", [True]),
    ("stop_ids", [1.0]),
    ("stop_ids", [-1]),
    ("stop_ids", [10**6]),
    ("on_tokens", 5),
    ("temperature", "hot"),
    ("seed", 1.5),
    ("top_k", "a"),
    ("top_p", [[0.5]]),
    ("min_p", "a"),
]
BAD = [
    ("config", 5),
    ("config", jspec.NgramConfig),
    ("params", 5),
    ("max_requests", 1.0),
    ("drafting", "much"),
    ("verification", "exact"),
    ("verification", 5),
]


def called(function, **changed):
    given = {"prompts": [[3, 4]], "max_tokens": 2, **changed}
    if changed.keys() & {"seed", "top_k", "top_p", "min_p"}:
        given["temperature"] = 1.0
    if function is not jspec.generate_plain:
        given = {"config": CONFIG} | given
    return lambda model: function(model, **given)


@pytest.mark.parametrize("name,value", BAD_OF_BOTH + BAD)
def test_generate_and_its_engine_name_a_wrong_argument(name, value, model):
    for function in (jspec.generate, jspec.runtime.decode.Engine):
        if function is jspec.generate or name != "on_tokens":
            raises_naming(name, called(function, **{name: value}), model)


@pytest.mark.parametrize("name,value", BAD_OF_BOTH)
def test_generate_plain_names_a_wrong_argument(name, value, model):
    raises_naming(name, called(jspec.generate_plain, **{name: value}), model)


def test_an_engine_names_a_wrong_callback_before_it_runs(model):
    engine = called(jspec.runtime.decode.Engine)(model)
    raises_naming("on_tokens", engine.run, 5)
    assert engine.report.num_steps == 0


@pytest.mark.parametrize("wrong", [5, None, "path/to/folder", {}])
def test_a_wrong_model_is_named(wrong):
    for function in (jspec.generate, jspec.generate_plain, jspec.runtime.decode.Engine):
        raises_naming("model", called(function), wrong)


def test_stop_ids_may_be_any_collection_of_ids(model):
    plain = jspec.generate_plain(model, [[3, 4]], max_tokens=3, stop_ids=[])
    first = plain.generations[0].tokens[0]
    for stops in ([first], (first,), {first}, np.array([first]), iter([first])):
        report = jspec.generate_plain(model, [[3, 4]], max_tokens=3, stop_ids=stops)
        assert report.generations[0] == ([first], "stop")


@pytest.mark.parametrize(
    "name,value",
    [
        ("path", 5),
        ("path", None),
        ("path", b"folder"),
        ("dtype", "int8"),
        ("dtype", 5),
        ("target", 5),
        ("method", 5),
        ("method", ["eagle"]),
        ("num_drafts", "3"),
        ("num_drafts", 0),
    ],
)
def test_load_names_a_wrong_argument(name, value, model):
    given = {"path": GOLDEN / "models" / "draft_llama_small", "target": model, name: value}
    raises_naming(name, jspec.load, **given)


@pytest.mark.parametrize(
    "name,value",
    [
        ("config", 5),
        ("config", None),
        ("params", 5),
        ("cache", 64),
        ("cache", None),
        ("max_requests", "2"),
        ("max_requests", 0),
    ],
)
def test_init_names_a_wrong_argument(name, value):
    given = {"config": CONFIG, "params": None, "cache": CACHE, "max_requests": 2, name: value}
    raises_naming(name, jspec.init, **given)


@pytest.mark.parametrize("function", [jspec.generate, jspec.runtime.decode.Engine])
@pytest.mark.parametrize("cache", [None, CACHE])
def test_more_drafts_than_a_request_has_tokens_are_refused(function, cache, model):
    config = jspec.NgramConfig(num_drafts=64)
    raises_naming("num_drafts", called(function, config=config, cache=cache), model)


def test_a_drafter_that_is_to_make_more_drafts_than_its_target_has_positions_is_refused(model):
    most = model.config.max_positions
    with pytest.raises(
        ValueError, match=f"to make {most} drafts.*{most} positions.*Pass num_drafts=, a smaller"
    ):
        jspec.load(GOLDEN / "models" / "draft_llama_small", target=model, num_drafts=most)
