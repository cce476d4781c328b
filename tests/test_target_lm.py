"""The target's trainer: its loss against plain autodiff, padding, schedule, data choice, and whole toy runs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ready_jax.config import FULL, LINEAR, RopeConfig
from ready_jax.configs.named import recipe
from ready_jax.configs.nano import NANO_DRAFTER, NANO_TARGET, Mixture, Optimizer, Steps, nano_target, nano_unloop
from ready_jax.train import lm_step, target_lm
from ready_jax.train.corpus import Corpus, write_corpus, write_stream
from ready_jax.train.lm_step import Batch
from ready_jax.train.rows import first_prompts, mixture

END, STOP, ASK, ANSWER = 60, 61, 62, 63  # of the toy vocabulary
TOY = replace(
    NANO_TARGET, vocab_size=64, hidden_size=32, intermediate_size=48, layer_types=(LINEAR, FULL),
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=8, rope=RopeConfig(1e4, 8), max_position_embeddings=128,
    eos_token_ids=(STOP, END),
)  # fmt: skip


def conversations(count: int, seed: int = 0) -> Corpus:
    """Ask for some numbers in a row, answer with those that follow; half `math`, half `code`."""
    rng = np.random.default_rng(seed)
    documents, spans = [], []
    for _ in range(count):
        start, asked, answered = rng.integers([0, 4, 3], [40, 10, 12])
        line = (start + np.arange(asked + answered)) % 50
        documents.append(np.r_[ASK, line[:asked], STOP, ANSWER, line[asked:], STOP].astype(np.uint16))
        spans.append((asked + 3, asked + answered + 4))
    number = np.arange(count)
    return Corpus(
        np.concatenate(documents), np.cumsum([0, *map(len, documents)], dtype=np.int64), np.array(spans, np.int32),
        np.arange(count + 1, dtype=np.int64), (number % 2).astype(np.uint8), np.zeros(count, np.uint8),
        ("code", "math"), ("toy",), {"bytes": 1000, "tokens": 500},
    )  # fmt: skip


def toy_batch(rows: int = 2, length: int = 32, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    segment_BT = np.sort(rng.integers(1, 3, (rows, length)), axis=1).astype(np.uint16)
    segment_BT[:, -5:] = 0
    return Batch(
        jnp.asarray(rng.integers(0, 60, (rows, length)), jnp.uint16),
        jnp.asarray(segment_BT),
        jnp.asarray(rng.random((rows, length)) < 0.7),
        jnp.asarray(rng.random((rows, length)) < 0.2),
    )


def test_parameter_counts_and_sizes():
    from flax import nnx

    from ready_jax.drafter import Drafter

    target = jax.eval_shape(lambda: lm_step.new_params(NANO_TARGET, 0))
    count = lm_step.num_params(NANO_TARGET, target)
    assert 10.0e6 < count < 10.2e6
    drafter = nnx.state(nnx.eval_shape(lambda: Drafter(NANO_DRAFTER, rngs=nnx.Rngs(0), dtype="bfloat16")))
    draft_count = sum(x.size for x in jax.tree.leaves(drafter))
    assert 2 * (count + draft_count) + 2e6 < 28e6


def test_token_losses_equal_autodiff():
    key = jax.random.split(jax.random.key(0), 2)
    hidden_ND = jax.random.normal(key[0], (6, 8))
    table_VD = jax.random.normal(key[1], (11, 8))
    label_N = jnp.array([0, 3, 10, 5, 5, 1])
    weight_N = jnp.array([1.0, 0.0, 2.0, 0.5, 1.0, 3.0])

    def plain(hidden_ND, table_VD):
        logp_N = jax.nn.log_softmax(hidden_ND @ table_VD.T)[jnp.arange(6), label_N]
        return jnp.sum(weight_N * -logp_N) + 0.7 * jnp.sum(-jnp.log1p(-jnp.exp(logp_N)))

    def ours(hidden_ND, table_VD):
        learn_N, avoid_N = lm_step.token_losses(hidden_ND, table_VD, label_N)
        return jnp.sum(weight_N * learn_N) + 0.7 * jnp.sum(avoid_N)

    wanted, wanted_gradient = jax.value_and_grad(plain, (0, 1))(hidden_ND, table_VD)
    found, found_gradient = jax.value_and_grad(ours, (0, 1))(hidden_ND, table_VD)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for a, b in zip(found_gradient, wanted_gradient, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_unlikelihood_of_a_certain_token_has_a_finite_gradient():
    hidden_ND, table_VD = jnp.ones((1, 4)), jnp.stack([jnp.full(4, 50.0), jnp.full(4, -50.0)])
    gradient = jax.grad(lambda h: lm_step.token_losses(h, table_VD, jnp.array([0]))[1].sum())(hidden_ND)
    assert jnp.isfinite(gradient).all()
    assert jnp.abs(gradient).max() > 1


def test_padding_may_hold_anything():
    build = lm_step.builder(TOY)
    flat = lm_step.new_params(TOY, 0)
    batch = toy_batch()
    junk = batch._replace(
        token_BT=jnp.where(batch.segment_BT > 0, batch.token_BT, 65535).astype(jnp.uint16),
        learn_BT=batch.learn_BT | (batch.segment_BT == 0),
    )
    rows = jax.jit(lambda flat, batch: [lm_step.summed(*x) for x in lm_step.row_losses(build(flat), batch)])
    np.testing.assert_array_equal(np.array(rows(flat, batch)), np.array(rows(flat, junk)))


def test_labels_stay_within_their_segment():
    batch = toy_batch()
    label_BT, learn_BT, _ = lm_step.targets(batch)
    np.testing.assert_array_equal(label_BT[:, :-1][learn_BT[:, :-1]], batch.token_BT[:, 1:][learn_BT[:, :-1]])
    segment, learn = np.asarray(batch.segment_BT).astype(int), np.asarray(batch.learn_BT)
    for row in range(len(segment)):
        for t in range(segment.shape[1]):
            inside = t + 1 < segment.shape[1] and segment[row, t] == segment[row, t + 1] > 0
            assert learn_BT[row, t] == (inside and learn[row, t + 1])


def test_rate_and_fitted_schedule():
    settings, steps = Optimizer(learning_rate=1.0, warmup_steps=10), Steps(pretrain=60, sft=40)
    rates = [target_lm.rate(i, steps, settings) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:60] == [1.0] * 50
    assert rates[80] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(1 / 40)
    shorter = target_lm.fitted(replace(steps, max_seconds=60.0), 10, 10.0, 1.0)
    assert (shorter.pretrain, shorter.sft) == (36, 24)
    assert target_lm.fitted(replace(steps, max_seconds=1e6), 10, 10.0, 1.0).pretrain == 60


def test_mixture_keeps_shares_and_drops_cut_conversations():
    corpus = conversations(400)
    corpus.tokens[corpus.offsets[1:21] - 1] = 7  # these have lost their end
    index = mixture(corpus, Mixture(math=0.75, code=0.25), STOP, 0)
    assert not np.isin(index, np.arange(20)).any()
    labels = (corpus.spans[:, 1] - corpus.spans[:, 0])[index]
    math = corpus.category_ids[index] == 1
    assert labels[math].sum() / labels.sum() == pytest.approx(0.75, abs=0.03)
    assert labels.sum() == pytest.approx((corpus.spans[:, 1] - corpus.spans[:, 0]).sum(), rel=0.05)


def test_prompts_end_where_the_answer_begins():
    corpus = conversations(5)
    for i, prompt in enumerate(first_prompts(corpus, 100)):
        assert prompt[-1] == ANSWER
        np.testing.assert_array_equal(prompt, corpus.document(i)[: len(prompt)])


def test_loop_rows_avoid_only_what_repeats():
    token_BN = np.array([np.tile([1, 2], 10), np.arange(20)])
    prompts = [np.array([9, 9, 9]), np.array([8])]
    batch, share = target_lm.loop_rows(prompts, token_BN, np.array([20, 12]), 64, 4, 0.1)
    assert batch.token_BT.shape == (1, 64)
    assert batch.avoid_BT[0].nonzero()[0].tolist() == list(range(3 + 5, 3 + 20))
    assert batch.segment_BT[0, :23].tolist() == [1] * 23
    assert (batch.segment_BT[0] == 2).sum() == 13
    assert share == 15 / 32


def test_overrides_name_what_is_known():
    assert recipe("nano_target", ["optimizer.learning_rate=1", "data.pretrain=x"]).optimizer.learning_rate == 1.0
    with pytest.raises(ValueError, match=r"no field 'rate' in Optimizer, which has learning_rate"):
        recipe("nano_target", ["optimizer.rate=1"])
    with pytest.raises(ValueError, match="nano_target"):
        recipe("nano")
    with pytest.raises(ValueError, match="a int is needed"):
        recipe("nano_target", ["steps.sft=1.5"])


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Recipes of both runs over toy files."""
    folder = tmp_path_factory.mktemp("toy")
    write_corpus(folder / "sft.npz.xz", conversations(300))
    write_corpus(folder / "heldout.npz.xz", conversations(20, seed=1))
    texts = [np.r_[np.arange(start, start + 30) % 50, END] for start in range(50)]
    write_stream(folder / "pretrain.npy.xz", np.concatenate(texts).astype(np.uint16), {"separator": END})
    data = replace(
        nano_target().data, pretrain=str(folder / "pretrain.npy.xz"), conversations=str(folder / "sft.npz.xz"),
        heldout=str(folder / "heldout.npz.xz"), prompts=str(folder / "none"), row_length=64,
    )  # fmt: skip
    output = replace(nano_target().output, folder=str(folder / "out"), log_every=10, loop_prompts=0, new_tokens=16)
    target = replace(
        nano_target(), model=TOY, data=data, output=output, optimizer=Optimizer(1e-2, 5),
        steps=Steps(pretrain=20, sft=20, batch_size=4, fit_after=0),
    )  # fmt: skip
    unloop = replace(
        nano_unloop(), model=TOY, data=data, start=output.folder, optimizer=Optimizer(1e-3, 2),
        output=replace(output, folder=str(folder / "out2")),
        unloop=replace(nano_unloop().unloop, rounds=2, prompts=8, steps=2, batch_size=4, max_prompt=16, min_share=-1.0),
    )  # fmt: skip
    return target, unloop


@pytest.mark.slow
def test_a_run_learns_and_one_that_was_stopped_ends_equal(toy, tmp_path):
    target, _ = toy
    result = target_lm.train_target(target)
    assert result["heldout"]["answers"] < 2.5  # log 64 is 4.2
    whole = target_lm.load_weights(target.output.folder)
    state = str(tmp_path / "state")
    output = replace(target.output, folder=str(tmp_path / "out"), state=state, save_every=15)
    stopped = replace(target, output=output, steps=replace(target.steps, max_seconds=1e-9))
    assert target_lm.train_target(stopped)["steps"] == 1
    target_lm.train_target(replace(target, output=output))
    for key, value in target_lm.load_weights(output.folder).items():
        np.testing.assert_array_equal(value, whole[key], err_msg=key)


@pytest.mark.slow
def test_unloop_runs_from_the_stored_weights(toy):
    target, unloop = toy
    if not list((target_lm.Path(target.output.folder)).glob("params-*")):
        target_lm.train_target(target)
    result = target_lm.train_unloop(unloop)
    assert result["steps"] == 4
    assert result["heldout"]["answers"] < 3
