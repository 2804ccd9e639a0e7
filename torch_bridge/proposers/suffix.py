"""Suffix decoding for PyTorch runners, on the host.

Source: vLLM v1/spec_decode/suffix_decoding.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from jspec._checks import check_at_least
from jspec.suffix import SuffixDecodingCache
from torch_bridge.proposers.settings import ConfigReader, count_first, drafts_of_step


class SuffixDecodingProposer:
    """Drafts the most frequent continuation of a request's last tokens in all requests so far.

    JAX does not run, so it works in forked workers. Construction compiles.

    Args:
      vllm_config: read by attribute: `model_config.max_model_len`, and of its
        `speculative_config`: `suffix_decoding_max_tree_depth` (24 by default),
        `suffix_decoding_max_cached_requests` (10,000; -1 = no limit),
        `suffix_decoding_max_spec_factor` (1.0),
        `suffix_decoding_min_token_prob` (0.1), `num_speculative_tokens` (max_tree_depth).

    Attributes:
      num_speculative_tokens: most drafts a request gets (K).
      max_tree_depth: longest path that is counted, match and draft together, in tokens.
      max_spec_factor: a match of m tokens drafts at most `factor * m`.
      min_token_prob: a draft ends before a token that is less probable.
      max_model_len: most tokens of a request.
      suffix_cache: the trees; `suffix_cache.save(path)` writes them to a file.

    Raises:
      ValueError: a value is missing or out of range.
    """

    def __init__(self, vllm_config: Any):
        owner, name = type(self).__name__, "speculative_config.suffix_decoding_"
        read = ConfigReader(vllm_config, owner)
        depth = read(f"{name}max_tree_depth", 24)
        cached = read(f"{name}max_cached_requests", 10_000)
        factor, least = read(f"{name}max_spec_factor", 1.0), read(f"{name}min_token_prob", 0.1)
        check_at_least(owner, 1, suffix_decoding_max_tree_depth=depth)
        check_at_least(owner, -1, suffix_decoding_max_cached_requests=cached)
        for option, value, high in (
            ("max_spec_factor", factor, math.inf),
            ("min_token_prob", least, 1),
        ):
            if not isinstance(value, int | float) or not 0 <= value <= high:
                raise ValueError(
                    f"{owner}: `suffix_decoding_{option}` is {value!r}, wanted a number from 0 to "
                    f"{high}. Change it in the speculative config."
                )
        most = read("speculative_config.num_speculative_tokens", depth)
        limit = read("model_config.max_model_len")
        check_at_least(owner, 1, num_speculative_tokens=most, max_model_len=limit)
        self.num_speculative_tokens, self.max_model_len = most, limit
        self.max_tree_depth, self.max_spec_factor, self.min_token_prob = depth, factor, least
        self.suffix_cache = SuffixDecodingCache(depth, cached)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there are no weights."""

    @count_first
    def propose(
        self,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        slot_mappings: Any = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> list[list[int]]:
        """Adds the sampled tokens to the trees and drafts; row i is added before row i + 1 drafts.

        A request that is not in the batch is stopped. When it is resumed after preemption, it
        starts from its prompt alone, as in the original: its response so far is discarded.

        Args:
          input_batch: vLLM's: `req_ids`, `req_id_to_index`, `num_tokens_no_spec` (the sampled
            tokens included), `num_prompt_tokens` and `token_ids_cpu` are read.
          sampled_token_ids: what each request sampled in this step; one without drafts nothing.
          slot_mappings: not read.
          num_speculative_tokens: K of this step, by default the configured one.

        Returns:
          A list of drafts for each request. With n known tokens there are at most
          `max_model_len - n - 1`.

        Raises:
          TypeError, ValueError: an argument is invalid; the message names it.

        Source: vLLM v1/spec_decode/suffix_decoding.py, SuffixDecodingProposer.propose.
        """
        del slot_mappings
        num_drafts = drafts_of_step(
            type(self).__name__, num_speculative_tokens, self.num_speculative_tokens
        )
        cache, table = self.suffix_cache, input_batch.token_ids_cpu
        if isinstance(table, torch.Tensor):
            table = table.numpy()
        drafts = []
        for i, sampled in enumerate(sampled_token_ids):
            num_tokens = int(input_batch.num_tokens_no_spec[i])
            if len(sampled) == 0 or num_tokens >= self.max_model_len:
                drafts.append([])
                continue
            req_id, row = input_batch.req_ids[i], table[i]
            if req_id not in cache.active_requests:
                # Its response so far is evicted, if it was stopped before.
                cache.start_request(req_id, row[: input_batch.num_prompt_tokens[i]])
            cache.add_active_response(req_id, list(sampled))
            draft = cache.speculate(
                req_id,
                row[max(0, num_tokens - self.max_tree_depth) : num_tokens],
                max_spec_tokens=min(num_drafts, self.max_model_len - num_tokens - 1),
                max_spec_factor=self.max_spec_factor,
                min_token_prob=self.min_token_prob,
            )
            drafts.append(draft.token_ids)
        for req_id in cache.active_requests - input_batch.req_id_to_index.keys():
            cache.stop_request(req_id)
        return drafts
