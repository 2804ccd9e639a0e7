"""A suffix cache is saved and loaded unchanged; damaged files are refused."""

import numpy as np
import pytest

from jspec.suffix import SuffixDecodingCache
from jspec.suffix import tables as t
from tests.support.suffix_trees import paths, text


def test_a_cache_comes_back_from_disk_with_its_counts(rng, tmp_path):
    path = tmp_path / "cache.npz"
    cache = SuffixDecodingCache(12, 6)
    for req_id in ["a", 1, "b", "empty", 2**40, "c", "d"]:
        cache.start_request(req_id, text(rng, 20))
        cache.add_active_response(req_id, [] if req_id == "empty" else text(rng, 90))
    cache.save(path)
    again = SuffixDecodingCache.load(path, 12, 6)
    assert list(again.cached_requests) == [1, "b", "empty", 2**40, "c", "d"]
    assert not again.active_requests
    assert paths(again) == paths(cache)
    assert again.num_cached_tokens == cache.num_cached_tokens
    context = cache._text(cache._shared["b"])[10:20]
    again.start_request("new", [])
    assert again.speculate("new", context).token_ids
    newest = SuffixDecodingCache.load(path, 12, 2)
    assert list(newest.cached_requests) == ["c", "d"]
    assert list(SuffixDecodingCache.load(path, max_cached_tokens=100).cached_requests) == ["d"]
    assert not SuffixDecodingCache.load(path, 12, 0).cached_requests
    assert [file.name for file in tmp_path.iterdir()] == ["cache.npz"]


def test_an_empty_cache_comes_back_from_disk(tmp_path):
    SuffixDecodingCache().save(tmp_path / "cache.npz")
    assert not SuffixDecodingCache.load(tmp_path / "cache.npz").cached_requests


def test_a_file_that_is_no_whole_cache_is_refused_by_name(tmp_path):
    path = tmp_path / "cache.npz"
    cache = SuffixDecodingCache()
    cache.start_request("a", [])
    cache.add_active_response("a", list(range(200)))
    cache.save(path)
    whole = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    for change in (
        {"format": np.array("something else")},
        {"lengths": np.array([199])},
        {"lengths": np.array([200, 0])},
        {"lengths": np.array([300, -100])},
        {"tokens": arrays["tokens"].astype(np.int64)},
        {"tokens": np.full(200, t.END, np.int32)},
        {"ids": np.array("no json")},
    ):
        np.savez(path, **arrays | change)
        with pytest.raises(ValueError, match="cache.npz is not a whole suffix cache"):
            SuffixDecodingCache.load(path)
    np.save(tmp_path / "array.npy", np.arange(3))
    array = (tmp_path / "array.npy").read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2], array):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="cache.npz is not a whole suffix cache"):
            SuffixDecodingCache.load(path)
    with pytest.raises(FileNotFoundError):
        SuffixDecodingCache.load(tmp_path / "nothing")
    cache.start_request((1, 2), [])
    with pytest.raises(TypeError, match=r"\(1, 2\) is a tuple, wanted str or int"):
        cache.save(path)
