"""Following a generation round by round: text in commit order, stop strings, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ready_jax.chat import Chat, StopMatcher, TextStream
from ready_jax.decode import Decoding, Limits, finish
from ready_jax.generation import TextPiece
from ready_jax.verify import RUNNING, STOP


class _Row:
    """Text of one prompt: whole characters only, checked for stop strings one token at a time."""

    def __init__(self, chat: Chat, stop: tuple[str, ...]):
        self.stream, self.matcher = TextStream(chat), StopMatcher(stop)
        self.seen, self.rounds = 0, 0
        self.text = ""
        self.stopped = False

    def push(self, token_ids: list[int]) -> int | None:
        """Read the tokens of a round; the number of them up to the one that completes a stop string, if one does."""
        for count, token in enumerate(token_ids, 1):
            if self.matcher.push(self.stream.push([token])):
                self.stopped = True
                return count
        return None

    def take(self, last: bool) -> str:
        """The text that may be shown by now; everything that is left when this is the last round."""
        if last and not self.stopped:
            self.matcher.push(self.stream.flush())
        piece = self.matcher.take(last=last)
        self.text += piece
        return piece


class Watch:
    """Drives a generation one round at a time where somebody wants to see it; does nothing otherwise."""

    def __init__(
        self,
        batch: int,
        budget: int,
        *,
        chat: Chat | None,
        stop: tuple[str, ...],
        on_text: Callable | None,
        progress: bool | Callable | None,
    ):
        self.on_text, self.progress, self.total = on_text, progress, batch * budget
        self.rows = [_Row(chat, stop) for _ in range(batch)] if chat is not None else []
        self.needed = bool(self.rows or progress)

    def text(self, index: int) -> str | None:
        return self.rows[index].text if self.rows else None

    def follow(self, run: Decoding, limits: Limits, one_round: Callable[[Decoding, Limits], Decoding]) -> Decoding:
        """Round by round until every row is done.

        A stop string completed inside a round repeats that round from the memory before it, with the budget that
        ends at the completing token: memory, tokens and counts then end there, and no rollback is needed.
        """
        report, close = self._reporter()
        previous = run
        try:
            while True:
                run = self._read(run, previous, limits, one_round)
                report(int(np.sum(run.num_emitted_B)))
                if not np.any(np.asarray(run.finish_B) == RUNNING):
                    return run
                previous, run = run, one_round(run, limits)
        finally:
            close()

    def _read(self, run: Decoding, previous: Decoding, limits: Limits, one_round) -> Decoding:
        if not self.rows:
            return run
        before = [row.seen for row in self.rows]
        ends = np.zeros(len(self.rows), np.int32)  # tokens of a row up to its stop string; 0: none was completed
        emitted, tokens = jax.device_get((run.num_emitted_B, run.token_BN))
        for b, row in enumerate(self.rows):
            found = row.push(tokens[b, row.seen : emitted[b]].tolist())
            ends[b] = row.seen + found if found else 0
        if np.any((ends > 0) & (ends < emitted)):
            run = one_round(previous, replace(limits, budget_B=jnp.where(ends > 0, ends, limits.budget_B)))
        if np.any(ends > 0):
            run = finish(run, jnp.where(ends > 0, STOP, RUNNING).astype(jnp.int32))
        self._tell(run, before)
        return run

    def _tell(self, run: Decoding, before: list[int]) -> None:
        fields = (run.num_emitted_B, run.token_BN, run.num_rounds_B, run.accepted_BN, run.finish_B)
        emitted, tokens, rounds, accepted, finished = jax.device_get(fields)
        for b, row in enumerate(self.rows):
            row.seen = int(emitted[b])
            if row.seen == before[b]:
                continue
            text = row.take(last=bool(finished[b] != RUNNING))
            if self.on_text is not None:
                count = int(accepted[b, rounds[b] - 1]) if rounds[b] else None
                self.on_text(TextPiece(text, tokens[b, before[b] : row.seen].tolist(), count, b))

    def _reporter(self) -> tuple[Callable[[int], None], Callable[[], None]]:
        if self.progress is True:
            from tqdm.auto import tqdm

            bar = tqdm(total=self.total, unit="token")

            def advance(count: int) -> None:
                bar.update(count - bar.n)

            return advance, bar.close
        if callable(self.progress):
            show = self.progress
            return lambda count: show(count, self.total), lambda: None
        return lambda count: None, lambda: None
