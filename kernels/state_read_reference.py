"""``state_read`` in plain fp32 jax.numpy: the specification, and the gradient of the kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


def prepare(states, u_ZXJ, v_ZYJ, *, width, eps, heads, rms_axes, feature):
    if heads is not None:
        states = [s_BMXY[:, jnp.array(heads)] for s_BMXY in states]
    s_BZXY = jnp.concatenate(states, axis=1).astype(jnp.float32)
    pairs = s_BZXY.shape[1]
    power = jnp.mean(jnp.square(s_BZXY), axis=2 if rms_axes == "row" else (2, 3), keepdims=True)
    layer_power = jnp.mean(power.reshape((power.shape[0], len(states), -1) + power.shape[2:]), axis=2)
    if rms_axes == "layer":
        power = jnp.repeat(layer_power, pairs // len(states), axis=1)
    rho = jnp.sqrt(power + eps)
    u_ZXJ, v_ZYJ = (jnp.repeat(w.astype(jnp.float32), pairs // w.shape[0], axis=0) for w in (u_ZXJ, v_ZYJ))
    t_BZXJ = jnp.einsum("BZXY,ZYj->BZXj", s_BZXY / (rho * width**0.5), v_ZYJ, precision="highest")
    a_BZJJ = jnp.einsum("BZXj,ZXi->BZji", t_BZXJ, u_ZXJ, precision="highest")
    if feature == "none":
        return a_BZJJ, None
    if feature == "layer":
        return a_BZJJ, 0.5 * jnp.log(layer_power + eps)[:, :, 0, 0]
    rho_BZ = rho[:, :, 0, 0]
    return a_BZJJ, rho_BZ if feature == "raw" else jnp.log(rho_BZ)


def prepare_gradient(arguments, found, cotangent, *, width, eps, heads, feature):
    """Cotangents of ``prepare``'s arguments with ``rms_axes="head"``; ``found`` is its result.

    ``A = V^T S^T U f`` with ``f = 1 / (rho sqrt(width))`` gives ``dU = sum_b (S V) dA f`` and ``dV = sum_b (S^T U)
    dA^T f``: a pass over the states for either, without a copy of them. What the states' own cotangent takes is
    dropped by the compiler where they do not train.
    """
    states, u_ZXJ, v_ZYJ = arguments
    options = dict(width=width, eps=eps, heads=heads, rms_axes="head", feature=feature)
    _, to_states = jax.vjp(lambda states: prepare(states, u_ZXJ, v_ZYJ, **options), states)
    picked = [s if heads is None else s[:, jnp.array(heads)] for s in states]
    if feature == "none":
        power_BZ = jnp.concatenate([jnp.mean(jnp.square(s.astype(jnp.float32)), axis=(2, 3)) for s in picked], axis=1)
        rho_BZ = jnp.sqrt(power_BZ + eps)
    else:
        rho_BZ = found[1] if feature == "raw" else jnp.exp(found[1])
    g_BZJJ = cotangent[0] / (rho_BZ * width**0.5)[..., None, None]
    batch, pairs = rho_BZ.shape
    product = partial(jnp.einsum, precision="highest")

    def every(w):
        """Weights of each pair, [B, Z, _, J]: products of a (sequence, pair) each leave the states where they are."""
        w = jnp.repeat(w.astype(jnp.float32), pairs // w.shape[0], axis=0)
        return jnp.broadcast_to(w, (batch, *w.shape))

    def shared(parts, w):
        """Gradients of pairs added up where they share weights."""
        found = jnp.concatenate(parts).reshape(w.shape[0], -1, *w.shape[1:])
        return jnp.sum(found, axis=1).astype(w.dtype)

    du, dv, number = [], [], pairs // len(states)
    for n, s in enumerate(picked):
        part = slice(n * number, (n + 1) * number)
        s = s.astype(jnp.float32)
        read_BMXj = product("BMXY,BMYj->BMXj", s, every(v_ZYJ)[:, part])
        seen_BMYi = product("BMXY,BMXi->BMYi", s, every(u_ZXJ)[:, part])
        du.append(product("BMXj,BMji->MXi", read_BMXj, g_BZJJ[:, part]))
        dv.append(product("BMYi,BMji->MYj", seen_BMYi, g_BZJJ[:, part]))
    return *to_states(cotangent), shared(du, u_ZXJ), shared(dv, v_ZYJ)


def read(latent_BPI, gain_ZJ, a_BZJJ, scale_BZ, *, eps, norm_axes):
    pairs, rank = gain_ZJ.shape
    lead = latent_BPI.shape[:2]
    latent = latent_BPI.astype(jnp.float32).reshape(lead + (-1, rank))
    if norm_axes != "none":
        axes = -1 if norm_axes == "rank" else (-2, -1)
        latent = latent * jax.lax.rsqrt(jnp.mean(jnp.square(latent), axis=axes, keepdims=True) + eps)
    z_BPZJ = jnp.repeat(latent, pairs // latent.shape[2], axis=2) * gain_ZJ.astype(jnp.float32)[None, None]
    feature = jnp.einsum("BZji,BPZi->BPZj", a_BZJJ, z_BPZJ, precision="highest").reshape(lead + (-1,))
    if scale_BZ is not None:
        scale = jnp.broadcast_to(scale_BZ[:, None], lead + scale_BZ.shape[1:])
        feature = jnp.concatenate([feature, scale], axis=-1)
    return feature.astype(latent_BPI.dtype)
