"""The jit boundary: what a serving loop calls.

`init`, `admit`, `propose` (or `prepare` and `propose` in one: `step`), `release`. Each returns a
new `State`; the memory of the old one is consumed. Params are never donated.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jspec import metadata, proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.config import Buckets, CacheConfig, check_at_least
from jspec.proposers.fitting import check_params
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
        params, memory = _commit(params, device), _commit(memory, device)
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
    _check_alive(state, "admit")
    slot = _check_slot("admit", slot)
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
        memory = _admit(state.config, memory, *_commit(arguments, device_of(memory)))
    return dataclasses.replace(state, memory=memory, occupied=state.occupied | {slot})


def release(state: State, slot: int) -> State:
    """Takes a request's memory row back.

    Args:
      state: consumed.
      slot: the row that `admit` gave.

    Raises:
      TypeError: the slot is no int. ValueError: no request holds it.
    """
    _check_alive(state, "release")
    slot = _check_slot("release", slot)
    if slot not in state.occupied:
        raise ValueError(
            f"release: slot {slot} holds no request. Taken now: {sorted(state.occupied) or 'none'}."
        )
    proposer = proposers.of(state.config)
    memory = state.memory
    if proposer.release is not None and proposer.kind == "host":
        memory = proposer.release(state.config, memory, slot)
    elif proposer.release is not None:
        memory = _release(state.config, memory, _commit(np.int32(slot), device_of(memory)))
    return dataclasses.replace(state, memory=memory, occupied=state.occupied - {slot})


def prepare(scheduled: Scheduled, verified: Verified, *, vocab_size: int | None = None) -> Batch:
    """Joins what the target ran with what the verifier kept; see `jspec.metadata.prepare`."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((scheduled, verified))):
        metadata.check_scheduled(scheduled)
        metadata.check_verified(verified, scheduled)
        scheduled, verified = _commit((scheduled, verified), device_of((scheduled, verified)))
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
    _check_alive(state, "propose")
    if not isinstance(batch, Batch):
        raise TypeError(
            f"propose: `batch` is a {type(batch).__name__}, wanted a Batch. Call "
            "jspec.prepare(scheduled, verified) first, or jspec.step for both."
        )
    metadata.check_scheduled(batch)
    num_drafts = _check_reads("propose", state.config, batch, num_drafts)
    if proposers.of(state.config).kind == "host":
        return _propose_on_host(state, _to_host(batch, state.config), num_drafts)
    batch = _commit(batch, device_of(state.memory))
    memory, drafts = _propose(
        state.config, state.params, state.memory, batch, num_drafts=num_drafts
    )
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

    Raises:
      As `propose`.
    """
    _check_alive(state, "step")
    metadata.check_scheduled(scheduled)
    metadata.check_verified(verified, scheduled)
    num_drafts = _check_reads("step", state.config, scheduled, num_drafts)
    if proposers.of(state.config).kind == "host":
        scheduled, verified = _to_host((scheduled, verified), state.config)
        batch = metadata.prepare(scheduled, verified, vocab_size=state.config.vocab_size)
        return _propose_on_host(state, batch, num_drafts)
    scheduled, verified = _commit((scheduled, verified), device_of(state.memory))
    memory, drafts = _step(
        state.config, state.params, state.memory, scheduled, verified, num_drafts=num_drafts
    )
    return dataclasses.replace(state, memory=memory), drafts


def pure(
    config: Any, *, num_drafts: int | None = None
) -> Callable[[Params, Memory, Batch], tuple[Memory, Drafts]]:
    """Returns `propose(params, memory, batch) -> (memory, drafts)` for use inside your own jit.

    Donate `memory` there, and pass `params` as an argument: a whole `State` through an outer jit
    would copy the params or, donated, delete weights that the target shares.

    Args:
      config: a device drafter's.
      num_drafts: as `propose`.

    Raises:
      TypeError: the drafter runs on the host. ValueError: `num_drafts` is out of range.
    """
    proposer = proposers.of(config)
    if proposer.kind == "host":
        raise TypeError(_HOST_ONLY.format(name=proposer.name))
    num_drafts = _check_num_drafts("pure", config, num_drafts)
    return functools.partial(proposers.propose, config, num_drafts=num_drafts)


def warmup(state: State, buckets: Buckets) -> None:
    """Compiles every bucket, so that no later call with one of these shapes compiles.

    Touches neither memory nor params: the state stays as it was.

    Args:
      state: as `init` returned it.
      buckets: batch sizes and token counts; the block table is `cache.pages_per_request` wide
        and `verified.tokens` is num_drafts + 1 wide.

    Raises:
      ValueError: the buckets have what this drafter cannot do.
    """
    _check_alive(state, "warmup")
    proposer = proposers.of(state.config)
    if proposer.kind == "host":
        for num_requests, num_rows in buckets.pairs()[:1]:  # numba compiles once for all shapes
            scratch = proposer.init(state.config, state.params, state.cache, num_requests)
            scheduled, verified = _examples(state, buckets, num_requests, num_rows)[0]
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
    if proposer.admit is not None:
        _admit.lower(state.config, memory, slot, row, slot).compile()
    if proposer.release is not None:
        _release.lower(state.config, memory, slot).compile()
    examples = (x for pair in buckets.pairs() for x in _examples(state, buckets, *pair))
    for scheduled, verified in map(abstract, examples):
        batch = jax.eval_shape(_prepare, scheduled, verified)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch
        )
        for vocab_size in {None, state.config.vocab_size}:
            _prepare.lower(scheduled, verified, vocab_size=vocab_size).compile()
        for num_drafts in _all_num_drafts(state.config, buckets):
            arguments = (state.config, params, memory)
            _propose.lower(*arguments, batch, num_drafts=num_drafts).compile()
            _step.lower(*arguments, scheduled, verified, num_drafts=num_drafts).compile()


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
    return proposers.propose(config, params, memory, batch, num_drafts=num_drafts)


@functools.partial(jax.jit, static_argnums=0, static_argnames="num_drafts", donate_argnums=2)
def _step(config, params, memory, scheduled, verified, *, num_drafts):
    with jax.named_scope("prepare"):
        batch = metadata.prepare(scheduled, verified, vocab_size=config.vocab_size)
    with jax.named_scope("propose"):
        return proposers.propose(config, params, memory, batch, num_drafts=num_drafts)


# Boundary helpers.

_HOST_ONLY = (
    "{name} drafts on the host and cannot be traced. Call jspec.step or jspec.propose outside of "
    "jit, or take a device drafter (for n-gram: method 'ngram_gpu')."
)


def _propose_on_host(state: State, batch: Batch, num_drafts: int) -> tuple[State, Drafts]:
    memory, drafts = proposers.propose(
        state.config, state.params, state.memory, batch, num_drafts=num_drafts
    )
    return dataclasses.replace(state, memory=memory), drafts


def _to_host(tree, config):
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise TypeError(_HOST_ONLY.format(name=proposers.of(config).name))
    return jax.tree.map(np.asarray, tree)


def device_of(tree: Any) -> Any:
    """Returns the device of the first JAX array of a pytree, the first one where there is none."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return next(iter(leaf.devices()))
    return jax.devices()[0]


