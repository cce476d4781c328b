"""The drafter's loss over blocks: cross entropy, total variation against the target, confidence.

Per slot k, with p the corrected draft distribution and q the target's at the same place (DSpark, arXiv 2607.05147,
section 3.3; DeepSpec ``modeling/dspark/loss``):

    ce = -log p[label]       l1 = sum_v |p - q|   (unhalved: 0..2)       overlap = 1 - l1 / 2
    confidence = BCE(conf_logit, overlap)         the label is detached, the logit's gradient reaches the backbone

Each term is ``sum_k w_k m_k x_k / sum_k w_k m_k`` with ``w_k = exp(-k / decay)`` over all blocks of the batch: terms
travel as (sum, count) pairs, so that devices and micro-batches add up before they divide.

Logits exist for one slice of the blocks at a time. Under differentiation a slice's gradients are taken as soon as its
logits are there, so that no product with the vocabulary is done twice (as in Liger Kernel, arXiv 2410.10989).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from ready_jax.configs.drafter_training import LossConfig
from ready_jax.train.anchors import Labels
from ready_jax.train.features import cast


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over the blocks of a batch; ``ratio`` and ``metrics`` divide them.

    ``objective`` is what is minimised, ``ce``, ``l1`` and ``confidence`` times their weights in the configuration: the
    one field of what ``sums`` returns that has a gradient. Weighted by decay: the three and their common denominator
    ``weight``. Per slot and unweighted:
    ``overlap_P``, ``top1_P`` (the draft's argmax is the target's), ``right_P`` (it is the label), ``count_P``.
    ``tau``: sum over blocks of 1 + the expected accepted proposals; ``blocks``: how many have a supervised slot.
    """

    objective: Float[Array, ""]
    ce: Float[Array, ""]
    l1: Float[Array, ""]
    confidence: Float[Array, ""]
    weight: Float[Array, ""]
    overlap_P: Float[Array, "P"]
    top1_P: Float[Array, "P"]
    right_P: Float[Array, "P"]
    count_P: Float[Array, "P"]
    tau: Float[Array, ""]
    blocks: Float[Array, ""]


