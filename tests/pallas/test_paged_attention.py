"""paged_attention: each implementation against a plain loop in float64, and host waits."""

import doctest
import functools
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_SLOT, Impl
from jspec.pallas import Attended, _backend, _dispatch, paged_attention
from tests.support.op_runs import POISON
from tests.support.steps import Row, make_step

BACKENDS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
LAYER = 1
# float32 sums in another order; the others also round weights to 8 or 11 bits.
TOLERANCE = {
    "float32": (1e-5, 1e-5),  # absolute, relative
    "float16": (2e-3, 4e-3),
    "bfloat16": (1e-2, 2e-2),
}
SHAPES = [  # G, n, E, d, S, M
    (1, 1, 1, 8, 1, 1),
    (3, 2, 5, 24, 4, 9),
    (5, 1, 3, 64, 1, 130),  # pages of one slot
    (4, 2, 4, 96, 48, 3),  # pages that are no power of two
    (2, 1, 70, 80, 16, 7),  # more rows than a program takes
    (2, 2, 12, 128, 16, 9),
    (3, 1, 2, 256, 8, 20),
    (30, 18, 1, 8, 4, 40),  # so many tiles that their keys are not split
]
CASES = [
    *((shape, window, "float32") for shape in SHAPES for window in (None, 40)),
    *((shape, window, "bfloat16") for shape in SHAPES[-4:] for window in (None, 40)),
    (SHAPES[1], 1, "float32"),
    (SHAPES[5], None, "float16"),
]


@functools.cache
def compiled(impl: Impl, scale: float):
    return jax.jit(functools.partial(paged_attention, scale=scale, impl=impl))


