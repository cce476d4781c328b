"""The decode loop: autoregressive, DSpark and ReaDy decoding are one jitted ``while_loop``.

A round reads the committed states, proposes, verifies, accepts and commits. Autoregressive decoding is the same
loop with nothing proposed. Everything a user may vary between calls (budget, stop ids, number of rounds, threshold,
how many proposals) is a runtime value: one executable per shape, streaming included.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ready_jax import collectives
from ready_jax.drafter import Draft
from ready_jax.pytree import register
from ready_jax.state import DecodeState, commit
from ready_jax.tensor_parallel import Sharded, holds_shards, on_shards
from ready_jax.verify import CAPACITY, LENGTH, RUNNING, STOP, accept_greedy, committed, is_stop


@register
@dataclass(frozen=True)
class Limits:
    """What ends a generation; all runtime values.

    ``budget_B``: new tokens asked for; ``stop_L``: stop ids (-1: unused entry); ``draft_B``: proposals that may
    count per round (0: autoregressive); ``threshold``: a proposal is cut at the first slot whose confidence is
    lower (0: never); ``draft_limit``: last position (exclusive) the drafter was made for.
    """

    budget_B: Int[Array, "B"]
    stop_L: Int[Array, "L"]
    draft_B: Int[Array, "B"]
    threshold: Float[Array, ""]
    draft_limit: Int[Array, ""]


@register
@dataclass(frozen=True)
class Decoding:
    """A generation in progress: what a loop carries and returns.

    ``token_BN`` holds the emitted tokens; the newest, ``anchor_B``, is emitted but not consumed: the memory holds
    prompt + emitted - 1 tokens. Per round ``r < num_rounds_B``: ``proposed_BN``, ``accepted_BN`` (proposals that were
    emitted) and ``emitted_BN`` (with the target's own token). ``finish_B``: see ``verify.FINISH_REASONS``.
    ``logits_BNV``: the target's logits behind every emitted token, when asked for.
    """

    state: DecodeState
    context: object
    anchor_B: Int[Array, "B"]
    token_BN: Int[Array, "B N"]
    num_emitted_B: Int[Array, "B"]
    num_rounds_B: Int[Array, "B"]
    finish_B: Int[Array, "B"]
    proposed_BN: Int[Array, "B N"]
    accepted_BN: Int[Array, "B N"]
    emitted_BN: Int[Array, "B N"]
    logits_BNV: Float[Array, "B N V"] | None


class DrafterShape(NamedTuple):
    """What the loop needs to know of a drafter that has no weights: it reads no taps."""

    block_size: int = 7
    taps: tuple[int, ...] = ()


@register
@dataclass(frozen=True)
class Autoregressive:
    """The drafter that proposes nothing: every verify pass of ``block_size + 1`` rows commits one token."""

    config: DrafterShape = field(default=DrafterShape(), metadata=dict(static=True))

    def init_context(self, batch: int, capacity: int):
        return None

    def absorb(self, context, token_BT, num_B):
        return None

    def propose(self, context, anchor_B, states=None, embed=None, unembed=None) -> Draft:
        return Draft(jnp.zeros((anchor_B.shape[0], self.config.block_size), jnp.int32), None, None)


def _absorb(drafter, context, taps_BTED, token_BT, num_B):
    """Drafters without taps are told the tokens themselves."""
    return drafter.absorb(context, taps_BTED if drafter.config.taps else token_BT, num_B)


def _put(buffer, rows_BT, start_B, num_B):
    """Rows ``0 .. num_B - 1`` written at ``start_B ..`` of the second axis; the rest dropped."""
    row_BT = jnp.arange(rows_BT.shape[1])[None]
    slot_BT = jnp.where(row_BT < num_B[:, None], start_B[:, None] + row_BT, buffer.shape[1])
    batch_BT = jnp.broadcast_to(jnp.arange(buffer.shape[0])[:, None], slot_BT.shape)
    return buffer.at[batch_BT, slot_BT].set(rows_BT.astype(buffer.dtype), mode="drop")


def begin(
    target,
    drafter,
    state: DecodeState,
    token_BT: Int[Array, "B T"],
    num_B: Int[Array, "B"],
    limits: Limits,
    *,
    keep_logits: bool = False,
) -> Decoding:
    """Prefill the prompts (``num_B[b]`` of ``T`` tokens each), fill the draft context, emit the first token."""
    drafter = Autoregressive() if drafter is None else drafter
    if isinstance(target, Sharded):
        arguments = dict(target=target, drafter=drafter, state=state, token_BT=token_BT, num_B=num_B, limits=limits)
        vocab = target.config.vocab_size if keep_logits else None
        like = jax.eval_shape(partial(_empty, drafter=drafter, vocab=vocab), state)
        return on_shards(partial(begin, keep_logits=keep_logits), arguments, like, batch=token_BT.shape[0])
    out, state = target.prefill(token_BT, state, num_B, taps=drafter.config.taps)
    last_B1D = jnp.take_along_axis(out.hidden_BTD, (num_B - 1)[:, None, None], axis=1)
    logits_B1V = target.unembed(last_B1D)
    anchor_B = collectives.argmax(logits_B1V[:, 0])
    run = _empty(state, drafter=drafter, vocab=logits_B1V.shape[-1] if keep_logits else None)
    logits_BNV = run.logits_BNV
    if logits_BNV is not None:
        logits_BNV = logits_BNV.at[:, 0].set(logits_B1V[:, 0])
    finish_B = jnp.where(
        is_stop(anchor_B, limits.stop_L),
        STOP,
        jnp.where(limits.budget_B <= 1, LENGTH, jnp.where(state.length_B >= state.capacity, CAPACITY, RUNNING)),
    )
    return replace(
        run,
        context=_absorb(drafter, run.context, out.taps_BTED, token_BT, num_B),
        anchor_B=anchor_B,
        token_BN=run.token_BN.at[:, 0].set(anchor_B),
        num_emitted_B=run.num_emitted_B + 1,
        finish_B=finish_B.astype(jnp.int32),
        logits_BNV=logits_BNV,
    )


def _empty(state: DecodeState, *, drafter, vocab: int | None) -> Decoding:
    """A generation that has emitted nothing; logits are kept if ``vocab`` is their number."""
    batch, slots = state.length_B.shape[0], state.capacity
    zero_B, counters = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32)
    return Decoding(
        state=state,
        context=drafter.init_context(batch, slots),
        anchor_B=zero_B,
        token_BN=counters,
        num_emitted_B=zero_B,
        num_rounds_B=zero_B,
        finish_B=zero_B,
        proposed_BN=counters,
        accepted_BN=counters,
        emitted_BN=counters,
        logits_BNV=None if vocab is None else jnp.zeros((batch, slots, vocab), jnp.float32),
    )


def _propose(target, drafter, run: Decoding, limits: Limits):
    """The block's tokens and how many of them count."""
    states, unembed = run.state.recurrent, target.unembed
    if collectives.axis.value is not None and not holds_shards(drafter):  # it gets all heads and the whole vocabulary
        states, unembed = collectives.whole_states(states), lambda x: collectives.whole(target.unembed(x))
    borrowed = () if getattr(drafter.config, "own_embeddings", False) else (target.embed, unembed)
    draft = drafter.propose(run.context, run.anchor_B, states, *borrowed)
    block = draft.token_BP.shape[1]
    num_B = jnp.minimum(limits.draft_B, block)
    if draft.confidence_BP is not None:
        sure_BP = draft.confidence_BP >= limits.threshold
        num_B = jnp.minimum(num_B, jnp.sum(jnp.cumprod(sure_BP.astype(jnp.int32), axis=1), axis=1))
    in_reach_B = run.state.length_B + block <= limits.draft_limit
    return draft.token_BP, jnp.where(in_reach_B, num_B, 0)


def speculate(target, drafter, run: Decoding, limits: Limits) -> Decoding:
    """One round: read the states, propose, verify, accept, commit."""
    draft_BP, num_proposed_B = _propose(target, drafter, run, limits)
    context = drafter.remember(run.context, run.state.recurrent) if hasattr(drafter, "remember") else run.context
    token_BT = jnp.concatenate([run.anchor_B[:, None], draft_BP], axis=1)
    out, pending = target.verify(token_BT, run.state, taps=drafter.config.taps)
    logits_BTV = target.unembed(out.hidden_BTD)
    verdict = accept_greedy(draft_BP, collectives.argmax(logits_BTV), num_proposed_B)
    running_B = run.finish_B == RUNNING
    kept = committed(
        draft_BP,
        verdict,
        stop_L=limits.stop_L,
        budget_B=limits.budget_B - run.num_emitted_B,
        room_B=run.state.capacity - run.state.length_B,
        running_B=running_B,
    )
    last_B1 = jnp.maximum(kept.num_B - 1, 0)[:, None]
    newest_B = jnp.take_along_axis(kept.token_BT, last_B1, axis=1)[:, 0]
    counted_B = running_B.astype(jnp.int32)

    def count(buffer_BN, value_B):
        return _put(buffer_BN, value_B[:, None], run.num_rounds_B, counted_B)

    logits_BNV = run.logits_BNV
    if logits_BNV is not None:
        logits_BNV = _put(logits_BNV, logits_BTV, run.num_emitted_B, kept.num_B)
    return Decoding(
        state=commit(run.state, pending, kept.num_B),
        context=_absorb(drafter, context, out.taps_BTED, token_BT, kept.num_B),
        anchor_B=jnp.where(kept.num_B > 0, newest_B, run.anchor_B),
        token_BN=_put(run.token_BN, kept.token_BT, run.num_emitted_B, kept.num_B),
        num_emitted_B=run.num_emitted_B + kept.num_B,
        num_rounds_B=run.num_rounds_B + counted_B,
        finish_B=jnp.where(running_B, kept.finish_B, run.finish_B),
        proposed_BN=count(run.proposed_BN, num_proposed_B),
        accepted_BN=count(run.accepted_BN, jnp.minimum(verdict.num_accepted_B, kept.num_B)),
        emitted_BN=count(run.emitted_BN, kept.num_B),
        logits_BNV=logits_BNV,
    )


def decode(target, drafter, run: Decoding, limits: Limits, max_rounds) -> Decoding:
    """Rounds until every row is done, at most ``max_rounds`` of them (a runtime value).

    A pure function of arrays (modules are pytrees): jit it with target, drafter and ``run`` as arguments; a model
    that is closed over would be baked in as constants. ``drafter`` None is autoregressive decoding; any object with
    ``config.taps``, ``config.block_size``, ``init_context``, ``absorb`` and ``propose`` can draft; one that has
    ``remember(context, states)`` is shown the states of a round after it has proposed. Rows finish independently; a
    finished row's memory does not move.
    """

    drafter = Autoregressive() if drafter is None else drafter
    if isinstance(target, Sharded):
        arguments = dict(target=target, drafter=drafter, run=run, limits=limits, max_rounds=max_rounds)
        return on_shards(decode, arguments, run, batch=run.anchor_B.shape[0])

    def unfinished(carry):
        run, rounds = carry
        return (rounds < max_rounds) & jnp.any(run.finish_B == RUNNING)

    def body(carry):
        run, rounds = carry
        return speculate(target, drafter, run, limits), rounds + 1

    return jax.lax.while_loop(unfinished, body, (run, jnp.zeros((), jnp.int32)))[0]


def finish(run: Decoding, finish_B: Int[Array, "B"]) -> Decoding:
    """The same generation with rows declared finished for another reason (nonzero entries of ``finish_B``)."""
    return replace(run, finish_B=jnp.where(finish_B != RUNNING, finish_B, run.finish_B))
