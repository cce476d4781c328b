"""The short convolution of a Gated DeltaNet layer over many tokens (Yang et al. 2025; ``modeling_qwen3_5``).

Depthwise and causal, window ``W``, over the channels of q, k and v side by side, then SiLU:

    out_t = silu(sum_i conv_i u_{t - W + 1 + i})

with the ``W - 1`` inputs before the first token in ``tail``. Dead tokens come out as zeros. Decoding has its own,
inside ``gated_delta.rows``.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ready_jax.kernels import causal_conv_fused as fused
from ready_jax.kernels import first_use
from ready_jax.kernels.dispatch import Implementation, always, choose
from ready_jax.kernels.gated_delta_inputs import convolve


def _reference(p_BTI, tail_BWC, conv_WC, segment_BT, live_BT, *, keys, values):
    # Behind a barrier: compiled into what follows, a part of the projection would keep all of it alive.
    u_BTC = jax.lax.optimization_barrier(p_BTI[..., : conv_WC.shape[1]])
    history_BWC = jnp.concatenate([tail_BWC, u_BTC.astype(tail_BWC.dtype)], axis=1)
    mixed_BTC = convolve(history_BWC, conv_WC, p_BTI.shape[1], segment_BT)
    if live_BT is not None:
        mixed_BTC = jnp.where(live_BT[..., None], mixed_BTC, jnp.zeros((), mixed_BTC.dtype))
    return jnp.split(mixed_BTC, [keys, 2 * keys], axis=-1)


def _kernel(p_BTI, tail_BWC, conv_WC, segment_BT, live_BT, **options):
    """The kernel's values, the reference's gradient."""
    widths = {name: options[name] for name in ("keys", "values")}
    call = jax.custom_vjp(partial(fused.causal_conv, **options))

    def backward(saved, cotangents):
        *arrays, segment_BT, live_BT = saved
        reference = partial(_reference, segment_BT=segment_BT, live_BT=live_BT, **widths)
        return *jax.vjp(reference, *arrays)[1](list(cotangents)), None, None

    call.defvjp(lambda *arrays: (fused.causal_conv(*arrays, **options), arrays), backward)
    return call(p_BTI, tail_BWC, conv_WC, segment_BT, live_BT)


IMPLEMENTATIONS = (
    Implementation("fused", _kernel, fused.why_not, partial(first_use.causal_conv, _reference)),
    Implementation("reference", _reference, always),
    Implementation("interpret", partial(_kernel, interpret=True), always),
)


def causal_conv(
    p_BTI: Float[Array, "B T I"],
    tail_BWC: Float[Array, "B tail C"],
    conv_WC: Float[Array, "W C"],
    *,
    keys: int,
    segment_BT: Int[Array, "B T"] | None = None,
    live_BT: Bool[Array, "B T"] | None = None,
    impl: str | None = None,
) -> tuple[Array, Array, Array]:
    """q and k [B, T, keys] and v [B, T, C - 2 keys], in the type of ``tail``.

    The first ``C`` columns of ``p_BTI`` are convolved. With ``segment_BT``, taps do not reach into another segment;
    the tail belongs to the first. Dead tokens (``live_BT`` false) come out as zeros, whatever they hold. Raises
    ValueError where the widths do not fit.
    """
    channels = conv_WC.shape[1]
    values = channels - 2 * keys
    if values < 1 or p_BTI.shape[2] < channels:
        raise ValueError(
            f"found {channels} channels with keys={keys}, and {p_BTI.shape[2]} columns of projection: q and k take "
            "2 keys of the channels, v the rest, and every channel is a column"
        )
    q, k, v = choose("causal_conv", IMPLEMENTATIONS, impl).call(
        p_BTI, tail_BWC, conv_WC, segment_BT, live_BT, keys=keys, values=values
    )
    return q, k, v
