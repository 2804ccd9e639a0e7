"""N-gram lookup through torch tensors: recordings of both drafters, and the one on the host."""

import copy
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.support import recordings
from tests.support.oracles import ngram as oracle

torch = pytest.importorskip("torch")

from tests.support.torch_lookup import (
    LOOKUP,
    MAX_LEN,
    assert_tensors,
    config,
    run,
    tensor,
)
from torch_bridge.proposers import ngram as bridge


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")


@pytest.fixture(scope="module")
def drafter(device):
    return bridge.NgramProposerGPU(config(), device, None)


@pytest.fixture(scope="module")
def host():
    return bridge.NgramProposer(config())


# Recordings.


@recordings.each_case("ngram_cpu_gpu")
def test_the_recorded_host_drafts_are_reproduced(case):
    scalars = case.scalars
    proposer = bridge.NgramProposer(config(**scalars))
    sampled = [[1] if has else [] for has in case.given["has_sampled"]]
    tables = (case.given["token_ids"], torch.from_numpy(case.given["token_ids"]))
    for table, lengths in zip(tables, (case.given["num_tokens"],) * 2, strict=True):
        drafts = proposer.propose(sampled, lengths, table, slot_mappings=None)
        for b, draft in enumerate(drafts):
            assert draft == case.want["cpu_drafts"][b, : case.want["cpu_num"][b]].tolist()


@pytest.mark.any_device
@recordings.each_case("ngram_cpu_gpu")
def test_the_recorded_device_drafts_are_reproduced_past_the_length_limit_too(case, device):
    scalars = case.scalars
    proposer = bridge.NgramProposerGPU(config(**scalars, max_num_seqs=1), device)
    table, lengths = tensor(case.given["token_ids"], device), case.given["num_tokens"]
    count = case.given["has_sampled"].astype(np.int32)
    before = lengths - count
    sampled = np.take_along_axis(case.given["token_ids"], before[:, None], 1)
    table.scatter_(1, tensor(before, device).long()[:, None], 99_999)
    table[torch.tensor(count == 0, device=device)] = tensor(
        case.given["token_ids"][count == 0], device
    )
    got = run(proposer, table, before, sampled, count)
    assert_tensors(got, (case.want["gpu_drafts"], case.want["gpu_num"]))
    np.testing.assert_array_equal(table.cpu().numpy(), case.given["token_ids"])


@pytest.mark.any_device
@recordings.each_case("ngram_gpu_propose")
def test_the_recorded_appends_and_their_drafts_are_reproduced(case, device):
    scalars = case.scalars
    proposer = bridge.NgramProposerGPU(config(**scalars, max_num_seqs=1), device)
    names = ("valid_sampled_token_ids", "valid_sampled_tokens_count")
    before = tensor(case.given["num_tokens_no_spec"], device)
    table = tensor(case.given["token_ids"], device)
    drafts, num_valid = proposer.propose(
        before, table, *(tensor(case.given[f"{name}"], device) for name in names)
    )
    np.testing.assert_array_equal(before.cpu(), case.given["num_tokens_no_spec"])
    defined = case.want["row_is_well_defined"]
    for got, name in (
        (table, "token_ids"),
        (drafts, "draft_tokens"),
        (num_valid, "num_valid_draft_tokens"),
    ):
        np.testing.assert_array_equal(got.cpu().numpy()[defined], case.want[f"{name}"][defined])


@pytest.mark.any_device
@recordings.each_case("ngram_gpu_update_token_ids")
def test_the_recorded_token_updates_are_reproduced(case, drafter):
    scalars = case.scalars
    ids = case.given["sampled_token_ids"]
    if scalars["as_list"]:
        ids = [np.trim_zeros(row + 1, "b") - 1 for row in ids]
        ids = [row.tolist() for row in ids]
    else:
        ids = tensor(ids, drafter.device)
    before = copy.deepcopy(ids)
    batch = SimpleNamespace(
        num_reqs=len(case.given["num_tokens_no_spec"]), vocab_size=scalars["vocab_size"]
    )
    names = ("token_ids", "num_tokens_no_spec", "discard_request_mask")
    got = drafter.update_token_ids_ngram(
        ids, batch, *(tensor(case.given[f"{name}"], drafter.device) for name in names)
    )
    names = ("next_token_ids", "valid_sampled_tokens_count", "valid_sampled_token_ids")
    assert_tensors(got, [case.want[f"{name}"] for name in names])
    assert ids == before if isinstance(ids, list) else torch.equal(ids, before)


