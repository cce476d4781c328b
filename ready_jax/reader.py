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
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ready_jax import collectives
from ready_jax.config import ReaderConfig
from ready_jax.kernels import state_read
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


def substituted(s_BMXY, reads: str):
    """What a control reads instead of the target's own states (``ReaderConfig.reads``)."""
    if reads == "zero":
        return jnp.zeros_like(s_BMXY)
    if reads == "identity":
        eye_XY = jnp.eye(*s_BMXY.shape[2:], dtype=s_BMXY.dtype)
        return jnp.broadcast_to(eye_XY[None, None], s_BMXY.shape)
    if reads == "shuffled":
        if s_BMXY.shape[0] < 2:
            raise ValueError("reads='shuffled' takes another sequence's states: a batch of 1 has no other sequence")
        return jnp.roll(s_BMXY, s_BMXY.shape[0] // 2, axis=0)
    return s_BMXY


class StateReader(nnx.Module):
    """A reader plugs into a drafter through two calls: ``prepare(states)`` and ``reader(prep, hidden_BPD, site)``.

    ``states`` is ``DecodeState.recurrent`` or any mapping from absolute layer number to ``s_BMXY``; ``site`` counts
    the injection layers. Anything with these two methods can stand in for it.
    """

    def __init__(self, config: ReaderConfig, hidden: int, sites: int = 1, *, rngs: nnx.Rngs, dtype="bfloat16"):
        self.config = config
        self.sites = nnx.List([ReadSite(config, hidden, rngs=rngs, dtype=dtype) for _ in range(sites)])

    def prepare(self, states, *, impl: str | None = None) -> Prepared:
        """The scale features and the J x J maps of every pair, fp32; the only pass over the states.

        ``impl``: see ``kernels/state_read.py``. Raises ValueError if a selected layer has no recurrent state.
        """
        c = self.config
        picked = tuple(states[layer] for layer in c.state_layers)
        if any(s is None for s in picked):
            empty = [layer for layer, s in zip(c.state_layers, picked, strict=True) if s is None]
            raise ValueError(f"state_layers names {empty}: these layers of the target hold no recurrent state")
        picked = tuple(substituted(s, c.reads) for s in picked)
        key_dim, value_dim = picked[0].shape[2:]
        if (key_dim, value_dim) != (c.key_dim, c.value_dim):
            raise ValueError(
                f"states are {key_dim} x {value_dim} (key x value), the reader was made for {c.key_dim} x {c.value_dim}"
            )
        width = c.key_dim if c.read_scale == "key_dim" else c.rank
        maps = []
        for site in self.sites:
            found = state_read.prepare(
                picked, site.u_ZXJ[...], site.v_ZYJ[...], width=width, eps=c.eps, heads=c.state_heads,
                rms_axes=c.state_rms_axes, feature=c.scale_feature, impl=impl,
            )  # fmt: skip
            maps.append(found)
        prep = Prepared(tuple(a_BZJJ for a_BZJJ, _ in maps), maps[0][1])
        return prep if collectives.axis.value is None else self._gathered(prep)

    def _gathered(self, prep: Prepared) -> Prepared:
        """Every shard's pairs in the order of one device: layer by layer, all at once."""
        leaves, structure = jax.tree.flatten(prep)
        batch, pairs = leaves[0].shape[:2]
        layers = len(self.config.state_layers)
        flat = [leaf.reshape(batch, layers, pairs // layers, -1) for leaf in leaves]
        edges = np.cumsum([leaf.shape[-1] for leaf in flat])[:-1]
        found = jnp.split(collectives.whole(jnp.concatenate(flat, axis=-1), 2), edges, axis=-1)
        whole = [x.reshape((batch, -1) + leaf.shape[2:]) for x, leaf in zip(found, leaves, strict=True)]
        return jax.tree.unflatten(structure, whole)

    def __call__(
        self, prep: Prepared, hidden_BPD: Float[Array, "B P D"], site: int = 0, *, impl: str | None = None
    ) -> Float[Array, "B P D"]:
        """The update of every draft position, in the positions' type."""
        c, w = self.config, self.sites[site]
        feature = state_read.read(
            linear(hidden_BPD, w.w_q_DI[...]), w.gain_ZJ[...], prep.a_BZJJ[site], prep.scale_BZ,
            eps=c.eps, norm_axes=c.query_norm_axes, impl=impl,
        )  # fmt: skip
        if w.norm_I is not None:
            feature = rms_norm(feature, w.norm_I[...], c.eps)
        return linear(ACTIVATIONS[c.mlp_act](linear(feature, w.w_in_IU[...])), w.w_out_UD[...])
