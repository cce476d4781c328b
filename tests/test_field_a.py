"""Field cases A: what goes wrong when a hybrid target is decoded speculatively. Every test names its case.

One tiny pair, scripted through arrays alone, so that nearly everything below runs the same compiled programs.
A16, A18 and A22 of the target alone are in test_target.py, A12 in the tests of the pair.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from ready_jax.baselines import PromptLookup, Scripted
from ready_jax.config import FULL, LINEAR
from ready_jax.drafter import Draft, Drafter
from ready_jax.generation import (
    Generation,
    Timing,
    acceptance_length,
    draft_acceptance_rate,
    mean_accepted_drafts,
    survival,
)
from ready_jax.programs import EXACT
from ready_jax.pytree import register
from ready_jax.state import SPARE_ROWS, commit
from ready_jax.verify import FINISH_REASONS

BLOCK, CAPACITY, WIDTH, VOCAB = 7, 256, 272, 97
OWN = -1  # in a script: the drafter's own proposals
PLENTY = 1000


@register
@dataclass(frozen=True)
class Puppet:
    """A real drafter whose proposals and confidences are overruled by tables, looked up by the anchor's place.

    ``accept_BN``: right proposals after emitted token i (``OWN``: whatever the drafter says); ``wrong_BN``: the token
    in the slots behind them (``OWN``: the drafter's, moved where it happens to be right).
    """

    inner: Drafter
    script: Scripted
    wrong_BN: jax.Array
    confidence_BNP: jax.Array

    @property
    def config(self):
        return self.inner.config

    def init_context(self, batch, capacity):
        return self.inner.init_context(batch, capacity)

    def absorb(self, context, taps_BTED, num_B):
        return self.inner.absorb(context, taps_BTED, num_B)

    def propose(self, context, anchor_B, states=None, embed=None, unembed=None) -> Draft:
        own = self.inner.propose(context, anchor_B, states, embed, unembed)
        right_BP = self.script.right(context)
        at_B = jnp.clip(context.length_B - self.script.prompt_B, 0, WIDTH - 1)
        row_B = jnp.arange(at_B.shape[0])
        accept_B1, wrong_B1 = self.script.accept_BN[row_B, at_B][:, None], self.wrong_BN[row_B, at_B][:, None]
        wrong_BP = jnp.where(wrong_B1 == OWN, own.token_BP, wrong_B1)
        wrong_BP = jnp.where(wrong_BP == right_BP, (right_BP + 1) % VOCAB, wrong_BP)
        scripted_BP = jnp.where(jnp.arange(BLOCK)[None] < accept_B1, right_BP, wrong_BP)
        token_BP = jnp.where(accept_B1 == OWN, own.token_BP, scripted_BP)
        return Draft(token_BP, self.confidence_BNP[row_B, at_B], None)


def model():
    return tiny.target(layer_types=(LINEAR, FULL))


def inner(**changes):
    return tiny.drafter(config=model().config, taps=(-1, 0), num_target_layers=2, **changes)


@functools.cache
def plain(target=None) -> tiny.Plain:
    return tiny.Plain(target or model(), CAPACITY)


@functools.cache
def _text(ids: tuple[int, ...], count: int) -> list[int]:
    return plain().greedy(list(ids), count)


def text(ids: list[int], count: int = 0) -> list[int]:
    """``AR``: greedy continuation, one token at a time; by default until the memory is full."""
    return _text(tuple(ids), count or CAPACITY - len(ids) + 1)[: count or None]


def puppet(prompts, texts, accept: Any = BLOCK, *, wrong: int = OWN, confidence: Any = 1.0, drafter=None) -> Puppet:
    """``accept``: one number for all, or per row the counts of each round in turn (nothing right afterwards), or an
    array by place [B, N]. ``confidence`` broadcasts to [B, N, 7].
    """
    batch = len(prompts)
    text_BN = np.array([row[:WIDTH] + [0] * (WIDTH - len(row)) for row in texts], np.int32)
    accept_BN = np.full((batch, WIDTH), accept) if isinstance(accept, int) else np.zeros((batch, WIDTH), np.int32)
    if isinstance(accept, np.ndarray):
        accept_BN = accept
    elif isinstance(accept, list):
        for row, counts in zip(accept_BN, accept, strict=True):
            place = 0
            for count in counts:
                row[place] = count
                place += count + 1
    numbers = jnp.array([len(ids) for ids in prompts], jnp.int32)
    script = Scripted(numbers, jnp.asarray(text_BN), jnp.asarray(accept_BN, jnp.int32), VOCAB)
    confidence_BNP = np.broadcast_to(np.float32(confidence), (batch, WIDTH, BLOCK))
    wrong_BN = jnp.full((batch, WIDTH), wrong, jnp.int32)
    return Puppet(drafter or inner(), script, wrong_BN, jnp.asarray(confidence_BNP))


def expected(text, num_prompt: int, accept_N, sure_N, *, budget: int, stop=(), proposals: int = BLOCK):
    """One row in plain Python: (tokens, finish reason, proposed, accepted and emitted per round)."""
    tokens, proposed, accepted, emitted = [text[0]], [], [], []

    def reason():
        if tokens[-1] in stop:
            return "stop"
        if len(tokens) == budget:
            return "length"
        return "capacity" if num_prompt + len(tokens) - 1 == CAPACITY else None

    while reason() is None:
        place = len(tokens) - 1
        proposed.append(min(int(sure_N[place]), proposals))
        right = min(int(accept_N[place]), proposed[-1])
        while len(tokens) - place - 1 <= right and reason() is None:
            tokens.append(text[len(tokens)])
        emitted.append(len(tokens) - place - 1)
        accepted.append(min(emitted[-1], right))
    return tokens, reason(), proposed, accepted, emitted


def found(run, row: int = 0):
    """What ``expected`` says, of a run."""
    reason = FINISH_REASONS[int(run.finish_B[row])]
    return (
        tiny.tokens(run, row),
        reason,
        *(tiny.per_round(run, name, row) for name in ("proposed", "accepted", "emitted")),
    )


def go_on(target, drafter, run, limit, rounds: int = 1):
    """Some more rounds, by the very program that ``tiny.generate`` runs."""
    _, program = tiny.shared_programs()
    return program(target=target, drafter=drafter, run=run, limits=limit, max_rounds=jnp.int32(rounds))


def row_of(state, row: int):
    """One sequence's memory."""
    return jax.tree.map(lambda x: x[row : row + 1], state)


def same_bits(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def dead(buffer, length_B, value):
    """The buffer with every slot at or past the length holding ``value``."""
    if buffer is None:
        return None
    unseen_BS = jnp.arange(buffer.shape[1])[None] >= length_B[:, None]
    return jnp.where(unseen_BS[..., None, None], value, buffer)


def poisoned(run):
    """NaN in every slot of target and drafter that no committed token owns."""
    length_B = run.state.length_B

    def buffers(memory):
        return {name: tuple(dead(x, length_B, jnp.nan) for x in getattr(memory, name)) for name in ("key", "value")}

    return replace(
        run, state=replace(run.state, **buffers(run.state)), context=replace(run.context, **buffers(run.context))
    )


def bad_embedding(token: int):
    """The same target with NaN for one token: every row that consumes it is NaN in all layers."""
    target = jax.tree.map(lambda x: x, model())
    target.embed_VD[...] = target.embed_VD[...].at[token].set(jnp.nan)
    return target


def distinct_prompt(places, length: int = 12) -> list[int]:
    """A prompt whose continuation has, at each of these places, a token that it did not have before."""
    for seed in range(200):
        ids = tiny.prompt(length, seed=seed)
        start = text(ids, 24)
        if all(start[i] not in start[:i] for i in places) and tiny.EOS not in start:
            return ids
    raise AssertionError("no such prompt")


# A01


def test_a01_rejected_drafts_leave_nothing_behind():
    """64 tokens in 63 rounds of wrong drafts; the newest token is not consumed: memory of prompt + 63."""
    ids = tiny.prompt(12)
    run = tiny.generate(model(), puppet([ids], [text(ids)], 0), [ids], tiny.limits(64))
    assert found(run) == (text(ids)[:64], "length", [7] * 63, [0] * 63, [1] * 63)
    assert len(set(tiny.tokens(run))) > 20  # a text worth the name
    tiny.memory_close(run.state, plain().feed(ids + text(ids)[:63])[1])


def test_a01_memory_after_every_single_round():
    """Acceptance counts that change from round to round; the draft context equals that of a prompt so long."""
    ids, counts = tiny.prompt(4), [7, 0, 3, 1, 0, 0, 6, 2]
    drafter, limit = puppet([ids], [text(ids)], [counts]), tiny.limits(PLENTY)
    run = tiny.generate(model(), drafter, [ids], limit, rounds=0)
    _, wanted = plain().feed(ids)
    done = 0
    for count in counts:
        run = go_on(model(), drafter, run, limit)
        _, wanted = plain().feed(text(ids)[done : done + count + 1], wanted)
        done += count + 1
        assert tiny.tokens(run) == text(ids)[: done + 1]
        assert int(run.context.length_B[0]) == len(ids) + done
        tiny.memory_close(run.state, wanted)
    assert tiny.per_round(run, "accepted") == counts
    whole = ids + text(ids)[:done]
    fresh = tiny.generate(model(), drafter, [whole], limit, rounds=0)
    assert len(whole) <= 32  # the program that is compiled already
    for name in ("key", "value"):
        for a, b in zip(getattr(run.context, name), getattr(fresh.context, name), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)  # past the length too: zeros in both


# A04


@functools.partial(jax.jit, compiler_options=EXACT)
def one_plain_step(target, token_B, state):
    """The anchor alone through a pass of the usual width; the rows behind it hold something else."""
    rows = jnp.concatenate([token_B[:, None], jnp.full((token_B.shape[0], BLOCK), 11, jnp.int32)], axis=1)
    _, pending = target.verify(rows, state)
    return commit(state, pending, jnp.ones_like(state.length_B))


def test_a04_nothing_accepted_commits_the_targets_token_and_nothing_else():
    ids = tiny.prompt(12)
    drafter, limit = puppet([ids], [text(ids)], 0), tiny.limits(PLENTY)
    run = tiny.generate(model(), drafter, [ids], limit, rounds=0)
    for i in range(5):
        before, run = run, go_on(model(), drafter, run, limit)
        step = one_plain_step(model(), before.anchor_B, before.state)
        assert tiny.memory_equal(run.state, step)
        for new, old, wanted in zip(run.state.conv, before.state.conv, step.conv, strict=True):
            if new is not None:
                same_bits(new, wanted)
                same_bits(new[:, :-1], old[:, 1:])  # one step along: never back at offset -1
                assert np.abs(new[:, -1] - old[:, -1]).max() > 1e-3
        assert found(run) == (text(ids)[: i + 2], None, [7] * (i + 1), [0] * (i + 1), [1] * (i + 1))
    tiny.memory_close(run.state, plain().feed(ids + text(ids)[:5])[1])


@pytest.mark.parametrize("accept", [0, 3])
def test_a04_what_nobody_committed_may_be_nan(accept):
    """Rejected rows whose activations are all NaN, and NaN in every dead slot before each round: not a bit moves."""
    ids = tiny.prompt(12)
    bad = next(token for token in range(VOCAB) if token not in ids + text(ids) + [tiny.MASK])
    broken, limit = bad_embedding(bad), tiny.limits(PLENTY)
    clean_puppet = puppet([ids], [text(ids)], accept)
    nan_puppet = puppet([ids], [text(ids)], accept, wrong=bad)
    clean = tiny.generate(model(), clean_puppet, [ids], limit, rounds=0)
    run = tiny.generate(broken, nan_puppet, [ids], limit, rounds=0)
    for _ in range(5):
        clean = go_on(model(), clean_puppet, clean, limit)
        run = go_on(broken, nan_puppet, poisoned(run), limit)
        assert found(run) == found(clean)
        assert tiny.memory_equal(run.state, clean.state)
        length = len(ids) + len(tiny.tokens(run)) - 1
        same_bits([x[:, :length] for x in run.context.key], [x[:, :length] for x in clean.context.key])
        same_bits([x[:, :length] for x in run.context.value], [x[:, :length] for x in clean.context.value])
        for buffer in (*run.state.recurrent, *run.state.conv):
            assert buffer is None or np.isfinite(buffer).all()
    assert tiny.per_round(run, "accepted") == [accept] * 5
    assert np.isnan(
        np.asarray(run.state.key[1])[:, int(run.state.length_B[0]) :]
    ).all()  # the poison was there: rejected rows, unused slots


# A06


def speculation_equals_plain(prompts, count, lookup: bool):
    """Batches of five, an untrained drafter and prompt lookup; also one by one through passes of a single row."""
    accepted = 0
    for start in range(0, len(prompts), 5):
        some = prompts[start : start + 5]
        wanted = [text(ids, count) for ids in some]
        limit = tiny.limits(count, batch=5)
        for drafter in (puppet(some, wanted, OWN), *([PromptLookup()] if lookup else [])):
            run = tiny.generate(model(), drafter, some, limit)
            assert [tiny.tokens(run, b) for b in range(5)] == wanted
            assert [FINISH_REASONS[int(f)] for f in run.finish_B] == ["length"] * 5
            accepted += int(np.sum(run.accepted_BN))
            for b in (0, 4):
                tiny.memory_close(row_of(run.state, b), plain().feed(some[b] + wanted[b][:-1])[1])
    return accepted


def test_a06_greedy_speculation_is_plain_greedy():
    prompts = [tiny.prompt(3 + i % 27, seed=30 + i) for i in range(10)]
    assert speculation_equals_plain(prompts, 60, lookup=False) > 0  # lookup at each run: test_baselines.py


@pytest.mark.slow
def test_a06_twenty_prompts_of_two_hundred_tokens():
    assert speculation_equals_plain([tiny.prompt(3 + i, seed=30 + i) for i in range(20)], 200, lookup=True) > 20


# A08


@pytest.mark.parametrize("place", [0, 1, 2, 7, 8, 9, 12])
def test_a08_the_text_ends_with_the_stop_token_wherever_it_falls(place):
    """From the prefill, in mid-block, the last proposal, the target's own token after a full block, the next round."""
    ids = distinct_prompt([0, 1, 2, 7, 8, 9, 12])
    start = text(ids, 24)
    limit = tiny.limits(24, stop=[tiny.EOS, start[place]])
    run = tiny.generate(model(), puppet([ids], [start]), [ids], limit)
    rounds = -(-place // 8)
    last = place - 8 * (rounds - 1)
    accepted = ([7] * (rounds - 1) + [min(last, 7)]) if rounds else []
    emitted = ([8] * (rounds - 1) + [last]) if rounds else []
    assert found(run) == (start[: place + 1], "stop", [7] * rounds, accepted, emitted)
    tiny.memory_close(run.state, plain().feed(ids + start[:place])[1])  # the stop token itself is not consumed
    same_bits(go_on(model(), puppet([ids], [start]), run, limit), run)  # and nothing follows


@pytest.mark.parametrize("accept", [0, 2, 6])
def test_a08_a_stop_token_that_the_target_rejects_does_not_exist(accept):
    ids = distinct_prompt([0])
    start = text(ids, 24)
    drafter = puppet([ids], [start], accept, wrong=tiny.EOS)
    run = tiny.generate(model(), drafter, [ids], tiny.limits(24, stop=[tiny.EOS]))
    assert found(run) == expected(start, len(ids), [accept] * WIDTH, [7] * WIDTH, budget=24)
    assert tiny.tokens(run) == start


# A10


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16])
def test_a10_exactly_so_many_tokens_and_no_counter_speaks_of_others(count):
    ids = tiny.prompt(12)
    run = tiny.generate(model(), puppet([ids], [text(ids)]), [ids], tiny.limits(count))
    emitted = tiny.per_round(run, "emitted")
    assert tiny.tokens(run) == text(ids)[:count]
    assert 1 + sum(emitted) == count == int(run.num_emitted_B[0])
    assert emitted == [8] * ((count - 1) // 8) + ([(count - 1) % 8] if (count - 1) % 8 else [])
    assert tiny.per_round(run, "accepted") == [min(7, n) for n in emitted]
    assert FINISH_REASONS[int(run.finish_B[0])] == "length"
    assert not np.asarray(run.token_BN)[0, count:].any()  # tokens that were cut are nowhere
    tiny.memory_close(run.state, plain().feed(ids + text(ids)[: count - 1])[1])


# A14


@pytest.mark.parametrize("counts", [[0, 0, 7, 7, 7], [0, 7, 7, 7, 7]])
def test_a14_beyond_its_own_positions_the_drafter_is_silent(counts):
    """Block of 7 from position 31 is the last that fits into 38. Of a pair with such a drafter: test_pair.py."""
    ids = tiny.prompt(30)
    wanted, drafter = text(ids, 20), puppet([ids], [text(ids, 20)], [counts])
    tiny.generate(model(), drafter, [ids], tiny.limits(20))
    before = [program.num_compiles for program in tiny.shared_programs()]
    run = tiny.generate(model(), drafter, [ids], tiny.limits(20, reach=38))
    right = counts[1]
    silent = 18 - 1 - right  # rounds of one token each
    proposed, accepted, emitted = [7, 7] + [0] * silent, [0, right] + [0] * silent, [1, 1 + right] + [1] * silent
    assert found(run) == (wanted, "length", proposed, accepted, emitted)
    assert [program.num_compiles for program in tiny.shared_programs()] == before


# A16


def test_a16_padding_leaves_no_trace():
    """Six tokens: unpadded, padded by 26 (what the padding holds changes no bit), and beside four other rows."""
    ids = tiny.prompt(6)
    wanted = text(ids, 10)
    drafter, limit = puppet([ids], [wanted], [[3, 0, 2]]), tiny.limits(10)
    others = [ids, *(tiny.prompt(n, seed=7) for n in (32, 1, 2, 13))]
    texts = [wanted] + [text(row, 10) for row in others[1:]]

    def start(prompts, token_BT, drafter, limit):
        program, _ = tiny.shared_programs()
        num_B = jnp.array([len(row) for row in prompts], jnp.int32)
        return program(
            target=model(), drafter=drafter, token_BT=jnp.asarray(token_BT, jnp.int32), num_B=num_B, limits=limit,
            capacity=CAPACITY, keep_logits=False,
        )  # fmt: skip

    padded = tiny.generate(model(), drafter, [ids], limit, rounds=0)
    alone = start([ids], [ids], drafter, limit)
    junk = start([ids], [ids + tiny.prompt(26, seed=9)], drafter, limit)
    beside = tiny.generate(
        model(), puppet(others, texts, [[3, 0, 2]] + [[7]] * 4), others, tiny.limits(10, batch=5), rounds=0
    )
    same_bits(junk, padded)
    _, fed = plain().feed(ids)
    for run in (alone, padded, beside):
        tiny.memory_close(row_of(run.state, 0), fed)
        tiny.memory_close(row_of(run.state, 0), alone.state, 1e-5)
        assert int(run.context.length_B[0]) == 6
        for name in ("key", "value"):
            for a, b in zip(getattr(run.context, name), getattr(alone.context, name), strict=True):
                np.testing.assert_allclose(a[:1], b, atol=1e-4, rtol=0)  # past the length too: zeros in both
        assert int(run.anchor_B[0]) == wanted[0]
    assert tiny.tokens(go_on(model(), drafter, alone, limit, 99)) == wanted
    assert tiny.tokens(go_on(model(), drafter, padded, limit, 99)) == wanted


# A18


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("counts", [[0] * 9, [7, 0], [1, 2, 3]])
def test_a18_prompts_shorter_than_the_convolution(length, counts):
    ids = tiny.prompt(length, seed=3)
    wanted = text(ids, 10)
    drafter, limit = puppet([ids], [wanted], [counts]), tiny.limits(10)
    run = tiny.generate(model(), drafter, [ids], limit, rounds=0)
    tiny.memory_close(run.state, plain().feed(ids)[1])  # one token at a time: a prefill cut 1 + 1 + 1
    window = model().config.linear_conv_kernel_dim - 1
    for tail in run.state.conv[:1]:
        assert tail.shape == (1, window, model().config.conv_channels)
        assert not np.asarray(tail)[:, : window - length].any()
        assert (np.abs(tail[:, window - length :]).max(axis=-1) > 0).all()
    run = go_on(model(), drafter, run, limit, 99)
    assert tiny.tokens(run) == wanted
    assert tiny.per_round(run, "accepted")[: len(counts)] == counts
    tiny.memory_close(run.state, plain().feed(ids + wanted[:-1])[1])


# A24


def generation_of(run, row: int = 0) -> Generation:
    tokens, reason, proposed, accepted, emitted = found(run, row)
    timing = Timing(0.0, 0.0, 0.0, 0, 1, len(tokens))
    return Generation(None, tokens, str(reason), "dspark", len(emitted), proposed, accepted, emitted, timing)


def test_a24_one_meaning_of_acceptance_length():
    ids, counts = tiny.prompt(12), [7, 3, 0, 7, 1]
    run = tiny.generate(model(), puppet([ids], [text(ids)], [counts]), [ids], tiny.limits(24))
    one = generation_of(run)
    assert one.accepted_per_round == counts
    assert one.acceptance_length == pytest.approx(4.6)
    assert mean_accepted_drafts([one]) == pytest.approx(3.6)
    assert draft_acceptance_rate([one]) == pytest.approx(18 / 35)
    assert one.survival == pytest.approx([0.8, 0.6, 0.6, 0.4, 0.4, 0.4, 0.4])
    assert 1 + sum(one.survival) == pytest.approx(one.acceptance_length)

    # Pooled over rounds, not over prompts; a round cut by the budget counts what it emitted.
    run = tiny.generate(model(), puppet([ids], [text(ids)]), [ids], tiny.limits(12))
    two = generation_of(run)
    assert (two.accepted_per_round, two.emitted_per_round) == ([7, 3], [8, 3])
    assert acceptance_length([one, two]) == pytest.approx((23 + 11) / 7)
    assert mean_accepted_drafts(iter([one, two])) == pytest.approx((18 + 10) / 7)
    assert draft_acceptance_rate(iter([one, two])) == pytest.approx(28 / 49)
    assert survival([one, two]) == pytest.approx([6 / 7, 5 / 7, 5 / 7, 3 / 7, 3 / 7, 3 / 7, 3 / 7])

    # One token needs no round; autoregressive rounds commit one each and propose nothing.
    none = generation_of(tiny.generate(model(), puppet([ids], [text(ids)]), [ids], tiny.limits(1)))
    assert none.num_rounds == 0
    assert np.isnan([none.acceptance_length, mean_accepted_drafts([none]), draft_acceptance_rate([none])]).all()
    assert acceptance_length([one, none]) == one.acceptance_length
    plainly = generation_of(tiny.generate(model(), puppet([ids], [text(ids)]), [ids], tiny.limits(9, draft=0)))
    assert (plainly.acceptance_length, mean_accepted_drafts([plainly])) == (1.0, 0.0)
    assert np.isnan(draft_acceptance_rate([plainly]))


# A25: rows are masked at full width (docs/decisions.md), so the case's "width at most 4" becomes "2 proposals count".


@pytest.mark.parametrize(("threshold", "committed"), [(0.0, 8), (0.05, 8), (0.5, 3), (0.9, 3), (0.901, 1), (1.0, 1)])
def test_a25_the_confidence_cuts_the_block_at_the_first_unsure_slot(threshold, committed):
    """Sure slots behind an unsure one do not count; a confidence equal to the threshold does."""
    ids = tiny.prompt(12)
    drafter = puppet([ids], [text(ids)], confidence=[0.9, 0.9, 0.1, 0.95, 0.95, 0.95, 0.95])
    budget = 1 + 5 * committed
    run = tiny.generate(model(), drafter, [ids], tiny.limits(budget, threshold=threshold))
    assert found(run) == (
        text(ids)[:budget], "length", [committed - 1] * 5, [committed - 1] * 5, [committed] * 5,
    )  # fmt: skip
    tiny.memory_close(run.state, plain().feed(ids + text(ids)[: budget - 1])[1])


def test_a25_no_confidence_and_no_threshold_compiles_anew_or_changes_the_text():
    ids = tiny.prompt(12)
    wanted, rng = text(ids), np.random.default_rng(0)
    first = tiny.generate(model(), puppet([ids], [wanted]), [ids], tiny.limits(100))
    before = [program.num_compiles for program in tiny.shared_programs()]
    rounds, seen = 0, set()
    for _ in range(10):
        confidence = rng.random((1, WIDTH, BLOCK)).astype(np.float32) ** 0.1
        accept = rng.integers(0, BLOCK + 1, (1, WIDTH))
        threshold, proposals = np.float32(rng.random()), int(rng.choice([2, 5, 7, 7, 7]))
        sure = np.cumprod(confidence >= threshold, axis=-1).sum(-1)[0]
        limit = tiny.limits(100, threshold=float(threshold), draft=proposals)
        run = tiny.generate(model(), puppet([ids], [wanted], accept, confidence=confidence), [ids], limit)
        assert found(run) == expected(wanted, len(ids), accept[0], sure, budget=100, proposals=proposals)
        assert tiny.tokens(run) == wanted[:100]
        assert tiny.memory_equal(run.state, first.state)
        rounds += int(run.num_rounds_B[0])
        seen |= set(tiny.per_round(run, "proposed"))
    assert rounds > 50
    assert seen == set(range(BLOCK + 1))
    assert [program.num_compiles for program in tiny.shared_programs()] == before


# Memory that is full, rows that finish apart, rounds one at a time: the same kinds of fault without a case


def test_a_memory_that_fills_up_in_mid_block():
    """256 tokens fit: 30 full rounds, then 4 tokens of a block of 8. Slots are written at most 8 past the capacity."""
    ids = tiny.prompt(12)
    wanted = text(ids)
    drafter, limit = puppet([ids], [wanted]), tiny.limits(PLENTY)
    run = tiny.generate(model(), drafter, [ids], limit, rounds=0)
    marked = replace(run, state=replace(run.state, key=tuple(dead(x, run.state.length_B, 7.0) for x in run.state.key)))
    run = go_on(model(), drafter, marked, limit, 10**6)
    assert found(run) == (wanted, "capacity", [7] * 31, [7] * 30 + [4], [8] * 30 + [4])
    assert (len(wanted), int(run.state.length_B[0]), int(run.context.length_B[0])) == (245, 256, 256)
    tiny.memory_close(run.state, plain().feed(ids + wanted[:-1])[1])
    key = run.state.key[1]
    assert key.shape[1] == CAPACITY + SPARE_ROWS
    last_pass = 12 + 30 * 8
    assert (np.asarray(key[:, last_pass + BLOCK + 1 :]) == 7.0).all()
    same_bits(go_on(model(), drafter, run, limit), run)
    assert not np.asarray(run.context.key[0][:, CAPACITY:]).any()


@functools.cache
def ragged():
    """Five rows that end for every reason: (prompts, texts, accept by place, confidence, budgets, stop id)."""
    prompts = [tiny.prompt(n, seed=6) for n in (11, 3, 30, 1, 17)]
    texts = [text(ids) for ids in prompts]
    rng = np.random.default_rng(4)
    accept = rng.integers(0, BLOCK + 1, (5, WIDTH))
    accept[2] = BLOCK  # the memory of the third fills up early
    accept[0] = rng.integers(0, 3, WIDTH)  # the first is slow and is the last to run
    confidence = np.where(rng.random((5, WIDTH, BLOCK)) < 0.1, 0.2, 0.8).astype(np.float32)
    confidence[2] = 1.0
    place = next(i for i in range(20, 60) if texts[1][i] not in texts[1][:i] + texts[2] + texts[4][:90] + texts[0])
    return prompts, texts, accept, confidence, [150, PLENTY, PLENTY, 1, 90], texts[1][place]


def ragged_puppet(rows):
    prompts, texts, accept, confidence, _, _ = ragged()
    return puppet([prompts[b] for b in rows], [texts[b] for b in rows], accept[rows], confidence=confidence[rows])


def test_rows_of_a_batch_equal_their_single_runs():
    prompts, texts, accept, confidence, budgets, stop = ragged()
    sure = np.cumprod(confidence >= 0.5, axis=-1).sum(-1)
    run = tiny.generate(
        model(), ragged_puppet([0, 1, 2, 3, 4]), prompts, tiny.limits(budgets, stop=[stop], threshold=0.5)
    )
    reasons = []
    for b, ids in enumerate(prompts):
        wanted = expected(texts[b], len(ids), accept[b], sure[b], budget=budgets[b], stop=[stop])
        single = tiny.generate(model(), ragged_puppet([b]), [ids], tiny.limits(budgets[b], stop=[stop], threshold=0.5))
        assert found(run, b) == wanted
        assert found(single) == wanted
        tiny.memory_close(row_of(run.state, b), single.state)
        tiny.memory_close(single.state, plain().feed(ids + wanted[0][:-1])[1])
        reasons.append(wanted[1])
    assert reasons == ["length", "stop", "capacity", "length", "length"]
    assert len(set(np.asarray(run.num_rounds_B).tolist())) == 5


def test_one_round_at_a_time_is_one_call_and_finished_rows_stand_still():
    prompts, _, _, _, budgets, stop = ragged()
    drafter, limit = ragged_puppet([0, 1, 2, 3, 4]), tiny.limits(budgets, stop=[stop], threshold=0.5)
    whole = tiny.generate(model(), drafter, prompts, limit)
    run = tiny.generate(model(), drafter, prompts, limit, rounds=0)
    ended, rounds = {}, 0
    while not np.all(run.finish_B):
        for b in np.flatnonzero(run.finish_B):
            ended.setdefault(int(b), (rounds, run))
        run = go_on(model(), drafter, run, limit)
        rounds += 1
        for b, (_, then) in ended.items():
            assert tiny.memory_equal(run.state, then.state, row=b)
            assert found(run, b) == found(then, b)
            assert int(run.anchor_B[b]) == int(then.anchor_B[b])
            same_bits(row_of(replace(run.context, capacity=0), b), row_of(replace(then.context, capacity=0), b))
    assert len({when for when, _ in ended.values()}) == 4  # the others ended at four different times
    assert rounds == int(whole.num_rounds_B.max())
    same_bits(run, whole)
    same_bits(go_on(model(), drafter, run, limit, 5), whole)


def test_a_call_for_some_rounds_runs_exactly_so_many():
    ids = tiny.prompt(12)
    drafter, limit = puppet([ids], [text(ids)], [[1, 2, 3, 4]]), tiny.limits(PLENTY)
    for rounds in range(4):
        run = tiny.generate(model(), drafter, [ids], limit, rounds=rounds)
        assert tiny.per_round(run, "accepted") == [1, 2, 3, 4][:rounds]
        assert FINISH_REASONS[int(run.finish_B[0])] is None
