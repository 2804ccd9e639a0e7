"""vLLM's n-gram search, reimplemented from its behaviour, for `benchmarks.ngram`."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


@numba.njit
def _draft_one(tokens, min_n, max_n, max_model_len, k):
    """The longest, then earliest match by Knuth-Morris-Pratt over the reversed tokens."""
    total = tokens.shape[0]
    k = min(k, max_model_len - total)
    if total < min_n or k <= 0:
        return np.empty(0, np.int32)
    flipped = tokens[::-1]
    lps = np.zeros(max_n, np.int32)
    longest = pos = p = 0
    i = 1
    while i < total:
        if flipped[p] == flipped[i]:
            p += 1
            if p >= longest:
                longest, pos = p, i
            if i < max_n:
                lps[i] = p
            if p == max_n:
                p = lps[max_n - 1]
            i += 1
        elif p:
            p = lps[p - 1]
        else:
            i += 1
    if longest < min_n:
        return np.empty(0, np.int32)
    start = total - 1 - pos + longest
    return tokens[start : start + min(k, total - start)].copy()


@numba.njit(parallel=True)
def _draft_batch(valid, num_tokens, token_ids, min_n, max_n, max_model_len, k, drafts, counts):
    for i in numba.prange(len(valid)):
        b = valid[i]
        found = _draft_one(token_ids[b, : num_tokens[b]], min_n, max_n, max_model_len, k)
        counts[b] = found.shape[0]
        if found.shape[0]:
            drafts[b, : found.shape[0]] = found


class Original:
    """Drafts lists from lists of sampled tokens, with result buffers that persist.

    In favour of the original, a set answers which requests were searched.
    """

    def __init__(self, max_requests: int, max_model_len: int, bounds: tuple[int, int], k: int):
        self.max_model_len = max_model_len
        self.bounds = bounds
        self.k = k
        self.drafts = np.zeros((max_requests, k), np.int32)
        self.counts = np.zeros(max_requests, np.int32)

    def propose(self, sampled: list[list[int]], num_tokens, token_ids) -> list[list[int]]:
        valid = [b for b, new in enumerate(sampled) if new and num_tokens[b] < self.max_model_len]
        if valid:
            num_threads = numba.get_num_threads()
            if np.sum(num_tokens) < 8192:
                numba.set_num_threads(1)
            args = valid, num_tokens, token_ids, *self.bounds, self.max_model_len, self.k
            _draft_batch(*args, self.drafts, self.counts)
            numba.set_num_threads(num_threads)
        searched = set(valid)
        return [
            self.drafts[b, : self.counts[b]].tolist() if b in searched and self.counts[b] else []
            for b in range(len(sampled))
        ]


def torch_search(min_n: int, max_n: int, k: int) -> Callable[..., Any]:
    """The vectorised search in torch: windows of every length, unfolded and compared."""
    import torch

    def search(token_ids, seq_lens, mask):
        B, S = token_ids.shape
        request = torch.arange(B, device=token_ids.device)
        firsts = []
        for n in range(min_n, max_n + 1):
            windows = token_ids.unfold(1, n, 1)  # [B, S - n + 1, n]
            column = seq_lens[:, None] - n + torch.arange(n, device=token_ids.device)
            suffix = token_ids.gather(1, column.clamp(min=0))
            equal = (windows == suffix[:, None]).all(-1)
            place = torch.arange(S - n + 1, device=token_ids.device)
            equal = equal & (place <= seq_lens[:, None] - n - 1)
            at = equal.int().argmax(1)
            firsts.append(torch.where(equal[request, at], at, -1))
        first = torch.stack(firsts, 1)  # [B, lengths]
        lengths = torch.arange(min_n, max_n + 1, device=token_ids.device)
        best = torch.where(first >= 0, lengths, 0).argmax(1)
        matched = first[request, best] >= 0
        start = torch.where(matched, first[request, best] + lengths[best], 0)
        step = torch.arange(k, device=token_ids.device)
        source = start[:, None] + step
        drafts = token_ids.gather(1, source.clamp(max=S - 1))
        keep = (step < (seq_lens - start)[:, None]) & (matched & mask)[:, None]
        drafts = torch.where(keep, drafts, -1)
        leading = (drafts != -1).cumsum(1) == step + 1
        return drafts, leading.sum(1)

    return search
