"""Greedy verification against hand cases, the recorded rule and a plain Python loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ready_jax.verify import CAPACITY, LENGTH, RUNNING, STOP, Verdict, accept_greedy, committed, is_stop

BLOCK, PLENTY = 7, 1000
accept = jax.jit(accept_greedy)
keep = jax.jit(committed)


def verdict_of(draft, target, num_proposed=None):
    limit = None if num_proposed is None else jnp.array([num_proposed], jnp.int32)
    found = accept(jnp.array([draft], jnp.int32), jnp.array([target], jnp.int32), limit)
    return int(found.num_accepted_B[0]), int(found.next_token_B[0])


@pytest.mark.parametrize(
    ("draft", "target", "wanted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], (3, 4)),
        ([1, 2, 3], [9, 2, 3, 4], (0, 9)),
        ([1, 2, 3], [1, 9, 3, 4], (1, 9)),  # a match behind the first refusal does not count
        ([1, 2, 3], [1, 2, 9, 4], (2, 9)),
        ([1, 1, 1], [1, 1, 1, 1], (3, 1)),
        ([2, 3, 4], [1, 2, 3, 4], (0, 1)),  # shifted by one slot
    ],
)
def test_the_longest_right_prefix(draft, target, wanted):
    assert verdict_of(draft, target) == wanted


@pytest.mark.parametrize(("num_proposed", "wanted"), [(0, (0, 1)), (1, (1, 2)), (2, (2, 3)), (3, (3, 4))])
def test_slots_past_the_proposed_ones_do_not_count(num_proposed, wanted):
    assert verdict_of([1, 2, 3], [1, 2, 3, 4], num_proposed) == wanted


def test_rows_are_judged_apart():
    found = accept(jnp.array([[1, 2], [1, 2], [1, 2]]), jnp.array([[1, 2, 3], [5, 2, 3], [1, 6, 3]]))
    assert found.num_accepted_B.tolist() == [2, 0, 1]
    assert found.next_token_B.tolist() == [3, 5, 6]


def test_every_proposal_needs_a_verified_row():
    with pytest.raises(ValueError, match="3 proposals need 4 verified rows, found 3"):
        accept_greedy(jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32))


def one(draft, accepted, next_token, *, stop=(), budget=PLENTY, room=PLENTY, running=True):
    """(kept tokens, why the row ends) of a batch of one, and of the same row at place 1 of a batch of two."""
    table = jnp.array([*stop] + [-1] * (4 - len(stop)), jnp.int32)
    draft = [*draft] + [0] * (BLOCK - len(draft))
    other = [4, 4, 4, 4, 4, 4, 4]
    kept = keep(
        jnp.array([other, draft], jnp.int32),
        Verdict(jnp.array([2, accepted], jnp.int32), jnp.array([4, next_token], jnp.int32)),
        stop_L=table,
        budget_B=jnp.array([9, budget], jnp.int32),
        room_B=jnp.array([9, room], jnp.int32),
        running_B=jnp.array([True, running]),
    )
    if 4 not in stop:
        assert kept.token_BT[0, :3].tolist() == [4, 4, 4]
        assert (int(kept.num_B[0]), int(kept.finish_B[0])) == (3, RUNNING)
    return kept.token_BT[1, : int(kept.num_B[1])].tolist(), int(kept.finish_B[1])


def test_accepted_proposals_and_the_targets_own_token_are_kept():
    for accepted in range(BLOCK + 1):
        draft = [10, 11, 12, 13, 14, 15, 16]
        assert one(draft, accepted, 99) == (draft[:accepted] + [99], RUNNING)


@pytest.mark.parametrize("place", range(BLOCK + 1))
def test_a_stop_token_ends_the_text_wherever_it_stands(place):
    offered = [10, 11, 12, 13, 14, 15, 16, 17]
    assert one(offered[:BLOCK], BLOCK, offered[BLOCK], stop=[60, offered[place]]) == (offered[: place + 1], STOP)


def test_a_refused_stop_token_is_not_there():
    """Proposals behind the first refusal, also the one that stands where the target's own token goes."""
    for place in range(3, BLOCK):
        draft = [10, 11, 12, 13, 14, 15, 16]
        draft[place] = 60
        assert one(draft, 3, 99, stop=[60]) == ([10, 11, 12, 99], RUNNING)


def test_the_first_of_several_stop_tokens_counts():
    assert one([10, 61, 60, 60], 4, 60, stop=[60, 61]) == ([10, 61], STOP)


def test_unused_entries_of_the_stop_table_stop_nothing():
    """Also not a token id of -1, and a table of all unused entries."""
    assert one([10, -1, 12], 3, -1) == ([10, -1, 12, -1], RUNNING)
    assert not bool(is_stop(jnp.array([-1]), jnp.array([-1, -1]))[0])
    assert is_stop(jnp.array([[0, 3], [5, 7]]), jnp.array([3, 7, -1])).tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("limit", range(1, BLOCK + 3))
