"""Lossless means bit-identical: logits, states, conv tails, keys and values, however the tokens are cut into passes."""

import functools
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from ready_jax.baselines import Forced
from ready_jax.config import FULL, LINEAR
from ready_jax.kernels import gated_delta_reference, gated_delta_rows
from ready_jax.programs import EXACT
from ready_jax.serve.exact import every_pair
from ready_jax.state import commit, init_state

LENGTH, PREFIX = 64, 8
THREE = (LINEAR, FULL, LINEAR)
WIDTHS = {
    "small": dict(layer_types=THREE),
    "unequal": dict(layer_types=THREE, linear_value_head_dim=24, hidden_size=40),
    "full": dict(
        layer_types=(LINEAR, FULL), linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_value_heads=4, hidden_size=64,
    ),
}  # fmt: skip


def segmentations(seed: int, count: int) -> list[list[int]]:
    """All ones, all eights, and random cuts of the sequence into passes of 1..8 rows."""
    rng = np.random.default_rng(seed)
    found = [[1] * LENGTH, [8] * (LENGTH // 8)]
    for _ in range(count):
        cuts = []
        while sum(cuts) < LENGTH:
            cuts.append(min(int(rng.integers(1, 9)), LENGTH - sum(cuts)))
        found.append(cuts)
    return found


def poisoned(model):
    """The same model with an embedding row of NaN: what rejected rows may hold."""
    model = jax.tree.map(lambda x: x, model)
    model.embed_VD[...] = model.embed_VD[...].at[tiny.PAD].set(jnp.nan)
    return model


def disagreements(model, batch: int, cuts: list[list[int]]) -> list[str]:
    """What differs, bit for bit, between a run of single rows and the same tokens cut otherwise.

    Rows past the cut hold random tokens and NaN; batch rows have prefixes of different lengths.
    """
    rng = np.random.default_rng(5)
    text = rng.integers(0, tiny.PAD, (batch, PREFIX + LENGTH)).astype(np.int32)
    num_B = jnp.asarray(rng.integers(PREFIX - 4, PREFIX + 1, batch), jnp.int32)

    @functools.partial(jax.jit, compiler_options=EXACT)  # made anew in every call: a mutated commit is traced again
    def step(model, token_BT, state, num_B):
        out, pending = model.verify(token_BT, state)
        return commit(state, pending, num_B), model.unembed(out.hidden_BTD)

    # The prefix is one pass of which each row keeps another number: no prefill to compile.
    first, _ = step(
        model, jnp.asarray(text[:, :PREFIX]), init_state(model.config, batch, 128, dtype=model.dtype), num_B
    )

    def follow(cuts):
        state, logits, at = first, [], PREFIX
        for rows in cuts:
            token_BT = np.where(rng.random((batch, 8)) < 0.5, tiny.PAD, rng.integers(0, tiny.PAD, (batch, 8)))
            token_BT[:, :rows] = text[:, at : at + rows]
            state, found = step(model, jnp.asarray(token_BT, jnp.int32), state, jnp.full((batch,), rows, jnp.int32))
            logits.append(np.asarray(found)[:, :rows])
            at += rows
        return state, np.concatenate(logits, axis=1)

    wanted_state, wanted = follow(cuts[0])
    assert np.isfinite(wanted).all()
    found = []
    for cut in cuts[1:]:
        state, logits = follow(cut)
        if not np.array_equal(logits.view(np.uint32), wanted.view(np.uint32)):
            found.append(f"logits of {cut}")
        if not tiny.memory_equal(state, wanted_state):
            found.append(f"memory of {cut}")
    return found


def some(every, fast: list) -> list:
    """All of these cases, of which only ``fast`` are not slow."""
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every]


#: Every two values of widths, dtype and batch occur together in one of these; all others are slow.
CUT = [
    ("small", "float32", 5),
    ("small", "bfloat16", 1),
    ("unequal", "float32", 1),
    ("unequal", "bfloat16", 5),
    ("full", "float32", 5),
    ("full", "bfloat16", 1),
]


@pytest.mark.parametrize(("widths", "dtype", "batch"), some(product(WIDTHS, ("float32", "bfloat16"), (1, 5)), CUT))
def test_no_cut_of_the_tokens_changes_a_bit(widths, dtype, batch):
    model = poisoned(tiny.target(dtype=dtype, **WIDTHS[widths]))
    assert disagreements(model, batch, segmentations(batch, 6 if widths != "full" else 3)) == []


class Log(NamedTuple):
    """What an elementwise replay would need: keys, writes and decays of each row."""

    k_BTMX: jax.Array
    u_BTMY: jax.Array
    g_BTM: jax.Array


def _elementwise():
    """Commit by replaying ``e^g S + k u`` outside the loop that scored: same mathematics, other rounding."""

    def verify(s_BMXY, q, k, v, g, beta):
        out, rows = gated_delta_reference.verify(s_BMXY, q, k, v, g, beta)
        before = jnp.concatenate([s_BMXY[None], rows.s_TBMXY[:-1]])
        k_BTMX = jnp.repeat(gated_delta_reference.l2_normalise(k), v.shape[2] // k.shape[2], axis=2)
        decayed = jnp.moveaxis(before, 0, 1) * jnp.exp(g)[..., None, None]
        read = jnp.einsum("BTMXY,BTMX->BTMY", decayed, k_BTMX, precision="highest")
        return out, Log(k_BTMX, (v.astype(jnp.float32) - read) * beta[..., None], g)

    def replay(s_BMXY, log, num_B):
        for t in range(log.g_BTM.shape[1]):
            write = log.k_BTMX[:, t, :, :, None] * log.u_BTMY[:, t, :, None, :]
            after = jnp.exp(log.g_BTM[:, t])[..., None, None] * s_BMXY + write
            s_BMXY = jnp.where((t < num_B)[:, None, None, None], after, s_BMXY)
        return s_BMXY

    return SimpleNamespace(verify=verify, commit=replay)


def _shifted():
    """Commit one row too few: the anchor counted as already consumed."""

    def shifted(s_BMXY, pending, num_B):
        return gated_delta_reference.commit(s_BMXY, pending, jnp.maximum(num_B - 1, 0))

    return SimpleNamespace(verify=gated_delta_reference.verify, commit=shifted)


@pytest.mark.parametrize("mutant", [_elementwise, _shifted])
def test_the_check_catches_a_commit_that_is_not_the_scoring_step(mutant, monkeypatch):
    monkeypatch.setattr(gated_delta_rows, "gated_delta_reference", mutant())  # what the target's rows run here
    model = tiny.target(**WIDTHS["small"])
    assert disagreements(model, 1, segmentations(1, 2)) != []


def bare(drafter, target):
    """Without heads and reader: what ``begin`` does with a drafter, the same program for all of them."""
    c, dtype = drafter.config, str(drafter.dtype)
    shape = dict(taps=c.taps, num_target_layers=c.num_target_layers, markov_rank=0, confidence_head=False)
    graph, own = nnx.split(tiny.drafter(dtype=dtype, config=target.config, **shape))
    weights = dict(nnx.to_flat_state(nnx.state(drafter)))
    return nnx.merge(graph, nnx.from_flat_state([(path, weights[path]) for path, _ in nnx.to_flat_state(own)]))


#: Every two values of head, reader, dtype and batch occur together in one of these; all others are slow.
PAIRWISE = [
    ("vanilla", False, "float32", 1),
    ("vanilla", True, "bfloat16", 5),
    ("gated", False, "bfloat16", 1),
    ("gated", True, "float32", 5),
    ("rnn", False, "float32", 5),
    ("rnn", True, "bfloat16", 1),
]
EVERY = product(("vanilla", "gated", "rnn"), (False, True), ("float32", "bfloat16"), (1, 5))


@pytest.mark.parametrize(("head", "reader", "dtype", "batch"), some(EVERY, PAIRWISE))
def test_speculation_equals_autoregressive_decoding_over_all_pairs_of_acceptance_counts(head, reader, dtype, batch):
    """Every (previous, next) pair of 0..7 accepted proposals; ragged prompts, rows that finish apart."""
    model = tiny.target(dtype=dtype, layer_types=THREE)
    reads = tiny.reader_config(model.config, state_layers=(0, 2)) if reader else False
    changes = dict(markov_head_type=head, taps=(0, 1), num_target_layers=3)
    inner = tiny.drafter(dtype=dtype, reader=reads, config=model.config, **changes)
    walk = every_pair(7)
    assert len(set(pairwise(walk))) == 64
    prompts = [tiny.prompt(n, seed=1) for n in (11, 3, 30, 1, 17)[:batch]]
    budgets = [1 + sum(a + 1 for a in walk)] + [40, 7, 1, 100][: batch - 1]
    limit = tiny.limits(budgets)
    plain = tiny.generate(model, None, prompts, limit, capacity=512, keep_logits=True)
    texts = [tiny.tokens(plain, b) for b in range(batch)]
    script = tiny.script(prompts, texts, [walk[b:] + walk[:b] for b in range(batch)])
    start, go_on = tiny.shared_programs()
    token_BT, num_B = tiny.padded(prompts)
    begun = start(
        target=model, drafter=Forced(bare(inner, model), script), token_BT=token_BT, num_B=num_B, limits=limit,
        capacity=512, keep_logits=True,
    )  # fmt: skip

    def speculate(limit):
        every_round = jnp.int32(2**31 - 1)
        return go_on(target=model, drafter=Forced(inner, script), run=begun, limits=limit, max_rounds=every_round)

    run = speculate(limit)
    assert tiny.per_round(run, "accepted") == walk
    for b in range(batch):
        assert len(texts[b]) == budgets[b]
        assert tiny.tokens(run, b) == texts[b]
    assert np.array_equal(np.asarray(run.logits_BNV).view(np.uint32), np.asarray(plain.logits_BNV).view(np.uint32))
    assert tiny.memory_equal(run.state, plain.state)

    # The same executable with nothing proposed is the autoregressive program too.
    none = speculate(replace(limit, draft_B=0 * limit.draft_B))
    assert [tiny.tokens(none, b) for b in range(batch)] == texts
    assert np.array_equal(np.asarray(none.logits_BNV).view(np.uint32), np.asarray(plain.logits_BNV).view(np.uint32))
    assert tiny.memory_equal(none.state, plain.state)
