"""What tests of N-gram lookup through torch tensors share."""

from types import SimpleNamespace

import numpy as np
import torch

from jspec.axes import PAD_TOKEN
from tests.support.oracles import ngram as oracle

LOOKUP = dict(min_n=1, max_n=3, num_drafts=4)
MAX_LEN = 48


def config(*, min_n=1, max_n=3, k=4, max_model_len=MAX_LEN, max_num_seqs=6):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=min_n, prompt_lookup_max=max_n, num_speculative_tokens=k
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )


def tensor(array, device="cpu"):
    return torch.tensor(array, device=device)


def assert_tensors(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.int32 and a.is_contiguous()
        np.testing.assert_array_equal(a.cpu().numpy(), b)


def split(rng, histories, lengths, width=5):
    """Cuts the newest tokens off as sampled in this step: (table, before, sampled, count)."""
    B = len(lengths)
    count = np.minimum(rng.integers(0, width + 1, B), lengths).astype(np.int32)
    before, table = lengths - count, histories.copy()
    sampled = np.full((B, width), PAD_TOKEN, np.int32)
    for b in range(B):
        sampled[b, : count[b]] = histories[b, before[b] : lengths[b]]
        table[b, before[b] : lengths[b]] = 7
    return table, before, sampled, count


def wanted_of(histories, lengths, count):
    """Drafts and their numbers by the definition; the device knows no length limit."""
    drafts = np.full((len(lengths), LOOKUP["num_drafts"]), PAD_TOKEN, np.int32)
    for b, length in enumerate(lengths):
        found = oracle.draft(histories[b, :length].tolist(), **LOOKUP) if count[b] else []
        drafts[b, : len(found)] = found
    return drafts, (drafts != PAD_TOKEN).sum(1)


def run(drafter, table, before, sampled, count, **kwargs):
    device = drafter.device
    arrays = (tensor(x, device) for x in (sampled, count))
    return drafter.propose(tensor(before, device), table, *arrays, **kwargs)
