"""Norms, rotary embedding, SwiGLU and the plain linear product, shared by target and drafter.

Statistics are fp32, one cast at a block's edge (Qwen3.5 reference, ``modeling_qwen3_5``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ready_jax import collectives
from ready_jax.config import RopeConfig
from ready_jax.kernels import coded_product, fragments, scaled_product
from ready_jax.pytree import register


def precision_for(dtype):
    """fp32 operands ask for IEEE products (the GPU's default is TF32); bf16 operands need nothing."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@register
@dataclass(frozen=True)
class Scaled:
    """A matrix in fp8 (see ``quantize.py``): ``weight``, [out, in] or its words in the order of
    `kernels/fragments.py`, and one fp32 ``scale`` per output, [out]."""

    weight: jax.Array
    scale: jax.Array

    def __getitem__(self, index):
        """Itself: ``parameter[...]`` reads a stored matrix as it reads an array."""
        return self


@register
@dataclass(frozen=True)
class Coded:
    """A bf16 matrix in 12 bits a weight, exactly (see ``lossless.py``, `kernels/coded_weights.py`)."""

    words: jax.Array
    table: jax.Array
    rare: jax.Array

    def __getitem__(self, index):
        """Itself, as of ``Scaled``."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out) of the matrix."""
        return fragments.shape(self.words)

    def times(self, x, dtype):
        """``x @ matrix``, summed in fp32; up to 32 rows meet the stored form, more of them a decoded copy."""
        y_TN = coded_product.product(x.reshape(-1, x.shape[-1]), self.words, self.table, self.rare, dtype=dtype)
        return y_TN.reshape(x.shape[:-1] + y_TN.shape[1:])


@register
@dataclass(frozen=True)
class LowRank:
    """A matrix and updates of low rank for ranges of its output columns (see ``lora.py``).

    ``down`` [in, rank] and ``up`` [rank, columns of the part]; ``columns`` are the (first, end) of every part.
    """

    weight: jax.Array
    down: tuple[jax.Array, ...]
    up: tuple[jax.Array, ...]
    columns: tuple[tuple[int, int], ...] = field(metadata=dict(static=True))
    scale: float = field(metadata=dict(static=True))

    def update(self, x):
        """``scale * x @ down @ up`` over all output columns, in the type of ``x``; zero outside the parts."""
        precision, at, pieces = precision_for(x.dtype), 0, []
        for down, up, (first, end) in zip(self.down, self.up, self.columns, strict=True):
            low = jnp.matmul(x, down.astype(x.dtype), precision=precision)
            pieces += [jnp.zeros(x.shape[:-1] + (first - at,), x.dtype)] if first > at else []
            pieces.append(jnp.matmul(low, up.astype(x.dtype) * self.scale, precision=precision))
            at = end
        rest = self.weight.shape[1] - at
        return jnp.concatenate(pieces + ([jnp.zeros(x.shape[:-1] + (rest,), x.dtype)] if rest else []), axis=-1)


def product(x, w):
    """``x @ w`` in fp32; ``w`` is cast to the activation type on the way, so that only what is stored is read."""
    if isinstance(w, Scaled):
        y_TN = scaled_product.product(x.reshape(-1, x.shape[-1]), w.weight, w.scale)
        return y_TN.reshape(x.shape[:-1] + y_TN.shape[1:])
    if isinstance(w, Coded):
        return w.times(x, jnp.float32)
    return jnp.matmul(x, w.astype(x.dtype), precision=precision_for(x.dtype), preferred_element_type=jnp.float32)


def linear(x, w, bias=None):
    """``x @ w`` with fp32 accumulation, returned in the activation type; masters are cast before the product."""
    if isinstance(w, Scaled):
        y = product(x, w).astype(x.dtype)
    elif isinstance(w, Coded):
        y = w.times(x, x.dtype)
    elif isinstance(w, LowRank):
        y = linear(x, w.weight) + w.update(x)
    else:
        y = jnp.matmul(x, w.astype(x.dtype), precision=precision_for(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


def summed_linear(x, w):
    """``linear`` where shards hold slices of ``x``'s features: fp32 partial products are summed, then cast once."""
    if collectives.axis.value is None:
        return linear(x, w)
    return collectives.total(product(x, w)).astype(x.dtype)


def rms(x, eps):
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in fp32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _last_axis(weight, ndim):
    return weight.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def rms_norm(x, weight, eps):
    """Plain RMSNorm of the drafter and of the GDN output: normalise, cast, then times ``w``."""
    return rms(x, eps).astype(x.dtype) * _last_axis(weight, x.ndim).astype(x.dtype)


def rms_norm_1p(x, weight, eps):
    """Zero-centred RMSNorm of the target: times ``1 + w`` in fp32, one cast at the end."""
    return (rms(x, eps) * (1.0 + _last_axis(weight, x.ndim))).astype(x.dtype)


def rope_frequencies(config: RopeConfig) -> tuple[np.ndarray, float]:
    """Angular frequencies of the ``rotary_dim / 2`` pairs and the factor on cos and sin.

    With YaRN the frequencies between the two correction bounds are blended linearly between the original and the
    interpolated ones (Peng et al. 2023, NTK-by-parts); the bounds are truncated to whole indices.
    """
    half = config.rotary_dim // 2
    base = config.theta ** (-np.arange(half, dtype=np.float64) * 2 / config.rotary_dim)
    if config.yarn is None:
        return base.astype(np.float32), 1.0
    yarn = config.yarn

    def bound(rotations):
        turns = yarn.original_max_position_embeddings / (rotations * 2 * np.pi)
        return config.rotary_dim * np.log(turns) / (2 * np.log(config.theta))

    low = max(np.floor(bound(yarn.beta_fast)), 0)
    high = min(np.ceil(bound(yarn.beta_slow)), config.rotary_dim - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
    return (base * (1 - ramp) + base / yarn.factor * ramp).astype(np.float32), yarn.attention_factor


def rope_angles(position_BT: Int[Array, "B T"], config: RopeConfig) -> tuple[Float[Array, "B T 1 H2"], ...]:
    """cos and sin of every position, fp32, broadcast over heads."""
    frequency, factor = rope_frequencies(config)
    angle = position_BT.astype(jnp.float32)[..., None, None] * frequency[None, None, None]
    return jnp.cos(angle) * np.float32(factor), jnp.sin(angle) * np.float32(factor)


def rotate(x, angles):
    """Rotate the first ``2 * angles`` entries of each head, half-split; the rest passes through. fp32 inside."""
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1)


class SwiGLU(nnx.Module):
    """``down(silu(gate x) * up x)``; gate and up columns are stored side by side."""

    def __init__(self, hidden: int, width: int, *, rngs: nnx.Rngs, dtype):
        self.w_in_DI = nnx.Param(normal(rngs.params(), (hidden, 2 * width), hidden, dtype))
        self.w_out_FD = nnx.Param(normal(rngs.params(), (width, hidden), width, dtype))

    def __call__(self, x):
        gate, up = jnp.split(linear(x, self.w_in_DI[...]), 2, axis=-1)
        return summed_linear(jax.nn.silu(gate) * up, self.w_out_FD[...])


def normal(key, shape, fan_in, dtype):
    """Gaussian of variance ``1 / fan_in``, drawn in fp32 so that every dtype gets the same numbers."""
    return (jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5).astype(dtype)
