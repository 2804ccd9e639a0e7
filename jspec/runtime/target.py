"""The target's pass over a step: logits, verification, and the drafter's inputs."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import metadata
from jspec.axes import PAD_TOKEN
from jspec.models import llama
from jspec.models.kv_cache import KVCache, keep_nodes, with_nodes
from jspec.state import PagedView, Params, Scheduled, Verified
from jspec.verification import greedy, rejection, sampling

Verification: TypeAlias = Literal["match", "rejection", "block"]
"""How drafts are verified where tokens are sampled: by exact match with the target's own sample, by
rejection sampling of each draft, or of the block (see `jspec.verification.rejection`)."""


class TargetOutput(NamedTuple):
    """Inputs of the drafter from a pass of the target.

    Attributes:
      hidden: [T, len(hidden_layers) * D]; None without `hidden_layers`.
      token_ids: where drafts were trees: the rows with the accepted nodes as a chain.
      draft_seed: seeds of the next drafts, where these differ from the requests'.
    """

    hidden: Float[Array, "T Dh"] | None
    token_ids: Int[Array, "T"] | None = None
    draft_seed: Int[Array, "B"] | None = None

    def join(self, scheduled: Scheduled, *, sampling: bool) -> Scheduled:
        """Returns the step for the drafter, with the accepted path of a tree as a chain.

        Args:
          scheduled: the target's step.
          sampling: the drafter reads temperatures and seeds.
        """
        seed = scheduled.seed if self.draft_seed is None else self.draft_seed
        return dataclasses.replace(
            scheduled,
            token_ids=scheduled.token_ids if self.token_ids is None else self.token_ids,
            hidden=self.hidden,
            draft_parents=None,
            temperature=scheduled.temperature if sampling else None,
            seed=seed if sampling else None,
            **dict.fromkeys(("top_k", "top_p", "min_p")),
        )


class DraftProbs(NamedTuple):
    """Distributions that the drafts of a step were sampled from, on the device.

    Attributes:
      probs: over the target's vocabulary.
      slot: `request_slot` of the step that made the drafts, as rows of requests change.
    """

    probs: Float[Array, "B K V"]
    slot: Int[Array, "B"]


@functools.partial(
    jax.jit,
    static_argnames=(
        *("config", "width", "columns", "hidden_layers", "tree_depth", "verification"),
    ),
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
    tree_depth: int | None = None,
    verification: Verification = "match",
    draft_probs: DraftProbs | None = None,
) -> tuple[Verified, TargetOutput, KVCache]:
    """Runs the target over a step's rows and verifies its drafts: one executable.

    The target's token is the argmax, or where the step has temperatures a sample that is a function
    of seed and position. So the kept tokens are those of decoding with these seeds without drafts;
    with another `verification` than "match" they have the same distribution, and more drafts are
    kept.

    Args:
      config: the target's ModelConfig.
      params: the target's weights.
      cache: donated.
      scheduled: the rows; a request's last `num_drafts` rows are its drafts.
      width: logits rows per request, at least 1 + the most drafts of any request in this step.
      columns: width of the result (W), by default `width`; the same for all steps, it saves the
        drafter an executable for steps without drafts.
      hidden_layers: hidden states to return; see `jspec.models.llama.forward`.
      tree_depth: where drafts are trees: most tokens from the root to a node.
      verification: for steps that have temperatures; of trees "match".
      draft_probs: of the step before, where its drafts were sampled; without them drafts are
        verified as functions of the context, which is lossless, too, but keeps fewer.

    Returns:
      (verified [B, W], output, cache).
    """
    view = metadata.paged_view(
        scheduled, page_size=cache.page_size, max_model_len=cache.max_model_len
    )
    parents = scheduled.draft_parents if width > 1 else None
    page_slots = view.slots
    if parents is not None:
        assert tree_depth is not None
        view = metadata.tree_view(view, scheduled, depth=tree_depth)
        cache = with_nodes(cache, *parents.shape)
    num_rows = scheduled.token_ids.shape[0]
    column = jnp.arange(width, dtype=jnp.int32)[None]  # [1, W]
    rows = (scheduled.query_start[1:] - 1 - scheduled.num_drafts)[:, None] + column  # [B, W]
    rows = jnp.clip(rows, 0, num_rows - 1)  # columns past num_drafts are never kept
    scores_each_once = num_rows < rows.size  # a row may be in several columns of `rows`
    logits, hidden, cache = llama.forward(
        config,
        params,
        scheduled.token_ids,
        view,
        cache,
        logit_rows=jnp.arange(num_rows) if scores_each_once else rows.reshape(-1),
        hidden_layers=hidden_layers,
    )
    if scores_each_once:
        logits = logits.at[rows.reshape(-1)].get(mode="clip")  # [T, V] -> [B * W, V]
    logits = _constrain(logits, scheduled, width)
    drafts = scheduled.token_ids.at[rows[:, 1:]].get(mode="fill", fill_value=PAD_TOKEN)
    output = TargetOutput(hidden)
    if parents is not None and tree_depth is not None:
        count = scheduled.num_drafts
        chosen = _choose(logits, scheduled, view, rows)  # [B, W]
        verified, path, accepted = greedy.tree(chosen, drafts, parents, count, depth=tree_depth)
        after = rows[:, 1 : tree_depth + 1]  # rows at the positions that accepted nodes get
        cache = keep_nodes(cache, path, page_slots.at[after].get(mode="clip"))
        output = TargetOutput(*metadata.path_as_chain(scheduled, hidden, path, accepted))
    elif scheduled.temperature is not None and verification != "match":
        verified, draft_seed = _rejection_sampling(
            verification, logits, drafts, scheduled, _next_positions(view, rows)[:, 0], draft_probs
        )
        output = TargetOutput(hidden, draft_seed=draft_seed)
    else:
        chosen = _choose(logits, scheduled, view, rows)  # [B, W]
        verified, _ = greedy.chain(chosen, drafts, scheduled.num_drafts)
    missing = ((0, 0), (0, (columns or width) - verified.tokens.shape[1]))
    tokens = jnp.pad(verified.tokens, missing, constant_values=PAD_TOKEN)
    return Verified(tokens=tokens), output, cache


def _choose(
    logits: Float[Array, "R V"], scheduled: Scheduled, view: PagedView, rows: Int[Array, "B W"]
) -> Int[Array, "B W"]:
    """Returns the target's token after each row: the argmax, or a sample."""
    if scheduled.temperature is None or scheduled.seed is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(rows.shape)
    temperature, seed = (
        jnp.repeat(x, rows.shape[1]) for x in (scheduled.temperature, scheduled.seed)
    )
    position = _next_positions(view, rows).reshape(-1)
    drawn = sampling.draw(logits, temperature, seed, position, stream=rejection.TARGET_STREAM)
    return drawn.reshape(rows.shape)


