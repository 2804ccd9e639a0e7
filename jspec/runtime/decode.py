"""The decode loop as functions; with `jspec.runtime.engine` the reference for arXiv 2211.17192.

`generate_plain` is the oracle: no drafts, no batch, one token at a time.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.metrics import SpecDecodingStats
from jspec.models import llama
from jspec.runtime import scheduling
from jspec.runtime.arguments import check_call, check_on_tokens
from jspec.runtime.engine import Engine, Report
from jspec.runtime.policies import Drafting
from jspec.runtime.scheduling import Generation, OnTokens, RequestRows
from jspec.runtime.target import Verification, target_step
from jspec.state import Params
from jspec.verification.sampling_params import sampling_params

__all__ = ["Engine", "Report", "generate", "generate_plain"]


def generate(
    model: Model,
    prompts: Iterable[Sequence[int]],
    config: Any,
    params: Params = None,
    *,
    max_tokens: int,
    max_requests: int = 8,
    cache: CacheConfig | None = None,
    chunk_size: int = 64,
    stop_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    drafting: Drafting | None = None,
    temperature: float | Sequence[float] | None = None,
    seed: int | Sequence[int] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    min_p: float | Sequence[float] | None = None,
    verification: Verification = "match",
) -> Report:
    """Continues prompts with speculative decoding, greedily unless there is a temperature.

    The tokens equal `generate_plain`'s, whatever the drafter does; with a temperature and another
    `verification` than "match" they have the same distribution.

    Args:
      model: the target, from `jspec.load`.
      prompts: token ids, of any lengths.
      config: the drafter's, for example `NgramConfig(num_drafts=5)`.
      params: the drafter's weights.
      max_tokens: most tokens to add to each prompt.
      max_requests: most prompts decoded at the same time.
      cache: KV pages; by default enough for this call.
      chunk_size: most rows of a pass; longer prompts are read in chunks.
      stop_ids: ids that end a request; by default the model's.
      on_tokens: called after each step for each request with new tokens.
      drafting: how much a step drafts and verifies; None = `Adaptive()`: the highest expected
        throughput. "fixed" = `num_drafts` tokens in every step.
      temperature: of all prompts, or one for each; None and 0 are greedy (below 1.2e-38, too).
      seed: as `temperature`; by default 0. Equal prompts with the same seed get the same tokens.
      top_k: most tokens to sample from; 0 and -1 = all. As `temperature`, as those below.
      top_p: least total probability of the tokens to sample from; 1 = all.
      min_p: least probability of a token, as a fraction of the highest one; 0 = all.
      verification: "match" keeps drafts that equal the target's own sample; "rejection" and "block"
        keep more of the drafts of drafters with draft_sampling="probabilistic".

    Returns:
      The continuations with counts and times.

    Raises:
      TypeError: an argument is of another type.
      ValueError: a prompt is empty or leaves no room for a token in `max_model_len`; a token or a
        stop id is outside the vocabulary; a size is below 1; `num_drafts` reaches `max_model_len`;
        the cache cannot hold the longest request, or allows more positions than the model has;
        the drafter does not support `drafting` or `verification`; a sampling parameter is out of
        range. Raised before anything compiles.
    """
    check_on_tokens(on_tokens)
    engine = Engine(
        model,
        prompts,
        config,
        params,
        max_tokens=max_tokens,
        max_requests=max_requests,
        cache=cache,
        chunk_size=chunk_size,
        stop_ids=stop_ids,
        drafting=drafting,
        verification=verification,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    return engine.run(on_tokens)


def generate_plain(
    model: Model,
    prompts: Iterable[Sequence[int]],
    *,
    max_tokens: int,
    cache: CacheConfig | None = None,
    chunk_size: int = 64,
    stop_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    temperature: float | Sequence[float] | None = None,
    seed: int | Sequence[int] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    min_p: float | Sequence[float] | None = None,
) -> Report:
    """Continues prompts one after the other and token by token: the oracle of `generate`.

    Args, Returns, Raises: as `generate`.
    """
    check_on_tokens(on_tokens)
    prompts, stops = check_call(model, prompts, cache, stop_ids)
    limits = scheduling.limits(model, prompts, max_tokens, 1, cache, chunk_size)
    numbers = {"temperature": temperature, "seed": seed}
    numbers |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = sampling_params("generate_plain", len(prompts), **numbers)
    report = Report([], SpecDecodingStats.new(1))
    kv = llama.init_pages(model.config, limits)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        tokens, computed = list(prompt), 0
        end = min(len(prompt) + max_tokens, limits.max_model_len)
        pages = range(math.ceil(end / limits.page_size))
        while len(tokens) < end and (len(tokens) == len(prompt) or tokens[-1] not in stops):
            begin = time.perf_counter()
            chunk = tokens[computed : computed + (1 if computed == len(tokens) - 1 else chunk_size)]
            scheduled = scheduling.pack(
                [RequestRows(0, chunk, computed, 0, pages)],
                num_rows=1 if len(chunk) == 1 else chunk_size,
                num_requests=1,
                pages_per_request=limits.pages_per_request,
            )
            if params is not None:
                scheduled = params.join(scheduled, [index])
            verified, _, kv = target_step(model.config, model.params, kv, scheduled, width=1)
            report.num_steps += 1
            computed += len(chunk)
            if computed == len(tokens):
                tokens.append(int(jax.device_get(verified.tokens)[0, 0]))
                if on_tokens:
                    on_tokens(index, tokens[-1:], 0)
            if len(chunk) > 1:
                jax.block_until_ready(verified)
                report.prompt_seconds += time.perf_counter() - begin
                report.prompt_tokens += computed == len(prompt)
        reason = "stop" if tokens[-1] in stops and len(tokens) > len(prompt) else "length"
        report.generations.append(Generation(tokens[len(prompt) :], reason))
    report.seconds = time.perf_counter() - start
    return report
