"""Prompts that are read in chunks, and drafts near `max_model_len`: figures of docs/pytorch.md."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jspec
import torch_bridge
from jspec.models import llama
from jspec.models.kv_cache import init_cache
from jspec.state import PagedView
from tests.conftest import GOLDEN
from tests.support.torch_runner import Request, common_attn_metadata, vllm_config

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
MODELS = GOLDEN / "models"
K, PAGE_SIZE, NUM_PAGES = 3, 16, 4
TABLE = np.arange(NUM_PAGES, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def target():
    return jspec.load(MODELS / "target_llama", "float32")


@functools.cache
def loaded(name, method, folder, **options):
    config = vllm_config(
        *(method, K), path=MODELS / folder, num_pages=NUM_PAGES, page_size=PAGE_SIZE, **options
    )
    drafter = getattr(torch_bridge, name)(config, DEVICE)
    drafter.load_model(MODELS / "target_llama")
    return drafter


def make(*names, **options):
    """A drafter with nothing in its pages."""
    drafter = loaded(*names, **options)
    drafter._memory = None
    return drafter


def hidden_states(target, drafter, tokens):
    """The target's hidden states at each token."""
    place = np.arange(len(tokens), dtype=np.int32)
    cache = init_cache(
        jspec.CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=64),
        num_layers=target.config.num_layers,
        num_kv_heads=target.config.num_kv_heads,
        head_dim=target.config.head_dim,
    )
    view = PagedView(
        block_table=TABLE,
        seq_lens=place[-1:] + 1,
        positions=place,
        slots=place,
        query_start=np.array([0, len(tokens)], np.int32),
    )
    _, hidden, _ = llama.forward(
        *(target.config, target.params, np.array(tokens, np.int32), view, cache),
        logit_rows=place[-1:],
        hidden_layers=drafter._reads.hidden_layers,
    )
    return torch.tensor(np.asarray(hidden), device=DEVICE)


def propose(drafter, tokens, hidden, start, end, next_ids):
    """Drafts after a pass over some of a request's tokens."""
    place = torch.arange(start, end, device=DEVICE)
    metadata = common_attn_metadata(
        [0, end - start], [end], TABLE, page_size=PAGE_SIZE, device=DEVICE
    )
    return drafter.propose(
        target_token_ids=torch.tensor(tokens[start:end], dtype=torch.int32, device=DEVICE),
        target_positions=place,
        target_hidden_states=None if hidden is None else hidden[place],
        next_token_ids=next_ids,
        token_indices_to_sample=None,
        common_attn_metadata=metadata,
    ).tolist()[0]


def read_again(target, tokens, ends, way):
    """Reads a preempted request's known tokens in chunks and samples one; returns its drafts."""
    drafter = make("EagleProposer", "eagle", "eagle1_llama")
    *known, sampled = tokens
    hidden = hidden_states(target, drafter, known)
    request, drafts = Request(known), []
    for start, end in zip([0, *ends], [*ends, len(known)], strict=True):
        is_last = end == len(known)
        request.num_computed_tokens = start
        num_known = np.array([len(known)], np.int32)
        if way == "lengths":
            num_known = np.minimum(num_known, end + 1)
        batch = SimpleNamespace(
            num_reqs=1, req_ids=["a"], vocab_size=128, num_tokens_no_spec=num_known
        )
        token = torch.tensor([[sampled if is_last else 5]], dtype=torch.int32, device=DEVICE)
        if way == "host":
            kept = [[sampled]] if is_last else [[]]
            next_ids = drafter.prepare_next_token_ids_cpu(
                kept, {"a": request}, batch, {"a": end - start}
            )
        else:
            next_ids, _ = drafter.prepare_next_token_ids_padded(
                token, {"a": request}, batch, torch.tensor([not is_last], device=DEVICE)
            )
        drafts = propose(drafter, known, hidden, start, end, next_ids)
    return drafts


def tokens_of(index, count):
    data = np.load(MODELS / "e2e_llama_eagle1" / "expected.npz")
    return data[f"prompt_{index}"].tolist()[:count]


def test_a_prompt_read_again_in_chunks_drafts_as_vllm_does_and_the_way_round_as_read_at_once(
    target,
):
    tokens, ends = tokens_of(5, 16), [5, 10]
    at_once = read_again(target, tokens, [], "as it is")
    assert at_once == [25, 65, 51]
    assert read_again(target, tokens, ends, "as it is") == [25, 122, 126]  # vLLM's value
    for way in ("lengths", "host"):
        assert read_again(target, tokens, ends, way) == at_once


def at_the_limit(target, name, method, folder, max_model_len):
    drafter = make(name, method, folder, max_model_len=max_model_len)
    *known, sampled = tokens_of(5, 14)
    hidden = None
    if method != "draft_model":
        hidden = hidden_states(target, drafter, known)
    next_ids = torch.tensor([sampled], dtype=torch.int32, device=DEVICE)
    return propose(drafter, known, hidden, 0, len(known), next_ids)


@pytest.mark.parametrize(
    "name, method, folder, wanted",
    [
        ("DraftModelProposer", "draft_model", "draft_llama_small", [97, 120, 38]),
        ("EagleProposer", "eagle", "eagle1_llama", [97, 120, 38]),
    ],
)
def test_the_last_step_that_a_runner_drafts_in_ends_with_one_minus_one(
    target, name, method, folder, wanted
):
    """13 tokens and 3 drafts in 16 places: vLLM's runner drafts, and its scheduler keeps one."""
    assert at_the_limit(target, name, method, folder, 64) == wanted
    assert at_the_limit(target, name, method, folder, 17) == wanted
    assert at_the_limit(target, name, method, folder, 16) == [*wanted[:2], -1]
