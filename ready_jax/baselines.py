"""Drafters that read tokens instead of the target: what a trained drafter must beat, and a scripted one for tests.

They have no taps, so the decode loop tells them the tokens themselves: the prompt, then each round's rows (anchor
and proposals) of which the first ``num_B`` were kept. Whatever they propose, verification keeps the text exact.
`Forced` and `Stale` are real drafters with one thing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ready_jax.drafter import Draft
from ready_jax.pytree import register
from ready_jax.state import SPARE_ROWS


@dataclass(frozen=True)
class BaselineConfig:
    """What the decode loop asks a drafter about itself."""

    block_size: int = 7
    max_position_embeddings: int = 1 << 30
    taps: tuple[int, ...] = ()
    reader: None = None

    def __post_init__(self):
        if not 1 <= self.block_size < SPARE_ROWS:
            raise ValueError(f"block_size={self.block_size} must lie in 1..{SPARE_ROWS - 1}: a pass has one row more")


@register
@dataclass(frozen=True)
class Seen:
    """The committed tokens of each row; slots at or past ``length_B`` mean nothing."""

    length_B: Int[Array, "B"]
    token_BS: Int[Array, "B S"]
    capacity: int = field(metadata=dict(static=True))


class _TokenDrafter:
    """The part of the drafter interface that keeps the committed tokens."""

    def init_context(self, batch: int, capacity: int) -> Seen:
        return Seen(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, capacity + SPARE_ROWS), jnp.int32), capacity)

    def absorb(self, context: Seen, token_BT: Int[Array, "B T"], num_B: Int[Array, "B"]) -> Seen:
        row_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1])[None], token_BT.shape)
        dropped = context.token_BS.shape[1]
        slot_BT = jnp.where(row_BT < num_B[:, None], context.length_B[:, None] + row_BT, dropped)
        batch_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[0])[:, None], token_BT.shape)
        token_BS = context.token_BS.at[batch_BT, slot_BT].set(token_BT.astype(jnp.int32), mode="drop")
        return Seen(context.length_B + num_B, token_BS, context.capacity)


@register
@dataclass(frozen=True)
class PromptLookup(_TokenDrafter):
    """Continues the most recent earlier match of the longest suffix (``max_ngram`` tokens, then fewer).

    Source: prompt lookup decoding (Saxena 2023). A continuation that reaches the present goes on into its own
    proposals, so a loop is continued for the whole block. Without any match the anchor is repeated.
    """

    config: BaselineConfig = field(default_factory=BaselineConfig, metadata=dict(static=True))
    max_ngram: int = field(default=3, metadata=dict(static=True))

    def propose(self, context: Seen, anchor_B: Int[Array, "B"], states=None, embed=None, unembed=None) -> Draft:
        batch, slots = context.token_BS.shape
        slot_S = jnp.arange(slots)[None]
        last_B1 = context.length_B[:, None]  # the anchor's slot
        token_BS = jnp.where(slot_S == last_B1, anchor_B[:, None], context.token_BS)
        matched_BS, found_B1 = slot_S < last_B1, jnp.full((batch, 1), -1)
        for n in range(self.max_ngram):
            suffix_B1 = jnp.take_along_axis(token_BS, jnp.maximum(last_B1 - n, 0), axis=1)
            shifted_BS = jnp.pad(token_BS, [(0, 0), (n, 0)], constant_values=-1)[:, :slots]
            matched_BS &= (shifted_BS == suffix_B1) & (last_B1 >= n)
            end_B1 = jnp.max(jnp.where(matched_BS, slot_S, -1), axis=1, keepdims=True)
            found_B1 = jnp.where(end_B1 >= 0, end_B1, found_B1)  # longer suffixes come later and win
        period_B1 = jnp.where(found_B1 >= 0, last_B1 - found_B1, 1)
        begin_B1 = jnp.where(found_B1 >= 0, found_B1 + 1, last_B1)
        slot_BP = begin_B1 + jnp.arange(self.config.block_size)[None] % period_B1
        return Draft(jnp.take_along_axis(token_BS, slot_BP, axis=1), None, None)


@register
@dataclass(frozen=True)
class Bigram(_TokenDrafter):
    """Proposes the most frequent successor of the anchor, then of that token, and so on."""

    next_V: Int[Array, "V"]
    config: BaselineConfig = field(default_factory=BaselineConfig, metadata=dict(static=True))

    @classmethod
    def count(cls, documents: Sequence[np.ndarray], vocab_size: int, config: BaselineConfig | None = None) -> Bigram:
        """The table of most frequent successors within documents; a token never followed proposes token 0."""
        pairs = np.concatenate([d[:-1].astype(np.int64) * vocab_size + d[1:] for d in documents])
        code, times = np.unique(pairs, return_counts=True)
        order = np.argsort(times, kind="stable")  # the most frequent successor is written last
        table = np.zeros(vocab_size, np.int32)
        table[code[order] // vocab_size] = code[order] % vocab_size
        return cls(jnp.asarray(table), config or BaselineConfig())

    def propose(self, context: Seen, anchor_B: Int[Array, "B"], states=None, embed=None, unembed=None) -> Draft:
        tokens, token_B = [], anchor_B
        for _ in range(self.config.block_size):
            token_B = self.next_V[token_B]
            tokens.append(token_B)
        return Draft(jnp.stack(tokens, axis=1), None, None)


@register
@dataclass(frozen=True)
class Scripted(_TokenDrafter):
    """Knows the greedy continuation and proposes exactly so many right tokens; for forced-acceptance tests.

    ``text_BN``: emitted tokens, first one included; ``accept_BN``: for an anchor that is emitted token i, how many of
    the proposals are right. Everything depends on the position alone, so that cut rounds stay on script.
    """

    prompt_B: Int[Array, "B"]
    text_BN: Int[Array, "B N"]
    accept_BN: Int[Array, "B N"]
    vocab_size: int = field(metadata=dict(static=True))
    config: BaselineConfig = field(default_factory=BaselineConfig, metadata=dict(static=True))

    @classmethod
    def by_round(cls, prompt_B, text_BN, accept_BR, vocab_size: int, config: BaselineConfig | None = None) -> Scripted:
        """A script from accept counts per round [B, R]; rounds after the last propose nothing right."""
        accept_BR, text_BN = np.asarray(accept_BR), np.asarray(text_BN)
        config = config or BaselineConfig()
        if accept_BR.min() < 0 or accept_BR.max() > config.block_size:
            raise ValueError(
                f"accept counts {accept_BR.min()}..{accept_BR.max()} must lie in 0..block_size={config.block_size}"
            )
        accept_BN = np.zeros(text_BN.shape, np.int32)
        anchor_BR = np.cumsum(accept_BR + 1, axis=1) - accept_BR - 1
        for row, anchors in enumerate(anchor_BR):
            inside = anchors < text_BN.shape[1]
            accept_BN[row, anchors[inside]] = accept_BR[row, inside]
        return cls(jnp.asarray(prompt_B), jnp.asarray(text_BN), jnp.asarray(accept_BN), vocab_size, config)

    def right(self, context) -> Int[Array, "B P"]:
        """The continuation after the anchor that ``context.length_B`` points at."""
        at_B1 = context.length_B[:, None] - self.prompt_B[:, None]
        slot_P = jnp.arange(self.config.block_size)[None]
        return jnp.take_along_axis(self.text_BN, jnp.clip(at_B1 + 1 + slot_P, 0, self.text_BN.shape[1] - 1), axis=1)

    def propose(self, context, anchor_B: Int[Array, "B"], states=None, embed=None, unembed=None) -> Draft:
        right_BP = self.right(context)
        slot_P = jnp.arange(self.config.block_size)[None]
        at_B1 = jnp.clip(context.length_B[:, None] - self.prompt_B[:, None], 0, self.text_BN.shape[1] - 1)
        accept_B1 = jnp.take_along_axis(self.accept_BN, at_B1, axis=1)
        wrong_BP = (right_BP + 1) % self.vocab_size
        return Draft(jnp.where(slot_P < accept_B1, right_BP, wrong_BP).astype(jnp.int32), None, None)


@register
@dataclass(frozen=True)
class Forced:
    """A real drafter whose block is overruled to be right exactly as often as a script says.

    The wrong proposals are its own, so that backbone, heads and reader stay in the program.
    """

    inner: Any  # a Drafter, or one that is spread over a mesh
    script: Scripted

    @property
    def config(self):
        return self.inner.config

    def init_context(self, batch: int, capacity: int):
        return self.inner.init_context(batch, capacity)

    def absorb(self, context, taps_BTED, num_B: Int[Array, "B"]):
        return self.inner.absorb(context, taps_BTED, num_B)

    def propose(self, context, anchor_B: Int[Array, "B"], states=None, embed=None, unembed=None) -> Draft:
        own = self.inner.propose(context, anchor_B, states, embed, unembed)
        forced = self.script.propose(context, anchor_B)
        right_BP = self.script.right(context)
        wrong_BP = jnp.where(own.token_BP == right_BP, (right_BP + 1) % self.script.vocab_size, own.token_BP)
        return Draft(jnp.where(forced.token_BP == right_BP, right_BP, wrong_BP), own.confidence_BP, None)


@register
@dataclass(frozen=True)
class Given:
    """A reader whose states have been read before."""

    inner: Any
    prepared: Any

    def prepare(self, states):
        return self.prepared

    def __call__(self, prep, hidden_BPD, *site):
        return self.inner(prep, hidden_BPD, *site)


@register
@dataclass(frozen=True)
class Remembered:
    """A draft context, and what the reader took from the states of the last of ``rounds`` rounds."""

    inner: Any
    prepared: Any
    rounds: Int[Array, ""]

    @property
    def length_B(self):
        return self.inner.length_B


@register
@dataclass(frozen=True)
class Stale:
    """A control: a drafter whose reader sees the states of the round before; in the first round it sees the present."""

    inner: Any  # a Drafter with a StateReader

    def __post_init__(self):
        if getattr(self.inner, "reader", None) is None:
            raise ValueError("states of the round before are a control of a drafter with a reader; this one has none")

    @property
    def config(self):
        return self.inner.config

    @property
    def reader(self):
        return self.inner.reader

    def init_context(self, batch: int, capacity: int) -> Remembered:
        c = self.config.reader
        state = jax.ShapeDtypeStruct((batch, c.memory_heads, c.key_dim, c.value_dim), jnp.float32)
        prepared = jax.eval_shape(self.reader.prepare, dict.fromkeys(c.state_layers, state))
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), prepared)
        return Remembered(self.inner.init_context(batch, capacity), empty, jnp.zeros((), jnp.int32))

    def absorb(self, context: Remembered, taps_BTED, num_B: Int[Array, "B"]) -> Remembered:
        return replace(context, inner=self.inner.absorb(context.inner, taps_BTED, num_B))

    def remember(self, context: Remembered, states) -> Remembered:
        return replace(context, prepared=self.reader.prepare(states), rounds=context.rounds + 1)

    def propose(self, context: Remembered, anchor_B: Int[Array, "B"], states=None, embed=None, unembed=None) -> Draft:
        present = self.reader.prepare(states)
        before = jax.tree.map(lambda old, new: jnp.where(context.rounds > 0, old, new), context.prepared, present)
        drafter = self.inner.with_reader(Given(self.reader, before))
        return drafter.propose(context.inner, anchor_B, states, embed, unembed)
