"""One slot of greedy drafting with a Markov head (DSpark, arXiv 2607.05147, section 3.1):

    token = argmax_V (base + latent W2)        the lowest index of equal maxima
    embed = W1[token]                          what the next slot's latent is made from

``base_BPV`` holds the base logits of the whole block in fp32, ``latent_BR`` the slot's latent. The bias is added in
fp32. ``w2`` [R, V] may be fp8, then it is [V, R], with a factor per token, ``scale_V``: ``base + scale (latent W2)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Float, Int

from ready_jax.kernels import first_use
from ready_jax.kernels import markov_step_fused as fused
from ready_jax.kernels import markov_step_reference as reference
from ready_jax.kernels.dispatch import Implementation, always, choose
from ready_jax.kernels.pallas_triton import gpu_only

CHECK = partial(first_use.markov_step, reference.step)
IMPLEMENTATIONS = (
    Implementation("fused", fused.step, lambda **facts: gpu_only(**facts) or fused.why_not(**facts), CHECK),
    Implementation("reference", reference.step, always),
    Implementation("interpret", partial(fused.step, interpret=True), always),
)


def step(
    base_BPV: Float[Array, "B P V"],
    slot: int,
    latent_BR: Float[Array, "B R"],
    w2: Float[Array, "_ _"],
    w1_VR: Float[Array, "rows R"],
    *,
    scale_V: Float[Array, "V"] | None = None,
    gather: Callable | None = None,
    impl: str | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B R"]]:
    """The token of ``slot`` and its Markov embedding, in the latents' type.

    Where the columns are a slice of the vocabulary (``w1_VR`` never is), ``gather`` turns the best values and their
    indices here, [B, N], into those of all slices, lower indices first.
    """
    facts = dict(batch=latent_BR.shape[0], rank=latent_BR.shape[1], dtype=latent_BR.dtype.name)
    call = choose("markov_step", IMPLEMENTATIONS, impl, **facts).call
    return call(base_BPV, slot, latent_BR, w2, w1_VR, scale_V, gather)
