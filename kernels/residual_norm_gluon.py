"""``residual_norm`` in Gluon, through jax-triton: a row is one cluster of programs, the other processors fetch.

A row's programs exchange one number each. While they wait for memory, the processors without a row ask for the
beginning of the next matrix, which its product then finds in the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ready_jax.kernels import gluon
from ready_jax.kernels.pallas_triton import gpu_only

#: Partial sums that a product is left in; programs of one row; warps of a program.
PARTS, PROGRAMS, WARPS = 8, 8, 4
#: Rows of a decoding pass: more have better kernels.
MAX_ROWS = 16
#: What is fetched of the next matrix, in bytes: more displaces what is read meanwhile.
FETCH = 8 << 20


def why_not(*, rows=1, width=PROGRAMS * 128, dtype="bfloat16", **facts) -> str | None:
    if dtype != "bfloat16":
        return f"the stream is {dtype}; needs bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; needs at most {MAX_ROWS}"
    if width % (PROGRAMS * 128):
        return f"width {width}; needs a multiple of {PROGRAMS * 128}: {PROGRAMS} programs share a row"
    return gpu_only(**facts) or gluon.missing()


def add(x_BTD, part_SBTD, weight_D, eps, next_IN=None, starts=1):
    """See ``residual_norm.add``."""
    from ready_jax.kernels import residual_norm_gluon_source as source

    (batch, tokens, width), sums = x_BTD.shape, part_SBTD.shape[0]
    rows, piece = batch * tokens, 32 * WARPS * 2048  # bytes that a fetching program asks for
    following = weight_D if next_IN is None else next_IN
    span = following.size // starts // 16 * 16
    pieces = FETCH // piece // starts
    fetch = following.dtype.itemsize == 2 and span * 2 >= pieces * piece
    x_BTD, normed_BTD, _ = gluon.call()(
        x_BTD, part_SBTD, weight_D, following,
        kernel=source.add,
        out_type=[
            jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype), jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
            jax.ShapeDtypeStruct((rows, PROGRAMS), jnp.float32),
        ],
        grid=(rows + (starts * pieces // PROGRAMS if fetch else 0),), num_warps=WARPS,
        ROWS=rows, D=width, S=sums, PROGRAMS=PROGRAMS, BLOCK=1 << (width // PROGRAMS - 1).bit_length(), PIECES=pieces,
        RANGE=span, EPS=eps, WARPS=WARPS,
    )  # fmt: skip
    return x_BTD, normed_BTD
