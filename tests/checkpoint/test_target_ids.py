"""Draft vocabularies: the table of offsets, its inverse, and tables that are refused."""

import numpy as np
import pytest

from jspec import proposers
from jspec.checkpoint.target_ids import read_d2t, read_token_map
from tests.support import heads

V, OWNER = 13, "eagle3"


def read(d2t, t2d=None, *, vocab_size=V):
    d2t = np.asarray(d2t)
    return read_d2t(OWNER, d2t, t2d, num_ids=len(d2t), vocab_size=vocab_size)


def mask(*ids, dtype=bool):
    t2d = np.zeros(V, dtype)
    t2d[list(ids)] = 1
    return t2d


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint8])
@pytest.mark.parametrize("inverse", [None, bool, np.uint8, np.int64])
def test_offsets_become_target_ids(dtype, inverse):
    t2d = None if inverse is None else mask(0, 3, 5, dtype=inverse)
    ids, order = read(np.array([0, 2, 3], dtype), t2d)
    assert ids.tolist() == [0, 3, 5] and ids.dtype == np.int32 and order is None


def test_ids_ascend_whatever_the_order_of_draft_ids():
    ids, order = read([5, 2, -2], mask(0, 3, 5))
    assert ids.tolist() == [0, 3, 5] and order is not None and order.tolist() == [2, 1, 0]
    ids, order = read_token_map(OWNER, "map", np.array([5, 3, 0]), num_ids=3, vocab_size=V)
    assert ids.tolist() == [0, 3, 5] and order is not None and order.tolist() == [2, 1, 0]


def test_no_table_of_a_whole_vocabulary_is_each_id_to_itself():
    ids, order = read_d2t(OWNER, None, np.ones(4, bool), num_ids=4, vocab_size=4)
    assert ids.tolist() == [0, 1, 2, 3] and order is None
    with pytest.raises(ValueError, match="d2t leads to 2, and t2d has False"):
        read_d2t(OWNER, None, np.array([1, 1, 0, 1], bool), num_ids=4, vocab_size=4)


@pytest.mark.parametrize(
    "d2t,match",
    [
        # 2 + 7 = 9 is a token, 3 + 12 = 15 is none.
        ([0, 3, 7, 12], r"from draft id 3 to 3 \+ 12 = 15.*0\.\.12.*hold target ids.*0\.\.3 from"),
        ([0, 0, 99], r"from draft id 2 to 2 \+ 99 = 101.*Fetch"),
        ([0, -2, 0], r"from draft id 1 to 1 \+ -2 = -1.*Fetch"),
        # Two draft ids of one token: only one of their rows of the head could be meant.
        ([0, 3, 2], r"from draft id 2 to 2 \+ 2 = 4, wanted a token of its own"),
        ([0, 1, 1.5], r"d2t is float64 \[3\], wanted 3 ints"),
        ([True, False, True], r"d2t is bool \[3\], wanted 3 ints"),
        ([2**62, 0, 0], "from draft id 0"),
    ],
)
def test_a_table_that_leads_astray_says_where(d2t, match):
    with pytest.raises(ValueError, match=f"{OWNER}: .*{match}") as error:
        read(d2t)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), ()])
def test_a_table_has_an_entry_for_each_draft_id(shape):
    with pytest.raises(ValueError, match="wanted 3 ints.*draft_vocab_size, rows of lm_head"):
        read_d2t(OWNER, np.zeros(shape, np.int64), None, num_ids=3, vocab_size=V)


@pytest.mark.parametrize(
    "t2d,match",
    [
        (mask(0, 3), "contradict each other in 1 target ids: d2t leads to 5, and t2d has False"),
        (mask(0, 3, 4, 5), "in 1 target ids: d2t leads not to 4, and t2d has True"),
        (np.zeros(V, bool), "in 3 target ids: d2t leads to 0, and t2d has False"),
        (mask(0, 2, 3), "in 2 target ids"),  # what d2t would say as absolute ids
        (np.ones(3, bool), r"t2d is bool \[3\], wanted 13 bools"),
        (np.arange(V), r"t2d is int64 \[13\], wanted 13 bools"),
        (np.zeros(V, np.float32), r"t2d is float32 \[13\], wanted 13 bools"),
    ],
)
def test_an_inverse_that_contradicts_its_table_is_named_with_it(t2d, match):
    with pytest.raises(ValueError, match=f"{match}.*Fetch the checkpoint again"):
        read([0, 2, 3], t2d)


def test_zeros_are_a_table_that_may_never_have_been_filled():
    with pytest.warns(UserWarning, match="d2t is all zeros, so that the 3 draft ids are.*first"):
        assert read([0, 0, 0]).ids.tolist() == [0, 1, 2]
    assert read([0, 0, 0], mask(0, 1, 2)).ids.tolist() == [0, 1, 2]  # the inverse says so, too
    assert read([0, 0, 0], vocab_size=3).ids.tolist() == [0, 1, 2]  # all that there are
    with pytest.raises(ValueError, match="d2t and t2d contradict"):
        read([0, 0, 0], mask(0, 3, 5))


# Every method that has such a table.

D, VOCAB = 64, 128
HEADS = {
    "eagle3": ("eagle3_llama", "target_llama"),
    "dflash": ("dflash_qwen3", "target_qwen3"),
}


def load(method, d2t, t2d=None, *, size):
    name, target = HEADS[method]
    tensors = {"d2t": np.asarray(d2t), "lm_head.weight": np.ones((size, D), np.float32)}
    tensors["lm_head.weight"] *= np.arange(size)[:, None]
    tensors |= {} if t2d is None else {"t2d": t2d}
    config = {"draft_vocab_size": size}
    given = heads.checkpoint(name, drop=["t2d"], config=config, **tensors)
    load = proposers.find(method).load
    assert load is not None
    return load(given, heads.target(target), dtype="float32").params


@pytest.mark.parametrize("method", HEADS)
def test_rows_of_the_head_go_with_their_target_ids(method):
    params = load(method, [100, 4, 4], size=3)
    assert params["target_ids"].tolist() == [5, 6, 100]
    assert params["head"][:, 0].tolist() == [1, 2, 0]


@pytest.mark.parametrize("method", HEADS)
def test_a_table_of_the_whole_vocabulary_orders_the_head(method):
    order = np.arange(VOCAB)[::-1]
    params = load(method, order - np.arange(VOCAB), size=VOCAB)
    assert "target_ids" not in params
    assert params["head"][:, 0].tolist() == order.tolist()


@pytest.mark.parametrize("method", HEADS)
def test_every_method_compares_the_tables(method):
    t2d = np.zeros(VOCAB, bool)
    with pytest.raises(ValueError, match=f"{method}: d2t and t2d contradict each other"):
        load(method, [4, 4, 100], t2d, size=3)
    with pytest.raises(ValueError, match=f"{method}: d2t leads from draft id 2 to 2"):
        load(method, [0, 4, 127], size=3)
    with pytest.warns(UserWarning, match=f"{method}: d2t is all zeros"):
        load(method, [0, 0, 0], size=3)


def test_a_selector_of_candidates_knows_the_targets_order_alone():
    reverse = VOCAB - 1 - 2 * np.arange(VOCAB)
    given = heads.checkpoint("dflash2_qwen3", d2t=reverse)
    load = proposers.find("dflash").load
    assert load is not None
    with pytest.raises(ValueError, match="d2t gives the draft ids another order.*selector"):
        load(given, heads.target("target_qwen3"), dtype="float32")
