"""Evaluation metrics on records made by hand: definitions, pairing, exactness, and what the clock may change."""

from typing import Any

import numpy as np
import pytest

from ready_jax.generation import Timing
from ready_jax.serve import metrics, summary
from ready_jax.serve.grade import Grade

PLAIN = "autoregressive"


def method(accepted, emitted=None, *, tokens=None, reason="length", seconds=(0.5, 2.0), **more) -> dict[str, Any]:
    emitted = emitted or [a + 1 for a in accepted]
    return dict(
        token_ids=tokens, text=None, finish_reason=reason, accepted=accepted, emitted=emitted,
        proposed=[7] * len(accepted), prefill_seconds=seconds[0], decode_seconds=seconds[1], **more,
    )  # fmt: skip


def record(index: int, tokens: list[int], *, benchmark="gsm8k", batch=None, **methods) -> dict[str, Any]:
    steps = len(tokens) - 1
    first = method([0] * steps, tokens=tokens) | dict(proposed=[0] * steps)
    return dict(
        benchmark=benchmark, index=index, id=f"{benchmark}-{index}", prompt_tokens=9,
        batch=f"{benchmark}/{index}" if batch is None else batch, batch_prompts=1, methods={PLAIN: first, **methods},
    )  # fmt: skip


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens without a repetition."""
    return np.random.default_rng(seed).permutation(1000)[:length].tolist()


def test_acceptance_is_pooled_over_rounds_and_the_other_definitions_differ():
    """Rounds 7, 3, 0 of one prompt and 7, 1 of another, whose last round the budget cut to two tokens (A10, A24)."""
    records = [
        record(0, text(14), d=method([7, 3, 0], reason="stop")),
        record(1, text(11, 1), d=method([7, 2], [8, 2])),
    ]
    found = metrics.of_method(records, "d", "gsm8k")
    assert found["acceptance_length"] == pytest.approx((13 + 10) / 5)
    assert found["acceptance_length_sglang"] == pytest.approx(np.mean([14 / 3, 11 / 2]))
    assert found["acceptance_length_deepspec"] == pytest.approx((13 + 8) / 4), "without the round that was cut"
    assert found["draft_acceptance_rate"] == pytest.approx(19 / 35)
    assert found["survival"] == pytest.approx([0.8, 0.8, 0.6, 0.4, 0.4, 0.4, 0.4])
    assert (found["rounds"], found["tokens"], found["prompts"]) == (5, 25, 2)
    low, high = found["ci95"]
    assert low <= found["acceptance_length"] <= high


def test_a_stop_token_inside_the_proposals_counts_what_was_emitted():
    found = metrics.other_definitions([record(0, text(12), d=method([7, 3], [8, 3], reason="stop"))], "d")
    assert found["acceptance_length_deepspec"] == 5.5


def test_speed_is_that_of_generation_and_compile_time_is_in_none():
    """Field case F07: 201 tokens, prefill 0.5 s, decode 2.0 s."""
    found = metrics.speed([record(0, text(201))], PLAIN, "gsm8k")
    timing = Timing(0.5, 2.0, 30.0, 2, 1, 201)
    assert found["decode_tokens_per_second"] == timing.decode_tokens_per_second == 100.0
    assert found["end_to_end_tokens_per_second"] == pytest.approx(timing.tokens_per_second) == pytest.approx(80.4)
    assert found["time_to_first_token_seconds"] == 0.5
    assert found["milliseconds_per_round"] == pytest.approx(10.0)


def test_a_batch_has_one_time_and_as_many_rounds_as_its_slowest_row():
    rows = [record(0, text(11), batch="b"), record(1, text(21), batch="b"), record(2, text(11))]
    found = metrics.speed(rows, PLAIN, "gsm8k")
    assert found["decode_seconds"] == 4.0
    assert found["decode_tokens_per_second"] == pytest.approx((10 + 20 + 10) / 4)
    assert found["milliseconds_per_round"] == pytest.approx(4000 / 30)
    assert found["time_to_first_token_seconds"] == 0.5


def test_exactness_lists_places_and_margins():
    """Field case F11: ten pairs, three of which differ at tokens 5, 50 and 500."""
    rows = []
    for i in range(10):
        tokens = text(600, i)
        other = method([1] * 300)
        if i < 3:
            place = (5, 50, 500)[i]
            changed = tokens[:place] + [tokens[place] + 1] + tokens[place + 1 :]
            other = method([1] * 300, tokens=changed, margin=(0.01, 0.2, 0.05)[i])
        rows.append(record(i, tokens, d=other))
    found = metrics.exactness(rows, "d")
    assert found["exact_match"] == pytest.approx(0.7)
    assert [one["position"] for one in found["differences"]] == [5, 50, 500]
    assert found["worst_margin"] == 0.2
    status, message = metrics.verdict([found], "float32", 0.25)
    assert status == 1
    assert "3 texts differ" in message
    assert "[5, 50, 500]" in message
    status, message = metrics.verdict([found], "bfloat16", 0.25)
    assert (status, message[:7]) == (0, "WARNING")
    assert metrics.verdict([found], "bfloat16", 0.1)[0] == 1
    assert metrics.verdict([metrics.exactness(rows[3:], "d")], "float32", 0.0) == (
        0, "every text equals the autoregressive one",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "wanted", "place"), [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2], [1], 1)]
)
def test_first_difference(found, wanted, place):
    assert metrics.first_difference(found, wanted) == place


def test_loops_are_told_apart_by_the_baselines_text():
    loop = [1, 2, 3, 4, 5, 6] * 10
    rows = [record(0, loop, d=method([7] * 8)), record(1, text(60), d=method([1] * 30))]
    found = metrics.of_method(rows, "d", "gsm8k")
    assert found["loop_share"] == 0.5
    assert found["non_loop"]["acceptance_length"] == 2.0
    assert found["loop"]["acceptance_length"] == 8.0
    assert found["non_loop"]["survival"][:2] == [1.0, 0.0]
    assert found["distinct_4"] == pytest.approx((6 + 57) / (57 + 57))


def test_accuracy_counts_missing_answers_as_such():
    found = metrics.accuracy(["correct", "wrong", "none", "none"], "gsm8k")
    assert found is not None
    assert (found["rate"], found["graded"], found["correct"], found["none"]) == (0.25, 4, 1, 2)
    assert metrics.accuracy([], "mt_bench") is None


def many(seed: int = 0) -> list[dict[str, Any]]:
    """Two sets; every prompt accepts one more under `b` than under `a`, which spreads widely."""
    rng = np.random.default_rng(seed)
    rows = []
    for name in ("gsm8k", "mbpp"):
        for i in range(12):
            accepted = int(rng.integers(0, 6))
            length = 1 + 7 * 5
            rows.append(
                record(i, text(length, i), benchmark=name, a=method([accepted] * 5), b=method([accepted + 1] * 5))
            )
    return rows


def test_methods_are_compared_on_the_same_resamples():
    found = summary.summary(many())
    assert list(found["paired"]) == ["b_over_a"]
    change = found["paired"]["b_over_a"]["acceptance_length_change"]
    a, b = (found["overall"][name]["acceptance_length"] for name in "ab")
    assert change["change"] == pytest.approx(b / a - 1)
    assert b - a == pytest.approx(1.0)
    low, high = change["ci95"]
    assert 0 < low < change["change"] < high
    alone = found["overall"]["a"]["ci95"]
    assert alone[1] > found["overall"]["b"]["ci95"][0], "apart only because the differences are paired"
    assert found["paired"]["b_over_a"]["benchmarks"]["mbpp"]["change"] > 0


def test_means_are_unweighted_over_the_seven_sets():
    rows = [record(i, text(11), d=method([1] * 5)) for i in range(9)]
    rows += [record(0, text(17), benchmark="mbpp", d=method([7] * 2))]
    rows += [record(0, text(17), benchmark="self_instruct", d=method([3] * 4))]
    found = summary.summary(rows)["overall"]["d"]
    assert found["acceptance_length"] == (2.0 + 8.0) / 2
    assert found["benchmarks"] == ["gsm8k", "mbpp"]
    assert found["rounds"] == 47
    alone = summary.summary(rows[-1:])["overall"]["d"]
    assert (alone["benchmarks"], alone["acceptance_length"]) == (["self_instruct"], 4.0)


def test_grades_go_to_their_method():
    rows = many()[:2]
    grades = {("gsm8k", "gsm8k-0", "a"): Grade("correct", "1"), ("gsm8k", "gsm8k-1", "a"): Grade("wrong", "2")}
    found = summary.summary(rows, grades)["methods"]
    assert found["a"]["gsm8k"]["accuracy"]["rate"] == 0.5
    assert found["b"]["gsm8k"]["accuracy"] is None


def test_only_times_depend_on_the_clock():
    first, second = many(), many()
    for row in second:
        for one in row["methods"].values():
            one["decode_seconds"] *= 3
            one["prefill_seconds"] *= 2
    a, b = summary.summary(first), summary.summary(second)
    assert a != b
    assert metrics.without_times(a) == metrics.without_times(b)


def test_prompts_that_end_with_their_first_token_have_no_rounds():
    found = metrics.of_method([record(0, [5], d=method([], []))], "d", "gsm8k")
    assert (found["acceptance_length"], found["ci95"], found["rounds"], found["tokens"]) == (None, None, 0, 1)
    assert found["survival"] == [None] * 7
    assert found["decode_tokens_per_second"] == 0.0
    assert summary.summary([record(0, [5], d=method([], []))])["overall"]["d"]["acceptance_length"] is None


def test_a_mean_over_sets_has_no_interval_where_a_set_has_none():
    """A set of one prompt says nothing of its spread, and leaving it out would move the interval off the mean."""
    many, one = np.array([2.0, 4.0]), np.full(2, np.nan)
    np.testing.assert_array_equal(summary._mean_draws([many, many + 2]), many + 1)
    assert summary._mean_draws([many, one]).size == 0
    assert summary._mean_draws([]).size == 0
