"""``state_read.prepare`` in Gluon, through jax-triton: programs keep a state in registers, as products need it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ready_jax.kernels import gluon
from ready_jax.kernels import state_read_reference as reference
from ready_jax.kernels.pallas_triton import gpu_only
from ready_jax.kernels.state_read_fused import differentiable, why_not_prepare

WARPS = 16


def why_not(*, shape=(128, 128), rank=8, picked=False, **facts) -> str | None:
    reason = gpu_only(**facts) or why_not_prepare(**facts)
    if reason is not None:
        return reason
    if shape != (128, 128):
        return f"states are {shape[0]} x {shape[1]}; needs 128 x 128: its layouts are written for that"
    if rank not in (4, 8, 16):
        return f"rank {rank}; needs 4, 8 or 16: its columns are written out one by one"
    if picked:
        return "state_heads picks heads; needs all of them, in their order"
    return gluon.missing()


def prepare(states, u_ZXJ, v_ZYJ, *, width, eps, heads, rms_axes, feature):
    """See ``state_read.prepare``."""
    del heads, rms_axes
    batch, memories, key_dim, value_dim = states[0].shape
    pairs, rank = len(states) * memories, u_ZXJ.shape[2]

    def fast(states, u_ZXJ, v_ZYJ):
        from ready_jax.kernels import state_read_gluon_source as source

        a_BZJJ, scale_BZ = gluon.call()(
            u_ZXJ, v_ZYJ, tuple(states),
            kernel=source.prepare,
            out_type=[
                jax.ShapeDtypeStruct((batch, pairs, rank, rank), jnp.float32),
                jax.ShapeDtypeStruct((batch, pairs), jnp.float32),
            ],
            grid=(pairs, batch), num_warps=WARPS,
            LAYERS=len(states), M=memories, X=key_dim, Y=value_dim, J=rank, ZU=u_ZXJ.shape[0], ZV=v_ZYJ.shape[0],
            FACTOR=width**-0.5, EPS=eps, LOG=feature == "pair", WARPS=WARPS,
        )  # fmt: skip
        return a_BZJJ, None if feature == "none" else scale_BZ

    backward = partial(reference.prepare_gradient, width=width, eps=eps, heads=None, feature=feature)
    return differentiable(fast, backward)(tuple(states), u_ZXJ, v_ZYJ)
