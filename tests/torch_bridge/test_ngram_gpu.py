"""N-gram lookup on the device for a runner of PyTorch: its memory, modes, threads and streams."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from tests.support.counting import backend_compiles
from tests.support.oracles import ngram as oracle

torch = pytest.importorskip("torch")

from tests.support.torch_lookup import (
    LOOKUP,
    MAX_LEN,
    assert_tensors,
    config,
    run,
    split,
    tensor,
    wanted_of,
)
from tests.support.torch_runner import no_waits
from torch_bridge.proposers import ngram as bridge


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")


@pytest.fixture(scope="module")
def drafter(device):
    return bridge.NgramProposerGPU(config(), device, None)


@pytest.mark.any_device
def test_the_device_drafts_what_the_definition_says_at_every_batch_size(rng, device):
    """As the runner calls: slices of one table. All was compiled at construction."""
    drafter = bridge.NgramProposerGPU(config(max_model_len=40, max_num_seqs=7), device)
    assert drafter.load_model() is None
    storage = torch.full((7, 40), 9, dtype=torch.int32, device=drafter.device)
    with backend_compiles() as compiled:
        for B in (3, 1, 6, 5, 2, 4, 7, 1):
            histories, lengths = oracle.contexts(rng, B, 40)
            table, *step = split(rng, histories, lengths)
            storage[:B] = tensor(table, drafter.device)
            got = run(drafter, storage[:B], *step)
            assert_tensors(got, wanted_of(histories, lengths, step[-1]))
            np.testing.assert_array_equal(storage[:B].cpu().numpy(), histories)
    assert not compiled
    assert not drafter._copy.numel()  # all were read where they are


@pytest.mark.any_device
def test_a_long_session_of_a_runner_drafts_what_the_definition_says(rng, device):
    """Requests come, miss steps, come back, are discarded and leave, and rows change places."""
    drafter = bridge.NgramProposerGPU(config(max_model_len=40, max_num_seqs=5), device)
    table = torch.full((5, 40), 9, dtype=torch.int32, device=device)
    lengths = torch.zeros(5, dtype=torch.int32, device=device)
    known, previous, num_drafts = {}, None, 0
    for step in range(80):
        while len(known) < 7:
            known[f"{step}.{len(known)}"] = rng.integers(0, 3, rng.integers(1, 9)).tolist()
        order = rng.permutation(list(known))[: rng.integers(0, 6)].tolist()
        host_table, B = np.full((5, 40), -9, np.int32), len(order)
        for row, req_id in zip(host_table, order, strict=False):
            row[: len(known[req_id])] = known[req_id]
        batch = SimpleNamespace(
            num_reqs=B,
            vocab_size=3,
            req_id_to_index={req_id: i for i, req_id in enumerate(order)},
            prev_req_id_to_index=previous,
            num_tokens_no_spec=np.array([len(known[r]) for r in order] + [0] * (5 - B), np.int32),
            token_ids_cpu_tensor=torch.from_numpy(host_table),
        )
        new = [SimpleNamespace(req_id=r) for r in order if r not in (previous or {})]
        bridge.update_ngram_gpu_tensors_incremental(batch, table, lengths, new, device)

        count = rng.integers(1, 6, B)
        sampled = np.where(np.arange(5) < count[:, None], rng.integers(0, 3, (B, 5)), PAD_TOKEN)
        discard = rng.random(5) < 0.2
        next_token, valid, ids = drafter.update_token_ids_ngram(
            tensor(sampled.astype(np.int32), device), batch, table, lengths, tensor(discard, device)
        )
        got, num_valid = drafter.propose(lengths[:B], table[:B], ids, valid)

        for b, req_id in enumerate(order):
            kept = [] if discard[b] else sampled[b, : count[b]].tolist()
            known[req_id] += kept
            wanted = oracle.draft(known[req_id], **LOOKUP) if kept else []
            assert got[b, : num_valid[b]].tolist() == wanted and valid[b] == len(kept)
            assert got[b, num_valid[b] :].eq(PAD_TOKEN).all()
            assert next_token[b] == known[req_id][-1]
            assert table[b, : len(known[req_id])].tolist() == known[req_id]
            num_drafts += len(wanted)
            if len(known[req_id]) > 35:
                del known[req_id]
        previous = batch.req_id_to_index
    assert num_drafts > 200


@pytest.mark.any_device
@pytest.mark.parametrize("form", ["narrow", "exact", "odd", "long"])
def test_tables_that_jax_cannot_read_in_place_are_copied(rng, device, form):
    proposer = bridge.NgramProposerGPU(config(max_num_seqs=8), device)
    for B in (5, 3, 7, 3, 9):
        histories, lengths = oracle.contexts(rng, B, MAX_LEN)
        table, before, sampled, count = split(rng, histories, lengths)
        if form == "narrow":  # columns of a wider table
            rows = torch.zeros((8 + B, MAX_LEN + 4), dtype=torch.int32, device=device)
            view = rows[:B, 2 : MAX_LEN + 2]
        elif form == "odd":  # begins at no multiple of 64 bytes
            view = torch.zeros(16 * MAX_LEN + 1, dtype=torch.int32, device=device)
            view = view[1 : 1 + B * MAX_LEN].view(B, MAX_LEN)
        else:  # no row behind the last
            view = torch.zeros((B, MAX_LEN), dtype=torch.int32, device=device)
        view.copy_(tensor(table, device))
        if form == "long":
            before, sampled, count = (x.astype(np.int64) for x in (before, sampled, count))
        got = run(proposer, view, before, sampled, count)
        assert_tensors(got, wanted_of(histories, lengths, count))
        np.testing.assert_array_equal(view.cpu().numpy(), histories)


@pytest.mark.any_device
def test_a_step_may_draft_fewer_tokens(rng, drafter):
    histories, lengths = oracle.contexts(rng, 6, MAX_LEN)
    table, *step = split(rng, histories, lengths)
    drafts, num_valid = wanted_of(histories, lengths, step[-1])
    for columns in (4, 2, 1, 0):
        wanted = drafts[:, :columns], np.minimum(num_valid, columns)
        rows = tensor(table, drafter.device)
        assert_tensors(run(drafter, rows, *step, num_speculative_tokens=columns), wanted)
        before, *rest = (tensor(x, drafter.device) for x in step)
        assert_tensors(drafter.propose(columns, before, rows, *rest), wanted)
    with pytest.raises(ValueError, match="num_speculative_tokens.*5"):
        run(drafter, rows, *step, num_speculative_tokens=5)


@pytest.mark.any_device
def test_tokens_that_land_outside_their_row_are_dropped(drafter):
    table = torch.arange(12, dtype=torch.int32, device=drafter.device).reshape(3, 4)
    sampled = np.array([[91, 92, 93], [94, PAD_TOKEN, 96], [97, 98, 99]], np.int32)
    run(drafter, table, np.array([3, 1, 6], np.int32), sampled, np.array([3, 3, 2], np.int32))
    assert table.tolist() == [[0, 1, 2, 91], [4, 94, 6, 96], [8, 9, 10, 11]]


@pytest.mark.any_device
@pytest.mark.parametrize("length", [-1, -3, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_length_below_0_writes_nothing_and_drafts_nothing(drafter, length, dtype):
    table = torch.arange(8, dtype=torch.int32, device=drafter.device).reshape(2, 4)
    sampled = np.array([[91, 92, 93], [94, 95, 96]], np.int32)
    drafts, num_valid = run(
        drafter, table, np.array([length, 1], dtype), sampled, np.array([3, 1], np.int32)
    )
    assert table.tolist() == [[0, 1, 2, 3], [4, 94, 6, 7]]
    assert num_valid[0] == 0 and (drafts[0] == PAD_TOKEN).all()


@pytest.mark.any_device
def test_what_is_returned_may_be_written_to(rng, drafter):
    histories, lengths = oracle.contexts(rng, 6, MAX_LEN)
    table, *step = split(rng, histories, lengths)
    wanted = wanted_of(histories, lengths, step[-1])
    rows = tensor(table, drafter.device)
    first = run(drafter, rows, *step)
    first[0].fill_(-5)
    assert_tensors(first[1:], wanted[1:])
    first[1].fill_(-6)
    second = run(drafter, rows, *step)
    assert_tensors(second, wanted)
    assert first[0].eq(-5).all() and first[1].eq(-6).all()


@pytest.mark.any_device
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("of_inference", [False, True])
def test_tensors_of_inference_mode_work_inside_and_outside_of_it(
    rng, drafter, inside, of_inference
):
    histories, lengths = oracle.contexts(rng, 4, MAX_LEN)
    table, *step = split(rng, histories, lengths)
    with torch.inference_mode(of_inference):
        rows = torch.zeros((6, MAX_LEN), dtype=torch.int32, device=drafter.device)
        rows[:4] = tensor(table, drafter.device)
        before, *rest = (tensor(x, drafter.device) for x in step)
        view = rows[:4]
    with torch.inference_mode(inside):
        got = drafter.propose(before, view, *rest)
        assert_tensors(got, wanted_of(histories, lengths, step[-1]))
        got[0].zero_()
    np.testing.assert_array_equal(rows[:4].cpu().numpy(), histories)


@pytest.mark.any_device
def test_a_batch_without_requests_has_no_drafts(drafter):
    empty = torch.zeros(0, dtype=torch.int32, device=drafter.device)
    drafts, num_valid = drafter.propose(
        empty, empty.reshape(0, MAX_LEN), empty.reshape(0, 5), empty
    )
    assert drafts.shape == (0, 4) and num_valid.shape == (0,)
    batch = SimpleNamespace(num_reqs=0, vocab_size=9)
    table, mask = torch.ones((2, 3), dtype=torch.int32, device=drafter.device), empty.bool()
    got = drafter.update_token_ids_ngram([], batch, table, empty, mask)
    assert [tuple(t.shape) for t in got] == [(0,), (0,), (0, 1)]


ARGUMENTS = {
    "num_tokens_no_spec": (2,),
    "token_ids_gpu": (2, 8),
    "valid_sampled_token_ids_gpu": (2, 3),
    "valid_sampled_tokens_count": (2,),
}


@pytest.mark.any_device
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda t: t.to("meta" if t.device.type == "cpu" else "cpu"), ValueError, "is on .*Move"),
        (lambda t: t.cpu().numpy(), TypeError, "ndarray.*torch.as_tensor"),
        (lambda t: t.float(), TypeError, "float32.*int32"),
        (lambda t: t[:1], ValueError, r"B.*2\b"),
        (lambda t: t[..., None], ValueError, "shape.*B"),
    ],
    ids=["device", "numpy", "dtype", "rows", "axes"],
)
def test_the_device_drafter_names_what_does_not_fit(drafter, name, change, error, words):
    arguments = {
        n: torch.ones(shape, dtype=torch.int32, device=drafter.device)
        for n, shape in ARGUMENTS.items()
    }
    arguments[name] = change(arguments[name])
    if name == "num_tokens_no_spec" and words.startswith("B"):
        name, words = "token_ids_gpu", r"B.*1\b"  # whose rows are then too many
    with pytest.raises(error, match=f"NgramProposerGPU: `{name}`.*{words}"):
        drafter.propose(**arguments)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "name", ["sampled_token_ids", "token_ids_gpu", "num_tokens_no_spec", "discard_request_mask"]
)
def test_updates_name_what_does_not_fit(drafter, name):
    def ones(*shape):
        return torch.ones(shape, dtype=torch.int32, device=drafter.device)

    arguments = dict(
        sampled_token_ids=ones(2, 3),
        token_ids_gpu=ones(3, 8),
        num_tokens_no_spec=ones(3),
        discard_request_mask=ones(3).bool(),
    )
    batch = SimpleNamespace(num_reqs=2, vocab_size=9)
    drafter.update_token_ids_ngram(gpu_input_batch=batch, **arguments)
    good = arguments[name]
    for bad in (good[:1], good[..., None], good.cpu().numpy(), good.float(), good.to("meta")):
        with pytest.raises((TypeError, ValueError), match=f"NgramProposerGPU: `{name}`"):
            drafter.update_token_ids_ngram(gpu_input_batch=batch, **arguments | {name: bad})


# Threads and streams.


@pytest.mark.any_device
def test_two_threads_draft_with_a_proposer_each(rng, device):
    def work(seed):
        rng = np.random.default_rng(seed)
        host = bridge.NgramProposer(config(max_num_seqs=4))
        proposer = bridge.NgramProposerGPU(config(max_num_seqs=4), device)
        rows = torch.zeros((4, MAX_LEN), dtype=torch.int32, device=device)
        for _ in range(60):
            B = rng.integers(1, 5)
            histories, lengths = oracle.contexts(rng, B, MAX_LEN)
            table, *step = split(rng, histories, lengths)
            rows[:B] = tensor(table, device)
            wanted = wanted_of(histories, lengths, step[-1])
            assert_tensors(run(proposer, rows[:B], *step), wanted)
            drafts = host.propose([[0] * n for n in step[-1]], lengths, histories)
            room = MAX_LEN - lengths
            assert [len(d) for d in drafts] == np.minimum(wanted[1], room).tolist()
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (1, 2))) == [True, True]


@pytest.mark.gpu
def test_nothing_waits_for_the_device(rng, drafter):
    histories, lengths = oracle.contexts(rng, 6, MAX_LEN)
    table, *step = split(rng, histories, lengths)
    table, *step = (tensor(x, drafter.device) for x in (table, *step))
    batch = SimpleNamespace(num_reqs=6, vocab_size=9)
    discard = torch.zeros(6, dtype=torch.bool, device=drafter.device)
    drafter.propose(step[0], table, *step[1:])
    with no_waits():
        drafter.propose(step[0], table, *step[1:])
        drafter.update_token_ids_ngram(step[1], batch, table, step[0], discard)
        drafter.update_token_ids_ngram(
            [[1], [], [2, 3], [], [], []], batch, table, step[0], discard
        )


@pytest.mark.gpu
def test_steps_follow_the_stream_that_they_are_called_on(rng, drafter):
    """The tokens arrive late on the caller's stream, and are overwritten behind the call."""
    cuda = pytest.importorskip("torch.cuda")
    rows = torch.zeros((6, MAX_LEN), dtype=torch.int32, device=drafter.device)
    for trial in range(20):
        histories, lengths = oracle.contexts(rng, 6, MAX_LEN)
        table, *step = split(rng, histories, lengths)
        step, table = [tensor(x, drafter.device) for x in step], tensor(table, drafter.device)
        before = torch.zeros_like(step[0])
        stream = cuda.Stream() if trial % 2 else cuda.current_stream()
        cuda.synchronize()
        with cuda.stream(stream):
            cuda._sleep(20_000_000)
            rows.copy_(table)
            before.copy_(step[0])
            got = drafter.propose(before, rows, *step[1:])
            rows.fill_(3)
            before.fill_(1)
        cuda.synchronize()
        assert_tensors(got, wanted_of(histories, lengths, step[-1].cpu().numpy()))
