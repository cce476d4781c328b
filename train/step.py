"""One training step of a drafter against a frozen target: features, blocks, loss, AdamW; one jitted program.

Masters and moments are fp32 and exist for what trains only; the forward runs on a cast copy, which is also what gets
exported. A batch without a usable anchor, or whose loss or gradient is not finite, changes nothing (parameters,
moments and schedule included) and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

from ready_jax.configs.drafter_training import LossConfig, OptimizerConfig
from ready_jax.lora import LoraParam
from ready_jax.pytree import register
from ready_jax.train import loss as losses
from ready_jax.train.anchors import Anchors, block_labels, sample_anchors, step_key
from ready_jax.train.features import Features, block_hidden, cast, features
from ready_jax.train.mesh import on_own_rows

_OWN = nnx.All(
    nnx.Param,
    nnx.Not(nnx.Any(nnx.PathContains("embed_VD"), nnx.PathContains("w_out_DV"))),
)
READER = nnx.All(nnx.Param, nnx.PathContains("reader"))
#: What may train, as NNX filters: all of a drafter but the embedding and head it shares with the target; its reader;
#: its LoRA factors.
FILTERS: dict[str, Any] = {
    "drafter": nnx.All(_OWN, nnx.Not(READER), nnx.Not(LoraParam)),
    "reader": READER,
    "lora": LoraParam,
}
TRAINED = nnx.All(_OWN, nnx.Not(LoraParam))


def trained_filter(parts: tuple[str, ...]):
    """The filter of several of ``FILTERS``; ValueError for a name that is none of them."""
    unknown = sorted(set(parts) - set(FILTERS))
    if unknown or not parts:
        raise ValueError(f"adapt.trains={parts}: needed some of {tuple(FILTERS)}")
    return nnx.Any(*(FILTERS[part] for part in parts))


COUNTERS = ("step", "skipped", "nonfinite", "streak")


@register
@dataclass(frozen=True)
class TrainState:
    """What a step replaces, and returns first: on CUDA, jax 0.11.2 misreads a donated state returned after others.

    ``masters``: the trained parameters in fp32; ``step`` counts batches, ``skipped`` those without an anchor,
    ``nonfinite`` those whose loss or gradient was not finite, ``streak`` the latest of these in a row.
    """

    step: Int[Array, ""]
    skipped: Int[Array, ""]
    nonfinite: Int[Array, ""]
    streak: Int[Array, ""]
    masters: Any
    optimizer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """A drafter's structure and the leaves that do not train, in the compute type."""

    leaves: Any
    graph: Any = field(metadata=dict(static=True))
    dtype: Any = field(metadata=dict(static=True))

    def whole(self, masters):
        """The module with masters as they are."""
        return nnx.merge(self.graph, masters, self.leaves)

    def drafter(self, masters):
        """The module in the compute type, as a decode loop and ``save_pretrained`` take it."""
        return cast(self.whole(masters), self.dtype)


