"""``coded_product`` and ``scaled_product`` on tensor cores, in Gluon through jax-triton.

A thread decodes in registers what it multiplies. That needs the place of every entry in a thread's registers, which
Pallas cannot say.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import jax
import jax.numpy as jnp

from ready_jax.kernels import fragments, gluon
from ready_jax.kernels.pallas_triton import gpu_only
from ready_jax.kernels.scaled_weights import half

#: Rows of one product of tensor cores, and the most that a launch takes.
TILE, ROWS = 8, 32


def why_not(*, rows=1, dtype="bfloat16", **facts) -> str | None:
    reason = gpu_only(**facts)
    if reason is not None:
        return reason
    if dtype != "bfloat16":
        return f"rows are {dtype}; needs bfloat16"
    if rows > ROWS:
        return f"{rows} rows; needs at most {ROWS}"
    return gluon.missing()


def why_not_decode(**facts) -> str | None:
    return gpu_only(**facts) or gluon.missing()


def _warps(terms: int) -> int:
    return next(n for n in (8, 4, 2, 1) if terms // fragments.TERMS % n == 0)


def _product(x_TK, words, table, rare, dtype):
    from ready_jax.kernels import fragment_product_gluon_source as source

    (rows, terms), warps = x_TK.shape, _warps(x_TK.shape[1])
    columns, loads = words.shape[0] * fragments.COLUMNS, words.shape[2]
    tiles = next(n for n in (1, 2, 4) if n * TILE >= rows)
    code, operands = source.BLOCKS[loads, tiles]
    return gluon.call()(
        x_TK, words, table, rare,
        kernel=source.product, out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(words.shape[0],), num_warps=warps,
        K=terms, N=columns, T=rows, E=rare.shape[1], TILES=tiles, WARPS=warps,
        STEPS=terms // fragments.TERMS // warps, LOADS=loads, CODE=code, OPERANDS=operands,
    )  # fmt: skip


def coded_product(x_TK, words, table, rare, *, dtype):
    """See ``coded_product.product``."""
    return _product(x_TK, words, table, rare, dtype)


def scaled_product(x_TK, words, scale_N):
    """See ``scaled_product.product``."""
    return _product(half(x_TK), words, scale_N, words, jnp.float32)


def decode(words, table, rare):
    """See ``coded_weights.decode``."""
    from ready_jax.kernels import fragment_product_gluon_source as source

    terms, columns = fragments.shape(words)
    warps, (code, operands) = _warps(terms), source.WHOLE
    steps = terms // fragments.TERMS // warps
    parts = 2 if steps % 2 == 0 else 1
    return gluon.call()(
        words, table, rare,
        kernel=source.decode, out_type=jax.ShapeDtypeStruct((columns, terms), jnp.bfloat16),
        grid=(words.shape[0], parts), num_warps=warps, K=terms, E=rare.shape[1], WARPS=warps, STEPS=steps // parts,
        CODE=code, OPERANDS=operands,
    )  # fmt: skip
