"""What training needs of the target, and the drafter's training forward over many anchors at once.

The drafter's own decode-time functions do the work (``fuse``, ``key_value``, ``hidden``): blocks of ``A`` anchors lie
side by side as ``A * P`` rows, see the context strictly before their anchor and themselves, and never each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ready_jax.drafter import Drafter, blocks
from ready_jax.kernels import dispatch
from ready_jax.layers import rope_angles
from ready_jax.train.anchors import Anchors


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """Of packed rows: taps, final-normed hidden states (the teacher), and per layer the states at the anchors."""

    taps_BTED: Float[Array, "B T E D"]
    hidden_BTD: Float[Array, "B T D"]
    states: dict[int, Float[Array, "B A M X Y"]]


class PerAnchorReader(nnx.Module):
    """A reader over ``A * P`` rows whose prepared states come one per anchor (``B * A`` of them)."""

    def __init__(self, reader, num_anchors: int):
        self.reader = reader
        self.num_anchors = num_anchors

    def __call__(self, prep, hidden_BPD, *site):
        batch, rows, width = hidden_BPD.shape
        blocks = hidden_BPD.reshape(batch * self.num_anchors, rows // self.num_anchors, width)
        return self.reader(prep, blocks, *site).reshape(hidden_BPD.shape)


def state_layers_of(drafter) -> tuple[int, ...]:
    """Target layers whose states the drafter's reader reads; none without a reader."""
    return () if drafter.config.reader is None else drafter.config.reader.state_layers


def filled(anchors: Anchors) -> Int[Array, "B A"]:
    """Positions with spare slots pointing at a row's real anchors in turn: a control that takes another row's
    states then never meets the empty state of a spare."""
    count_B1 = jnp.maximum(jnp.sum(anchors.keep_BA, axis=1, keepdims=True), 1)
    slot_BA = jnp.arange(anchors.keep_BA.shape[1])[None] % count_B1  # kept ones come first, sorted
    return jnp.where(anchors.keep_BA, anchors.position_BA, jnp.take_along_axis(anchors.position_BA, slot_BA, axis=1))


def prefixes(position_BA: Int[Array, "B A"], segment_BT: Int[Array, "B T"]) -> Int[Array, "B A"]:
    """After how many tokens of a row an anchor's state is that of its own segment: none of them, where the segment
    begins with the anchor, and the row's last state is still another segment's."""
    before_BA = jnp.take_along_axis(segment_BT, jnp.maximum(position_BA - 1, 0), axis=1)
    return jnp.where(before_BA == jnp.take_along_axis(segment_BT, position_BA, axis=1), position_BA, 0)


def features(
    target,
    drafter_config,
    token_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    anchors: Anchors,
    precision: jax.lax.Precision | None = None,
    layer_at: Callable | None = None,
) -> Features:
    """One frozen pass of the target over packed rows; with a reader also the states after the ``a`` tokens
    before each anchor (never after the anchor itself: that would leak it).

    ``precision`` of the delta rule's products; None: that of its GPU kernel, which bf16 targets run, and the lowest
    where operands are spread over a mesh, which no kernel takes. ``layer_at``: see ``Target.sequence``.
    """
    if precision is None:
        precision = jax.lax.Precision.DEFAULT if dispatch.partitioned.value else jax.lax.Precision.HIGHEST
    layers = () if drafter_config.reader is None else drafter_config.reader.state_layers
    out = target.sequence(
        token_BT,
        segment_BT,
        taps=drafter_config.taps,
        states_at_BA=prefixes(filled(anchors), segment_BT) if layers else None,
        state_layers=layers,
        precision=precision,
        layer_at=layer_at,
    )
    return jax.lax.stop_gradient(Features(out.taps_BTED, out.hidden_BTD, out.states))


def visible_context(
    position_BA: Int[Array, "B A"], segment_BT: Int[Array, "B T"], sliding_window: int | None = None
) -> Bool[Array, "B A T"]:
    """Which tokens a block sees beside itself: strictly before its anchor, of its segment, at most
    ``sliding_window`` tokens back."""
    row_T = jnp.arange(segment_BT.shape[1])[None, None]
    own_BA1 = jnp.take_along_axis(segment_BT, position_BA, axis=1)[..., None]
    visible_BAT = (row_T < position_BA[..., None]) & (segment_BT[:, None] == own_BA1)
    if sliding_window is not None:
        visible_BAT &= row_T >= position_BA[..., None] - sliding_window
    return visible_BAT


def cast(module, dtype):
    """A view of a module (its own arrays stay) with floating leaves as ``dtype``; None leaves them as they are."""
    if dtype is None:
        return module
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, module)


def block_hidden(
    drafter: Drafter,
    taps_BTED: Float[Array, "B T E D"],
    token_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    anchors: Anchors,
    embed=None,
    states: dict[int, Float[Array, "B A M X Y"]] | None = None,
    *,
    group: int = 0,
    dtype=None,
) -> Float[Array, "B A P D"]:
    """Final-normed hidden states of every block; ``states`` feeds the reader, if the drafter has one.

    ``group`` anchors of a row go through the layers at once and are recomputed backward, which bounds the memory of
    activations and scores (0: all at once, kept). ``dtype``: the type to compute in, where the drafter holds masters;
    they are cast inside each group, so that gradients add up in the masters' type.
    """
    if drafter.reader is not None and not states:
        raise ValueError(f"this drafter reads the states of layers {state_layers_of(drafter)}: found none")
    c, batch, count = drafter.config, *anchors.position_BA.shape
    group = group or count
    if count % group:
        raise ValueError(f"group={group} must divide the {count} anchors of a row")
    outer = cast(drafter, dtype)
    feature_BTD = outer.fuse(taps_BTED.astype(outer.dtype))
    row_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1])[None], token_BT.shape)
    contexts = [layer.key_value(feature_BTD, rope_angles(row_BT, c.rope)) for layer in outer.layers]

    def some(drafter, contexts, position_BA, states):
        drafter = cast(drafter, dtype)
        anchor_BA = jnp.take_along_axis(token_BT, position_BA, axis=1)
        x_NPD = drafter.block_inputs(anchor_BA.reshape(-1), drafter.embedding(embed))
        x_BPD = x_NPD.reshape(batch, group * c.block_size, -1)
        position_BAP = position_BA[..., None] + jnp.arange(c.block_size)[None, None]
        visible = blocks(visible_context(position_BA, segment_BT, c.sliding_window))
        prep = None
        if drafter.reader is not None:
            per_anchor = {layer: s.reshape((batch * group,) + s.shape[2:]) for layer, s in states.items()}
            prep = drafter.reader.prepare(per_anchor)
            drafter = nnx.merge(*nnx.split(drafter))  # a view of the same arrays: the caller's stays untouched
            setattr(drafter, "reader", PerAnchorReader(drafter.reader, group))  # noqa: B010  another type, same call
        hidden_BPD = drafter.hidden(x_BPD, position_BAP.reshape(batch, -1), contexts, visible, prep)
        return hidden_BPD.reshape(batch, group, c.block_size, -1)

    if group == count:
        return some(drafter, contexts, anchors.position_BA, states or {})

    def grouped(x):
        return jnp.moveaxis(x.reshape((batch, count // group, group) + x.shape[2:]), 1, 0)

    inputs = jax.tree.map(grouped, (anchors.position_BA, states or {}))
    one = jax.checkpoint(some)
    _, hidden = jax.lax.scan(lambda _, inputs: (None, one(drafter, contexts, *inputs)), None, inputs)
    return jnp.moveaxis(hidden, 0, 1).reshape(batch, count, c.block_size, -1)
