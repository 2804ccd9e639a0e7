"""The reference loop: target -> verify -> step, over a batch that requests enter and leave.

Short enough to check against the paper (arXiv 2211.17192): `generate` schedules on the host,
runs two executables a step (`target_step`, `jspec.step`) and reads their tokens once.
`generate_plain` is the oracle: no drafts, no batch, one token at a time.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec import api, metadata, proposers, scheduling, verify
from jspec.axes import PAD_TOKEN
from jspec.cache import KVCache, init_cache
from jspec.checkpoint import Model
from jspec.config import Buckets, CacheConfig
from jspec.metrics import SpecDecodingStats
from jspec.models import llama
from jspec.scheduling import Generation, OnTokens, Rows, Scheduler
from jspec.state import Drafts, Params, Scheduled, State, Verified


@dataclass
class Report:
    """What a run produced and what it took.

    Attributes:
      generations: one per prompt, in their order.
      stats: drafts, drafted and accepted tokens, accepted by position.
      num_steps: passes of the target.
      seconds: wall clock from the first pass to the last token.
      prompt_seconds: part of `seconds` in passes that read a chunk of some prompt.
      prompt_tokens: tokens that those passes gave, such as the first of each prompt.
      draft_seconds: part of `seconds` in drafting calls (for device drafters: their dispatch).
    """

    generations: list[Generation]
    stats: SpecDecodingStats
    num_steps: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    prompt_tokens: int = 0
    draft_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Counts the generated tokens."""
        return sum(len(generation.tokens) for generation in self.generations)

    @property
    def tokens_per_second(self) -> float:
        """Divides the tokens of the passes that read no prompt by the time of these passes."""
        seconds = self.seconds - self.prompt_seconds
        return (self.num_tokens - self.prompt_tokens) / max(seconds, 1e-9)


@functools.partial(
    jax.jit,
    static_argnames=("config", "width", "columns", "hidden_layers"),
    donate_argnames="cache",
)
def target_step(
    config: Any,
    params: Params,
    cache: KVCache,
    scheduled: Scheduled,
    *,
    width: int,
    columns: int | None = None,
    hidden_layers: tuple[llama.HiddenId, ...] = (),
) -> tuple[Verified, Float[Array, "T D"] | None, KVCache]:
    """Runs the target over a step's rows and verifies its drafts greedily: one executable.

    Args:
      config: the target's ModelConfig.
      params: the target's weights.
      cache: donated.
      scheduled: the rows; a request's last `num_drafts` rows are its drafts.
      width: logits rows per request, at least 1 + the most drafts of any request in this step.
      columns: width of the result (W), by default `width`: a step without drafts need not be a
        shape of its own for the drafter.
      hidden_layers: hidden states to return; see `jspec.models.llama.forward`.

    Returns:
      (verified [B, W], hidden [T, len(hidden_layers) * D] or None, cache).
    """
    view = metadata.paged_view(
        scheduled, page_size=cache.page_size, max_model_len=cache.max_model_len
    )
    num_rows = scheduled.token_ids.shape[0]
    column = jnp.arange(width, dtype=jnp.int32)[None]  # [1, W]
    rows = (scheduled.query_start[1:] - 1 - scheduled.num_drafts)[:, None] + column  # [B, W]
    rows = jnp.clip(rows, 0, num_rows - 1)  # columns past num_drafts are never kept
    logits, hidden, cache = llama.forward(
        config,
        params,
        scheduled.token_ids,
        view,
        cache,
        logit_rows=rows.reshape(-1),
        hidden_layers=hidden_layers,
    )
    drafts = scheduled.token_ids.at[rows[:, 1:]].get(mode="fill", fill_value=PAD_TOKEN)
    verified, _ = verify.greedy(logits.reshape(*rows.shape, -1), drafts, scheduled.num_drafts)
    missing = ((0, 0), (0, (columns or width) - width))
    tokens = jnp.pad(verified.tokens, missing, constant_values=PAD_TOKEN)
    return Verified(tokens=tokens), hidden, cache


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
) -> Report:
    """Continues prompts greedily with speculative decoding.

    The tokens equal `generate_plain`'s, whatever the drafter does.

    Args:
      model: the target, from `jspec.load`.
      prompts: token ids; of any lengths, any number of them.
      config: the drafter's, for example `NgramConfig(num_drafts=5)`.
      params: the drafter's weights.
      max_tokens: most tokens to add to each prompt; a prompt of `max_model_len` gets none.
      max_requests: prompts decoded at the same time; the others wait.
      cache: KV pages; by default just enough for this call.
      chunk_size: most rows of a pass; longer prompts are read in chunks.
      stop_ids: ids that end a request; by default the model's.
      on_tokens: called after each step for each request that got tokens.

    Returns:
      The continuations with counts and times.

    Raises:
      ValueError: a prompt is empty, too long or holds an id outside the vocabulary; a size is
        below 1; the cache cannot hold the longest request, or is for longer ones than the model.
        Raised before anything compiles.
    """
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
) -> Report:
    """Continues prompts greedily, one by one and token by token: the oracle of `generate`.

    Args, Returns, Raises: as `generate`.
    """
    prompts = list(prompts)
    limits = scheduling.limits(model, prompts, max_tokens, 1, cache, chunk_size)
    stops = frozenset(model.stop_ids if stop_ids is None else stop_ids)
    report = Report([], SpecDecodingStats.new(1))
    kv = _target_cache(model, limits)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        tokens, computed = list(prompt), 0
        end = min(len(prompt) + max_tokens, limits.max_model_len)
        pages = range(math.ceil(end / limits.page_size))
        while len(tokens) < end and (len(tokens) == len(prompt) or tokens[-1] not in stops):
            begin = time.perf_counter()
            chunk = tokens[computed : computed + (1 if computed == len(tokens) - 1 else chunk_size)]
            scheduled = scheduling.pack(
                [Rows(0, chunk, computed, 0, pages)],
                num_rows=1 if len(chunk) == 1 else chunk_size,
                num_requests=1,
                pages_per_request=limits.pages_per_request,
            )
            verified, _, kv = target_step(
                model.config, model.params, kv, jax.device_put(scheduled), width=1
            )
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