def _commit(tree, device):
    """Puts every leaf on a device for good: one uncommitted leaf in a warmed call recompiles."""
    leaves, structure = jax.tree.flatten(tree)
    loose = [
        i
        for i, leaf in enumerate(leaves)
        if not (isinstance(leaf, Tracer) or getattr(leaf, "committed", False))
    ]
    if loose:
        for i, array in zip(loose, jax.device_put([leaves[i] for i in loose], device), strict=True):
            leaves[i] = array
        return jax.tree.unflatten(structure, leaves)
    return tree


def _check_num_drafts(owner: str, config: Any, num_drafts: int | None) -> int:
    most = config.num_drafts
    if num_drafts is None:
        return most
    if isinstance(num_drafts, bool) or num_drafts not in range(most + 1):
        raise ValueError(
            f"{owner}: `num_drafts` is {num_drafts!r}, wanted an int from 0 to {most}. "
            "Make the state with a larger num_drafts to draft more."
        )
    return int(num_drafts)


def _all_num_drafts(config: Any, buckets: Buckets) -> list[int]:
    counts = {_check_num_drafts("Buckets", config, count) for count in buckets.num_drafts}
    return sorted(counts | {config.num_drafts})


def _check_reads(owner: str, config: Any, scheduled: Scheduled, num_drafts: int | None) -> int:
    """Refuses a step without what the drafter reads of it; returns the number of drafts."""
    proposer = proposers.of(config)
    reads = proposer.reads(config)
    if reads.hidden_layers:
        got = None if scheduled.hidden is None else scheduled.hidden.shape
        if got is None or got[-1] != reads.hidden_size:
            raise ValueError(
                f"{owner}: `hidden` is {'None' if got is None else f'of shape {got}'}, wanted "
                f"[T, {reads.hidden_size}]: {proposer.name} reads the target's hidden states "
                f"{list(reads.hidden_layers)} side by side (n = after n layers). Run the target "
                "with these hidden_layers and pass the result as Scheduled.hidden."
            )
    embeds = scheduled.embeds
    if embeds is not None and reads.embeds_size not in (0, embeds.shape[-1]):
        raise ValueError(
            f"{owner}: `embeds` is of shape {embeds.shape}, wanted [T, {reads.embeds_size}]: "
            f"{proposer.name} puts them in the place of token embeddings of that width. Pass the "
            "input embeddings of the drafter, or leave embeds and embeds_mask out."
        )
    if reads.sampling and scheduled.temperature is None:
        raise ValueError(
            f"{owner}: `temperature` is None, and {proposer.name} samples its drafts "
            "(draft_sampling='probabilistic'). Pass Scheduled.temperature and seed, one a request, "
            "or choose draft_sampling='greedy'."
        )
    return _check_num_drafts(owner, config, num_drafts)


