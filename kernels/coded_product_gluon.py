"""``coded_product`` on tensor cores, in Gluon through jax-triton: a thread decodes in registers what it multiplies.

Needs the exact place of every entry in a thread's registers, which Pallas cannot say.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import jax
import jax.numpy as jnp

from ready_jax.kernels import coded_weights, gluon
from ready_jax.kernels.pallas_triton import gpu_only

#: Rows of one product of tensor cores, and the most that a launch takes.
TILE, ROWS = 8, 32


def why_not(*, rows=1, dtype="bfloat16", **facts) -> str | None:
    reason = gpu_only(**facts)
    if reason is not None:
        return reason
    if dtype != "bfloat16":
        return f"rows are {dtype}; needs bfloat16, as the matrix is"
    if rows > ROWS:
        return f"{rows} rows; needs at most {ROWS}"
    return gluon.missing()


def why_not_decode(**facts) -> str | None:
    return gpu_only(**facts) or gluon.missing()


def _warps(terms: int, most: int = 8) -> int:
    blocks = terms // coded_weights.TERMS
    return next(n for n in (8, 4, 2, 1) if n <= most and blocks % n == 0)


def product(x_TK, words, table, rare, *, dtype):
    """See ``coded_product.product``."""
    from ready_jax.kernels import coded_product_gluon_source as source

    (rows, terms), columns = x_TK.shape, words.shape[0] * coded_weights.COLUMNS
    tiles = next(n for n in (1, 2, 4) if n * TILE >= rows)
    warps = _warps(terms)
    return gluon.call()(
        x_TK, words, table, rare,
        kernel=source.product, out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(words.shape[0],), num_warps=warps,
        K=terms, N=columns, T=rows, E=rare.shape[1], TILES=tiles, WARPS=warps,
    )  # fmt: skip


def decode(words, table, rare):
    """See ``coded_weights.decode``."""
    from ready_jax.kernels import coded_product_gluon_source as source

    terms, columns = coded_weights.shape(words)
    warps = _warps(terms)
    return gluon.call()(
        words, table, rare,
        kernel=source.decode, out_type=jax.ShapeDtypeStruct((columns, terms), jnp.bfloat16),
        grid=(words.shape[0],), num_warps=warps, K=terms, E=rare.shape[1], WARPS=warps,
    )  # fmt: skip
