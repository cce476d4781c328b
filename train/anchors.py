"""Anchors of training blocks, and what each block is asked to predict.

An anchor at position ``a`` stands for the newest emitted token of a decoding round: its block predicts the tokens at
``a + 1 .. a + P`` (slot k predicts ``a + 1 + k``) from what the target computed for the tokens before ``a``.
Source: DSpark (arXiv 2607.05147, section 3.3) and DeepSpec's trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ready_jax.pytree import register


@register
@dataclass(frozen=True)
class Anchors:
    """``A`` slots per row, sorted; spare slots (``keep_BA`` false) stand at position 0 and count for nothing."""

    position_BA: Int[Array, "B A"]
    keep_BA: Bool[Array, "B A"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Labels:
    """Per block and slot: the token to predict, the token just before it, where the teacher sits, what counts."""

    token_BAP: Int[Array, "B A P"]
    previous_BAP: Int[Array, "B A P"]
    teacher_BAP: Int[Array, "B A P"]
    mask_BAP: Bool[Array, "B A P"]


def step_key(seed, place):
    """The key of one training step: every random choice derives from the seed and the batch's place in the stream."""
    return jax.random.fold_in(jax.random.key(seed), place)


def pairs(mask_BT, segment_BT):
    """Which tokens, all but a row's last, may begin a block (NumPy or JAX arrays): see ``usable``."""
    same_BT = (segment_BT[:, :-1] == segment_BT[:, 1:]) & (segment_BT[:, :-1] > 0)
    return mask_BT[:, :-1] & mask_BT[:, 1:] & same_BT


def usable(mask_BT: Bool[Array, "B T"], segment_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a block may start: a token and the one after it are supervised and of one segment.

    The last prompt token is therefore never an anchor: decoding never drafts from it either.
    """
    return jnp.pad(pairs(mask_BT, segment_BT), [(0, 0), (0, 1)])


def sample_anchors(key, mask_BT: Bool[Array, "B T"], segment_BT: Int[Array, "B T"], num_anchors: int) -> Anchors:
    """``num_anchors`` slots per row: uniform without replacement over the usable positions, then sorted.

    Rows with fewer usable positions take them all and leave spare slots; a row without any leaves only those.
    """
    tokens = mask_BT.shape[1]
    if not 0 < num_anchors <= tokens:
        raise ValueError(f"num_anchors={num_anchors} must lie in 1..{tokens}, the tokens of a row")
    draw_BT = jnp.where(usable(mask_BT, segment_BT), jax.random.uniform(key, mask_BT.shape), -1.0)
    best_BA, position_BA = jax.lax.top_k(draw_BT, num_anchors)
    sorted_BA = jnp.sort(jnp.where(best_BA >= 0, position_BA, tokens), axis=1)
    keep_BA = sorted_BA < tokens
    return Anchors(jnp.where(keep_BA, sorted_BA, 0).astype(jnp.int32), keep_BA)


def block_labels(
    anchors: Anchors,
    token_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    segment_BT: Int[Array, "B T"],
    block_size: int,
) -> Labels:
    """Slot k: label at ``a + 1 + k``, previous token and teacher at ``a + k``.

    The mask is a running product of "in the row, supervised, of the anchor's segment": a gap ends the block.
    """
    tokens = token_BT.shape[1]
    slot_P = jnp.arange(block_size)
    at_BAP = anchors.position_BA[..., None] + slot_P[None, None]
    before_BAP, label_BAP = jnp.minimum(at_BAP, tokens - 1), jnp.minimum(at_BAP + 1, tokens - 1)

    def pick(x_BT, index_BAP):
        flat = jnp.take_along_axis(x_BT, index_BAP.reshape(index_BAP.shape[0], -1), axis=1)
        return flat.reshape(index_BAP.shape)

    own_BA1 = jnp.take_along_axis(segment_BT, anchors.position_BA, axis=1)[..., None]
    right_BAP = (at_BAP + 1 < tokens) & pick(mask_BT, label_BAP) & (pick(segment_BT, label_BAP) == own_BA1)
    right_BAP &= anchors.keep_BA[..., None]
    mask_BAP = jnp.cumprod(right_BAP.astype(jnp.int32), axis=-1) > 0
    return Labels(pick(token_BT, label_BAP), pick(token_BT, before_BAP), before_BAP, mask_BAP)
