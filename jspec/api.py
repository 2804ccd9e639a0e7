"""The jit boundary: what a serving loop calls.

`init`, `admit`, `propose` (or `prepare` and `propose` in one: `step`), `release`. Each returns a
new `State`; the memory of the old one is consumed. Params are never donated.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jspec import _warmed, metadata, proposers
from jspec._boundary import (
    HOST_ONLY,
    all_num_drafts,
    check_alive,
    check_batch,
    check_buckets,
    check_num_drafts,
    check_slot,
    check_slots,
    commit,
    device_of,
    examples,
    to_host,
    what_is_read,
)
from jspec._checks import check_at_least
from jspec.axes import PAD_TOKEN
from jspec.config import Buckets, CacheConfig
from jspec.metadata.prepare import prepare_checked
from jspec.proposers.fitting import check_memory, check_params, check_shapes
from jspec.state import Batch, Drafts, Memory, Params, Scheduled, State, Verified


def init(
    config: Any,
    params: Params = None,
    *,
    cache: CacheConfig,
    max_requests: int,
) -> State:
    """Makes the state of a drafter.

    Args:
      config: a proposer's config, for example `NgramConfig(num_drafts=5)`.
      params: the drafter's weights; None for drafters without.
      cache: limits of the KV cache and of the longest request.
      max_requests: requests that may be admitted at the same time.

    Returns:
      A state whose arrays are committed to a device, so that warmed calls never compile again.

    Raises:
      TypeError: config belongs to no registered proposer, cache is no CacheConfig, or params are
        no nested dict of arrays.
      ValueError: max_requests < 1, or params do not fit the config (all that is wrong is listed).

    Example:
      >>> import jspec
      >>> cache = jspec.CacheConfig(num_pages=8, max_model_len=64)
      >>> state = jspec.init(jspec.NgramConfig(num_drafts=3), cache=cache, max_requests=2)
      >>> state = jspec.admit(state, 0, [1, 2, 9, 1, 2])
    """
    proposer = proposers.of(config)
    if not isinstance(cache, CacheConfig):
        raise TypeError(
            f"init: `cache` is {cache!r}, wanted a CacheConfig. Pass "
            "jspec.CacheConfig(num_pages=..., max_model_len=...)."
        )
    check_at_least("init", 1, max_requests=max_requests)
    check_params("init", config, params)
    memory = proposer.init(config, params, cache, max_requests)
    if proposer.kind == "device":
        device = device_of((params, memory))
        params, memory = commit(params, device), commit(memory, device)
    return State(
        config=config,
        cache=cache,
        max_requests=max_requests,
        occupied=frozenset(),
        params=params,
        memory=memory,
    )


def admit(state: State, slot: int, prompt_tokens: Sequence[int] | np.ndarray) -> State:
    """Gives a request its memory row.

    Args:
      state: consumed.
      slot: free row, 0..max_requests-1; the request's `request_slot` until `release`.
      prompt_tokens: the whole prompt, a prefix-cached part included.

    Returns:
      The new state.

    Raises:
      TypeError: the slot is no int. ValueError: the slot is taken or out of range, the prompt is
        empty or longer than `max_model_len`, or a token is outside the vocabulary. The state is
        then unchanged.
    """
    check_alive(state, "admit")
    slot = check_slot("admit", slot)
    if not 0 <= slot < state.max_requests:
        raise ValueError(
            f"admit: `slot` is {slot}, wanted 0..{state.max_requests - 1}. "
            "Raise max_requests in jspec.init, or release a request first."
        )
    if slot in state.occupied:
        free = sorted(set(range(state.max_requests)) - state.occupied)
        raise ValueError(
            f"admit: slot {slot} is taken. Call jspec.release(state, {slot}) when its request "
            f"leaves; free now: {free or 'none'}."
        )
    tokens = metadata.check_prompt(
        "admit",
        prompt_tokens,
        max_len=state.cache.max_model_len,
        vocab_size=state.config.vocab_size,
    )
    proposer = proposers.of(state.config)
    memory = state.memory
    if proposer.admit is not None and proposer.kind == "host":
        memory = proposer.admit(state.config, memory, slot, tokens, len(tokens))
    elif proposer.admit is not None:
        padded = np.full(state.cache.max_model_len, PAD_TOKEN, np.int32)
        padded[: len(tokens)] = tokens
        arguments = (np.int32(slot), padded, np.int32(len(tokens)))
        memory = _admit(state.config, memory, *commit(arguments, device_of(memory)))
    return dataclasses.replace(state, memory=memory, occupied=state.occupied | {slot})


def release(state: State, slot: int) -> State:
    """Takes a request's memory row back.

    Args:
      state: consumed.
      slot: the row that `admit` gave.

    Raises:
      TypeError: the slot is no int. ValueError: no request holds it.
    """
    check_alive(state, "release")
    slot = check_slot("release", slot)
    if slot not in state.occupied:
        raise ValueError(
            f"release: slot {slot} holds no request. Taken now: {sorted(state.occupied) or 'none'}."
        )
    proposer = proposers.of(state.config)
    memory = state.memory
    if proposer.release is not None and proposer.kind == "host":
        memory = proposer.release(state.config, memory, slot)
    elif proposer.release is not None:
        memory = _release(state.config, memory, commit(np.int32(slot), device_of(memory)))
    return dataclasses.replace(state, memory=memory, occupied=state.occupied - {slot})


def prepare(scheduled: Scheduled, verified: Verified, *, vocab_size: int | None = None) -> Batch:
    """Joins what the target ran with what the verifier kept; see `jspec.metadata.prepare`.

    Numpy arrays that contradict each other are refused by name.
    """
    metadata.check_scheduled(scheduled)
    metadata.check_verified(verified, scheduled)
    metadata.check_counts("prepare", scheduled)
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((scheduled, verified))):
        scheduled, verified = commit((scheduled, verified), device_of((scheduled, verified)))
        return _prepare(scheduled, verified, vocab_size=vocab_size)
    return metadata.prepare(scheduled, verified, vocab_size=vocab_size)


def propose(state: State, batch: Batch, *, num_drafts: int | None = None) -> tuple[State, Drafts]:
    """Drafts the next tokens of each request.

    Args:
      state: consumed.
      batch: from `prepare`.
      num_drafts: columns of the result, 0..config.num_drafts, by default all; 0 only records the
        step. Each value is an executable of its own; see `Buckets.num_drafts`.

    Returns:
      (state, drafts). Device drafters return JAX arrays without waiting for them; host drafters
      return numpy arrays.

    Raises:
      TypeError, ValueError: a field of the batch does not fit; RuntimeError: the state was
        consumed before.
    """
    is_traced = check_alive(state, "propose")
    num_drafts = check_num_drafts("propose", state.config, num_drafts)
    batch = check_batch("propose", state.config, batch)
    proposer = proposers.of(state.config)
    is_on_host = proposer.kind == "host"
    batch = to_host(batch, state.config) if is_on_host else batch
    metadata.check_counts("propose", batch)
    check_slots("propose", state, batch, has_rows=proposer.admit is not None)
    if is_on_host:
        return _propose_on_host(state, batch, num_drafts)
    batch = commit(batch, device_of(state.memory))
    is_traced = is_traced or isinstance(batch.token_ids, Tracer)
    memory, drafts = _warmed.call(state, is_traced, _propose, batch, num_drafts=num_drafts)
    return dataclasses.replace(state, memory=memory), drafts


def step(
    state: State, scheduled: Scheduled, verified: Verified, *, num_drafts: int | None = None
) -> tuple[State, Drafts]:
    """Runs `prepare` and `propose` as one executable: what a serving loop calls.

    Args:
      state: consumed.
      scheduled: what the target just ran.
      verified: what the verifier kept of it.
      num_drafts: as `propose`.

    Returns:
      (state, drafts), as `propose`.

    Raises: as `propose`.
    """
    is_traced = check_alive(state, "step")
    metadata.check_scheduled(scheduled)
    metadata.check_verified(verified, scheduled)
    num_drafts = check_num_drafts("step", state.config, num_drafts)
    scheduled = what_is_read("step", state.config, scheduled)
    proposer = proposers.of(state.config)
    is_on_host = proposer.kind == "host"
    if is_on_host:
        scheduled, verified = to_host(scheduled, state.config), to_host(verified, state.config)
    metadata.check_counts("step", scheduled)
    check_slots("step", state, scheduled, has_rows=proposer.admit is not None)
    if is_on_host:
        return step_checked(state, scheduled, verified, num_drafts=num_drafts)
    arguments = commit((scheduled, verified), device_of(state.memory))
    is_traced = is_traced or isinstance(arguments[0].token_ids, Tracer)
    memory, drafts = _warmed.call(state, is_traced, _step, *arguments, num_drafts=num_drafts)
    return dataclasses.replace(state, memory=memory), drafts


def step_checked(
    state: State, scheduled: Scheduled, verified: Verified, *, num_drafts: int
) -> tuple[State, Drafts]:
    """Is `step` for what is known to fit, has what the drafter reads and no more.

    A loop that runs it has its shapes compiled as it calls them: numpy arrays are not committed to
    a device first, which takes longer than the call.
    """
    if proposers.of(state.config).kind == "host":
        batch = prepare_checked(scheduled, verified, vocab_size=state.config.vocab_size)
        return _propose_on_host(state, batch, num_drafts)
    arguments = (state.config, state.params, state.memory, scheduled, verified)
    memory, drafts = _step(*arguments, num_drafts=num_drafts)
    return dataclasses.replace(state, memory=memory), drafts


def pure(
    config: Any, *, num_drafts: int | None = None
) -> Callable[[Params, Memory, Batch], tuple[Memory, Drafts]]:
    """Returns `propose(params, memory, batch) -> (memory, drafts)` for use inside your own jit.

    Donate `memory` there, and pass `params` as an argument: a whole `State` through an outer jit
    would copy the params or, donated, delete weights that the target shares.

    The function checks types and shapes of its arguments while it is traced, so compiled steps pay
    nothing. Values are not known then: where a table of token ids (`target_ids`) leads out of the
    vocabulary, which `init` refuses, drafts end.

    Args:
      config: a device drafter's.
      num_drafts: as `propose`.

    Raises:
      TypeError: the drafter runs on the host; in a call of the function, an argument of another
        type, such as a State in the place of its memory.
      ValueError: `num_drafts` is out of range; in a call of the function, params or memory of
        another config, a batch that `prepare` did not make, or one without what the drafter reads.
    """
    proposer = proposers.of(config)
    if proposer.kind == "host":
        raise TypeError(HOST_ONLY.format(name=proposer.name))
    num_drafts = check_num_drafts("pure", config, num_drafts)

    def propose(params: Params, memory: Memory, batch: Batch) -> tuple[Memory, Drafts]:
        batch = check_batch("pure", config, batch)
        return _draft("pure", config, params, memory, batch, num_drafts)

    return propose


def warmup(state: State, buckets: Buckets, *, strict: bool = False) -> None:
    """Compiles every bucket, so that no later call with one of these shapes compiles.

    Touches neither memory nor params: the state stays as it was. A later `step` or `propose` that
    would compile, of this state or one that follows from it, is warned of once, or refused. Not so
    `prepare`, which takes no state: `propose` refuses what it returns.

    Args:
      state: as `init` returned it.
      buckets: batch sizes and token counts; the block table is `cache.pages_per_request` wide
        and `verified.tokens` is num_drafts + 1 wide.
      strict: refuse what would compile, with a ValueError that names the field. The last call of
        `warmup` decides.

    Raises:
      TypeError: `buckets` is no Buckets.
      ValueError: the buckets have what this drafter cannot do, or a size that no step needs.
    """
    check_alive(state, "warmup")
    check_buckets(state, buckets)
    columns = all_num_drafts(state.config, buckets)
    proposer = proposers.of(state.config)
    if proposer.kind == "host":
        for num_requests, num_rows in buckets.pairs()[:1]:  # numba compiles once for all shapes
            scratch = proposer.init(state.config, state.params, state.cache, num_requests)
            scheduled, verified = examples(state, buckets, num_requests, num_rows)[0]
            batch = metadata.prepare(scheduled, verified, vocab_size=state.config.vocab_size)
            proposers.propose(state.config, state.params, scratch, batch)
        return
    sharding = jax.sharding.SingleDeviceSharding(device_of(state.memory))

    def abstract(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=x.sharding if isinstance(x, jax.Array) else sharding
            ),
            tree,
        )

    params, memory = abstract((state.params, state.memory))
    slot, row = abstract((np.int32(0), np.zeros(state.cache.max_model_len, np.int32)))
    steps = [x for pair in buckets.pairs() for x in examples(state, buckets, *pair)]
    if proposer.admit is not None:
        _admit.lower(state.config, memory, slot, row, slot).compile()
    if proposer.release is not None:
        _release.lower(state.config, memory, slot).compile()
    for scheduled, verified in map(abstract, steps):
        batch = jax.eval_shape(_prepare, scheduled, verified)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch
        )
        for vocab_size in {None, state.config.vocab_size}:
            _prepare.lower(scheduled, verified, vocab_size=vocab_size).compile()
        for num_drafts in columns:
            arguments = (state.config, params, memory)
            _propose.lower(*arguments, batch, num_drafts=num_drafts).compile()
            _step.lower(*arguments, scheduled, verified, num_drafts=num_drafts).compile()
            of_batch = _warmed.forms_of(params, batch, None, num_drafts)
            of_step = _warmed.forms_of(params, scheduled, verified, num_drafts)
            _warmed.note(state, "propose", of_batch)
            _warmed.note(state, "step", of_step)
    state.warmed.strict = strict


# The jitted core. Config is static; memory alone is donated and rewritten in place.


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _admit(config, memory, slot, tokens, num_tokens):
    function = proposers.of(config).admit
    assert function is not None
    return function(config, memory, slot, tokens, num_tokens)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _release(config, memory, slot):
    function = proposers.of(config).release
    assert function is not None
    return function(config, memory, slot)


@functools.partial(jax.jit, static_argnames="vocab_size")
def _prepare(scheduled, verified, vocab_size=None):
    return metadata.prepare(scheduled, verified, vocab_size=vocab_size)


@functools.partial(jax.jit, static_argnums=0, static_argnames="num_drafts", donate_argnums=2)
def _propose(config, params, memory, batch, *, num_drafts):
    _warmed.check("propose", params, batch, None, num_drafts)
    return _draft("propose", config, params, memory, batch, num_drafts)


@functools.partial(jax.jit, static_argnums=0, static_argnames="num_drafts", donate_argnums=2)
def _step(config, params, memory, scheduled, verified, *, num_drafts):
    _warmed.check("step", params, scheduled, verified, num_drafts)
    with jax.named_scope("prepare"):
        batch = metadata.prepare(scheduled, verified, vocab_size=config.vocab_size)
    with jax.named_scope("propose"):
        return _draft("step", config, params, memory, batch, num_drafts)


def _draft(owner, config, params, memory, batch, num_drafts):
    """Checks what may be another config's, which costs a compiled step nothing, and drafts."""
    check_shapes(owner, config, params)
    check_memory(owner, config, memory)
    return proposers.propose(config, params, memory, batch, num_drafts=num_drafts)


def _propose_on_host(state: State, batch: Batch, num_drafts: int) -> tuple[State, Drafts]:
    memory, drafts = proposers.propose(
        state.config, state.params, state.memory, batch, num_drafts=num_drafts
    )
    return dataclasses.replace(state, memory=memory), drafts
