"""``state_read`` in plain fp32 jax.numpy: the specification, and the gradient of the kernels."""

from __future__ import annotations

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