def _next_positions(view: PagedView, rows: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """Returns the position of the token after each row."""
    return view.positions.at[rows].get(mode="clip") + 1


def _constrain(logits: Float[Array, "R V"], scheduled: Scheduled, width: int) -> Array:
    """Masks tokens that top-k, top-p or min-p excludes."""
    constraints = (scheduled.top_k, scheduled.top_p, scheduled.min_p)
    if all(x is None for x in constraints):
        return logits
    numbers = (
        None if x is None else jnp.repeat(x, width) for x in (scheduled.temperature, *constraints)
    )
    return sampling.constrain(logits, *numbers)


def _rejection_sampling(
    method: Literal["rejection", "block"],
    logits: Float[Array, "R V"],
    drafts: Int[Array, "B K"],
    scheduled: Scheduled,
    position: Int[Array, "B"],
    draft_probs: DraftProbs | None,
) -> tuple[Verified, Int[Array, "B"] | None]:
    """Verifies drafts by rejection sampling; also returns the seeds of the next drafts, or None."""
    B, K = drafts.shape
    logits = logits.reshape(B, K + 1, -1)
    probs = None
    if draft_probs is not None:
        slot = scheduled.request_slot[:, None]
        is_same = (slot == draft_probs.slot[None]) & (slot >= 0)  # [B, B of the step before]
        row = jnp.argmax(is_same, axis=1)
        probs = draft_probs.probs[:, :K].at[row].get(mode="clip")
        one_hot = jax.nn.one_hot(drafts, logits.shape[2], dtype=probs.dtype)
        probs = jnp.where(is_same.any(axis=1)[:, None, None], probs, one_hot)
    assert scheduled.temperature is not None and scheduled.seed is not None
    verified, _ = rejection.sampled(
        *(method, logits, drafts, scheduled.num_drafts),
        temperature=scheduled.temperature,
        seed=scheduled.seed,
        position=position,
        probs=probs,
    )
    if method == "rejection" or draft_probs is None:
        return verified, None
    return verified, rejection.draft_seed(scheduled.seed, position)


@functools.partial(jax.jit, static_argnums=1)
def widen(probs: Float[Array, "B K V"], num_drafts: int) -> Float[Array, "B K2 V"]:
    """Pads the drafts' axis, so that the target's executables are the same for all draft counts."""
    return jnp.pad(probs, ((0, 0), (0, num_drafts - probs.shape[1]), (0, 0)))
