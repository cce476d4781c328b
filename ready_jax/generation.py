"""What a call of ``generate`` gives back, and the numbers that can be read off it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds and counts of one call (shared by the prompts of a batch); compile time, tracing included, is apart.

    ``decode_tokens_per_second`` = (emitted - 1 per prompt) / decode seconds: the first token belongs to the prefill.
    """

    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    num_compiles: int
    num_prompts: int
    num_tokens: int

    @property
    def decode_tokens_per_second(self) -> float:
        return (self.num_tokens - self.num_prompts) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """End to end: prefill included, compile time not."""
        return self.num_tokens / (self.prefill_seconds + self.decode_seconds)


@dataclass(frozen=True)
class Generation:
    """One prompt's result.

    ``finish_reason``: "stop" (stop token or string), "length" (budget) or "capacity" (memory full).
    ``accepted_per_round`` counts proposals that were emitted, ``emitted_per_round`` those and the target's own token;
    the first token comes from the prefill and belongs to no round, so ``1 + sum(emitted_per_round)`` tokens exist.
    ``text`` is None without a tokenizer.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    method: str
    num_rounds: int
    proposed_per_round: list[int]
    accepted_per_round: list[int]
    emitted_per_round: list[int]
    timing: Timing
    logits: np.ndarray | None = field(default=None, repr=False)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verify round, the target's own included; nan without rounds."""
        return acceptance_length([self])

    @property
    def survival(self) -> list[float]:
        """Share of rounds with at least k accepted proposals, k = 1..7 (cumulative, not conditional)."""
        return survival([self])


class TextPiece(str):
    """What one round adds to the text: a string with ``token_ids``, ``accepted`` (None: the prefill) and ``row``
    (which prompt of the batch). The pieces of a prompt join to its whole text.
    """

    token_ids: list[int]
    accepted: int | None
    row: int

    def __new__(cls, text: str, token_ids: list[int], accepted: int | None, row: int):
        piece = super().__new__(cls, text)
        piece.token_ids, piece.accepted, piece.row = token_ids, accepted, row
        return piece


def acceptance_length(generations: Iterable[Generation]) -> float:
    """Pooled over all rounds of all generations: tokens emitted in rounds / rounds."""
    rounds = np.concatenate([np.asarray(g.emitted_per_round, float) for g in generations] or [np.zeros(0)])
    return float(rounds.mean()) if rounds.size else float("nan")


def mean_accepted_drafts(generations: Iterable[Generation]) -> float:
    """Accepted proposals per round: the drafts-only mean, one less than the acceptance length of uncut rounds."""
    rounds = np.concatenate([np.asarray(g.accepted_per_round, float) for g in generations] or [np.zeros(0)])
    return float(rounds.mean()) if rounds.size else float("nan")


def draft_acceptance_rate(generations: Iterable[Generation]) -> float:
    """Accepted proposals / proposals made; nan if nothing was proposed."""
    generations = list(generations)
    proposed = sum(sum(g.proposed_per_round) for g in generations)
    return sum(sum(g.accepted_per_round) for g in generations) / proposed if proposed else float("nan")


def survival(generations: Iterable[Generation], block: int = 7) -> list[float]:
    """Share of all rounds with at least k accepted proposals, k = 1..block."""
    rounds = np.concatenate([np.asarray(g.accepted_per_round, int) for g in generations] or [np.zeros(0, int)])
    return [float((rounds >= k).mean()) if rounds.size else float("nan") for k in range(1, block + 1)]
