"""ReaDy's state reader: every draft position queries the target's committed recurrent states.

For each selected pair m of (layer, memory head), with ``S_m`` the committed state (read as ``o = S q``, S [Y, X]):

    rho_m = sqrt(mean(S_m^2) + eps)            l_m = log rho_m
    z_m   = g_m * rmsnorm_J(W_q^m h)           a J-wide query latent from the position's own hidden state
    u_m   = A_m z_m,  A_m = V_m^T S_m U_m / (rho_m sqrt(X))
    dh    = W_out . act(W_in [u ; l])          over all pairs; W_out starts at zero

Source: ReaDy (arXiv 2610.20503) as restated in ``docs/decisions.md``, where every ambiguous point has a config
field. Only ``prepare`` touches the states, and what it leaves is J x J numbers per pair: it does not depend on the
draft's hidden states. States are stored transposed, ``s_BMXY``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ready_jax.config import ReaderConfig
from ready_jax.layers import linear, normal, rms_norm
from ready_jax.pytree import register

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


@register
@dataclass(frozen=True)
class Prepared:
    """All a draft block needs of the states: per site the J x J maps, and the scale features (or None)."""

    a_BZJJ: tuple
    scale_BZ: Float[Array, "B Z"] | None


class ReadSite(nnx.Module):
    """Weights of one injection layer."""

    def __init__(self, config: ReaderConfig, hidden: int, *, rngs: nnx.Rngs, dtype):
        c = config
        layers, pairs, rank = len(c.state_layers), c.num_pairs, c.rank
        maps = {"pair": pairs, "layer": layers, "all": 1}[c.projection_sharing]
        latents = {"pair": pairs, "layer": layers, "shared": 1}[c.query_latent]
        scales = {"pair": pairs, "raw": pairs, "layer": layers, "none": 0}[c.scale_feature]
        features = pairs * rank + scales
        orthonormal = jax.nn.initializers.orthogonal()

        def columns(rows):
            keys = jax.random.split(rngs.params(), maps)
            return jax.vmap(lambda key: orthonormal(key, (rows, rank), jnp.float32))(keys).astype(dtype)

        self.w_q_DI = nnx.Param(normal(rngs.params(), (hidden, latents * rank), hidden, dtype))
        self.gain_ZJ = nnx.Param(jnp.ones((pairs, rank), dtype))
        self.u_ZXJ = nnx.Param(columns(c.key_dim))
        self.v_ZYJ = nnx.Param(columns(c.value_dim))
        self.norm_I = nnx.data(nnx.Param(jnp.ones((features,), dtype)) if c.f_norm else None)
        self.w_in_IU = nnx.Param(normal(rngs.params(), (features, c.mlp_hidden), features, dtype))
        self.w_out_UD = nnx.Param(jnp.zeros((c.mlp_hidden, hidden), dtype))


class StateReader(nnx.Module):
    """A reader plugs into a drafter through two calls: ``prepare(states)`` and ``reader(prep, hidden_BPD, site)``.

    ``states`` is ``DecodeState.recurrent`` or any mapping from absolute layer number to ``s_BMXY``; ``site`` counts
    the injection layers. Anything with these two methods can stand in for it.
    """

    def __init__(self, config: ReaderConfig, hidden: int, sites: int = 1, *, rngs: nnx.Rngs, dtype="bfloat16"):
        self.config = config
        self.sites = nnx.List([ReadSite(config, hidden, rngs=rngs, dtype=dtype) for _ in range(sites)])

    def _per_pair(self, x, layers_axis_is: str):
        """Repeat weights shared per layer or by all so that the first axis counts pairs."""
        c = self.config
        if layers_axis_is == "pair":
            return x
        return jnp.repeat(x, len(c.heads) if layers_axis_is == "layer" else c.num_pairs, axis=0)

    def prepare(self, states) -> Prepared:
        """rho and the J x J maps of every pair, fp32; the only pass over the states.

        Raises ValueError if a selected layer has no recurrent state.
        """
        c = self.config
        picked = [states[layer] for layer in c.state_layers]
        if any(s is None for s in picked):
            empty = [layer for layer, s in zip(c.state_layers, picked, strict=True) if s is None]
            raise ValueError(f"state_layers names {empty}: these layers of the target hold no recurrent state")
        if c.state_heads is not None:
            picked = [s[:, jnp.array(c.heads)] for s in picked]
        s_BZXY = jnp.concatenate(picked, axis=1)
        if s_BZXY.shape[2:] != (c.key_dim, c.value_dim):
            raise ValueError(
                f"states are {s_BZXY.shape[2]} x {s_BZXY.shape[3]} (key x value), the reader was made for "
                f"{c.key_dim} x {c.value_dim}"
            )
        s_BZXY = s_BZXY.astype(jnp.float32)
        power = jnp.mean(jnp.square(s_BZXY), axis=2 if c.state_rms_axes == "row" else (2, 3), keepdims=True)
        by_layer = power.reshape((power.shape[0], len(c.state_layers), -1) + power.shape[2:])
        layer_power = jnp.mean(by_layer, axis=2)
        if c.state_rms_axes == "layer":
            power = jnp.repeat(layer_power, len(c.heads), axis=1)
        rho = jnp.sqrt(power + c.eps)
        scaled_BZXY = s_BZXY / (rho * (c.key_dim if c.read_scale == "key_dim" else c.rank) ** 0.5)
        a_BZJJ = []
        for site in self.sites:
            v = self._per_pair(site.v_ZYJ[...].astype(jnp.float32), c.projection_sharing)
            u = self._per_pair(site.u_ZXJ[...].astype(jnp.float32), c.projection_sharing)
            compressed = jnp.einsum("BZXY,ZYj->BZXj", scaled_BZXY, v, precision="highest")
            a_BZJJ.append(jnp.einsum("BZXj,ZXi->BZji", compressed, u, precision="highest"))
        if c.scale_feature == "none":
            return Prepared(tuple(a_BZJJ), None)
        if c.scale_feature == "layer":
            return Prepared(tuple(a_BZJJ), 0.5 * jnp.log(layer_power + c.eps)[:, :, 0, 0])
        rho_BZ = rho[:, :, 0, 0]
        return Prepared(tuple(a_BZJJ), rho_BZ if c.scale_feature == "raw" else jnp.log(rho_BZ))

    def __call__(self, prep: Prepared, hidden_BPD: Float[Array, "B P D"], site: int = 0) -> Float[Array, "B P D"]:
        """The update of every draft position, in the positions' type."""
        c, w = self.config, self.sites[site]
        lead = hidden_BPD.shape[:2]
        latent = linear(hidden_BPD, w.w_q_DI[...]).astype(jnp.float32).reshape(lead + (-1, c.rank))
        if c.query_norm_axes != "none":
            axes = -1 if c.query_norm_axes == "rank" else (-2, -1)
            latent = latent * jax.lax.rsqrt(jnp.mean(jnp.square(latent), axis=axes, keepdims=True) + c.eps)
        repeats = {"pair": 1, "layer": len(c.heads), "shared": c.num_pairs}[c.query_latent]
        z_BPZJ = jnp.repeat(latent, repeats, axis=2) * w.gain_ZJ[...].astype(jnp.float32)[None, None]
        u_BPZJ = jnp.einsum("BZji,BPZi->BPZj", prep.a_BZJJ[site], z_BPZJ, precision="highest")
        feature = u_BPZJ.reshape(lead + (-1,))
        if prep.scale_BZ is not None:
            scale = jnp.broadcast_to(prep.scale_BZ[:, None], lead + prep.scale_BZ.shape[1:])
            feature = jnp.concatenate([feature, scale], axis=-1)
        feature = feature.astype(hidden_BPD.dtype)
        if w.norm_I is not None:
            feature = rms_norm(feature, w.norm_I[...], c.eps)
        return linear(ACTIVATIONS[c.mlp_act](linear(feature, w.w_in_IU[...])), w.w_out_UD[...])