@pytest.mark.parametrize(("name", "reason"), [("budget", LENGTH), ("room", CAPACITY)])
def test_budget_and_room_cut_in_mid_block(name, reason, limit):
    offered = [10, 11, 12, 13, 14, 15, 16, 17]
    wanted = offered[:limit], reason if limit <= len(offered) else RUNNING
    assert one(offered[:BLOCK], BLOCK, offered[BLOCK], **{name: limit}) == wanted


def test_which_reason_wins():
    offered: dict[str, Any] = dict(draft=[10, 11, 12], accepted=3, next_token=13)
    assert one(**offered, stop=[11], budget=2, room=2) == ([10, 11], STOP)
    assert one(**offered, stop=[12], budget=2) == ([10, 11], LENGTH)  # cut before the stop token
    assert one(**offered, stop=[12], room=2) == ([10, 11], CAPACITY)
    assert one(**offered, budget=2, room=2) == ([10, 11], LENGTH)
    assert one(**offered, budget=3, room=2) == ([10, 11], CAPACITY)
    assert one(**offered, budget=2, room=3) == ([10, 11], LENGTH)


def test_a_row_that_does_not_run_keeps_nothing():
    assert one([10, 11, 12], 3, 13, running=False)[0] == []


def loop(draft, target, proposed, stop, budget, room):
    """One round, one token at a time: (accepted, kept tokens, why the row ends)."""
    accepted = 0
    while accepted < proposed and draft[accepted] == target[accepted]:
        accepted += 1
    kept = []
    for token in draft[:accepted] + [target[accepted]]:
        if len(kept) == budget:
            return accepted, kept, LENGTH
        if len(kept) == room:
            return accepted, kept, CAPACITY
        kept.append(token)
        if token in stop:
            return accepted, kept, STOP
    if len(kept) == budget:
        return accepted, kept, LENGTH
    return accepted, kept, CAPACITY if len(kept) == room else RUNNING


ROWS = 4
token = st.integers(0, 3)  # few ids: matches and stops are frequent
row = st.tuples(
    st.lists(token, min_size=BLOCK, max_size=BLOCK),
    st.lists(token, min_size=BLOCK + 1, max_size=BLOCK + 1),
    st.integers(0, BLOCK),  # right by construction up to here
    st.integers(0, BLOCK),
    st.integers(1, 10),
    st.integers(0, 10),
    st.booleans(),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows=st.lists(row, min_size=ROWS, max_size=ROWS), stop=st.lists(st.integers(0, 8), max_size=4))
def test_a_round_equals_a_plain_loop(rows, stop):
    rows = [(draft, draft[:right] + target[right:], *rest) for draft, target, right, *rest in rows]
    draft, target, proposed, budget, room, running = (jnp.array(x) for x in zip(*rows, strict=True))
    verdict = accept(draft, target, proposed)
    table = jnp.array([*stop] + [-1] * (4 - len(stop)), jnp.int32)
    kept = keep(draft, verdict, stop_L=table, budget_B=budget, room_B=room, running_B=running)
    for b, (draft, target, proposed, budget, room, running) in enumerate(rows):
        accepted, tokens, finish = loop(draft, target, proposed, stop, budget, room)
        assert int(verdict.num_accepted_B[b]) == accepted
        assert int(verdict.next_token_B[b]) == target[accepted]
        num = int(kept.num_B[b])
        assert kept.token_BT[b, :num].tolist() == (tokens if running else [])
        if running:
            assert int(kept.finish_B[b]) == finish


def test_the_recorded_rule(golden):
    """The reference's cases at temperature 0; the verdict counts accepted proposals, ``committed`` finds the stop."""
    stored = np.load(golden / "verify_rule.npz")
    seen = stopped = 0
    for i in range(int(stored["count"])):
        case = {name: stored[f"c{i}.{name}"] for name in ("temperature", "stop_token_ids", "target_logits", "proposed")}
        if case["temperature"] >= 1e-5:
            continue
        target, proposed = case["target_logits"].argmax(-1).tolist(), case["proposed"].tolist()
        count, stop = len(proposed), case["stop_token_ids"].tolist()
        draft = proposed + [0] * (BLOCK - count)
        accepted, next_token = verdict_of(draft, target + [0] * (BLOCK - count), count)
        tokens, finish = one(draft, accepted, next_token, stop=stop)
        seen += 1
        if stored[f"c{i}.stopped"]:
            stopped += 1
            assert (tokens, finish) == (proposed[: int(stored[f"c{i}.accepted"])], STOP)
        else:
            assert accepted == stored[f"c{i}.accepted"]
            assert stored[f"c{i}.effective_len"] == count
            assert next_token == stored[f"c{i}.next_probs"].argmax()
            assert tokens == proposed[:accepted] + [next_token]
    assert seen >= 10
    assert stopped >= 1
