"""Greedy verification: which proposals stand, and how many tokens a round really keeps."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ready_jax.pytree import register

#: Why a row is done. 0 while it runs.
RUNNING, STOP, LENGTH, CAPACITY = 0, 1, 2, 3
FINISH_REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", CAPACITY: "capacity"}


@register
@dataclass(frozen=True)
class Verdict:
    """``num_accepted_B`` leading proposals stand; ``next_token_B`` is the target's own token after them."""

    num_accepted_B: Int[Array, "B"]
    next_token_B: Int[Array, "B"]


@register
@dataclass(frozen=True)
class Kept:
    """What a round emits: the first ``num_B`` of ``token_BT``; as many rows are consumed by the target."""

    token_BT: Int[Array, "B T"]
    num_B: Int[Array, "B"]
    finish_B: Int[Array, "B"]


def accept_greedy(
    draft_BP: Int[Array, "B P"],
    target_BT: Int[Array, "B T"],
    num_proposed_B: Int[Array, "B"] | None = None,
) -> Verdict:
    """The longest prefix of proposals equal to the target's argmax tokens (``T = P + 1`` rows, anchor first).

    ``num_proposed_B`` limits how many proposals count (None: all of them).
    """
    proposals = draft_BP.shape[1]
    if target_BT.shape[1] != proposals + 1:
        raise ValueError(f"{proposals} proposals need {proposals + 1} verified rows, found {target_BT.shape[1]}")
    right_BP = draft_BP == target_BT[:, :-1]
    if num_proposed_B is not None:
        right_BP &= jnp.arange(proposals)[None] < num_proposed_B[:, None]
    num_accepted_B = jnp.sum(jnp.cumprod(right_BP.astype(jnp.int32), axis=1), axis=1)
    next_token_B = jnp.take_along_axis(target_BT, num_accepted_B[:, None], axis=1)[:, 0]
    return Verdict(num_accepted_B, next_token_B)


def is_stop(token, stop_L: Int[Array, "L"]):
    """Whether each token is one of the stop ids (negative entries of the table are unused)."""
    table = stop_L.reshape((1,) * token.ndim + (-1,))
    return jnp.any((token[..., None] == table) & (table >= 0), axis=-1)


def committed(
    draft_BP: Int[Array, "B P"],
    verdict: Verdict,
    *,
    stop_L: Int[Array, "L"],
    budget_B: Int[Array, "B"],
    room_B: Int[Array, "B"],
    running_B: Bool[Array, "B"],
) -> Kept:
    """The one place that decides how many tokens a round keeps.

    A round offers the accepted proposals and the target's token after them. It keeps them up to and including the
    first stop token, at most ``budget_B`` (tokens still asked for) and ``room_B`` (tokens the memory still holds);
    a row that is not running keeps nothing. Kept tokens and consumed rows are equally many: the anchor's row counts
    for the last token, which stays unconsumed.
    """
    slot_T = jnp.arange(draft_BP.shape[1] + 1)[None]
    accepted_B1 = verdict.num_accepted_B[:, None]
    padded_BT = jnp.pad(draft_BP, [(0, 0), (0, 1)])
    token_BT = jnp.where(slot_T < accepted_B1, padded_BT, verdict.next_token_B[:, None])
    stops_BT = is_stop(token_BT, stop_L) & (slot_T <= accepted_B1)
    first_stop_B = jnp.where(jnp.any(stops_BT, axis=1), jnp.argmax(stops_BT, axis=1), draft_BP.shape[1] + 1)
    offered_B = jnp.minimum(verdict.num_accepted_B, first_stop_B) + 1
    num_B = jnp.where(running_B, jnp.clip(offered_B, 0, jnp.minimum(budget_B, room_B)), 0)
    stopped_B = num_B == first_stop_B + 1
    finish_B = jnp.where(stopped_B, STOP, jnp.where(num_B >= budget_B, LENGTH, jnp.where(num_B >= room_B, CAPACITY, 0)))
    return Kept(token_BT, num_B.astype(jnp.int32), finish_B.astype(jnp.int32))
