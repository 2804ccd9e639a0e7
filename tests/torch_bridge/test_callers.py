"""Invalid arguments of callers, and settings of torch around a call: default device, modes."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jspec
from jspec.proposers import eagle, medusa
from tests.support.counting import backend_compiles
from tests.support.torch_runner import Request, common_attn_metadata, vllm_config
from torch_bridge import EagleProposer, MedusaProposer, NgramProposerGPU, ops
from torch_bridge.interop.dlpack import jax_device

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
CONFIG = jspec.EagleConfig.tiny()


def make(device=DEVICE):
    config = vllm_config("eagle", 3, max_model_len=64, num_pages=32, page_size=4)
    drafter = EagleProposer(config, device)
    with jax.default_device(jax_device(torch.device(device))):
        params = eagle.PROPOSER.init_params(CONFIG, jax.random.key(0), "float32")
    drafter.set_drafter(CONFIG, params)
    return drafter


def arguments():
    """Two prompts of five and three tokens."""
    random = torch.Generator().manual_seed(0)
    table = np.arange(32).reshape(2, 16)
    tensors = {
        "target_token_ids": torch.randint(64, (8,), generator=random),
        "target_positions": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]),
        "target_hidden_states": torch.randn((8, 32), generator=random),
        "next_token_ids": torch.tensor([5, 6]),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()} | {
        "token_indices_to_sample": None,
        "common_attn_metadata": common_attn_metadata(
            [0, 5, 8], [5, 3], table, page_size=4, device=DEVICE
        ),
    }


@pytest.fixture(scope="module")
def drafter():
    return make()


@pytest.fixture(scope="module")
def wanted(drafter):
    return drafter.propose(**arguments()).tolist()


def _ints(*shape, dtype=torch.int32):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("target_token_ids", [1] * 8, TypeError, "is a list, wanted a torch tensor"),
        ("target_token_ids", _ints(8).bool(), TypeError, "has dtype torch.bool, wanted torch.int"),
        ("target_positions", _ints(8).float(), TypeError, "has dtype torch.float32"),
        ("target_positions", _ints(2, 8), ValueError, r"\(2, 8\), wanted \[T\], or \[3, T\]"),
        ("target_positions", _ints(8, 3), ValueError, r"\(8, 3\), wanted \[T\], or \[3, T\]"),
        ("target_positions", _ints(7), ValueError, r"\(7,\), wanted"),
        ("next_token_ids", _ints(2).float(), TypeError, "has dtype torch.float32"),
        ("next_token_ids", _ints(2, 1), ValueError, r"has shape \(2, 1\), wanted \[B\]"),
        ("next_token_ids", _ints(1), ValueError, r"\(1,\), wanted"),
        ("target_hidden_states", [_ints(8, 32)], TypeError, "is a list, wanted a torch tensor"),
        ("target_hidden_states", None, TypeError, "is a NoneType"),
        ("target_hidden_states", _ints(8, 32).float().to_sparse(), TypeError, "is sparse"),
        ("target_hidden_states", _ints(8, 32).float().to("meta"), ValueError, "is on meta"),
        ("target_hidden_states", _ints(8, 31).float(), ValueError, r"\(8, 31\), wanted \(8, 32\)"),
        ("target_token_ids", _ints(1, 8), ValueError, r"\(1, 8\), wanted \[T\]"),
        ("target_token_ids", _ints(), ValueError, r"has shape \(\), wanted one entry"),
        ("common_attn_metadata", None, TypeError, "is a NoneType without `num_reqs`"),
        ("mm_embed_inputs", [], TypeError, "wanted None or a pair"),
        ("mm_embed_inputs", 3, TypeError, "wanted None or a pair"),
        ("next_token_ids", _ints(2).to_sparse(), TypeError, "is sparse"),
        ("target_hidden_states", _ints(8, 32), TypeError, "has dtype torch.int32"),
        ("token_indices_to_sample", [4, 7], TypeError, "is a list"),
        ("token_indices_to_sample", _ints(1), ValueError, r"has shape \(1,\), .* B = 2"),
        ("token_indices_to_sample", _ints(2).float(), TypeError, "has dtype torch.float32"),
        ("num_rejected_tokens_gpu", [0, 0], TypeError, "is a list"),
        ("num_rejected_tokens_gpu", _ints(3), ValueError, r"\(3,\), wanted"),
        ("num_rejected_tokens_gpu", _ints(2).float(), TypeError, "has dtype torch.float32"),
        ("num_speculative_tokens", 2.5, TypeError, "is 2.5, wanted an int from 0 to 3"),
        ("num_speculative_tokens", 4, ValueError, "is 4, wanted 0 to 3"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(drafter, wanted, name, value, error, words):
    with pytest.raises(error, match=f"EagleProposer: `{name}` .*{words}|^`{name}` .*{words}"):
        drafter.propose(**arguments() | {name: value})
    assert drafter.propose(**arguments()).tolist() == wanted


@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("num_reqs", None, TypeError, "is None, wanted an int"),
        ("num_reqs", "2", TypeError, "is '2', wanted an int"),
        ("query_start_loc", None, TypeError, "is a NoneType"),
        ("query_start_loc", np.array([0, 5, 8]), TypeError, "is a ndarray"),
        ("query_start_loc", _ints(3).to("meta"), ValueError, "is on meta"),
        ("query_start_loc", _ints(3).bool(), TypeError, "has dtype torch.bool"),
        ("query_start_loc", _ints(), ValueError, r"has shape \(\), wanted one entry"),
        ("query_start_loc", _ints(2), ValueError, r"\(2,\), wanted 3 entries"),
        ("seq_lens", _ints(1), ValueError, r"\(1,\), wanted 2 entries"),
        ("block_table_tensor", _ints(2), ValueError, r"has shape \(2,\), wanted \[B, M\]"),
        ("block_table_tensor", _ints(2, 0), ValueError, r"has shape \(2, 0\).*a column or more"),
        ("block_table_tensor", _ints(2, 16).float(), TypeError, "has dtype torch.float32"),
    ],
)
def test_metadata_that_does_not_fit_is_named(drafter, wanted, name, value, error, words):
    given = arguments()
    metadata = dataclasses.replace(given["common_attn_metadata"], **{name: value})
    for index in (None, torch.tensor([4, 7], device=DEVICE)):
        changes = {"common_attn_metadata": metadata, "token_indices_to_sample": index}
        with pytest.raises(error, match=f"EagleProposer: `{name}` .*{words}"):
            drafter.propose(**given | changes)
    assert drafter.propose(**arguments()).tolist() == wanted


def test_a_number_of_numpy_in_front_is_the_number_of_drafts(drafter, wanted):
    got = drafter.propose(np.int64(2), *arguments().values())
    assert got.tolist() == [row[:2] for row in wanted]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_drafts_may_be_written_to_in_and_outside_of_every_mode(drafter, wanted, mode):
    with mode():
        drafts = drafter.propose(**arguments())
        drafts.mul_(1)
    assert drafts.add_(0).tolist() == wanted
    drafts.fill_(-1)
    assert drafter.propose(**arguments()).tolist() == wanted


def test_more_requests_than_the_scheduler_has_are_refused():
    config = vllm_config("eagle", 3, max_model_len=64, num_pages=32, page_size=4, max_requests=1)
    drafter = EagleProposer(config, DEVICE)
    drafter.set_drafter(CONFIG, eagle.PROPOSER.init_params(CONFIG, jax.random.key(0), "float32"))
    with pytest.raises(ValueError, match="EagleProposer: `num_reqs` is 2, wanted at most 1. Raise"):
        drafter.propose(**arguments())


@pytest.mark.parametrize("value", [2**31 - 1, 2**32, 2**32 + 3, 2**63 - 1])
def test_an_index_beyond_int32_is_the_nearest_that_fits(drafter, value):
    def drafts(index):
        index = torch.tensor([index, 7], device=DEVICE)
        return drafter.propose(**arguments() | {"token_indices_to_sample": index}).tolist()

    assert drafts(value) == drafts(2**31 - 1)
    assert drafts(-value) == drafts(-1) and drafts(-1)[0] == [-1, -1, -1]


def test_a_table_of_another_width_compiles_nothing_and_drafts_the_same(wanted):
    drafter = make()
    drafter.dummy_run(8)
    given, widths = [], (3, 5, 16, 17, 24, 32)
    for width in widths:
        table = np.full((2, width), 31)  # pages of the other request, behind those that are read
        table[:, : min(width, 16)] = np.arange(32).reshape(2, 16)[:, :width]
        metadata = common_attn_metadata([0, 5, 8], [5, 3], table, page_size=4, device=DEVICE)
        given.append(arguments() | {"common_attn_metadata": metadata})
    with backend_compiles() as compiled:
        got = [drafter.propose(**each).tolist() for each in given]
    assert got == [wanted] * len(widths) and compiled == []


def test_the_index_of_a_cpu_does_not_matter():
    drafter = make("cpu:0")
    given = arguments()
    metadata = given.pop("common_attn_metadata")
    on_cpu = {name: None if value is None else value.cpu() for name, value in given.items()}
    on_cpu["common_attn_metadata"] = SimpleNamespace(
        **{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in vars(metadata).items()}
    )
    assert drafter.device == torch.device("cpu")
    assert drafter.propose(**on_cpu).shape == (2, 3)


def test_weights_that_do_not_fit_leave_the_drafter_as_it_was(wanted):
    drafter = make()
    with pytest.raises(ValueError, match="EagleProposer: `params` does not fit"):
        drafter.set_drafter(CONFIG, {"embed": np.zeros((2, 2), np.float32)})
    assert drafter.propose(**arguments()).tolist() == wanted


@pytest.fixture
def no_default_device():
    """Nothing works on the default device and with the default dtype: all calls must name both."""
    before = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(before)


class Given:
    """Tensors that were made before the default device changed."""

    step = arguments()
    counts = torch.tensor([3, 3], dtype=torch.int32, device=DEVICE)
    sampled = torch.tensor([[7, 8, -1], [-1, -1, -1]], dtype=torch.int32, device=DEVICE)
    discard = torch.tensor([False, False], device=DEVICE)
    histories = torch.tensor([[1, 2, 3, 1] + [0] * 28] * 2, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([4, 4], dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(10, dtype=torch.int64, device=DEVICE)


def test_a_default_device_of_torch_changes_nothing_of_a_drafter(no_default_device, wanted):
    drafter = make()
    drafter.dummy_run(8)
    assert drafter.propose(**Given.step).tolist() == wanted
    requests = {"a": Request([1, 2]), "b": Request([3, 4])}
    batch = SimpleNamespace(
        num_reqs=2, req_ids=["a", "b"], num_tokens_no_spec=np.array([2, 2]), vocab_size=64
    )
    assert drafter.prepare_next_token_ids_cpu([[7], [8]], requests, batch, {}).tolist() == [7, 8]
    next_ids, _ = drafter.prepare_next_token_ids_padded(
        Given.sampled, requests, batch, Given.discard
    )
    assert next_ids.tolist() == [8, 4]
    metadata, rows = drafter.prepare_inputs(
        Given.step["common_attn_metadata"], [[7, 8], [9]], [2, 1]
    )
    assert rows.tolist() == [0, 1, 2, 3, 5, 6]
    assert metadata.query_start_loc_cpu.tolist() == metadata.query_start_loc.tolist() == [0, 4, 6]


def test_a_default_device_of_torch_changes_nothing_of_ngrams_and_ops(no_default_device):
    config = vllm_config(
        "ngram_gpu", 2, max_model_len=32, max_requests=2, prompt_lookup_min=1, prompt_lookup_max=2
    )
    drafter = NgramProposerGPU(config, DEVICE)
    batch = SimpleNamespace(num_reqs=2, vocab_size=64)
    _, count, sampled = drafter.update_token_ids_ngram(
        [[2], []], batch, Given.histories, Given.lengths, Given.discard
    )
    drafts, _ = drafter.propose(Given.lengths, Given.histories.clone(), sampled, count)
    assert drafts.tolist() == [[3, 1], [-1, -1]]
    metadata = Given.step["common_attn_metadata"]
    longer = ops.extend_all_queries_by_N(metadata, 1, None, Given.slots)
    assert longer.query_start_loc_cpu.tolist() == longer.query_start_loc.tolist() == [0, 6, 10]
    block = ops.set_inputs_first_pass_dflash(
        *(Given.step["next_token_ids"], Given.step["target_positions"], metadata),
        num_speculative_tokens=2,
        parallel_drafting_token_id=0,
        block_size=4,
    )
    assert block.cad.query_start_loc_cpu.tolist() == block.cad.query_start_loc.tolist() == [0, 3, 6]


def test_medusa_takes_the_number_of_drafts_in_front_too():
    config = jspec.MedusaConfig.tiny()
    drafter = MedusaProposer(vllm_config("medusa", config.num_drafts), DEVICE)
    drafter.set_drafter(config, medusa.PROPOSER.init_params(config, jax.random.key(0), "float32"))
    hidden = arguments()["target_hidden_states"]
    wanted = drafter.propose(hidden).tolist()
    assert drafter.propose(config.num_drafts, hidden).tolist() == wanted
    for count in (0, 2):
        with torch.inference_mode():
            got = drafter.propose(hidden, num_speculative_tokens=count)
        got.add_(0)  # written to outside of it
        assert got.tolist() == [row[:count] for row in wanted]
    with pytest.raises(TypeError, match="`target_hidden_states` is a list, wanted a torch tensor"):
        drafter.propose([hidden])
