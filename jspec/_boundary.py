"""Validation of a step before anything compiles, and placement of its arrays on one device."""

import dataclasses
import operator
from itertools import pairwise
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jspec import metadata, proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.config import Buckets
from jspec.state import Batch, Scheduled, State, Verified

_Step = TypeVar("_Step", bound=Scheduled)
_OnHost = TypeVar("_OnHost", Scheduled, Batch, Verified)

HOST_ONLY = (
    "{name} drafts on the host and cannot be traced. Call jspec.step or jspec.propose outside of "
    "jit, or take a device drafter (for n-gram: method 'ngram_gpu')."
)


def to_host(step: _OnHost, config: Any) -> _OnHost:
    """Copies a step to the host; inside jit it says that the drafter cannot be traced.

    The fields are looked at one by one: flattening a pytree takes ten times as long.
    """
    fields = vars(step).values()
    if all(field is None or type(field) is np.ndarray for field in fields):
        return step
    if any(isinstance(field, Tracer) for field in fields):
        raise TypeError(HOST_ONLY.format(name=proposers.of(config).name))
    return jax.tree.map(np.asarray, step)


def device_of(tree: Any) -> Any:
    """Returns the device of the first JAX array of a pytree, the first one where there is none."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return next(iter(leaf.devices()))
    return jax.devices()[0]


def commit(tree, device):
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


def check_num_drafts(owner: str, config: Any, num_drafts: int | None) -> int:
    """Returns how many drafts a call asks for, or raises a ValueError."""
    most = config.num_drafts
    if num_drafts is None:
        return most
    if isinstance(num_drafts, bool) or num_drafts not in range(most + 1):
        raise ValueError(
            f"{owner}: `num_drafts` is {num_drafts!r}, wanted an int from 0 to {most}. "
            "Make the state with a larger num_drafts to draft more."
        )
    return int(num_drafts)


def all_num_drafts(config: Any, buckets: Buckets) -> list[int]:
    """Lists the numbers of drafts that calls will ask for."""
    counts = {check_num_drafts("Buckets", config, count) for count in buckets.num_drafts}
    return sorted(counts | {config.num_drafts})


def check_buckets(state: State, buckets: Buckets) -> None:
    """Refuses what is no Buckets, and a batch size that is never needed."""
    if not isinstance(buckets, Buckets):
        raise TypeError(
            f"warmup: `buckets` is a {type(buckets).__name__}, wanted a Buckets. Pass "
            "jspec.Buckets(requests=..., tokens=...)."
        )
    useless = [b for a, b in pairwise(buckets.requests) if a >= state.max_requests]
    if useless:
        raise ValueError(
            f"warmup: `requests` of the buckets is {buckets.requests}, and no step has more than "
            f"max_requests = {state.max_requests}. Leave {useless[-1]} out, or raise max_requests "
            "in jspec.init."
        )


def what_is_read(owner: str, config: Any, scheduled: _Step) -> _Step:
    """Raises unless a step has what the drafter reads; drops what only verification reads.

    An unused input would make another executable.
    """
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
    unread = ["top_k", "top_p", "min_p", "draft_parents"]
    unread += [] if reads.hidden_layers else ["hidden"]
    unread += [] if reads.sampling else ["temperature", "seed"]
    given: dict[str, Any] = {x: None for x in unread if getattr(scheduled, x) is not None}
    return dataclasses.replace(scheduled, **given) if given else scheduled


def check_batch(owner: str, config: Any, batch: Batch) -> Batch:
    """Returns what a drafter reads of a prepared step, or raises a TypeError or ValueError."""
    if not isinstance(batch, Batch):
        raise TypeError(
            f"{owner}: `batch` is a {type(batch).__name__}, wanted a Batch. Call "
            "jspec.prepare(scheduled, verified) first, or jspec.step for both."
        )
    metadata.check_scheduled(batch)
    return what_is_read(owner, config, batch)


def check_slots(owner: str, state: State, scheduled: Scheduled, *, has_rows: bool) -> None:
    """Raises ValueError, naming the request, unless each has a memory row of its own.

    Looks at numpy arrays alone: values on a device are not waited for.

    Args:
      owner: the function that was called, for messages.
      state: whose memory it is.
      scheduled: the step.
      has_rows: the drafter keeps a row for each request; others do not ask who was admitted.
    """
    slots = scheduled.request_slot
    if not isinstance(slots, np.ndarray):
        return
    given = [slot for slot in slots.tolist() if slot >= 0]
    if len(set(given)) == len(given):
        if state.occupied.issuperset(given):
            return
        if not has_rows and max(given) < state.max_requests:
            return
    if not isinstance(scheduled.query_start, np.ndarray):
        return  # some of them may be padding
    seen: dict[int, int] = {}
    for b in np.flatnonzero((np.diff(scheduled.query_start) > 0) & (slots >= 0)).tolist():
        slot = int(slots[b])
        if slot >= state.max_requests:
            raise ValueError(
                f"{owner}: `request_slot` of request {b} is {slot}, wanted 0 to "
                f"{state.max_requests - 1} (max_requests of jspec.init), or -1 for padding."
            )
        if has_rows and slot not in state.occupied:
            raise ValueError(
                f"{owner}: `request_slot` of request {b} is {slot}, which no request holds; taken "
                f"now: {sorted(state.occupied) or 'none'}. Call jspec.admit(state, {slot}, prompt) "
                "first."
            )
        if slot in seen:
            raise ValueError(
                f"{owner}: `request_slot` is {slot} for request {seen[slot]} and for request {b}. "
                "Admit each request to a slot of its own."
            )
        seen[slot] = b


def check_slot(owner: str, slot: int) -> int:
    """Returns a slot as int, or raises a TypeError."""
    try:
        if not isinstance(slot, bool):
            return operator.index(slot)
    except TypeError:
        pass
    raise TypeError(f"{owner}: `slot` is {slot!r}, wanted an int. Pass int(slot).")


def check_alive(state: State, owner: str) -> bool:
    """Refuses what is no state, and a state that was consumed; tells whether it is traced."""
    if not isinstance(state, State):
        raise TypeError(
            f"{owner}: `state` is a {type(state).__name__}, wanted a State. Make one with "
            "jspec.init."
        )
    for leaf in jax.tree.leaves(state.memory):
        if isinstance(leaf, Tracer):
            return True
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise RuntimeError(
                    f"{owner}: this state was consumed by an earlier call. Use the state that "
                    "admit, propose, step or release returned."
                )
            return False
    return False


def _hidden_dtype(state: State, buckets: Buckets) -> Any:
    """Returns the dtype of hidden states: `hidden_dtype`, else that of weights, else of KV."""
    if buckets.hidden_dtype is not None:
        return jax.numpy.dtype(buckets.hidden_dtype)
    floats = [
        leaf.dtype
        for leaf in jax.tree.leaves(state.params)
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    ]
    return floats[0] if floats else state.cache.dtype


def empty_step(num_rows: int, num_requests: int, pages_per_request: int) -> Scheduled:
    """Returns a step of padding alone, in arrays on the host."""
    return Scheduled(
        token_ids=full(0, num_rows),
        positions=full(0, num_rows),
        query_start=full(0, num_requests + 1),
        seq_lens=full(0, num_requests),
        block_table=full(PAD_SLOT, num_requests, pages_per_request),
        num_drafts=full(0, num_requests),
        request_slot=full(PAD_SLOT, num_requests),
        backup_token=full(PAD_TOKEN, num_requests),
        discard=np.ones(num_requests, bool),
    )


def full(value: int, *shape: int) -> np.ndarray:
    """Returns an int32 array on the host."""
    return np.full(shape, value, np.int32)


def examples(
    state: State, buckets: Buckets, num_requests: int, num_rows: int
) -> list[tuple[Scheduled, Verified]]:
    """Returns steps of padding in all forms that real ones have in a bucket."""
    scheduled = empty_step(num_rows, num_requests, state.cache.pages_per_request)
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