def ratio(total, count):
    """``total / count``, and 0 (with gradient 0) where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), 0.0)


def slot_weights(block_size: int, decay: float):
    """``exp(-k / decay)`` for slots 0 .. P-1."""
    return jnp.exp(-jnp.arange(block_size, dtype=jnp.float32) / decay)


def draft_logits(markov, hidden_NPD, latent_NPR, unembed):
    """Teacher-forced corrected logits [N, P, V], fp32: base logits plus the Markov bias.

    With bf16 hidden states the gradient's products are bf16 too: their fp32 cotangents would make them TF32.
    """
    is_bf16 = hidden_NPD.dtype == jnp.bfloat16
    with jax.default_matmul_precision("BF16_BF16_F32") if is_bf16 else nullcontext():
        base_NPV = unembed(hidden_NPD)
        return base_NPV if latent_NPR is None else base_NPV + markov.bias(latent_NPR)


def block_sums(logits_NPV, teacher_NPV, token_NP, mask_NP, confidence_NP, config: LossConfig) -> Sums:
    """All sums of a slice of blocks; ``confidence_NP`` are logits, or None without that head."""
    teacher_NPV = jax.lax.stop_gradient(teacher_NPV)
    mask = mask_NP.astype(jnp.float32)
    weight = mask * slot_weights(mask.shape[1], config.decay)[None]
    lse_NP1 = jax.nn.logsumexp(logits_NPV, axis=-1, keepdims=True)
    ce_NP = (lse_NP1 - jnp.take_along_axis(logits_NPV, token_NP[..., None], axis=-1))[..., 0]
    l1_NP = jnp.sum(jnp.abs(jnp.exp(logits_NPV - lse_NP1) - jax.nn.softmax(teacher_NPV, axis=-1)), axis=-1)
    overlap_NP = jax.lax.stop_gradient(1.0 - 0.5 * l1_NP)
    confidence = jnp.zeros(())
    if confidence_NP is not None:
        bce_NP = jax.nn.softplus(confidence_NP) - overlap_NP * confidence_NP
        confidence = jnp.sum(weight * bce_NP)
    ce, l1 = jnp.sum(weight * ce_NP), jnp.sum(weight * l1_NP)
    best_NP = jnp.argmax(logits_NPV, axis=-1)
    return Sums(
        objective=config.ce * ce + config.l1 * l1 + config.confidence * confidence,
        ce=ce,
        l1=l1,
        confidence=confidence,
        weight=jnp.sum(weight),
        overlap_P=jnp.sum(mask * overlap_NP, axis=0),
        top1_P=jnp.sum(mask * (best_NP == jnp.argmax(teacher_NPV, axis=-1)), axis=0),
        right_P=jnp.sum(mask * (best_NP == token_NP), axis=0),
        count_P=jnp.sum(mask, axis=0),
        tau=jnp.sum(mask[:, 0] * (1.0 + jnp.sum(jnp.cumprod(overlap_NP * mask, axis=1), axis=1))),
        blocks=jnp.sum(mask[:, 0]),
    )


def _slices(x, size: int):
    """[B, A, ...] -> [ceil(A / size), B, size, ...], the rest filled with zeros (whose mask is false).

    Slices run along the anchors of a row: rows may be spread over devices, and every device works on every slice.
    """
    rest = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape((x.shape[0], -1, size) + x.shape[2:]), 1, 0)


def sums(
    drafter,
    hidden_BAPD: Float[Array, "B A P D"],
    teacher_BTD: Float[Array, "B T D"],
    labels: Labels,
    unembed,
    config: LossConfig,
    *,
    teacher_unembed=None,
    dtype=None,
) -> Sums:
    """Sums over all blocks; logits exist for about ``config.slice_blocks`` blocks at a time (at least one of every
    row). Only ``objective`` has a gradient: in ``hidden_BAPD`` and the drafter's heads, not in either ``unembed``.

    ``teacher_BTD``: the target's final-normed hidden states; ``unembed`` makes fp32 logits of both, or of the draft
    alone beside ``teacher_unembed``. ``dtype``: the type to compute in, where the drafter holds masters.
    """
    batch, count, block_size, width = hidden_BAPD.shape
    teacher_unembed = teacher_unembed or unembed
    index_BR = labels.teacher_BAP.reshape(batch, -1)
    teacher_BAPD = jnp.take_along_axis(teacher_BTD, index_BR[..., None], axis=1)
    teacher_BAPD = teacher_BAPD.reshape(batch, count, block_size, -1)

    def blockwise(x):
        return x.reshape((batch, count) + x.shape[1:])

    flat_NPD, outer = hidden_BAPD.reshape(-1, block_size, width), cast(drafter, dtype)
    latent = embed_NPR = confidence = None
    if outer.markov is not None:
        latent_NPR, embed_NPR = outer.markov.latents(labels.previous_BAP.reshape(-1, block_size), flat_NPD)
        latent = blockwise(latent_NPR)
    if outer.confidence is not None:
        confidence = blockwise(outer.confidence(flat_NPD, embed_NPR))

    size = min(max(config.slice_blocks // batch, 1), count)
    moved = jax.tree.map(lambda x: _slices(x, size), (hidden_BAPD, latent, confidence))
    fixed = jax.tree.map(lambda x: _slices(x, size), (teacher_BAPD, labels.token_BAP, labels.mask_BAP))
    weights, structure = jax.tree.flatten(drafter.markov)

    def slice_sums(weights, moved, fixed) -> dict[str, Array]:
        moved, fixed = jax.tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), (moved, fixed))
        (hidden_NPD, latent_NPR, confidence_NP), (teacher_NPD, token_NP, mask_NP) = moved, fixed
        markov = cast(jax.tree.unflatten(structure, weights), dtype)
        logits_NPV = draft_logits(markov, hidden_NPD, latent_NPR, unembed)
        return vars(block_sums(logits_NPV, teacher_unembed(teacher_NPD), token_NP, mask_NP, confidence_NP, config))

    return Sums(**_scanned(slice_sums, weights, moved, fixed))


def _scanned(slice_sums, weights, moved, fixed) -> dict[str, Array]:
    """``slice_sums(weights, moved, fixed)`` added up over the leading axis of ``moved`` and ``fixed``.

    Under differentiation every slice also gives the gradient of its objective, in those of ``weights`` and ``moved``
    that somebody asks for; what comes back later is a scalar factor.
    """
    first_moved, first_fixed = jax.tree.map(lambda x: x[0], (moved, fixed))
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(slice_sums, weights, first_moved, first_fixed))

    def add(so_far, more):
        return jax.tree.map(jnp.add, so_far, more)

    def forward_only(weights, moved, fixed):
        def one(found, some):
            return add(found, slice_sums(weights, *some)), None

        return jax.lax.scan(one, nothing, (moved, fixed))[0]

    def forward(*arguments):
        weights, moved, fixed = jax.tree.map(lambda x: x.value, arguments)
        asked = jax.tree.map(lambda x: x.perturbed, arguments[:2])

        def chosen(values):
            return jax.tree.map(lambda asked, x: x if asked else None, asked, values)

        def one(carry, some):
            whole = (weights, some[0])

            def objective(learned):
                back = jax.tree.map(lambda x, y: y if x is None else x, learned, whole, is_leaf=lambda x: x is None)
                found = slice_sums(*back, some[1])
                return found["objective"], found

            (_, found), (slope, slopes) = jax.value_and_grad(objective, has_aux=True)(chosen(whole))
            return add(carry, (found, slope)), slopes

        start = (nothing, jax.tree.map(jnp.zeros_like, chosen((weights, moved))[0]))
        (found, slope), slopes = jax.lax.scan(one, start, (moved, fixed))
        return found, (slope, slopes)

    def backward(slopes, cotangent):
        scale = cotangent["objective"]
        if isinstance(scale, SymbolicZero):
            return None, None, None
        return *jax.tree.map(lambda x: (scale * x).astype(x.dtype), slopes), None

    scanned = jax.custom_vjp(forward_only)
    scanned.defvjp(forward, backward, symbolic_zeros=True)
    return scanned(weights, moved, fixed)


def total(found: Sums):
    """The scalar that is minimised: the weighted terms over their denominator."""
    return ratio(found.objective, found.weight)


def metrics(found: Sums) -> dict[str, Array]:
    """What a log line shows; ``@k`` counts slots from 1."""
    out = {
        "loss": total(found),
        "ce_loss": ratio(found.ce, found.weight),
        "l1_loss": ratio(found.l1, found.weight),
        "confidence_loss": ratio(found.confidence, found.weight),
        "tau_probabilistic": ratio(found.tau, found.blocks),
        "anchors": found.blocks,
    }
    for name, value_P in (("accept_rate", found.overlap_P), ("top1", found.top1_P), ("right", found.right_P)):
        rate_P = ratio(value_P, found.count_P)
        out |= {f"{name}@{k + 1}": rate_P[k] for k in range(rate_P.shape[0])}
    return out


def argmax_tokens(drafter, hidden_BAPD: Float[Array, "B A P D"], previous_BAP: Int[Array, "B A P"], unembed):
    """Teacher-forced proposals [B, A, P]: as long as a prefix is right they are what decoding would propose."""
    block_size, width = hidden_BAPD.shape[2:]
    flat_NPD, previous_NP = hidden_BAPD.reshape(-1, block_size, width), previous_BAP.reshape(-1, block_size)
    latent_NPR = None if drafter.markov is None else drafter.markov.latents(previous_NP, flat_NPD)[0]
    best = jnp.argmax(draft_logits(drafter.markov, flat_NPD, latent_NPR, unembed), axis=-1)
    return best.reshape(previous_BAP.shape).astype(jnp.int32)
