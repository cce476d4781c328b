"""A few rows times a matrix stored in fp8: ``y = (x w^T) scale``, fp32.

The matrix is e4m3 with one fp32 factor per column of the product: in the order in which threads multiply it
(`scaled_weights.py`), or plain, outputs first, where its size has no such order. Activations are not quantised.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ready_jax.kernels import first_use, scaled_weights
from ready_jax.kernels import fragment_product_gluon as gluon
from ready_jax.kernels.dispatch import Implementation, always, choose


def reference(x_TK, w, scale_N):
    """One product in the type of ``x``; e4m3 is exact in it."""
    w_NK = scaled_weights.decode(w) if w.ndim == 5 else w
    precision = jax.lax.Precision.HIGHEST if x_TK.dtype == jnp.float32 else None
    y_TN = jnp.einsum("TK,NK->TN", x_TK, w_NK.astype(x_TK.dtype), precision=precision,
                      preferred_element_type=jnp.float32)  # fmt: skip
    return y_TN * scale_N[None]


def why_not(*, ordered=True, **facts) -> str | None:
    if not ordered:
        return "the matrix is stored plainly; needs the order of fragments.py"
    return gluon.why_not(**facts)


IMPLEMENTATIONS = (
    Implementation("gluon", gluon.scaled_product, why_not, partial(first_use.scaled_product, reference)),
    Implementation("reference", reference, always),
)


def product(
    x_TK: Float[Array, "T K"], w: Num[Array, "*stored"], scale_N: Float[Array, "N"], *, impl: str | None = None
) -> Float[Array, "T N"]:
    """``(x w^T) scale`` in fp32; ``w``: e4m3 [N, K], or its words [G, B, 2, 32, 4]."""
    facts = dict(rows=x_TK.shape[0], dtype=x_TK.dtype.name, ordered=w.ndim == 5)
    return choose("scaled_product", IMPLEMENTATIONS, impl, **facts).call(x_TK, w, scale_N)