@recordings.each_document("ngram_gpu_trim_drafts.json")
def test_the_recorded_trims_are_reproduced(case):
    waited = []
    output = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=case["cached_req_ids"]), **case["before"]
    )
    bridge.update_scheduler_for_invalid_drafts(
        SimpleNamespace(synchronize=lambda: waited.append(True)),
        torch.tensor(case["num_valid_draft_tokens"], dtype=torch.int32),
        output,
        case["req_id_to_index"],
    )
    assert {name: getattr(output, name) for name in case["after"]} == case["after"] and waited


@pytest.mark.any_device
@recordings.each_case("ngram_gpu_incremental")
def test_the_recorded_reorderings_are_reproduced(case, device):
    scalars = case.scalars
    names = [f"r{j}" for j in range(len(case.given["cur_index"]))]
    now, before = (
        {n: int(i) for n, i in zip(names, case.given[f"{which}_index"], strict=True) if i >= 0}
        for which in ("cur", "prev")
    )
    batch = SimpleNamespace(
        req_id_to_index=now,
        prev_req_id_to_index=None if scalars["first_run"] else before,
        num_tokens_no_spec=case.given["num_tokens_cpu"],
        token_ids_cpu_tensor=torch.from_numpy(case.given["token_ids_cpu"]),
    )
    new = [
        SimpleNamespace(req_id=n) for n, new in zip(names, case.given["is_new"], strict=True) if new
    ]
    table, lengths = (tensor(case.given[f"{n}_gpu"], device) for n in ("token_ids", "num_tokens"))
    room = torch.zeros(len(table))
    buffers = dict(_pinned_idx_buf=room.long(), _pinned_val_buf=room.int())
    bridge.update_ngram_gpu_tensors_incremental(batch, table, lengths, new, device, **buffers)
    for got, name in ((table, "token_ids_gpu"), (lengths, "num_tokens_gpu")):
        np.testing.assert_array_equal(got.cpu().numpy(), case.want[f"{name}"])


@pytest.mark.any_device
def test_an_empty_batch_changes_nothing(device):
    table = torch.ones((2, 3), dtype=torch.int32, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    batch = SimpleNamespace(req_id_to_index={}, prev_req_id_to_index={"a": 0})
    bridge.update_ngram_gpu_tensors_incremental(batch, table, lengths, [], device)
    assert table.eq(1).all() and lengths.eq(1).all()


@pytest.mark.any_device
@pytest.mark.parametrize("batch_size, copied", [(2, 2), (9, 3), (0, 0)])
def test_numbers_of_drafts_are_copied_up_to_the_batch(device, batch_size, copied):
    cuda = device.type == "cuda"
    target = torch.full((5,), 7, dtype=torch.int32, pin_memory=cuda)
    stream, event = (torch.cuda.Stream(), torch.cuda.Event()) if cuda else (None, None)
    numbers = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    bridge.copy_num_valid_draft_tokens(target, stream, event, None, batch_size)
    bridge.copy_num_valid_draft_tokens(target, stream, event, numbers, batch_size)
    if cuda:
        torch.cuda.synchronize()
    assert target.tolist() == [1, 2, 3][:copied] + [7] * (5 - copied)


# The host.


def test_the_host_drafts_what_the_definition_says_with_a_length_of_each_step(rng, host):
    histories, lengths = oracle.contexts(rng, 300, MAX_LEN)
    sampled = [[1]] * 300
    for columns in (0, 1, 3, 4):
        wanted = [
            oracle.draft(
                histories[b, :n].tolist(),
                **{**LOOKUP, "num_drafts": columns},
                max_model_len=MAX_LEN,
            )
            for b, n in enumerate(lengths)
        ]
        assert host.propose(columns, sampled, lengths, histories) == wanted
        got = host.propose(sampled, lengths, histories, num_speculative_tokens=columns)
        assert got == wanted
    assert host.propose(sampled, lengths, histories) == wanted


def test_ids_are_drafted_as_they_come_negative_ones_too(host):
    table = torch.tensor([[5, -1, 6, 5]], dtype=torch.int32)
    assert host.propose([[5]], torch.tensor([4]), table) == [[-1, 6, 5]]


def test_a_table_of_any_strides_is_read_and_longer_arrays_are_those_of_the_runner(rng, host):
    histories, lengths = oracle.contexts(rng, 8, MAX_LEN)
    wide = np.full((8, MAX_LEN + 3), 9, np.int32)
    wide[:, 1 : MAX_LEN + 1] = histories
    wanted = host.propose([[1]] * 5, lengths, histories)
    assert len(wanted) == 5
    assert host.propose([[1]] * 5, lengths, wide[:, 1 : MAX_LEN + 1]) == wanted
    histories.flags.writeable = False
    assert host.propose([[1]] * 5, lengths.astype(np.int64), histories) == wanted
    assert host.propose([], lengths, histories) == []


def test_requests_at_the_limit_or_beyond_it_draft_nothing(host):
    table = np.ones((3, MAX_LEN), np.int32)
    lengths = np.array([MAX_LEN - 1, MAX_LEN, MAX_LEN + 9])
    assert host.propose([[1]] * 3, lengths, table) == [[1], [], []]


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (dict(table=np.zeros((2, 4), np.int64)), TypeError, "token_ids_cpu.*int64.*int32"),
        (dict(table=torch.zeros(4, dtype=torch.int32)), TypeError, "token_ids_cpu.*2 dimensions"),
        (dict(table=torch.zeros((2, 4), device="meta")), TypeError, "token_ids_cpu.*meta.*CPU"),
        (dict(lengths=[1, 2]), TypeError, "num_tokens_no_spec.*list"),
        (dict(lengths=np.array([1.0, 2.0])), TypeError, "num_tokens_no_spec.*float64"),
        (dict(lengths=np.array([1, 5])), ValueError, "num_tokens_no_spec.*0 to 4"),
        (dict(lengths=np.array([-1, 1])), ValueError, "num_tokens_no_spec.*-1"),
        (dict(lengths=np.array([1])), ValueError, "num_tokens_no_spec.*1 rows.*2"),
        (dict(columns=5), ValueError, "num_speculative_tokens.*5.*0 to 4"),
        (dict(columns=-1), ValueError, "num_speculative_tokens.*-1"),
    ],
)
def test_the_host_drafter_names_what_does_not_fit(host, changes, error, words):
    arguments = dict(table=np.zeros((2, 4), np.int32), lengths=np.ones(2, np.int32), columns=None)
    arguments |= changes
    with pytest.raises(error, match=f"NgramProposer: `{words}"):
        host.propose(
            [[1], [1]],
            arguments["lengths"],
            arguments["table"],
            num_speculative_tokens=arguments["columns"],
        )


