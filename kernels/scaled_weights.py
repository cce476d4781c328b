"""fp8 matrices in the order of `fragments.py`, four weights a word, as fp16 comes out of them in five instructions.

e4m3 is fp16 with an exponent 8 smaller: its seven lower bits, seven places up, and its sign are 2^-8 times the number.
A half word holds two columns, of which ``8 h + r`` with h = 0 is already in place (sign at bit 15, the rest at 7), the
other's sign is at bit 14 and its rest at bit 0; the lower half word is the even term.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ready_jax.kernels import fragments
from ready_jax.kernels.fragments import U32

FP8 = jnp.float8_e4m3fn
#: Activations meet fp8 weights as fp16, which has more mantissa than bf16 and less range.
LARGEST = float(jnp.finfo(jnp.float16).max)


def half(x):
    """fp16, clamped to its range."""
    return jnp.clip(x.astype(jnp.float32), -LARGEST, LARGEST).astype(jnp.float16)


@jax.jit
def encode(w_NK: Float[Array, "N K"]) -> Int[Array, "groups blocks 2 32 4"]:
    """``words`` of a matrix of e4m3, outputs first, of whole blocks (``fragments.misfit``)."""
    part = fragments.pairs(jax.lax.bitcast_convert_type(w_NK.T, jnp.uint8).astype(U32))

    def half(e):
        first, second = part(0, e), part(1, e)
        placed = (first & 0x80) << 8 | (first & 0x7F) << 7
        return placed | (second & 0x80) << 7 | second & 0x7F

    return fragments.stacked(fragments.by_thread(half(0) | half(1) << 16))


def decode(words: Int[Array, "groups blocks 2 32 4"]) -> Float[Array, "N K"]:
    """The matrix of e4m3, outputs first."""
    thread = fragments.unstacked(words)

    def entry(h, e):
        half = thread >> (16 * e)
        number = (half >> 8) & 0x80 | (half >> 7) & 0x7F if h == 0 else (half >> 7) & 0x80 | half & 0x7F
        return number.astype(jnp.uint8)

    return jax.lax.bitcast_convert_type(fragments.matrix(entry), FP8)
