"""Loss and step: hand-made numbers, slicing, packing, empty batches, fp32 masters, and training = decoding."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from compiling import quick, quickly
from flax import nnx

from ready_jax.config import FULL, LINEAR, DrafterConfig, ReaderConfig, RopeConfig, TargetConfig
from ready_jax.configs.drafter_training import LossConfig, OptimizerConfig
from ready_jax.drafter import Drafter
from ready_jax.state import init_state
from ready_jax.target import Target
from ready_jax.train import loss as losses
from ready_jax.train import step as steps
from ready_jax.train.anchors import Anchors, block_labels, sample_anchors, step_key
from ready_jax.train.features import block_hidden, features
from ready_jax.train.gates import compare, round_anchors, smoothness

TARGET = TargetConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    layer_types=(LINEAR, FULL, LINEAR),
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
DRAFTER = DrafterConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e4, 8),
    max_position_embeddings=256,
    block_size=7,
    taps=(-1, 0, 1),
    mask_token_id=28,
    markov_rank=4,
    markov_head_type="vanilla",
    confidence_head=True,
    confidence_head_with_markov=True,
    own_embeddings=False,
)
READER = ReaderConfig(rank=2, state_layers=(0, 2), memory_heads=2, key_dim=8, value_dim=4, mlp_hidden=8)
TOKENS = 40


def made(config=DRAFTER, seed=1):
    """A drafter without a parameter at zero or one, so that nothing hides behind them."""
    return tiny.randomised(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype="float32"), seed, norm=1.0)


@pytest.fixture(scope="module")
def target():
    return tiny.randomised(lambda: Target(TARGET, rngs=nnx.Rngs(0), dtype="float32"), 0, norm=0.0)


@pytest.fixture(scope="module")
def drafter():
    return made()


def batch(rows=2):
    rng = np.random.default_rng(2)
    token = rng.integers(0, 28, (rows, TOKENS))
    segment = np.where(np.arange(TOKENS) < 24, 1, 2) * np.ones((rows, 1), int)
    mask = (np.arange(TOKENS) % 24 >= 5) * np.ones((rows, 1), bool)
    return jnp.asarray(token), jnp.asarray(mask, bool), jnp.asarray(segment)


@functools.partial(quick, static_argnames="config")
def features_of(target, config, tokens, anchors):
    return features(target, config, tokens[0], tokens[2], anchors, jax.lax.Precision.HIGHEST)


@functools.partial(quick, static_argnames="config")
def loss_from(found, target, drafter, tokens, anchors, config):
    token_BT, mask_BT, segment_BT = tokens
    return steps.draft_loss(
        drafter, found, anchors, token_BT, mask_BT, segment_BT, target.embed, target.unembed, config
    )


def loss_of(target, drafter, tokens, anchors, config=None):
    found = features_of(target, drafter.config, tokens, anchors)
    return loss_from(found, target, drafter, tokens, anchors, config or LossConfig())


# The sums


def test_sums_against_numpy():
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 3, 4, 9)).astype(np.float32)
    token, confidence = rng.integers(0, 9, (3, 4)), rng.normal(size=(3, 4)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    sums = quick(functools.partial(losses.block_sums, config=LossConfig(0.1, 0.9, 1.0)))
    found = sums(logits, teacher, token, mask, confidence)

    def softmax(x):
        x = np.exp(x.astype(np.float64))
        return x / x.sum(-1, keepdims=True)

    p, q = softmax(logits), softmax(teacher)
    weight = mask * np.exp(-np.arange(4) / 4)
    l1 = np.abs(p - q).sum(-1)
    overlap = 1 - l1 / 2
    alive = 1 / (1 + np.exp(-confidence.astype(np.float64)))
    bce = -(overlap * np.log(alive) + (1 - overlap) * np.log(1 - alive))
    ce = -np.log(np.take_along_axis(p, token[..., None], -1)[..., 0])
    for name, want in (("ce", ce), ("l1", l1), ("confidence", bce), ("weight", np.ones_like(l1))):
        np.testing.assert_allclose(getattr(found, name), (weight * want).sum(), rtol=1e-5)
    np.testing.assert_allclose(found.overlap_P, (mask * overlap).sum(0), rtol=1e-5)
    assert np.asarray(found.count_P).tolist() == [2, 1, 1, 1]
    np.testing.assert_allclose(found.tau, 2 + (np.cumprod(overlap * mask, axis=1) * mask[:, :1]).sum(), rtol=1e-5)
    assert float(found.blocks) == 2


ANCHORS = 5  # of every row of whole batches, spare ones among them: one program


def test_slices_change_nothing(target, drafter):
    """Of one block of both rows, and of two where five do not divide; by default all of them are one slice."""
    anchors = sample_anchors(step_key(0, 0), *batch()[1:], ANCHORS)
    whole = loss_of(target, drafter, batch(), anchors)[0]
    for size in (1, 4):
        np.testing.assert_allclose(
            loss_of(target, drafter, batch(), anchors, LossConfig(slice_blocks=size))[0], whole, rtol=1e-5
        )


def test_no_array_holds_all_logits():
    """[rows, V] in fp32 must not exist for all rows at once, forward or backward."""
    vocab, blocks = 5003, 64
    drafter = made(replace(DRAFTER, vocab_size=vocab))
    graph, state = nnx.split(drafter)
    head = jnp.ones((16, vocab))
    labels = block_labels(Anchors(jnp.zeros((1, blocks), int), jnp.ones((1, blocks), bool)), *batch(1), 7)

    def value(state, hidden):
        sums = losses.sums(
            nnx.merge(graph, state),
            hidden,
            jnp.ones((1, TOKENS, 16)),
            labels,
            lambda h: h @ head,
            LossConfig(slice_blocks=4),
        )
        return losses.total(sums)

    text = str(jax.make_jaxpr(jax.grad(value, argnums=(0, 1)))(state, jnp.ones((1, blocks, 7, 16))))
    assert f"4,7,{vocab}]" in text
    assert f"64,7,{vocab}]" not in text
    assert f"448,{vocab}]" not in text


# Packing and decoding


def test_packed_segments_train_like_separate_rows(target, drafter):
    """The same segments as rows of their own, the shorter ones padded."""
    token, mask, segment = batch()
    spare = [0] * (ANCHORS - 2)
    keep = jnp.arange(ANCHORS)[None] < jnp.array([[2], [2]])
    anchors = Anchors(jnp.array([[8, 30, *spare], [6, 33, *spare]]), keep)
    packed = loss_of(target, drafter, (token, mask, segment), anchors)[1]
    rows = [jnp.concatenate([x[:, :24], jnp.pad(x[:, 24:], [(0, 0), (0, 8)])]) for x in (token, mask, segment)]
    alone = Anchors(jnp.array([[8], [6], [30 - 24], [33 - 24]]), jnp.ones((4, 1), bool))
    separate = loss_of(target, drafter, tuple(rows), alone)[1]
    for name in ("ce", "l1", "confidence", "weight", "tau"):
        np.testing.assert_allclose(getattr(packed, name), getattr(separate, name), rtol=2e-4)


@functools.partial(quick, static_argnames="taps")
def prefilled(target, token, taps):
    state = init_state(TARGET, 1, 64, dtype="float32")
    out, state = target.prefill(token, state, jnp.array([token.shape[1]]), taps=taps)
    return out.taps_BTED, state


#: Every two values of Markov rank, window and reader occur together in one of these; all others are slow.
PAIRWISE = [(4, None, None), (4, 6, READER), (0, None, READER), (0, 6, None)]


@pytest.mark.parametrize(
    ("markov", "window", "reader"),
    [
        pytest.param(*case, marks=() if case in PAIRWISE else pytest.mark.slow)
        for case in itertools.product((4, 0), (None, 6), (None, READER))
    ],
)
def test_training_predicts_what_decoding_proposes(target, markov, window, reader):
    """Field case B04: one anchor, all 7 slots, after a prefix committed by prefill."""
    config = replace(DRAFTER, markov_rank=markov, confidence_head=bool(markov), sliding_window=window, reader=reader)
    drafter = made(config, 4)
    token = jnp.asarray(np.random.default_rng(3).integers(0, 28, (1, TOKENS)))
    anchor = 20
    taps_BTED, state = prefilled(target, token[:, :anchor], config.taps)

    @quick
    def decoding(drafter, target):
        context = drafter.absorb(drafter.init_context(1, 64), taps_BTED, jnp.array([anchor]))
        borrowed = (target.embed, target.unembed)
        return drafter.propose(context, token[:, anchor], state.recurrent, *borrowed, with_logits=True)

    @quick
    def training(drafter, target, found, token):
        segment = jnp.ones_like(token)
        hidden = block_hidden(drafter, found.taps_BTED, token, segment, anchors, target.embed, found.states)[0]
        labels = block_labels(anchors, token, jnp.ones_like(token, bool), segment, 7)
        latent = drafter.markov.latents(labels.previous_BAP[0], hidden)[0] if markov else None
        logits = losses.draft_logits(drafter.markov, hidden, latent, target.unembed)
        return logits, losses.argmax_tokens(drafter, hidden[None], labels.previous_BAP, target.unembed)

    draft = decoding(drafter, target)
    # Teacher forcing uses the text as previous tokens: make the text what was proposed.
    token = token.at[:, anchor + 1 : anchor + 8].set(draft.token_BP)
    anchors = Anchors(jnp.array([[anchor, 33]]), jnp.ones((1, 2), bool))
    read = replace(DRAFTER, reader=reader)  # all that features depend on: two programs for eight cases
    found = features_of(target, read, (token, None, jnp.ones_like(token)), anchors)
    logits, best = training(drafter, target, found, token)
    np.testing.assert_allclose(logits[0], draft.logits_BPV[0], rtol=0, atol=1e-4)
    assert np.array_equal(best[0, 0], draft.token_BP[0])


def test_a_reader_with_zero_output_changes_nothing(target):
    with_reader = made(replace(DRAFTER, reader=READER))
    assert with_reader.reader is not None
    site = with_reader.reader.sites[0]
    site.w_out_UD[...] = jnp.zeros_like(site.w_out_UD[...])
    plain = made()
    graph, own = nnx.split(plain)
    shared = dict(nnx.to_flat_state(nnx.state(with_reader)))
    plain = nnx.merge(graph, nnx.from_flat_state([(path, shared[path]) for path, _ in nnx.to_flat_state(own)]))
    anchors = sample_anchors(step_key(0, 0), *batch()[1:], ANCHORS)
    one, two = (loss_of(target, drafter, batch(), anchors)[0] for drafter in (plain, with_reader))
    assert float(one) == float(two)
    assert type(with_reader.reader).__name__ == "StateReader", "the forward must leave the caller's module alone"


# The step


@functools.cache
def stepper():
    """One compiled step for all tests."""
    optimizer = steps.make_optimizer(OptimizerConfig(1e-2, 20))
    return optimizer, steps.make_step(DRAFTER, optimizer, LossConfig(), num_anchors=6)


def train_batch():
    return [x[:, :32] for x in batch()]


def train(target, drafter, number=1):
    optimizer, step = stepper()
    state, frozen = steps.start(drafter, optimizer)
    history = []
    for n in range(number):
        with quickly():
            state, found = step(state, frozen, target, *train_batch(), jnp.array([0, n]))
        history.append({name: float(x) for name, x in found.items()})
    return state, frozen, history


def test_training_lowers_the_loss_and_keeps_fp32_masters(target, drafter):
    state, frozen, history = train(target, drafter, 15)
    assert history[-1]["loss"] < history[0]["loss"] - 0.05
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.masters))
    trained = steps.export_drafter(state, frozen)
    assert trained.dtype == jnp.bfloat16
    assert steps.norms_unchanged(steps.norms(drafter), steps.norms(trained)) < 0.2


def test_a_batch_without_anchors_changes_nothing(target, drafter):
    """Field case B01 on one device."""
    token, mask, segment = train_batch()
    state, frozen, _ = train(target, drafter, 2)
    _, step = stepper()
    before = jax.device_get((state.masters, state.optimizer))
    with quickly():
        state, found = step(state, frozen, target, token, jnp.zeros_like(mask), segment, jnp.array([0, 2]))
    assert float(found["loss"]) == 0.0
    assert float(found["grad_norm"]) == 0.0
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get((state.masters, state.optimizer))))
    assert int(state.skipped) == 1


def test_norm_weights_move_in_bf16_training():
    """Field case B10: steps smaller than half a bf16 spacing must add up in the masters."""
    optimizer = optax.adam(6e-4)
    weight = jnp.ones((3,), jnp.float32)
    moments = optimizer.init(weight)
    for _ in range(100):
        updates, moments = optimizer.update(jnp.full((3,), 0.01), moments, weight)
        weight = optax.apply_updates(weight, updates)
    np.testing.assert_allclose(np.asarray(weight), 0.94, atol=1e-3)
    stale = jnp.ones((), jnp.bfloat16)
    for _ in range(100):
        stale = stale - jnp.bfloat16(6e-4)
    assert float(stale) == 1.0, "what would happen without masters"


def test_schedule():
    schedule = steps.warmup_cosine(OptimizerConfig(1.0, 100, warmup_ratio=0.1))
    found = [float(schedule(i)) for i in range(100)]
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert max(found) == pytest.approx(1.0)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[-1] < 1e-3


# The gates


def test_an_index_pattern_fails_the_smoothness_gate():
    rng = np.random.default_rng(0)
    offset = rng.integers(0, 256, 20000)
    fair = (rng.random(20000) < 0.7).astype(int)
    assert smoothness(offset, fair)["passed"]
    assert not smoothness(offset, np.where(offset % 32 == 0, fair, fair * (rng.random(20000) < 0.3)))["passed"]
    assert not smoothness(offset[:0], fair[:0])["passed"], "nothing measured is no success"


def test_round_anchors_and_comparison():
    emitted = np.array([[3, 1, 8, 99], [2, 99, 99, 99]])
    offset, real = round_anchors(emitted, np.array([3, 1]))
    assert offset[0, :3].tolist() == [0, 3, 4]
    assert real.sum() == 4
    run = {
        "num_B": np.array([4]), "num_emitted_B": np.array([3]), "num_rounds_B": np.array([2]),
        "token_BN": np.array([[5, 6, 7, 0]]), "accepted_BN": np.array([[1, 0, 0, 0]]),
    }  # fmt: skip
    assert compare(run, run)["passed"]
    other = compare(run | {"token_BN": np.array([[5, 9, 7, 0]])}, run)
    assert not other["passed"]
    assert other["first_difference"] == [[0, 1]]
