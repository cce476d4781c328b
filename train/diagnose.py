"""Which rows of a batch make a step useless: asked only when a loss or gradient was not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ready_jax.configs.drafter_training import Recipe
from ready_jax.train import loss as losses
from ready_jax.train.anchors import sample_anchors, step_key
from ready_jax.train.features import features
from ready_jax.train.step import draft_sums


def bad_rows(recipe: Recipe, drafter, target, batch, step: int) -> tuple[np.ndarray, str]:
    """(which rows [B] are not finite on their own, the terms of the whole batch in words).

    The anchors are those of the step; the drafter is as it stands, and one row is computed at a time.
    """
    rows, loss = recipe.rows, recipe.loss

    @jax.jit
    def row_sums(drafter, target, token_BT, mask_BT, segment_BT):
        anchors = sample_anchors(step_key(rows.seed, step), mask_BT, segment_BT, rows.anchors)

        def one(arguments):
            anchors, token_BT, mask_BT, segment_BT = jax.tree.map(lambda x: x[None], arguments)
            found = features(target, drafter.config, token_BT, segment_BT, anchors)
            sums = draft_sums(
                drafter, found, anchors, token_BT, mask_BT, segment_BT, target.embed, target.unembed, loss,
                group=rows.group, dtype=target.dtype,
            )  # fmt: skip
            return sums, jnp.isfinite(found.hidden_BTD).all()

        return jax.lax.map(one, (anchors, token_BT, mask_BT, segment_BT))

    sums, finite = jax.device_get(row_sums(drafter, target, *batch))
    terms = {"ce": sums.ce, "l1": sums.l1, "confidence": sums.confidence}
    good = finite & np.logical_and.reduce([np.isfinite(x) for x in terms.values()])
    weight = sums.weight.sum()
    words = ", ".join(f"{name} {float(losses.ratio(x.sum(), weight)):.4g}" for name, x in terms.items())
    return ~good, words
