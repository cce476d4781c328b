"""The Markov step, interpreted, and its reference against float64: ties, -inf rows, masked vocabulary ends."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick

from ready_jax.kernels import markov_step
from ready_jax.kernels import markov_step_fused as fused

BATCH, SLOTS, RANK, VOCAB = 3, 4, 8, 301
IMPLS = ["reference", "interpret"]


def problem(seed=0, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    shapes = ((BATCH, SLOTS, vocab), (BATCH, RANK), (RANK, vocab), (vocab, RANK))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def run(impl: str, slot: int, base, latent, w2, w1, scale=None):
    return _run(impl, slot, base, latent, w2, w1, scale)


@functools.partial(quick, static_argnums=(0, 1))
def _run(impl, slot, base, latent, w2, w1, scale):
    if impl == "reference":
        return markov_step.step(base, slot, latent, w2, w1, scale_V=scale, impl=impl)
    return fused.step(
        base, slot, latent, w2, w1, scale, width=64, programs=2, interpret=True
    )  # 3 trips, the last short


def logits(slot, base, latent, w2, scale=None):
    base, latent, w2 = (np.asarray(x, np.float64) for x in (base[:, slot], latent, w2))
    return base + latent @ w2 * (1.0 if scale is None else np.asarray(scale, np.float64))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", [0, 1])
def test_the_best_token_and_its_embedding(impl, slot):
    """Even slots walk the vocabulary forwards, odd ones backwards."""
    for seed in range(3):
        base, latent, w2, w1 = problem(seed)
        token, embed = run(impl, slot, base, latent, w2, w1)
        wanted = logits(slot, base, latent, w2).argmax(-1)
        np.testing.assert_array_equal(token, wanted)
        assert token.dtype == jnp.int32
        np.testing.assert_array_equal(embed, w1[wanted])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", [0, 1])
def test_equal_maxima_go_to_the_lowest_index(impl, slot):
    base, latent, w2, w1 = problem()
    ties = ([3, 299], [70, 140, 141, 300], [128, 129])  # in one lane of several blocks, in two programs, side by side
    for row, places in enumerate(ties):
        w2 = w2.at[:, jnp.array(places)].set(0.0)
        base = base.at[row, slot, jnp.array(places)].set(50.0)
    token, _ = run(impl, slot, base, latent, w2, w1)
    assert token.tolist() == [min(places) for places in ties]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", [0, 1])
def test_rows_without_a_finite_logit(impl, slot):
    """All -inf: token 0. A single one that is not: that one. NaN counts as the maximum, as in jnp.argmax."""
    base, latent, w2, w1 = problem()
    base = base.at[:, slot].set(-jnp.inf).at[1, slot, 300].set(-1e30).at[2, slot, 170].set(jnp.nan)
    token, embed = run(impl, slot, base, latent, w2, w1)
    assert token.tolist() == [0, 300, 170]
    np.testing.assert_array_equal(embed, w1[token])


@pytest.mark.parametrize("impl", IMPLS)
def test_fp8_weights_with_a_factor_per_column(impl):
    base, latent, w2, w1 = problem()
    scale = jnp.asarray(np.random.default_rng(1).uniform(0.1, 3, VOCAB), jnp.float32)
    w2 = w2.astype(jnp.float8_e4m3fn)
    token, _ = run(impl, 1, base, latent, w2.T, w1, scale)
    wanted = logits(1, base, latent, w2, scale).argmax(-1)
    np.testing.assert_array_equal(token, wanted)
    assert (wanted != logits(1, base, latent, w2).argmax(-1)).any()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_proposals_are_the_same_with_and_without_logits(kind):
    drafter = tiny.drafter(markov_head_type=kind, own_embeddings=True)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 48)), jnp.float32)

    @quick
    def both(drafter, hidden):
        anchor = jnp.array([5, 80], jnp.int32)
        return [drafter.speak(hidden, anchor, drafter.head(None), with_logits=flag) for flag in (False, True)]

    plain, full = both(drafter, hidden)
    np.testing.assert_array_equal(plain.token_BP, full.token_BP)
    np.testing.assert_array_equal(plain.confidence_BP, full.confidence_BP)
    np.testing.assert_array_equal(full.token_BP, jnp.argmax(full.logits_BPV, axis=-1))
    assert len(set(np.asarray(plain.token_BP).ravel())) > 5


def test_what_the_kernel_does_not_cover_is_refused_with_a_reason():
    reasons: dict[str, Any] = {
        "latents are float32; needs bfloat16": dict(dtype="float32"),
        "batch 17; needs at most 16": dict(batch=17),
        "rank 8; needs a power of two, at least 16": dict(rank=8),
    }
    for wanted, facts in reasons.items():
        assert wanted in str(fused.why_not(**facts))
    assert fused.why_not(batch=16, rank=256, dtype="bfloat16") is None