class Engine:
    """Decodes a list of prompts: admits what fits, steps, releases what ends.

    Args, Raises: as `generate`.
    """

    def __init__(
        self,
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
    ):
        proposer = proposers.of(config)
        self.on_host = proposer.kind == "host"
        self.hidden_layers = proposer.reads(config).hidden_layers
        prompts = list(prompts)
        limits = scheduling.limits(
            *(model, prompts, max_tokens, max_requests, cache, chunk_size),
            vocab_size=config.vocab_size,
        )
        self.model = model
        self.device = api.device_of(model.params)
        self.scheduler = Scheduler(
            prompts,
            limits,
            max_requests=max_requests,
            max_tokens=max_tokens,
            num_drafts=config.num_drafts,
            chunk_size=chunk_size,
            stop_ids=model.stop_ids if stop_ids is None else stop_ids,
        )
        with jax.default_device(self.device):
            self.state: State = api.init(config, params, cache=limits, max_requests=max_requests)
            self.cache = _target_cache(model, limits)
        self.report = Report(self.scheduler.generations, self.scheduler.stats)

    def warmup(self) -> None:
        """Compiles every shape that the loop runs, with no request in it."""
        scheduler = self.scheduler
        tokens = tuple(sorted({num_rows for num_rows, _ in scheduler.shapes}))
        api.warmup(self.state, Buckets(requests=(scheduler.max_requests,), tokens=tokens))
        for num_rows, width in scheduler.shapes:
            self._run_target(jax.device_put(scheduler.pack([], num_rows), self.device), width)

    def run(self, on_tokens: OnTokens | None = None) -> Report:
        """Steps until every prompt is done."""
        begin = time.perf_counter()
        while self.step(on_tokens):
            pass
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def step(self, on_tokens: OnTokens | None = None) -> bool:
        """Runs one pass of the target and one of the drafter; False when all prompts are done."""
        begin = time.perf_counter()
        for request in self.scheduler.admit():
            self.state = api.admit(self.state, request.slot, request.tokens)
        if not self.scheduler.running:
            return False
        rows, (num_rows, width) = self.scheduler.schedule()
        scheduled = self.scheduler.pack(rows, num_rows)
        on_device = jax.device_put(scheduled, self.device)
        verified, hidden = self._run_target(on_device, width)
        if self.on_host:
            verified = jax.device_get(verified)
            drafts = self._draft(scheduled, verified)
        else:
            drafts = self._draft(dataclasses.replace(on_device, hidden=hidden), verified)
            verified, drafts = jax.device_get((verified, drafts))  # the one read of a step
        num_tokens, ended = self.scheduler.keep(rows, verified.tokens, drafts, on_tokens)
        for slot in ended:
            self.state = api.release(self.state, slot)
        self.report.num_steps += 1
        if any(len(row.token_ids) - row.num_drafts > 1 for row in rows):
            self.report.prompt_seconds += time.perf_counter() - begin
            self.report.prompt_tokens += num_tokens
        return True

    def _run_target(self, scheduled: Scheduled, width: int) -> tuple[Verified, Array | None]:
        verified, hidden, self.cache = target_step(
            self.model.config,
            self.model.params,
            self.cache,
            scheduled,
            width=width,
            columns=self.scheduler.width,
            hidden_layers=self.hidden_layers,
        )
        return verified, hidden

    def _draft(self, scheduled: Scheduled, verified: Verified) -> Drafts:
        begin = time.perf_counter()
        self.state, drafts = api.step(self.state, scheduled, verified)
        self.report.draft_seconds += time.perf_counter() - begin
        return drafts


def _target_cache(model: Model, limits: CacheConfig) -> KVCache:
    return init_cache(
        limits,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )
