"""One training step of a drafter against a frozen target: features, blocks, loss, AdamW; one jitted program.

Masters and moments are fp32 and exist for what trains only; the forward runs on a cast copy, which is also what gets
exported. A batch without a usable anchor changes nothing (parameters, moments and schedule included) and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

from ready_jax.configs.drafter_training import LossConfig, OptimizerConfig
from ready_jax.train import loss as losses
from ready_jax.train.anchors import Anchors, block_labels, sample_anchors, step_key
from ready_jax.train.features import Features, block_hidden, features

#: Trained by default: all of a drafter but the embedding and head it shares with the target.
TRAINED = nnx.All(nnx.Param, nnx.Not(nnx.Any(nnx.PathContains("embed_VD"), nnx.PathContains("w_out_DV"))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step replaces, and returns first: on CUDA, jax 0.11.2 misreads a donated state returned after others.

    ``masters``: the trained parameters in fp32; ``step`` counts batches, ``skipped`` those without an anchor.
    """

    step: Int[Array, ""]
    skipped: Int[Array, ""]
    masters: Any
    optimizer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """A drafter's structure and the leaves that do not train; ``drafter(masters)`` puts it together again."""

    leaves: Any
    graph: Any = field(metadata=dict(static=True))
    dtype: Any = field(metadata=dict(static=True))

    def drafter(self, masters):
        """The module to compute with: masters cast to the compute type, gradients flow through the cast."""
        trained = jax.tree.map(lambda x: x.astype(self.dtype), masters)
        return nnx.merge(self.graph, trained, self.leaves)


def warmup_cosine(config: OptimizerConfig) -> Callable:
    """Learning rate of step i: linear over the warm-up, then cosine to 0 at the last step."""
    warmup = max(1, round(config.warmup_ratio * config.steps))

    def schedule(count):
        rising = (count + 1) / warmup
        progress = jnp.clip((count - warmup) / max(config.steps - warmup, 1), 0.0, 1.0)
        return config.learning_rate * jnp.minimum(rising, 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return schedule


def make_optimizer(config: OptimizerConfig, schedule: Callable | None = None) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW; ``schedule`` overrides the configuration's own."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            schedule or warmup_cosine(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )


def start(drafter, optimizer, *, trained=TRAINED, compute_dtype="bfloat16") -> tuple[TrainState, Frozen]:
    """fp32 masters (copies) of what ``trained`` selects, fresh moments, and the frozen rest."""
    graph, masters, rest = nnx.split(drafter, trained, ...)
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), masters)
    if not jax.tree.leaves(masters):
        raise ValueError("the filter selects no parameter of this drafter: nothing would train")
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, jnp.zeros((), jnp.int32), masters, optimizer.init(masters))
    return state, Frozen(rest, graph, jnp.dtype(compute_dtype))


def draft_loss(
    drafter, found: Features, anchors: Anchors, token_BT, mask_BT, segment_BT, embed, unembed, config: LossConfig
):
    """Scalar loss and its sums for given anchors; differentiable in the drafter's leaves."""
    labels = block_labels(anchors, token_BT, mask_BT, segment_BT, drafter.config.block_size)
    hidden_BAPD = block_hidden(drafter, found.taps_BTED, token_BT, segment_BT, anchors, embed, found.states)
    sums = losses.sums(drafter, hidden_BAPD, found.hidden_BTD, labels, unembed, config)
    return losses.total(sums, config), sums


def update(state: TrainState, gradients, sums: losses.Sums, optimizer) -> tuple[TrainState, Array]:
    """The state after one optimiser step, and the gradient norm before clipping."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients)))
    updates, moments = optimizer.update(gradients, state.optimizer, state.masters)
    masters = optax.apply_updates(state.masters, updates)
    useful = sums.weight > 0

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(useful, a, b), new, old)

    return (
        TrainState(
            state.step + 1,
            state.skipped + (~useful).astype(jnp.int32),
            keep(masters, state.masters),
            keep(moments, state.optimizer),
        ),
        norm,
    )


def make_step(drafter_config, optimizer, loss_config: LossConfig, *, num_anchors: int, seed: int):
    """``step(state, frozen, target, token_BT, mask_BT, segment_BT) -> (state, metrics)``, jitted; state is donated."""

    def step(state: TrainState, frozen: Frozen, target, token_BT, mask_BT, segment_BT):
        anchors = sample_anchors(step_key(seed, state.step), mask_BT, segment_BT, num_anchors)
        found = features(target, drafter_config, token_BT, segment_BT, anchors)

        def objective(masters):
            return draft_loss(
                frozen.drafter(masters), found, anchors, token_BT, mask_BT, segment_BT,
                target.embed, target.unembed, loss_config,
            )  # fmt: skip

        (_, sums), gradients = jax.value_and_grad(objective, has_aux=True)(state.masters)
        state, norm = update(state, gradients, sums, optimizer)
        return state, losses.metrics(sums, loss_config) | {"grad_norm": norm}

    return jax.jit(step, donate_argnums=0)


def export_drafter(state: TrainState, frozen: Frozen):
    """The trained module in the compute type, as a decode loop and ``save_pretrained`` take it."""
    return frozen.drafter(state.masters)


def norms_unchanged(before, after) -> float:
    """Share of norm entries that a run left exactly at their old value in the compute type (field case B10)."""
    pairs = zip(_norms(before), _norms(after), strict=True)
    same = [np.asarray(a) == np.asarray(b) for a, b in pairs]
    return float(np.mean(np.concatenate([x.ravel() for x in same])))


def _norms(drafter) -> list:
    flat = nnx.to_flat_state(nnx.state(drafter, nnx.Param))
    return [leaf.get_value() for path, leaf in flat if "norm" in str(path[-1])]
