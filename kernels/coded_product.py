"""Rows times a matrix stored in 12 bits a weight (`coded_weights.py`): the bf16 product, with a quarter less to read.

A few rows meet the stored form; more of them the decoded matrix. Sums are fp32 over the very weights that were encoded.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ready_jax.kernels import coded_weights, first_use
from ready_jax.kernels import fragment_product_gluon as gluon
from ready_jax.kernels.dispatch import Implementation, always, choose


def _times(x_TK, w_NK, dtype):
    precision = jax.lax.Precision.HIGHEST if x_TK.dtype == jnp.float32 else None
    return jnp.einsum("TK,NK->TN", x_TK, w_NK.astype(x_TK.dtype), precision=precision, preferred_element_type=dtype)


def reference(x_TK, words, table, rare, *, dtype):
    """The product with what ``decode`` finds."""
    return _times(x_TK, decode(words, table, rare), dtype)


IMPLEMENTATIONS = (
    Implementation("gluon", gluon.coded_product, gluon.why_not, partial(first_use.coded_product, reference)),
    Implementation("reference", reference, always),
)
DECODE = (
    Implementation(
        "gluon", gluon.decode, gluon.why_not_decode, partial(first_use.coded_weights, coded_weights.decode)
    ),
    Implementation("reference", coded_weights.decode, always),
)  # fmt: skip


def decode(
    words: Int[Array, "groups blocks 3 32 4"],
    table: Int[Array, "groups 4"],
    rare: Int[Array, "groups rare 16"],
    *,
    impl: str | None = None,
) -> Float[Array, "N K"]:
    """The matrix, columns first, bf16; bit for bit what was encoded."""
    return choose("coded_weights", DECODE, impl).call(words, table, rare)


def product(
    x_TK: Float[Array, "T K"], words: Int[Array, "groups blocks 3 32 4"], table: Int[Array, "groups 4"],
    rare: Int[Array, "groups rare 16"], *, dtype=jnp.float32, impl: str | None = None,
) -> Float[Array, "T N"]:  # fmt: skip
    """``x w`` summed in fp32, returned as ``dtype``. A row's bits do not depend on the other rows."""
    facts = dict(rows=x_TK.shape[0], dtype=x_TK.dtype.name)
    return choose("coded_product", IMPLEMENTATIONS, impl, **facts).call(x_TK, words, table, rare, dtype=dtype)
