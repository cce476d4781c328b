"""``scaled_product`` on tensor cores: e4m3 becomes fp16 in registers, two at a time, and meets fp16 activations.

fp16 has more mantissa than bf16 and less range, so activations are clamped to its largest value. To bf16 there is no
such conversion: it takes four instructions, one of them at a quarter of the speed, and was slower than reading bf16.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels.pallas_triton import WHOLE, kernel_call, load, store

ROWS = 16  # of the tensor cores' smallest product
CHUNK = 64  # terms of a sum that are on their way at once
PROGRAMS = 256  # that a launch should have: about two for every processor of an H200
LARGEST = float(jnp.finfo(jnp.float16).max)


def why_not(*, rows=1, terms=CHUNK, columns=64, dtype="bfloat16", **_: object) -> str | None:
    if dtype not in ("bfloat16", "float16"):
        return f"rows are {dtype}; needs bfloat16 or float16: they meet the matrix as fp16"
    if rows > ROWS:
        return f"{rows} rows; needs at most {ROWS}, those of one product"
    if terms % CHUNK or columns % 64:
        return f"a matrix of {columns} x {terms}; needs multiples of 64 x {CHUNK}"
    return None


def half(x):
    """fp16, clamped to its range."""
    return jnp.clip(x.astype(jnp.float32), -LARGEST, LARGEST).astype(jnp.float16)


def _body(x_ref, w_ref, scale_ref, out_ref, *, rows, terms, block):
    """Program (columns, part of the sum)."""
    n, part = pl.program_id(0) * block + jnp.arange(block), pl.program_id(1)
    row = jnp.arange(ROWS)
    live = (row < rows)[:, None]

    def step(i, total):
        k = part * terms + i * CHUNK + jnp.arange(CHUNK)
        x = load(x_ref.at[row[:, None], k[None]], mask=live, other=0.0)
        w = load(w_ref.at[n[:, None], k[None]]).astype(jnp.float16)
        return total + jnp.dot(x, w.T, preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, terms // CHUNK, step, jnp.zeros((ROWS, block), jnp.float32))
    store(out_ref.at[part, row[:, None], n[None]], total * load(scale_ref.at[n])[None], mask=live)


def product(x_TK, w_NK, scale_N, *, block: int | None = None, parts: int | None = None, warps: int = 4,
            stages: int = 4, interpret=False):  # fmt: skip
    """See ``scaled_product.product``. ``block`` columns and one of ``parts`` parts of the sum are left to a program."""
    (rows, terms), columns = x_TK.shape, w_NK.shape[0]
    block = block or (128 if columns % 128 == 0 and columns >= 128 * PROGRAMS else 64)
    if parts is None:
        able = [p for p in (1, 2, 4, 8) if terms % (p * CHUNK) == 0]
        parts = next((p for p in able if columns // block * p >= PROGRAMS), able[-1])
    (out,) = kernel_call(
        partial(_body, rows=rows, terms=terms // parts, block=block),
        name="scaled_product", grid=(columns // block, parts),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, columns), jnp.float32)],
        in_specs=[WHOLE] * 3, out_specs=[WHOLE], num_warps=warps, num_stages=stages, interpret=interpret,
    )(half(x_TK), w_NK, scale_N)  # fmt: skip
    return jnp.sum(out, axis=0)
