"""Which rows of a batch make a step useless: asked only when a loss or gradient was not finite."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ready_jax.configs.drafter_training import LossConfig, Recipe, RowsConfig
from ready_jax.train.anchors import sample_anchors, step_key
from ready_jax.train.features import features
from ready_jax.train.mesh import gathered
from ready_jax.train.step import draft_sums


def bad_rows(recipe: Recipe, drafter, target, batch, mesh=None) -> tuple[np.ndarray, str]:
    """(which rows [B] are not finite on their own, the terms of the whole batch in words).

    The anchors are those of the step; the drafter is as it stands, and one row is computed at a time.
    """
    found = row_sums(drafter, target, *batch, rows=recipe.rows, loss=recipe.loss)
    terms, weight, finite = jax.device_get(gathered(found, mesh))
    good = finite & np.logical_and.reduce([np.isfinite(x) for x in terms.values()])
    words = ", ".join(f"{name} {x.sum() / max(weight.sum(), 1e-9):.4g}" for name, x in terms.items())
    return ~good, words


@functools.partial(jax.jit, static_argnames=("rows", "loss"))
def row_sums(drafter, target, token_BT, mask_BT, segment_BT, draw, *, rows: RowsConfig, loss: LossConfig):
    """Of every row: sums of the loss's terms, their weight, and whether the target's hidden states are finite."""
    anchors = sample_anchors(step_key(*draw), mask_BT, segment_BT, rows.anchors)

    def one(arguments):
        anchors, token_BT, mask_BT, segment_BT = jax.tree.map(lambda x: x[None], arguments)
        found = features(target, drafter.config, token_BT, segment_BT, anchors)
        sums = draft_sums(
            drafter, found, anchors, token_BT, mask_BT, segment_BT, target.embed, target.unembed, loss,
            group=rows.group, dtype=target.dtype,
        )  # fmt: skip
        terms = {"ce": sums.ce, "l1": sums.l1, "confidence": sums.confidence}
        return terms, sums.weight, jnp.isfinite(found.hidden_BTD).all()

    return jax.lax.map(one, (anchors, token_BT, mask_BT, segment_BT))
