"""The residual stream and the norm behind it (Qwen3.5: zero-centred RMSNorm), on the rows of a decoding pass:

    x'     = x + y                            y rounded to x's type first
    normed = x' / sqrt(mean(x'^2) + eps) (1 + w)

``y`` arrives as ``S`` partial sums of a product, [S, B, T, D]: what has to be added up anyway is added up here, in fp32
and in the order of ``S``. ``parts`` says into how many a product should be left.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ready_jax.kernels import first_use
from ready_jax.kernels import residual_norm_gluon as gluon
from ready_jax.kernels.dispatch import Implementation, always, choose


def reference(x_BTD, part_SBTD, weight_D, eps, next_IN=None, starts=1):
    y_BTD = part_SBTD[0] if part_SBTD.shape[0] == 1 else jnp.sum(part_SBTD, axis=0)
    x_BTD = x_BTD + y_BTD.astype(x_BTD.dtype)
    f_BTD = x_BTD.astype(jnp.float32)
    f_BTD = f_BTD * jax.lax.rsqrt(jnp.mean(jnp.square(f_BTD), axis=-1, keepdims=True) + eps)
    return x_BTD, (f_BTD * (1.0 + weight_D.astype(jnp.float32)[None, None])).astype(x_BTD.dtype)


# The kernel has not been timed: until it is, it runs by name only.
IMPLEMENTATIONS = (
    Implementation("reference", reference, always),
    Implementation("gluon", gluon.add, gluon.why_not, partial(first_use.residual_norm, reference)),
)


def _choose(rows, width, dtype, impl=None):
    return choose("residual_norm", IMPLEMENTATIONS, impl, rows=rows, width=width, dtype=jnp.dtype(dtype).name)


def parts(x_BTI: Float[Array, "B T I"], terms: int, width: int, *, impl: str | None = None) -> int:
    """Into how many partial sums a product of ``terms`` terms, ``width`` wide, should be left for ``add``."""
    call = _choose(x_BTI.shape[0] * x_BTI.shape[1], width, x_BTI.dtype, impl).call
    return gluon.PARTS if call is gluon.add and terms % (gluon.PARTS * 128) == 0 else 1


def add(
    x_BTD: Float[Array, "B T D"],
    part_SBTD: Float[Array, "S B T D"],
    weight_D: Float[Array, "D"],
    eps: float,
    *,
    next_IN: Float[Array, "_ _"] | None = None,
    starts: int = 1,
    impl: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """(x', normed) in the type of ``x``.

    ``next_IN``: the matrix that ``normed`` meets next; an implementation may have the cache fetch its beginning, or the
    beginnings of ``starts`` equal ranges of its rows, where as many parts of a product begin.
    """
    batch, tokens, width = x_BTD.shape
    return _choose(batch * tokens, width, x_BTD.dtype, impl).call(x_BTD, part_SBTD, weight_D, eps, next_IN, starts)
