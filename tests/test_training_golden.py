"""The training forward, loss, gradients and optimiser against DeepSpec's own (tests/golden/D*/training.npz)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quick
from flax import nnx

from ready_jax import checkpoint, names
from ready_jax.configs.drafter_training import LossConfig, OptimizerConfig
from ready_jax.train import loss as losses
from ready_jax.train import step as steps
from ready_jax.train.anchors import Anchors, block_labels
from ready_jax.train.features import Features, block_hidden, visible_context

pytestmark = pytest.mark.usefixtures("all_quick")
DRAFTERS = ("D1_vanilla", "D2_gated", "D3_rnn", "D4_vanilla_yarn")
WEIGHTS = {
    "dspark": LossConfig(0.1, 0.9, 1.0),
    "ce_only": LossConfig(1.0, 0.0, 0.0),
    "l1_only": LossConfig(0.0, 1.0, 0.0),
    "conf_only": LossConfig(0.0, 0.0, 1.0),
    "ce_l1": LossConfig(1.0, 0.1, 0.0),
}


class Case:
    """A golden drafter with its batch, as our functions take them."""

    def __init__(self, folder):
        with np.load(folder / "training.npz") as file:
            self.want = {name: file[name] for name in file.files}
        self.drafter = checkpoint.load_drafter(folder / "checkpoint", dtype="float32")
        self.token_BT = jnp.array(self.want["in.input_ids"])
        self.mask_BT = jnp.array(self.want["in.loss_mask"]) > 0
        self.segment_BT = jnp.ones_like(self.token_BT)
        taps = self.want["in.target_hidden_states"]
        taps = taps.reshape(taps.shape[:2] + (len(self.drafter.config.taps), -1))
        self.features = Features(jnp.array(taps), jnp.array(self.want["in.target_last_hidden_states"]), {})
        self.keep_BA = self.want["in.block_keep_mask"]
        self.anchors = Anchors(jnp.array(self.want["in.anchor_positions"]), jnp.array(self.keep_BA))
        self.unembed = self.drafter.head(None)
        self.rates = jnp.array(self.want["run.lr"], jnp.float32)
        self.optimizer = steps.make_optimizer(OptimizerConfig(1.0, 50), lambda count: self.rates[count])
        self.state, self.frozen = steps.start(self.drafter, self.optimizer, compute_dtype="float32")

    def loss(self, drafter, config):
        batch = (self.token_BT, self.mask_BT, self.segment_BT)
        return steps.draft_loss(drafter, self.features, self.anchors, *batch, None, self.unembed, config)

    def labels(self):
        return block_labels(self.anchors, self.token_BT, self.mask_BT, self.segment_BT, 7)

    @functools.cached_property
    def _gradients(self):
        @quick
        def run(masters, weights):
            config = LossConfig()
            for name, weight in weights.items():
                object.__setattr__(config, name, weight)
            return jax.value_and_grad(lambda p: self.loss(self.frozen.drafter(p), config), has_aux=True)(masters)

        return run

    def gradients(self, masters, config=None):
        """((loss, sums), gradients); the weights of the terms are arguments of one program."""
        config = config or LossConfig()
        return self._gradients(masters, dict(ce=config.ce, l1=config.l1, confidence=config.confidence))


@pytest.fixture(scope="module", params=DRAFTERS)
def case(request, golden):
    return Case(golden / request.param)


def close(found, want, atol):
    np.testing.assert_allclose(np.asarray(found), want, rtol=0, atol=atol)


def test_blocks_are_laid_out_as_the_reference_lays_them(case):
    keep = np.repeat(case.keep_BA, 7, axis=1)
    visible = np.repeat(visible_context(case.anchors.position_BA, case.segment_BT), 7, axis=1)
    own = np.kron(np.eye(5, dtype=bool), np.ones((7, 7), bool))  # what `attend_blocks` adds: a block sees itself
    visible = np.concatenate([visible, np.broadcast_to(own, (2, 35, 35))], axis=-1)
    assert np.array_equal(visible[keep], case.want["attention_allowed"][keep])
    at = np.asarray(case.anchors.position_BA)[..., None] + np.arange(7)
    assert np.array_equal(at.reshape(2, -1)[keep], case.want["position_ids"][:, 36:][keep])
    anchor_BA = jnp.take_along_axis(case.token_BT, case.anchors.position_BA, axis=1)
    inputs = case.drafter.block_inputs(anchor_BA.reshape(-1), case.drafter.embedding(None)).reshape(2, 35, -1)
    assert np.array_equal(np.asarray(inputs)[keep], case.want["noise_embedding"][keep])


def test_labels_and_masks(case):
    labels, mask = case.labels(), case.want["eval_mask"]
    assert np.array_equal(labels.mask_BAP, mask)
    assert np.array_equal(np.asarray(labels.token_BAP)[mask], case.want["target_ids"][mask])


def test_forward(case):
    labels, keep = case.labels(), case.keep_BA

    @quick
    def forward(drafter, features):
        hidden = block_hidden(drafter, features.taps_BTED, case.token_BT, case.segment_BT, case.anchors)
        flat, previous = hidden.reshape(10, 7, -1), labels.previous_BAP.reshape(10, 7)
        latent, embed = drafter.markov.latents(previous, flat)
        logits = losses.draft_logits(drafter.markov, flat, latent, case.unembed).reshape(2, 5, 7, -1)
        confidence = drafter.confidence(flat, embed).reshape(2, 5, 7)
        teacher = jnp.take_along_axis(features.hidden_BTD, labels.teacher_BAP.reshape(2, -1)[..., None], axis=1)
        return hidden, logits, confidence, case.unembed(teacher).reshape(2, 5, 7, -1)

    hidden, logits, confidence, teacher = forward(case.drafter, case.features)
    close(np.asarray(hidden)[keep], case.want["backbone_hidden"].reshape(2, 5, 7, -1)[keep], 5e-5)
    mask = case.want["eval_mask"]  # beyond it the forced tokens are whatever the reference clips to
    close(np.asarray(logits)[mask], case.want["draft_logits"][mask], 5e-5)
    close(np.asarray(confidence)[mask], case.want["confidence_pred"][mask], 5e-5)
    close(np.asarray(teacher)[mask], case.want["aligned_target_logits"][mask], 5e-5)


@pytest.mark.parametrize("slice_blocks", [3, 512])
def test_terms_and_metrics(case, slice_blocks):
    config = LossConfig(slice_blocks=slice_blocks)
    if config == LossConfig():
        found = case.gradients(case.state.masters)[0][1]
    else:
        found = quick(lambda drafter: case.loss(drafter, config)[1])(case.drafter)
    for name, value in (("ce", found.ce), ("l1", found.l1), ("confidence", found.confidence)):
        np.testing.assert_allclose(value, case.want[f"term.{name}_loss_num"], rtol=1e-5)
        np.testing.assert_allclose(found.weight, case.want[f"term.{name}_loss_den"], rtol=1e-5)
    logged = losses.metrics(found)
    for name in ("loss", "ce_loss", "l1_loss", "confidence_loss", "tau_probabilistic"):
        np.testing.assert_allclose(logged[name], case.want[f"metric.{name}"], rtol=1e-5)
    for k in range(7):
        np.testing.assert_allclose(logged[f"accept_rate@{k + 1}"], case.want[f"metric.accept_rate@{k}"], rtol=1e-5)


def stored(drafter, gradients) -> dict[str, np.ndarray]:
    """Gradients under the checkpoint's names and layouts."""
    flat = dict(nnx.to_flat_state(gradients))
    out = {}
    for leaf in names.drafter_leaves(drafter.config):
        if leaf.path not in flat:
            continue
        value, first = np.asarray(flat[leaf.path].get_value()), 0
        for piece in leaf.pieces:
            if leaf.form == "transposed":
                out[piece.name] = value[:, first : first + piece.shape[0]].T
                first += piece.shape[0]
            else:
                out[piece.name] = value.reshape(piece.shape)
    return out


