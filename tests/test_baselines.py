"""Token drafters through the shared decode loop: exact text, and exactly the scripted acceptance."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick
from flax import nnx

from ready_jax.baselines import BaselineConfig, Bigram, PromptLookup, Scripted, Seen, Stale
from ready_jax.config import FULL, LINEAR, RopeConfig, TargetConfig
from ready_jax.decode import Limits, begin, decode
from ready_jax.state import init_state
from ready_jax.target import Target

pytestmark = pytest.mark.usefixtures("all_quick")
TINY = TargetConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    layer_types=(LINEAR, FULL),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=3,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e4, 4),
    tie_word_embeddings=False,
    max_position_embeddings=256,
)
BATCH, WIDTH, NEW = 3, 9, 40
NUM_B = np.array([9, 4, 6], np.int32)


@quick
def start(target, drafter, token_BT, limits):
    state = init_state(target.config, BATCH, WIDTH + NEW, dtype=target.dtype)
    return begin(target, drafter, state, token_BT, jnp.array(NUM_B), limits)


@quick
def go_on(target, drafter, run, limits):
    return decode(target, drafter, run, limits, 200)


def generate(target, drafter, token_BT, budget, proposals=7):
    """Token drafters begin alike, with the tokens that they have seen: one program for all of them."""
    limits = Limits(
        budget_B=jnp.full((BATCH,), budget),
        stop_L=jnp.array([-1]),
        draft_B=jnp.full((BATCH,), proposals),
        threshold=jnp.zeros(()),
        draft_limit=jnp.array(1 << 30),
    )
    run = start(target, None if drafter is None else PromptLookup(), token_BT, limits)
    return go_on(target, drafter, run, limits)


@pytest.fixture(scope="module")
def target():
    return Target(TINY, rngs=nnx.Rngs(3), dtype="float32")


@pytest.fixture(scope="module")
def prompt_BT():
    return jnp.asarray(np.random.default_rng(0).integers(0, 11, (BATCH, WIDTH)), jnp.int32)


@pytest.fixture(scope="module")
def plain(target, prompt_BT):
    return np.asarray(generate(target, None, prompt_BT, NEW).token_BN)[:, :NEW]


def test_lookup_and_bigram_change_nothing_in_the_text(target, prompt_BT, plain):
    table = Bigram.count(list(plain), 11)
    for drafter in (PromptLookup(), PromptLookup(BaselineConfig(block_size=3), max_ngram=2), table):
        run = generate(target, drafter, prompt_BT, NEW)
        assert np.array_equal(np.asarray(run.token_BN)[:, :NEW], plain)
        assert np.all(np.asarray(run.num_emitted_B) == NEW)
    run = generate(target, table, prompt_BT, NEW)
    assert int(np.asarray(run.accepted_BN).sum()) > 0, "a table counted on the very text must hit something"


def test_scripted_gives_the_scripted_acceptance(target, prompt_BT, plain):
    counts = np.array([[3, 0, 7, 1, 2, 7, 5, 0], [0] * 8, [7] * 8])
    drafter = Scripted.by_round(NUM_B, plain, counts, 11)
    run = generate(target, drafter, prompt_BT, NEW)
    assert np.array_equal(np.asarray(run.token_BN)[:, :NEW], plain)
    accepted = np.asarray(run.accepted_BN)
    assert accepted[0, :8].tolist() == [3, 0, 7, 1, 2, 7, 5, 0]
    assert accepted[1, :8].tolist() == [0] * 8
    assert accepted[2, :4].tolist() == [7] * 4  # 33 of 40 tokens; the next round is cut by the budget
    assert int(run.num_rounds_B[2]) == 5


def test_scripted_stays_on_script_after_a_cut(target, prompt_BT, plain):
    drafter = Scripted.by_round(NUM_B, plain, np.full((BATCH, 8), 4), 11)
    run = generate(target, drafter, prompt_BT, 9)
    assert np.asarray(run.num_emitted_B).tolist() == [9] * BATCH
    assert np.array_equal(np.asarray(run.token_BN)[:, :9], plain[:, :9])
    assert np.asarray(run.accepted_BN)[:, :2].tolist() == [[4, 3]] * BATCH


def lookup(tokens, anchor, **options):
    seen = Seen(jnp.array([len(tokens)]), jnp.array([list(tokens) + [99] * 12]), 12)
    return np.asarray(PromptLookup(**options).propose(seen, jnp.array([anchor])).token_BP)[0].tolist()


def test_lookup_prefers_the_longest_then_the_latest_match():
    # Suffix 1 2 3 stands at the start; the later 2 3 and 3 must lose to it.
    assert lookup([1, 2, 3, 40, 41, 42, 43, 44, 45, 46, 2, 3, 50, 3, 60, 1, 2], 3) == [40, 41, 42, 43, 44, 45, 46]
    # Only the single token matches: the most recent place wins.
    assert lookup([3, 40, 41, 3, 60, 61, 62, 63, 64, 65, 66, 1, 2], 3) == [60, 61, 62, 63, 64, 65, 66]
    # A loop goes on into its own proposals.
    assert lookup([7, 8, 9, 7, 8], 9) == [7, 8, 9, 7, 8, 9, 7]
    # Nothing matches: the anchor is repeated; junk behind the length is not looked at.
    assert lookup([1, 2], 99) == [99] * 7


def test_errors_name_the_bounds():
    with pytest.raises(ValueError, match=r"block_size=8 must lie in 1\.\.7"):
        BaselineConfig(block_size=8)
    with pytest.raises(ValueError, match=r"0\.\.block_size=7"):
        Scripted.by_round(NUM_B, np.zeros((3, 4), int), np.full((3, 1), 8), 11)


def test_a_stale_reader_sees_the_states_of_the_round_before():
    """Round by round: the proposals are those of the drafter itself on the states that the last round began with."""
    target, drafter = tiny.target(), tiny.drafter(reader=True)
    stale, (token_BT, num_B) = Stale(drafter), tiny.padded([tiny.prompt(9), tiny.prompt(6, seed=1)])
    limits = tiny.limits(40, batch=2)

    @quick
    def start(target, stale, token_BT, num_B):
        return begin(target, stale, init_state(target.config, 2, 80, dtype=target.dtype), token_BT, num_B, limits)

    @quick
    def one_round(target, stale, run):
        return decode(target, stale, run, limits, 1)

    @quick
    def proposals(target, drafter, run, states):
        given = drafter.propose(run.context.inner, run.anchor_B, states, target.embed, target.unembed)
        own = Stale(drafter).propose(run.context, run.anchor_B, run.state.recurrent, target.embed, target.unembed)
        return given.token_BP, own.token_BP

    run = start(target, stale, token_BT, num_B)
    states, differ = run.state.recurrent, 0
    for _ in range(4):
        given, found = proposals(target, drafter, run, states)
        np.testing.assert_array_equal(given, found)
        present, _ = proposals(target, drafter, run, run.state.recurrent)
        differ += int((np.asarray(present) != np.asarray(found)).sum())
        states, run = run.state.recurrent, one_round(target, stale, run)
    assert differ > 0  # else it would prove nothing


def test_a_stale_control_needs_a_reader():
    with pytest.raises(ValueError, match="this one has none"):
        Stale(tiny.drafter())
