"""What training needs of the target, and the drafter's training forward over many anchors at once.

The drafter's own decode-time functions do the work (``fuse``, ``key_value``, ``hidden``): blocks of ``A`` anchors lie
side by side as ``A * P`` rows, see the context strictly before their anchor and themselves, and never each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ready_jax.drafter import Drafter, masked
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


def features(
    target,
    drafter_config,
    token_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    anchors: Anchors,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
) -> Features:
    """One frozen pass of the target over packed rows; with a reader also the states after the ``a`` tokens
    before each anchor (never after the anchor itself: that would leak it)."""
    layers = () if drafter_config.reader is None else drafter_config.reader.state_layers
    out = target.sequence(
        token_BT,
        segment_BT,
        taps=drafter_config.taps,
        states_at_BA=anchors.position_BA if layers else None,
        state_layers=layers,
        precision=precision,
    )
    return jax.lax.stop_gradient(Features(out.taps_BTED, out.hidden_BTD, out.states))


def visible_rows(
    position_BA: Int[Array, "B A"],
    segment_BT: Int[Array, "B T"],
    block_size: int,
    sliding_window: int | None = None,
) -> Bool[Array, "B O S"]:
    """Which of the ``T`` context rows and ``A * P`` block rows each block row sees ([B, A*P, T + A*P]).

    Context: strictly before the anchor, of its segment, at most ``sliding_window`` tokens back. Blocks: itself.
    """
    batch, anchors = position_BA.shape
    row_T = jnp.arange(segment_BT.shape[1])[None, None]
    own_BA1 = jnp.take_along_axis(segment_BT, position_BA, axis=1)[..., None]
    context_BAT = (row_T < position_BA[..., None]) & (segment_BT[:, None] == own_BA1)
    if sliding_window is not None:
        context_BAT &= row_T >= position_BA[..., None] - sliding_window
    block = jnp.repeat(jnp.arange(anchors), block_size)
    same = jnp.broadcast_to((block[:, None] == block[None])[None], (batch, len(block), len(block)))
    return jnp.concatenate([jnp.repeat(context_BAT, block_size, axis=1), same], axis=-1)


def block_hidden(
    drafter: Drafter,
    taps_BTED: Float[Array, "B T E D"],
    token_BT: Int[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    anchors: Anchors,
    embed=None,
    states: dict[int, Float[Array, "B A M X Y"]] | None = None,
) -> Float[Array, "B A P D"]:
    """Final-normed hidden states of every block; ``states`` feeds the reader, if the drafter has one."""
    c = drafter.config
    batch, count = anchors.position_BA.shape
    feature_BTD = drafter.fuse(taps_BTED.astype(drafter.dtype))
    row_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1])[None], token_BT.shape)
    angles = rope_angles(row_BT, c.rope)
    contexts = [layer.key_value(feature_BTD, angles) for layer in drafter.layers]

    anchor_BA = jnp.take_along_axis(token_BT, anchors.position_BA, axis=1)
    x_NPD = drafter.block_inputs(anchor_BA.reshape(-1), drafter.embedding(embed))
    x_BPD = x_NPD.reshape(batch, count * c.block_size, -1)
    position_BAP = anchors.position_BA[..., None] + jnp.arange(c.block_size)[None, None]
    visible = visible_rows(anchors.position_BA, segment_BT, c.block_size, c.sliding_window)

    prep = None
    if drafter.reader is not None:
        if not states:
            raise ValueError(f"this drafter reads the states of layers {state_layers_of(drafter)}: found none")
        per_anchor = {layer: s.reshape((batch * count,) + s.shape[2:]) for layer, s in states.items()}
        prep = drafter.reader.prepare(per_anchor)
        drafter = nnx.merge(*nnx.split(drafter))  # a view of the same arrays, so that the caller's stays untouched
        setattr(drafter, "reader", PerAnchorReader(drafter.reader, count))  # noqa: B010  another type, the same call
    hidden_BPD = drafter.hidden(x_BPD, position_BAP.reshape(batch, -1), contexts, masked(visible), prep)
    return hidden_BPD.reshape(batch, count, c.block_size, -1)