@pytest.mark.parametrize("which", list(WEIGHTS))
def test_gradients(case, which):
    (value, _), gradients = case.gradients(case.state.masters, WEIGHTS[which])
    np.testing.assert_allclose(value, case.want[f"loss.{which}"], rtol=1e-5)
    found = stored(case.drafter, gradients)
    wanted = list(case.want[f"grad_names.{which}"])
    assert set(wanted) <= set(found)
    for i, name in enumerate(wanted):
        grad = found[name].astype(np.float64)
        norm = float(case.want[f"grad_norm.{which}"][i])
        np.testing.assert_allclose(np.linalg.norm(grad), norm, rtol=1e-4, atol=1e-7, err_msg=name)
        probe = np.sum(grad.ravel() * np.cos(0.37 * np.arange(grad.size)))
        np.testing.assert_allclose(
            probe, case.want[f"grad_probe.{which}"][i], rtol=0, atol=1e-4 * max(norm, 1e-3), err_msg=name
        )
        if which == "dspark" and f"grad.{name}" in case.want:
            whole, atol = case.want[f"grad.{name}"], 1e-4 * max(norm, 1e-3)
            np.testing.assert_allclose(grad, whole, rtol=0, atol=atol, err_msg=name)


def test_twelve_steps_of_adamw(case):
    state = case.state
    update = quick(lambda state, gradients, sums: steps.update(state, gradients, sums, case.optimizer))
    losses_found, norms = [], []
    for _ in range(12):
        (value, sums), gradients = case.gradients(state.masters)
        state, norm = update(state, gradients, sums)
        losses_found.append(float(value))
        norms.append(float(norm))
    close(losses_found, case.want["run.loss"], 5e-4)
    close(norms, case.want["run.grad_norm"], 5e-3)
