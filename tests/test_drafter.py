"""The drafter against the reference implementation's rounds, and against itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.checkpoint import load_drafter
from ready_jax.drafter import blocks

BOUND = 5e-5
KINDS = ["D1_vanilla", "D2_gated", "D3_rnn", "D4_vanilla_yarn"]


@pytest.fixture(scope="module", params=KINDS)
def case(request, golden):
    folder = golden / request.param
    return load_drafter(folder / "checkpoint", dtype="float32"), np.load(folder / "rounds.npz")


def close(found, wanted, bound=BOUND):
    assert found.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(found), wanted, atol=bound, rtol=0)


def absorbed(drafter, context, rounds, r):
    """The context after round r's newly committed features, absorbed with padding rows that must not matter."""
    features = rounds[f"r{r}.context_features"]
    new = features.shape[0]
    taps = np.full((1, new + 3, len(drafter.config.taps), drafter.config.hidden_size), np.nan, np.float32)
    taps[0, :new] = features.reshape(new, len(drafter.config.taps), -1)
    return drafter.absorb(context, jnp.asarray(taps), jnp.array([new], jnp.int32))


def test_five_rounds_equal_the_reference(case):
    drafter, rounds = case
    propose = jax.jit(lambda drafter, context, anchor: drafter.propose(context, anchor, with_logits=True))
    context = drafter.init_context(1, 64)
    for r in range(5):
        assert int(context.length_B[0]) == rounds[f"r{r}.cached_before"]
        context = absorbed(drafter, context, rounds, r)
        start = int(rounds[f"r{r}.start"])
        assert int(context.length_B[0]) == start
        for layer in range(drafter.config.num_layers):
            close(jnp.moveaxis(context.key[layer][0, :start], 0, 1), rounds[f"r{r}.cache_key"][layer])
            close(jnp.moveaxis(context.value[layer][0, :start], 0, 1), rounds[f"r{r}.cache_value"][layer])
        draft = propose(drafter, context, jnp.asarray(rounds[f"r{r}.anchor_token"]).reshape(1).astype(jnp.int32))
        assert draft.token_BP[0].tolist() == rounds[f"r{r}.draft_tokens"].tolist()
        close(draft.logits_BPV[0], rounds[f"r{r}.corrected_logits"])
        wanted = rounds[f"r{r}.confidence_logits"]
        close(draft.confidence_BP[0], 1 / (1 + np.exp(-wanted)))
        kept = [int(np.sum(np.cumprod(np.asarray(draft.confidence_BP[0]) >= t))) for t in (0, 0.3, 0.45, 0.6, 0.9)]
        assert kept == rounds[f"r{r}.proposal_len_by_threshold"].tolist()


def test_hidden_states_and_fused_features_equal_the_reference(case):
    drafter, rounds = case
    context = absorbed(drafter, drafter.init_context(1, 32), rounds, 0)
    features = rounds["r0.context_features"]
    taps = jnp.asarray(features.reshape(1, features.shape[0], len(drafter.config.taps), -1))
    close(drafter.fuse(taps)[0], rounds["r0.context_fused"])
    start, block = int(rounds["r0.start"]), drafter.config.block_size
    anchor = jnp.asarray(rounds["r0.anchor_token"]).reshape(1).astype(jnp.int32)
    inputs = drafter.block_inputs(anchor, drafter.embedding(None))
    slots = context.key[0].shape[1]
    hidden = drafter.hidden(
        inputs,
        start + jnp.arange(block)[None],
        list(zip(context.key, context.value, strict=True)),
        blocks((jnp.arange(slots) < start)[None, None]),
    )
    close(hidden[0], rounds["r0.block_hidden"])
    close(drafter.head(None)(hidden)[0], rounds["r0.base_logits"])


def test_a_drafter_without_embeddings_says_what_to_pass(case):
    drafter, _ = case
    drafter = jax.tree.map(lambda x: x, drafter)
    drafter.embed_VD = None
    with pytest.raises(ValueError, match=r"pass embed=target\.embed"):
        drafter.propose(drafter.init_context(1, 8), jnp.zeros((1,), jnp.int32))


def test_a_window_hides_older_context(case):
    """With sliding_window w the proposals depend on the last w context rows only."""
    drafter, rounds = case
    from dataclasses import replace

    narrow = jax.tree.map(lambda x: x, drafter)
    narrow.config = replace(drafter.config, sliding_window=4)
    context = absorbed(drafter, drafter.init_context(1, 32), rounds, 0)
    length = int(context.length_B[0])
    anchor = jnp.array([7], jnp.int32)

    def poisoned(keep):
        hide = (jnp.arange(context.key[0].shape[1]) < length - keep)[None, :, None, None]
        changed = tuple(jnp.where(hide, 9.0, x) for x in context.value)
        return replace(context, value=changed)

    plain = narrow.propose(context, anchor, with_logits=True).logits_BPV
    np.testing.assert_array_equal(plain, narrow.propose(poisoned(4), anchor, with_logits=True).logits_BPV)
    assert np.abs(plain - narrow.propose(poisoned(3), anchor, with_logits=True).logits_BPV).max() > 1e-3
    assert np.abs(plain - drafter.propose(context, anchor, with_logits=True).logits_BPV).max() > 1e-3