# Configuration.


@pytest.mark.parametrize(
    "low, high, resolved",
    [(None, None, (5, 5)), (2, None, (2, 2)), (None, 4, (4, 4)), (1, 3, (1, 3))],
)
def test_a_missing_bound_takes_the_other_or_five(low, high, resolved):
    proposer = bridge.NgramProposer(config(min_n=low, max_n=high))
    assert (proposer.min_n, proposer.max_n) == resolved and proposer.k == 4
    assert proposer.load_model(torch.nn.Identity(), keyword=1) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(min_n=4, max_n=3), "prompt_lookup_min.*4.*prompt_lookup_max"),
        (dict(min_n=0), "prompt_lookup_min.*0"),
        (dict(k=None), "num_speculative_tokens.*missing"),
        (dict(k=0), "num_speculative_tokens.*0"),
        (dict(max_model_len=None), "max_model_len.*missing"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(changes, words):
    for build in (bridge.NgramProposer, lambda c: bridge.NgramProposerGPU(c, "cpu")):
        with pytest.raises(ValueError, match=words):
            build(config(**changes))


_FORK = """
import multiprocessing
import jax.numpy as jnp, numpy as np, torch
from types import SimpleNamespace as Namespace
from torch_bridge.proposers.ngram import NgramProposer, NgramProposerGPU
from torch_bridge.proposers.suffix import SuffixDecodingProposer

jnp.arange(3).sum().block_until_ready()
config = Namespace(
    speculative_config=Namespace(prompt_lookup_min=1, num_speculative_tokens=3),
    model_config=Namespace(max_model_len=32),
)
text = [1, 2, 3, 1, 2]
table = np.array([text], np.int32)
made_before = NgramProposer(config)
batch = Namespace(
    req_ids=["a"], req_id_to_index={"a": 0}, num_tokens_no_spec=[5], num_prompt_tokens=[4],
    token_ids_cpu=table,
)

def work(queue):
    for proposer in (made_before, NgramProposer(config)):
        queue.put(proposer.propose([[2]], np.array([5]), table))
    queue.put(SuffixDecodingProposer(config).propose(batch, [[2]]))
    try:
        NgramProposerGPU(config, "cpu")
    except RuntimeError as error:
        queue.put(str(error))

context = multiprocessing.get_context("fork")
queue = context.Queue()
worker = context.Process(target=work, args=(queue,))
worker.start()
for _ in range(4):
    print(queue.get(timeout=100))
worker.join()
"""


def test_forked_workers_draft_on_the_host_and_refuse_the_device():
    """Even where the parent has run JAX, which does not survive a fork."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", _FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["[[3, 1, 2]]", "[[3, 1, 2]]", "[[3, 1]]"], done.stderr
    assert "forked" in lines[3] and "spawn" in lines[3]