def _check_slot(owner: str, slot: int) -> int:
    try:
        if not isinstance(slot, bool):
            return operator.index(slot)
    except TypeError:
        pass
    raise TypeError(f"{owner}: `slot` is {slot!r}, wanted an int. Pass int(slot).")


def _check_alive(state: State, owner: str) -> None:
    if not isinstance(state, State):
        raise TypeError(
            f"{owner}: `state` is a {type(state).__name__}, wanted a State. Make one with "
            "jspec.init."
        )
    for leaf in jax.tree.leaves(state.memory):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            if leaf.is_deleted():
                raise RuntimeError(
                    f"{owner}: this state was consumed by an earlier call. Use the state that "
                    "admit, propose, step or release returned."
                )
            return


def _hidden_dtype(state: State, buckets: Buckets) -> Any:
    """The element type that a target's hidden states have: as told, else as weights, else as KV."""
    if buckets.hidden_dtype is not None:
        return jax.numpy.dtype(buckets.hidden_dtype)
    floats = [
        leaf.dtype
        for leaf in jax.tree.leaves(state.params)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    ]
    return floats[0] if floats else state.cache.dtype


def _examples(
    state: State, buckets: Buckets, num_requests: int, num_rows: int
) -> list[tuple[Scheduled, Verified]]:
    """Steps without live requests, of all forms that real ones have in a bucket."""

    def full(value, *shape):
        return np.full(shape, value, np.int32)

    scheduled = Scheduled(
        token_ids=full(0, num_rows),
        positions=full(0, num_rows),
        query_start=full(0, num_requests + 1),
        seq_lens=full(0, num_requests),
        block_table=full(PAD_SLOT, num_requests, state.cache.pages_per_request),
        num_drafts=full(0, num_requests),
        request_slot=full(PAD_SLOT, num_requests),
        backup_token=full(0, num_requests),
        discard=np.ones(num_requests, bool),
    )
    if buckets.axes == 3:
        positions, token_index = full(0, 3, num_rows), full(0, num_rows)
        scheduled = dataclasses.replace(scheduled, positions=positions, token_index=token_index)
    if buckets.max_drafts:
        scheduled = dataclasses.replace(scheduled, max_drafts=full(0, num_requests))
    reads = proposers.of(state.config).reads(state.config)
    if reads.hidden_layers:
        hidden = np.zeros((num_rows, reads.hidden_size), _hidden_dtype(state, buckets))
        scheduled = dataclasses.replace(scheduled, hidden=hidden)
    if reads.sampling:
        temperature = np.zeros(num_requests, np.float32)
        scheduled = dataclasses.replace(
            scheduled, temperature=temperature, seed=full(0, num_requests)
        )
    verified = Verified(tokens=full(PAD_TOKEN, num_requests, state.config.num_drafts + 1))
    if not buckets.embeds:
        return [(scheduled, verified)]
    if not reads.embeds_size:
        raise ValueError(
            f"warmup: `embeds` is True in the buckets, and {proposers.of(state.config).name} reads "
            "no input embeddings. Pass Buckets(..., embeds=False)."
        )
    embeds = np.zeros((num_rows, reads.embeds_size), _hidden_dtype(state, buckets))
    mask = np.zeros(num_rows, bool)
    with_embeds = dataclasses.replace(scheduled, embeds=embeds, embeds_mask=mask)
    return [(scheduled, verified), (with_embeds, verified)]
