"""A few rows times a matrix stored in fp8: ``y = (x w^T) scale``, fp32.

``w_NK`` is e4m3 with one fp32 factor per row, its columns' order that of the sum: a thread then finds neighbouring
terms of a sum side by side, where four bytes are one load. The product is fp32 over ``x`` as it is given.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ready_jax.kernels import first_use
from ready_jax.kernels import scaled_product_fused as fused
from ready_jax.kernels.dispatch import Implementation, always, choose
from ready_jax.kernels.pallas_triton import gpu_only


def reference(x_TK, w_NK, scale_N):
    """One product in the type of ``x``; e4m3 is exact in it."""
    precision = jax.lax.Precision.HIGHEST if x_TK.dtype == jnp.float32 else None
    y_TN = jnp.einsum("TK,NK->TN", x_TK, w_NK.astype(x_TK.dtype), precision=precision,
                      preferred_element_type=jnp.float32)  # fmt: skip
    return y_TN * scale_N[None]


IMPLEMENTATIONS = (
    Implementation(
        "fused", fused.product, lambda **facts: gpu_only(**facts) or fused.why_not(**facts),
        partial(first_use.scaled_product, reference),
    ),
    Implementation("reference", reference, always),
    Implementation("interpret", partial(fused.product, interpret=True), fused.why_not),
)  # fmt: skip


def product(
    x_TK: Float[Array, "T K"], w_NK: Float[Array, "N K"], scale_N: Float[Array, "N"], *, impl: str | None = None
) -> Float[Array, "T N"]:
    """``(x w^T) scale`` in fp32."""
    facts = dict(rows=x_TK.shape[0], terms=x_TK.shape[1], columns=w_NK.shape[0], dtype=x_TK.dtype.name)
    return choose("scaled_product", IMPLEMENTATIONS, impl, **facts).call(x_TK, w_NK, scale_N)
