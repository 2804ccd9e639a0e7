"""The decode loop: schedule, run the target, verify, draft, with continuous batching.

Scheduling is on the host. A step runs two executables (`target_step`, `jspec.step`) and reads their
tokens once.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec import api, proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.metrics import SpecDecodingStats
from jspec.models import llama
from jspec.runtime import scheduling
from jspec.runtime.arguments import check_call, check_on_tokens
from jspec.runtime.policies import Drafting
from jspec.runtime.scheduling import Generation, OnTokens, Scheduler
from jspec.runtime.target import DraftProbs, TargetOutput, Verification, target_step, widen
from jspec.state import Drafts, Params, Scheduled, State, Verified
from jspec.verification.sampling_params import sampling_params

_MEASUREMENTS = 5
"""Timed passes of each shape during warm-up, where the policy needs latencies."""


@dataclass
class Report:
    """Continuations, counts and times of a run.

    Attributes:
      generations: one per prompt, in their order.
      stats: steps with drafts, drafted and accepted tokens, accepted by position; tokens after the
        end of a request are not counted.
      num_steps: passes of the target.
      seconds: wall clock from the first pass to the last token.
      prompt_seconds: part of `seconds` in passes that read a chunk of a prompt.
      prompt_tokens: first tokens of prompts, from those passes.
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
    def tokens_per_step(self) -> float:
        """Tokens of all requests per pass of the target; 0.0 without a pass.

        Passes without drafts count, unlike in `stats.mean_acceptance_length`.
        """
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first of each prompt, per second outside of `prompt_seconds`.

        Tokens that other requests get in passes that read a prompt count, too, so that runs of the
        same prompts compare by the time for the same tokens.
        """
        seconds = self.seconds - self.prompt_seconds
        return (self.num_tokens - self.prompt_tokens) / max(seconds, 1e-9)


class Engine:
    """Decodes a list of prompts: admits requests while there is room, steps, releases them.

    Args, Raises: as `generate`.
    """

    def __init__(
        self,
        model: Model,
        prompts: Iterable[Sequence[int]],
        config: Any,
        params: Params = None,
        *,
        drafting: Drafting | None = None,
        verification: Verification = "match",
        max_tokens: int,
        max_requests: int = 8,
        cache: CacheConfig | None = None,
        chunk_size: int = 64,
        stop_ids: Sequence[int] | None = None,
        **sampling: Any,
    ):
        proposer = proposers.of(config)
        self.on_host = proposer.kind == "host"
        reads = proposer.reads(config)
        self.hidden_layers, self.drafts_sampled = reads.hidden_layers, reads.sampling
        tree = proposer.tree(config)
        self.tree_depth = None if tree is None else tree.depth
        prompts, stops = check_call(model, prompts, cache, stop_ids)
        self.sampling = sampling_params("generate", len(prompts), **sampling)
        self.verification: Verification = verification
        _check_verification(verification, proposer.name, self.tree_depth)
        if reads.sampling and self.sampling is None:
            raise ValueError(
                f"generate: `temperature` is None, and {proposer.name} samples its drafts "
                "(draft_sampling='probabilistic'). Pass a temperature, 0 for greedy decoding, or "
                "choose draft_sampling='greedy'."
            )
        limits = scheduling.limits(
            *(model, prompts, max_tokens, max_requests, cache, chunk_size),
            vocab_size=config.vocab_size,
            num_drafts=self.tree_depth or config.num_drafts,
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
            stop_ids=stops,
            tree_depth=self.tree_depth,
            drafting=drafting,
        )
        with jax.default_device(self.device):
            self.state: State = api.init(config, params, cache=limits, max_requests=max_requests)
            # Committed like the results of steps, so that warmed steps never compile again.
            self.cache = jax.device_put(llama.init_pages(model.config, limits), self.device)
            self.draft_probs = None
            if reads.sampling and verification != "match":
                shape = (max_requests, config.num_drafts, model.config.vocab_size)
                slot = jnp.full(max_requests, PAD_SLOT, jnp.int32)
                empty = DraftProbs(jnp.zeros(shape, jnp.float32), slot)
                self.draft_probs = jax.device_put(empty, self.device)
        self.report = Report(self.scheduler.generations, self.scheduler.stats)

    def warmup(self) -> None:
        """Compiles all shapes of the loop with steps of padding; measures latencies if needed.

        The target has an executable for each number of rows, a drafter on the device one for each
        number of rows and of drafts: 4 and 4 * 3 with `Adaptive()`, 3 and 3 * 1 with "fixed".
        """
        scheduler = self.scheduler
        for num_rows, width in scheduler.shapes:
            for level in scheduler.policy.levels[:1] if self.on_host else scheduler.policy.levels:
                scheduler.num_drafts = level
                self._run(scheduler.pack([], num_rows), width)
        if not self.on_host:  # compiles both; the next request of the slot overwrites its memory
            self.state = api.release(api.admit(self.state, 0, [0]), 0)
        if not scheduler.policy.has_costs:
            self._measure()
        self.report.draft_seconds = 0.0

    def _measure(self) -> None:
        """Times steps of padding, alternating the shapes so that noise spreads over all of them.

        The minimum of each shape counts, as other work on the machine only adds latency.
        """
        scheduler = self.scheduler
        levels, shapes = scheduler.policy.levels, scheduler.shapes[:-1]
        passes, drafts = defaultdict(list), defaultdict(list)
        for _ in range(_MEASUREMENTS):
            scheduler.num_drafts = levels[0]
            for num_rows, width in shapes:
                begin = time.perf_counter()
                self._run(scheduler.pack([], num_rows), width)
                passes[num_rows].append(time.perf_counter() - begin)
            for level in levels:
                scheduler.num_drafts = level
                # A host drafter has the same latency for fewer drafts: it truncates.
                drafts[level].append(0.0 if self.on_host else self._time_drafter())
        least = {level: min(seconds) for level, seconds in drafts.items()}
        extra = {level: max(0.0, seconds - least[levels[0]]) for level, seconds in least.items()}
        scheduler.policy.take_costs({n: min(seconds) for n, seconds in passes.items()}, extra)

    def _time_drafter(self) -> float:
        num_rows, width = self.scheduler.shapes[0]
        scheduled = self._with_sampling(self.scheduler.pack([], num_rows))
        verified, ran = jax.block_until_ready(self._run_target(scheduled, width))
        begin = time.perf_counter()
        self._draft(ran.join(scheduled, sampling=self.drafts_sampled), verified)
        jax.block_until_ready(self.state.memory)
        return time.perf_counter() - begin

    def run(self, on_tokens: OnTokens | None = None) -> Report:
        """Steps until every prompt is done."""
        check_on_tokens(on_tokens)
        if not self.scheduler.policy.has_costs:
            self.warmup()
        begin = time.perf_counter()
        while self.step(on_tokens):
            pass
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def step(self, on_tokens: OnTokens | None = None) -> bool:
        """Runs one pass of the target and one of the drafter; False when all prompts are done."""
        if not self.scheduler.policy.has_costs:
            self.warmup()
        begin = time.perf_counter()
        for request in self.scheduler.admit():
            self.state = api.admit(self.state, request.slot, request.tokens)
        if not self.scheduler.running:
            return False
        rows, (num_rows, width) = self.scheduler.schedule()
        has_prompt = any(row.reads_prompt for row in rows)
        verified, drafts = self._run(self.scheduler.pack(rows, num_rows), width)
        if not has_prompt:
            seconds = time.perf_counter() - begin
            self.scheduler.policy.clock(num_rows, self.scheduler.num_drafts, seconds)
        ended = self.scheduler.keep(rows, verified.tokens, drafts, on_tokens)
        for slot in ended:
            self.state = api.release(self.state, slot)
        self.report.num_steps += 1
        if has_prompt:
            self.report.prompt_seconds += time.perf_counter() - begin
            ended_prompts = [row.reads_prompt and row.backup == PAD_TOKEN for row in rows]
            self.report.prompt_tokens += sum(ended_prompts)
        return True

    def _run(self, scheduled: Scheduled, width: int) -> tuple[Verified, Drafts]:
        """Runs the target, then the drafter; fetches both results to the host."""
        scheduled = self._with_sampling(scheduled)
        verified, ran = self._run_target(scheduled, width)
        if self.on_host:
            verified = Verified(tokens=np.asarray(verified.tokens))  # a pytree takes longer to get
            return verified, self._draft(scheduled, verified)
        drafts = self._draft(ran.join(scheduled, sampling=self.drafts_sampled), verified)
        if self.draft_probs is not None:
            probs = widen(drafts.probs, self.state.config.num_drafts)
            self.draft_probs = DraftProbs(
                probs, jax.device_put(scheduled.request_slot, self.device)
            )
        drafts = dataclasses.replace(drafts, probs=None)
        return jax.device_get((verified, drafts))  # the one read of a step

    def _with_sampling(self, scheduled: Scheduled) -> Scheduled:
        """Adds the sampling parameters of the step's requests."""
        if self.sampling is None:
            return scheduled
        slots = scheduled.request_slot[scheduled.request_slot != PAD_SLOT]
        running = self.scheduler.running
        return self.sampling.join(scheduled, [running[int(s)].index for s in slots])

    def _run_target(self, scheduled: Scheduled, width: int) -> tuple[Verified, TargetOutput]:
        verified, ran, self.cache = target_step(
            self.model.config,
            self.model.params,
            self.cache,
            scheduled,
            width=width,
            columns=self.scheduler.width,
            hidden_layers=self.hidden_layers,
            tree_depth=self.tree_depth,
            verification=self.verification,
            draft_probs=self.draft_probs,
        )
        return verified, ran

    def _draft(self, scheduled: Scheduled, verified: Verified) -> Drafts:
        begin = time.perf_counter()
        self.state, drafts = api.step_checked(
            self.state, scheduled, verified, num_drafts=self.scheduler.num_drafts
        )
        self.report.draft_seconds += time.perf_counter() - begin
        return drafts


def _check_verification(verification: str, method: str, tree_depth: int | None) -> None:
    choices = get_args(Verification)
    if verification not in choices:
        raise ValueError(
            f"generate: `verification` is {verification!r}, wanted one of {', '.join(choices)}."
        )
    if tree_depth is not None and verification != "match":
        raise ValueError(
            f"generate: `verification` is {verification!r}, and {method} drafts trees, which are "
            "verified by 'match' alone. Choose that, or a drafter with tree=None."
        )