def draw(rng, G, n, E, d, S, M, *, window=None, dtype="float32") -> tuple[Any, ...]:
    """Tiles that see any number of keys, in shuffled pages; NaN and poison wherever none sees.

    The first tile of several sees nothing, the second everything; the last two share a request.
    """
    num_seen = rng.integers(-2, M * S + 1, (G, E))
    if G > 1:
        num_seen[0], num_seen[1] = rng.integers(-2, 1, E), M * S
    first_seen = None if window is None else num_seen - rng.integers(1, window + 1, (G, E))
    P = G * M + 3
    table = rng.permutation(P)[: G * M].reshape(G, M)
    if G > 2:
        table[-2] = table[-1]
    pages = rng.standard_normal((2, P * S, n, d))
    read = np.zeros(P * S, bool)
    for g in range(G):
        seeing = num_seen[g] > 0
        stop = max(num_seen[g].max(), 0)
        start = 0
        if first_seen is not None and seeing.any():
            start = max(0, first_seen[g][seeing].min())
        key = np.arange(start, stop)
        read[table[g, key // S] * S + key % S] = True
        used = -(-stop // S)
        if G < 3 or g < G - 2:  # its own pages
            table[g, used:] = rng.choice([PAD_SLOT, POISON], M - used)
    pages[:, ~read] = np.nan
    k, v = (np.full((3, P, S, n, d), np.nan) for _ in range(2))
    k[LAYER], v[LAYER] = pages.reshape(2, P, S, n, d)
    q = rng.standard_normal((G, n, E, d))
    q = np.where((num_seen > 0)[:, None, :, None], q, np.nan)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    ints = [None if x is None else x.astype(np.int32) for x in (table, num_seen, first_seen)]
    return q, k, v, LAYER, *ints


def loop(q, k, v, layer, table, num_seen, first_seen, *, scale):
    """Attends row by row, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k[layer], v[layer]))
    S = k.shape[1]
    top, total, out = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3]), np.zeros(q.shape)
    for g, head, row in np.ndindex(q.shape[:3]):
        start = 0 if first_seen is None else max(0, first_seen[g, row])
        key = np.arange(start, num_seen[g, row])
        if not len(key):
            continue
        at = table[g, key // S], key % S, head
        scores = k[at] @ q[g, head, row] * scale
        top[g, head, row] = scores.max()
        weights = np.exp(scores - scores.max())
        total[g, head, row], out[g, head, row] = weights.sum(), weights @ v[at]
    return top, total, out


def assert_close(got: Attended, wanted, dtype):
    """Compares parts of a softmax; `out` as the result that it stands for."""
    top, total, out = (np.asarray(x) for x in got)
    assert {x.dtype for x in got} == {jnp.dtype("float32")}
    np.testing.assert_allclose(top, wanted[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(total, wanted[1], atol=1e-5, rtol=3e-5)
    assert not out[wanted[1] == 0].any()
    share = np.where(wanted[1] == 0, 1, wanted[1])[..., None]
    atol, rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(out / share, wanted[2] / share, atol=atol, rtol=rtol)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("shape,window,dtype", CASES)
def test_tiles_attend_as_a_plain_loop_does(shape, window, dtype, impl, rng):
    case = draw(rng, *shape, window=window, dtype=dtype)
    scale = shape[3] ** -0.5
    assert_close(compiled(impl, scale)(*case), loop(*case, scale=scale), dtype)


@pytest.mark.parametrize("impl", BACKENDS)
def test_queries_and_keys_may_differ_in_precision(impl, rng):
    q, k, v, *rest = draw(rng, 3, 2, 5, 24, 4, 9)
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        got = compiled(impl, 0.3)(q, k, v, *rest)
    assert_close(got, loop(q, k, v, *rest, scale=0.3), "bfloat16")


@pytest.mark.parametrize("impl", BACKENDS)
def test_the_layer_may_be_traced_and_is_read_alone(impl, rng):
    q, k, v, layer, *rest = draw(rng, 2, 2, 3, 8, 4, 6)
    wanted = loop(q, k, v, layer, *rest, scale=0.3)
    assert_close(compiled(impl, 0.3)(q, k, v, jnp.int32(layer), *rest), wanted, "float32")


@pytest.mark.parametrize("impl", BACKENDS)
def test_a_page_that_does_not_exist_reads_the_nearest(impl, rng):
    q, k, v = (jnp.asarray(rng.standard_normal(shape), "float32") for shape in [(1, 1, 2, 8)] * 3)
    k, v = (x.reshape(1, 2, 1, 1, 8) for x in (k, v))  # two pages of one slot
    num_seen = np.array([[3, 2]], np.int32)
    case = k, v, 0, np.array([[PAD_SLOT, POISON, 1]], np.int32), num_seen
    near = k, v, 0, np.array([[0, 1, 1]], np.int32), num_seen
    assert_close(compiled(impl, 0.3)(q, *case), loop(q, *near, None, scale=0.3), "float32")


def test_the_plain_loop_starts_at_the_first_key_that_a_window_reaches(monkeypatch, rng):
    """Rows that see keys 186 to 304, in rounds of 128 keys: the second and the third."""
    q, k, v, layer, table, num_seen, _ = draw(rng, 1, 1, 2, 8, 16, 20)
    num_seen[:], first_seen = [[190, 305]], np.array([[186, 300]], np.int32)
    module, rounds = sys.modules[paged_attention.__module__], []
    add_keys = module.add_keys

    def spy(*args, **kwargs):
        jax.debug.callback(lambda: rounds.append(1))
        return add_keys(*args, **kwargs)

    monkeypatch.setattr(module, "add_keys", spy)
    paged_attention(q, k, v, layer, table, num_seen, first_seen, scale=0.3, impl="xla")
    jax.effects_barrier()
    assert len(rounds) == 2


@pytest.mark.parametrize("impl", ["xla", "interpret"])
@pytest.mark.parametrize("window", [None, 3])
def test_vmap_attends_for_several_batches_at_once(impl, window, rng):
    cases = [draw(rng, 2, 1, 3, 8, 4, 5, window=window) for _ in range(2)]
    arrays = [[x for x in case if not isinstance(x, int | None)] for case in cases]
    stacked = [jnp.stack([jnp.asarray(x) for x in both]) for both in zip(*arrays, strict=True)]

    def call(q, k, v, *rest):
        return paged_attention(q, k, v, LAYER, *rest, scale=0.3, impl=impl)

    got = jax.jit(jax.vmap(call))(*stacked)
    for i, case in enumerate(cases):
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), loop(*case, scale=0.3), "float32")


@pytest.fixture
def stands_in(monkeypatch):
    """Makes the default device look like another one; nothing can run there."""

    def stand_in(platform="gpu", kind="NVIDIA H200", capability="9.0"):
        device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(_dispatch, "_default_device", lambda: device)

    return stand_in


@pytest.mark.parametrize(
    "device,fits,wanted",
    [
        (("gpu", "NVIDIA H200", "9.0"), True, "triton"),
        (("gpu", "NVIDIA GeForce RTX 5090", "12.0"), True, "triton"),
        (("gpu", "NVIDIA A100-SXM4-40GB", "8.0"), True, "triton"),
        (("gpu", "NVIDIA A100-SXM4-40GB", "8.0"), False, "xla"),
        (("gpu", "Tesla T4", "7.5"), True, "xla"),
        (("gpu", "AMD Instinct MI300X", "gfx942"), True, "xla"),
        (("cpu", "cpu", None), True, "xla"),
    ],
)
def test_auto_takes_the_kernel_wherever_triton_compiles(device, fits, wanted, stands_in):
    stands_in(*device)
    got = _dispatch.choose("auto", "paged_attention", num_cells=4, fits=fits, why="this")
    assert got == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("d,window", [(128, None), (80, 9)])
def test_the_kernel_lowers_without_a_loop_on_the_host(d, window, dtype, stands_in, rng):
    stands_in()
    case = draw(rng, 2, 2, 3, d, 16, 5, window=window, dtype=dtype)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    trace = jax.jit(functools.partial(paged_attention, scale=0.3)).trace
    with jax.sharding.use_abstract_mesh(mesh):
        module = trace(*case).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("custom_call") == module.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert "jspec_paged_attention" in module and "stablehlo.while" not in module


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(q=jnp.zeros((2, 1, 3, 8))), ValueError, r"wanted \(2, 2, 3, 8\).*side by side"),
        (dict(v=jnp.zeros((3, 13, 4, 2, 9))), ValueError, "`v` .*Pass the arrays of a KVCache"),
        (dict(layer=3), ValueError, "`layer` is 3, and `k` has 3 layers. Pass 0 to 2"),
        (dict(layer=-1), ValueError, "`layer` is -1"),
        (dict(num_seen=np.zeros((2, 3))), TypeError, "`num_seen` has dtype float64"),
        (dict(num_seen=np.zeros(2, np.int32)), ValueError, r"`num_seen` .*\[G, E\].*Reshape"),
        (dict(block_table=np.zeros((2, 0), np.int32)), ValueError, "pages a request.*one column"),
        (dict(first_seen=np.zeros((2, 4), np.int32)), ValueError, "`first_seen` .*as `num_seen`"),
        (dict(impl="cuda"), ValueError, "`impl` is 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, words, as_users_run_it, rng):
    names = ("q", "k", "v", "layer", "block_table", "num_seen", "first_seen")
    good = dict(zip(names, draw(rng, 2, 2, 3, 8, 4, 5), strict=True))
    with pytest.raises(error, match=f"paged_attention: .*{words}"):
        paged_attention(**{**good, **change}, scale=0.3)


def test_a_kernel_that_cannot_run_is_refused_with_what_to_pass(stands_in, rng):
    case, wide = draw(rng, 2, 2, 3, 8, 4, 5), draw(rng, 1, 1, 1, 513, 1, 2)
    with pytest.raises(NotImplementedError, match='head_dim above 512.*Pass impl="xla"'):
        paged_attention(*wide, scale=0.3, impl="interpret")
    stands_in("cpu", "cpu", None)
    with pytest.raises(NotImplementedError, match='needs a CUDA GPU.*Pass impl="xla"'):
        paged_attention(*case, scale=0.3, impl="pallas")
    stands_in()
    with _backend.use_lowering("mosaic"):
        with pytest.raises(NotImplementedError, match="no Mosaic kernel.*Triton"):
            paged_attention(*case, scale=0.3, impl="pallas")


def test_the_example_runs():
    results = doctest.testmod(sys.modules[paged_attention.__module__])
    assert results.attempted and not results.failed


@pytest.mark.gpu
def test_propose_returns_while_the_device_is_busy():
    """Nothing in a step reads a value back: the call returns long before its turn comes."""
    config = jspec.Eagle3Config.tiny()
    method = proposers.of(config)
    assert method.init_params is not None
    params = method.init_params(config, jax.random.key(0), "float32")
    cache = jspec.CacheConfig(num_pages=64, page_size=4, max_model_len=64, dtype="float32")
    state = jspec.init(config, params, cache=cache, max_requests=2)
    rows = [Row(slot=0, context=[5, 6, 7, 5] * 8, kept=[6]), Row(slot=1, context=[9], kept=[3])]
    scheduled, verified = make_step(
        rows,
        num_requests=2,
        num_rows=8,
        width=config.num_drafts + 1,
        pages_per_request=cache.pages_per_request,
        reads=method.reads(config),
    )
    batch = jspec.prepare(scheduled, verified, vocab_size=config.vocab_size)
    batch = jax.device_put(batch, jax.devices()[0])
    for _ in range(3):
        state, drafts = jspec.propose(state, batch)
        jax.block_until_ready(drafts)

    @jax.jit
    def work(x):
        return jax.lax.fori_loop(0, 100, lambda _, x: x @ x, x)

    x = jnp.eye(4096, dtype=jnp.float32)
    begin = time.perf_counter()
    jax.block_until_ready(work(x))
    begin = time.perf_counter()
    jax.block_until_ready(work(x))
    passes = 1 + int(0.05 / (time.perf_counter() - begin))
    begin = time.perf_counter()
    queued = [work(x) for _ in range(passes)]
    at = time.perf_counter()
    state, drafts = jspec.propose(state, batch)
    waited = time.perf_counter() - at
    jax.block_until_ready(queued)
    busy = time.perf_counter() - begin
    jax.block_until_ready(drafts)
    assert busy > 0.03 and waited < 0.01, (busy, waited)