def warmup_cosine(config: OptimizerConfig) -> Callable:
    """Learning rate of step i: linear over the warm-up, then cosine to 0 at the last step."""
    warmup = max(1, round(config.warmup_ratio * config.steps))

    def schedule(count):
        rising = (count + 1) / warmup
        progress = jnp.clip((count - warmup) / max(config.steps - warmup, 1), 0.0, 1.0)
        return config.learning_rate * jnp.minimum(rising, 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return schedule


def make_optimizer(config: OptimizerConfig, schedule: Callable | None = None) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW; ``schedule`` overrides the configuration's own.

    With ``reader_learning_rate`` the reader's updates are scaled to that rate.
    """
    parts = [
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            schedule or warmup_cosine(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    ]
    if config.reader_learning_rate is not None:

        def of_reader(masters):
            def inside(path, _):
                return any(getattr(key, "key", getattr(key, "name", None)) == "reader" for key in path)

            return jax.tree_util.tree_map_with_path(inside, masters)

        parts.append(optax.masked(optax.scale(config.reader_learning_rate / config.learning_rate), of_reader))
    return optax.chain(*parts)


def start(drafter, optimizer, *, trained: Any = TRAINED, compute_dtype="bfloat16") -> tuple[TrainState, Frozen]:
    """fp32 masters (copies) of what ``trained`` selects, fresh moments, and the frozen rest in the compute type."""
    graph, masters, rest = nnx.split(drafter, trained, ...)
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), masters)
    if not jax.tree.leaves(masters):
        raise ValueError("the filter selects no parameter of this drafter: nothing would train")
    counters = {name: jnp.zeros((), jnp.int32) for name in COUNTERS}
    dtype = jnp.dtype(compute_dtype)
    state = TrainState(**counters, masters=masters, optimizer=optimizer.init(masters))
    return state, Frozen(cast(rest, dtype), graph, dtype)


def draft_sums(
    drafter,
    found: Features,
    anchors: Anchors,
    token_BT,
    mask_BT,
    segment_BT,
    embed,
    unembed,
    config: LossConfig,
    *,
    group: int = 0,
    dtype=None,
) -> losses.Sums:
    """The loss's sums for given anchors. ``embed`` and ``unembed`` are the target's; a drafter that carries its own
    uses those. ``group`` and ``dtype``: see ``block_hidden``."""
    own = drafter.config.own_embeddings
    labels = block_labels(anchors, token_BT, mask_BT, segment_BT, drafter.config.block_size)
    hidden_BAPD = block_hidden(
        drafter, found.taps_BTED, token_BT, segment_BT, anchors, None if own else embed, found.states,
        group=group, dtype=dtype,
    )  # fmt: skip
    head = drafter.head(None if own else unembed)
    return losses.sums(
        drafter, hidden_BAPD, found.hidden_BTD, labels, head, config, teacher_unembed=unembed, dtype=dtype
    )


def draft_loss(drafter, found: Features, anchors: Anchors, token_BT, mask_BT, segment_BT, embed, unembed, config):
    """Scalar loss and its sums for given anchors; differentiable in the drafter's leaves."""
    sums = draft_sums(drafter, found, anchors, token_BT, mask_BT, segment_BT, embed, unembed, config)
    return losses.total(sums), sums


def update(state: TrainState, gradients, sums: losses.Sums, optimizer) -> tuple[TrainState, Array]:
    """The state after one optimiser step, and the gradient norm before clipping.

    Parameters, moments and schedule stay as they are where no anchor counted, or where loss or gradient is not finite.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients)))
    updates, moments = optimizer.update(gradients, state.optimizer, state.masters)
    masters = optax.apply_updates(state.masters, updates)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.ce) & jnp.isfinite(sums.l1) & jnp.isfinite(sums.confidence)
    empty = sums.weight == 0
    useful = finite & ~empty

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(useful, a, b), new, old)

    failed = (~finite).astype(jnp.int32)
    return (
        TrainState(
            state.step + 1,
            state.skipped + (finite & empty).astype(jnp.int32),
            state.nonfinite + failed,
            (state.streak + failed) * failed,
            keep(masters, state.masters),
            keep(moments, state.optimizer),
        ),
        norm,
    )


def no_sums(block_size: int) -> losses.Sums:
    """The sums of no blocks: what micro-batches add up from."""
    shapes = {x.name: (block_size,) if x.name.endswith("_P") else () for x in fields(losses.Sums)}
    return losses.Sums(**{name: jnp.zeros(shape) for name, shape in shapes.items()})


def micro_batches(x, parts: int):
    """[B, ...] -> [parts, B / parts, ...]: part k takes rows k, k + parts, ..., so that rows that are spread over
    devices stay where they are."""
    return jnp.moveaxis(x.reshape((x.shape[0] // parts, parts) + x.shape[1:]), 1, 0)


def make_step(
    drafter_config,
    optimizer,
    loss_config: LossConfig,
    *,
    num_anchors: int,
    accumulate: int = 1,
    group: int = 0,
    placement=None,
    compiler_options=None,
):
    """``step(state, frozen, target, *batch) -> (state, metrics)``, jitted; state is donated.

    ``batch``: tokens, mask and segments [B, T], and ``draw``: the seed and the place in the stream of rows, from
    which its anchors are drawn.
    ``accumulate`` micro-batches pass one after another, target included; their (sum, count) pairs add up before
    anything is divided, so that the step is that of the whole batch. ``placement``: the state's shardings, which it
    keeps (left to the compiler, the second step would be another program); each device then takes its own rows
    through all micro-batches before the devices' sums and gradients add up. ``compiler_options``: see
    ``mesh.gather_options``.
    """
    mesh = None if placement is None else jax.tree.leaves(placement)[0].mesh

    def one(masters, frozen, target, layer_at, anchors, token_BT, mask_BT, segment_BT):
        found = features(target, drafter_config, token_BT, segment_BT, anchors, layer_at=layer_at)

        def objective(masters):
            sums = draft_sums(
                frozen.whole(masters), found, anchors, token_BT, mask_BT, segment_BT,
                target.embed, target.unembed, loss_config, group=group, dtype=frozen.dtype,
            )  # fmt: skip
            return sums.objective, sums

        (_, sums), gradients = jax.value_and_grad(objective, has_aux=True)(masters)
        return sums, gradients

    def added(masters, frozen, target, layer_at, *batch):
        rows = batch[1].shape[0]
        if rows % accumulate:
            raise ValueError(f"accumulate={accumulate} must divide the {rows} rows of a device")
        if accumulate == 1:
            return one(masters, frozen, target, layer_at, *batch)
        parts = jax.tree.map(lambda x: micro_batches(x, accumulate), batch)
        nothing = no_sums(drafter_config.block_size), jax.tree.map(jnp.zeros_like, masters)

        def add(so_far, part):
            return jax.tree.map(jnp.add, so_far, one(masters, frozen, target, layer_at, *part)), None

        return jax.lax.scan(add, nothing, parts)[0]

    def step(state: TrainState, frozen: Frozen, target, token_BT, mask_BT, segment_BT, draw):
        anchors = sample_anchors(step_key(*draw), mask_BT, segment_BT, num_anchors)
        batch = (anchors, token_BT, mask_BT, segment_BT)
        sums, gradients = on_own_rows(added, mesh, state.masters, frozen, target, *batch)
        gradients = jax.tree.map(lambda x: losses.ratio(x, sums.weight), gradients)
        state, norm = update(state, gradients, sums, optimizer)
        supervised = jnp.sum(mask_BT, dtype=jnp.float32) / jnp.maximum(jnp.sum(segment_BT > 0, dtype=jnp.float32), 1)
        counted = {"grad_norm": norm, "supervised": supervised, "streak": state.streak}
        return state, losses.metrics(sums) | counted

    return jax.jit(step, donate_argnums=0, out_shardings=(placement, None), compiler_options=compiler_options)


def export_drafter(state: TrainState, frozen: Frozen):
    """The trained module in the compute type."""
    return frozen.drafter(state.masters)


def norms(drafter) -> list[np.ndarray]:
    """Norm weights of a module, on the host."""
    flat = nnx.to_flat_state(nnx.state(drafter, nnx.Param))
    return [np.asarray(leaf.get_value()) for path, leaf in flat if "norm" in str(path[-1])]


def norms_unchanged(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    """Share of norm entries that a run left exactly at their old value in the compute type (field case B10)."""
    same = [a == b for a, b in zip(before, after, strict=True)]
    return float(np.mean(np.concatenate([x.ravel() for x in same])))
