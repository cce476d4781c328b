"""Numbers of an evaluation from its records, one per prompt. Pure: no files, no clocks, no devices.

Acceptance lengths, all of them with the target's own token, all pooled over the rounds of a set unless said otherwise:

- ``acceptance_length``: tokens emitted in rounds / rounds. A round cut by a stop token or the budget counts what it
  emitted (field case A10).
- ``acceptance_length_sglang``: tokens / rounds of a request, the prefill's token included, averaged over requests.
  Published ReaDy values were measured in SGLang.
- ``acceptance_length_deepspec``: as the first, but rounds that the budget cut are left out; DeepSpec lets the last
  round run past the cap and counts accepted tokens only where it hits a stop token.

Throughput: decode tokens/s = (emitted - 1 per prompt) / decode seconds of its batch; end to end adds the first token
and the prefill. Intervals are 95 % bootstraps over prompts (over batches for tokens/s), means over benchmarks are
unweighted, and everything is given again for the prompts whose text does not loop (``repetition.py``).
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ready_jax.intervals import interval, ratio, ratio_draws
from ready_jax.repetition import LOOP_SHARE, repeated, repeated_share

BASELINE = "autoregressive"
BLOCK = 7
#: Keys whose values depend on the clock; everything else of a summary is the same on every run of equal conditions.
TIMES = frozenset(
    {
        "decode_tokens_per_second",
        "decode_tokens_per_second_ci95",
        "decode_tokens_per_second_change",
        "end_to_end_tokens_per_second",
        "time_to_first_token_seconds",
        "prefill_seconds",
        "decode_seconds",
        "milliseconds_per_round",
        "speedup",
    }
)

Record = dict[str, Any]


def tokens_of(record: Record, method: str) -> list[int]:
    """Emitted tokens; a method that equals the baseline does not store its own."""
    own = record["methods"][method]["token_ids"]
    return record["methods"][BASELINE]["token_ids"] if own is None else own


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """The first place where two continuations differ (the shorter one's end counts); None if they are equal."""
    for place, (a, b) in enumerate(zip(found, wanted, strict=False)):
        if a != b:
            return place
    return None if len(found) == len(wanted) else min(len(found), len(wanted))


def padded(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of tokens as one array [B, N], and their lengths [B]."""
    length_B = np.array([len(row) for row in rows], np.int64)
    token_BN = np.zeros((len(rows), int(length_B.max(initial=0))), np.int64)
    for place, row in enumerate(rows):
        token_BN[place, : len(row)] = row
    return token_BN, length_B


def looping(records: Sequence[Record]) -> NDArray[np.bool_]:
    """Which baseline texts loop: more than a fifth of their 6-grams stood in them before."""
    return repeated_share(*padded([tokens_of(record, BASELINE) for record in records])) > LOOP_SHARE


def seed_of(benchmark: str) -> int:
    """Resamples depend on the set and on nothing else, so that methods are compared on the same ones."""
    return zlib.crc32(benchmark.encode())


def rounds_of(records: Sequence[Record], method: str) -> tuple[NDArray, NDArray]:
    """Tokens emitted in rounds, and rounds, per prompt."""
    kept = [record["methods"][method] for record in records]
    return np.array([sum(m["emitted"]) for m in kept], float), np.array([len(m["emitted"]) for m in kept], float)


def acceptance(records: Sequence[Record], method: str, benchmark: str) -> dict[str, Any]:
    """Acceptance length with its interval, and how much it was measured on."""
    emitted_B, rounds_B = rounds_of(records, method)
    return dict(
        acceptance_length=ratio(emitted_B, rounds_B),
        ci95=interval(ratio_draws(emitted_B, rounds_B, seed=seed_of(benchmark))),
        prompts=len(records),
        rounds=int(rounds_B.sum()),
    )


def survival(records: Sequence[Record], method: str) -> list[float | None]:
    """Share of rounds with at least k accepted proposals, k = 1..7 (cumulative)."""
    accepted = np.array([a for record in records for a in record["methods"][method]["accepted"]], int)
    return [float(np.mean(accepted >= k)) if len(accepted) else None for k in range(1, BLOCK + 1)]


def other_definitions(records: Sequence[Record], method: str) -> dict[str, Any]:
    """The acceptance lengths that other evaluations call by the same name."""
    kept = [record["methods"][method] for record in records]
    requests = [(1 + sum(m["emitted"])) / len(m["emitted"]) for m in kept if m["emitted"]]
    emitted, rounds = 0, 0
    for m in kept:
        cut = m["finish_reason"] == "length" and m["emitted"] and m["emitted"][-1] <= m["accepted"][-1]
        whole = m["emitted"][:-1] if cut else m["emitted"]
        emitted, rounds = emitted + sum(whole), rounds + len(whole)
    proposed = sum(sum(m["proposed"]) for m in kept)
    return dict(
        acceptance_length_sglang=float(np.mean(requests)) if requests else None,
        acceptance_length_deepspec=emitted / rounds if rounds else None,
        draft_acceptance_rate=sum(sum(m["accepted"]) for m in kept) / proposed if proposed else None,
    )


def exactness(records: Sequence[Record], method: str) -> dict[str, Any]:
    """Equality with the baseline's tokens; each difference with its place and the target's logit margin there."""
    apart = []
    for record in records:
        place = first_difference(tokens_of(record, method), tokens_of(record, BASELINE))
        if place is not None:
            margin = record["methods"][method].get("margin")
            apart.append(dict(benchmark=record["benchmark"], id=record["id"], position=place, margin=margin))
    margins = [one["margin"] for one in apart if one["margin"] is not None]
    return dict(
        exact_match=1 - len(apart) / len(records) if records else None,
        differences=apart,
        worst_margin=max(margins) if margins else None,
    )


def verdict(exact: Iterable[dict[str, Any]], dtype: str, margin_limit: float) -> tuple[int, str]:
    """(exit status, what to say) about differences from the baseline (field case F11).

    In fp32 any difference fails. In lower precision differences at logit margins up to ``margin_limit`` are near-ties
    and only warned of; a larger or unknown margin fails.
    """
    apart = [one for part in exact for one in part["differences"]]
    if not apart:
        return 0, "every text equals the autoregressive one"
    margins = [one["margin"] for one in apart]
    near = all(margin is not None and margin <= margin_limit for margin in margins)
    known = [margin for margin in margins if margin is not None]
    text = (
        f"{len(apart)} texts differ from the autoregressive ones, first at tokens "
        f"{sorted(one['position'] for one in apart)[:10]}, largest logit margin {max(known) if known else 'unknown'}"
    )
    if dtype == "float32" or not near:
        return 1, f"FAILED: {text} ({dtype}, margin limit {margin_limit})"
    return 0, f"WARNING: {text}: near-ties in {dtype} (limit {margin_limit})"


def repetition(records: Sequence[Record]) -> dict[str, Any]:
    """``loop_share`` of the texts, and ``distinct_4``: different 4-grams / 4-grams, within texts."""
    token_BN, length_B = padded([tokens_of(record, BASELINE) for record in records])
    grams = float(np.maximum(length_B - 3, 0).sum())
    return dict(
        loop_share=float(looping(records).mean()) if len(records) else None,
        distinct_4=1 - float(repeated(token_BN, length_B, 4).sum()) / grams if grams else None,
    )


def batch_columns(records: Sequence[Record], method: str) -> dict[str, NDArray[np.float64]]:
    """Per batch: prompts, tokens after the first, prefill and decode seconds, rounds of the loop."""
    rows: dict[str, list[Record]] = {}
    for record in records:
        rows.setdefault(record["batch"], []).append(record["methods"][method])
    columns = dict(
        prompts=[len(some) for some in rows.values()],
        tokens=[sum(sum(m["emitted"]) for m in some) for some in rows.values()],
        prefill=[some[0]["prefill_seconds"] for some in rows.values()],
        decode=[some[0]["decode_seconds"] for some in rows.values()],
        rounds=[max(len(m["emitted"]) for m in some) for some in rows.values()],
    )
    return {name: np.array(column, float) for name, column in columns.items()}


def speed(records: Sequence[Record], method: str, benchmark: str) -> dict[str, Any]:
    """Tokens per second and seconds; compile time and warm-up are in none of them."""
    b = batch_columns(records, method)
    rate = ratio_draws(b["tokens"], b["decode"], seed=seed_of(benchmark))
    per_round = ratio(b["decode"], b["rounds"])
    return dict(
        decode_tokens_per_second=ratio(b["tokens"], b["decode"]),
        decode_tokens_per_second_ci95=interval(rate),
        end_to_end_tokens_per_second=ratio(b["tokens"] + b["prompts"], b["prefill"] + b["decode"]),
        time_to_first_token_seconds=ratio(b["prefill"] * b["prompts"], b["prompts"]),
        prefill_seconds=float(b["prefill"].sum()),
        decode_seconds=float(b["decode"].sum()),
        milliseconds_per_round=None if per_round is None else 1e3 * per_round,
    )


def accuracy(statuses: Sequence[str], benchmark: str) -> dict[str, Any] | None:
    """Correct answers of those graded; None for a set without grades. No answer is not right, and counted apart."""
    if not statuses:
        return None
    right_B = np.array([status == "correct" for status in statuses], float)
    return dict(
        rate=float(right_B.mean()),
        ci95=interval(ratio_draws(right_B, np.ones(len(right_B)), seed=seed_of(benchmark))),
        graded=len(statuses),
        correct=int(right_B.sum()),
        none=sum(status == "none" for status in statuses),
    )


def of_method(records: Sequence[Record], method: str, benchmark: str, statuses: Sequence[str] = ()) -> dict[str, Any]:
    """Everything about one method on one benchmark."""
    loops_B = looping(records)
    parts = {
        name: [record for record, keep in zip(records, kept_B, strict=True) if keep]
        for name, kept_B in (("non_loop", ~loops_B), ("loop", loops_B))
    }
    emitted_B, _ = rounds_of(records, method)
    return (
        acceptance(records, method, benchmark)
        | dict(survival=survival(records, method), tokens=int(emitted_B.sum()) + len(records))
        | other_definitions(records, method)
        | speed(records, method, benchmark)
        | exactness(records, method)
        | repetition(records)
        | dict(accuracy=accuracy(statuses, benchmark))
        | {
            name: acceptance(some, method, benchmark) | dict(survival=survival(some, method))
            for name, some in parts.items()
        }
    )


def without_times(report: Any) -> Any:
    """A report's content that does not depend on the clock: what two runs of equal conditions share."""
    if isinstance(report, dict):
        return {key: without_times(value) for key, value in report.items() if key not in TIMES}
    return [without_times(item) for item in report] if isinstance(report, list) else report
