"""What a state reader takes from recurrent states. For each of ``Z`` pairs (layer, memory head), ``S`` [X, Y]:

    rho = sqrt(mean(S^2) + eps)
    A   = V^T S^T U / (rho sqrt(width))        [J, J]; ``width`` is X or J, V [Y, J], U [X, J]
    scale feature: log rho ("pair"), rho ("raw"), log rho of a whole layer ("layer") or none

``prepare`` is the only pass over the states. ``read`` turns query latents (``W_q h``, [B, P, latents J]) into the
feature rows of the reader's MLP: ``concat_m [A_m (gain_m * rmsnorm_J(latent_m))]``, then the scale features.

``states`` has one ``s_BMXY`` per selected layer. U, V (first axis) and the latents may be fewer than the pairs: one
per layer or one for all, in the order of the pairs (layer by layer, ``heads`` in the order given). Arithmetic is IEEE
fp32. Source: ReaDy, arXiv 2610.20503.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from jaxtyping import Array, Float

from ready_jax.kernels import first_use
from ready_jax.kernels import state_read_fused as fused
from ready_jax.kernels import state_read_gluon as gluon
from ready_jax.kernels import state_read_reference as reference
from ready_jax.kernels.dispatch import Implementation, always, choose
from ready_jax.kernels.pallas_triton import gpu_only

CHECK_PREPARE = partial(first_use.state_prepare, reference.prepare)
CHECK_READ = partial(first_use.state_read, reference.read)
PREPARE = (
    Implementation("gluon", gluon.prepare, gluon.why_not, CHECK_PREPARE),
    Implementation(
        "fused", fused.prepare, lambda **facts: gpu_only(**facts) or fused.why_not_prepare(**facts), CHECK_PREPARE
    ),
    Implementation("reference", reference.prepare, always),
    Implementation("interpret", partial(fused.prepare, interpret=True), fused.why_not_prepare),
)
READ = (
    Implementation("fused", fused.read, lambda **f: gpu_only(**f) or fused.why_not_read(**f), CHECK_READ),
    Implementation("reference", reference.read, always),
    Implementation("interpret", partial(fused.read, interpret=True), fused.why_not_read),
)
IMPLEMENTATIONS = {"prepare": PREPARE, "read": READ}

RmsAxes = Literal["head", "row", "layer"]
ScaleFeature = Literal["pair", "layer", "raw", "none"]


def prepare(
    states: tuple[Float[Array, "B M X Y"], ...],
    u_ZXJ: Float[Array, "_ X J"],
    v_ZYJ: Float[Array, "_ Y J"],
    *,
    width: int,
    eps: float,
    heads: tuple[int, ...] | None = None,
    rms_axes: RmsAxes = "head",
    feature: ScaleFeature = "pair",
    impl: str | None = None,
) -> tuple[Float[Array, "B Z J J"], Float[Array, "B _"] | None]:
    """``A`` of every pair and the scale features (None for "none"), fp32. ``heads`` None: all of them."""
    shape = states[0].shape[2:]
    facts = dict(
        rms_axes=rms_axes, feature=feature, elements=shape[0] * shape[1], shape=shape, rank=u_ZXJ.shape[2],
        picked=heads is not None,
    )  # fmt: skip
    call = choose("state_read.prepare", PREPARE, impl, **facts).call
    return call(states, u_ZXJ, v_ZYJ, width=width, eps=eps, heads=heads, rms_axes=rms_axes, feature=feature)


def read(
    latent_BPI: Float[Array, "B P I"],
    gain_ZJ: Float[Array, "Z J"],
    a_BZJJ: Float[Array, "B Z J J"],
    scale_BZ: Float[Array, "B _"] | None,
    *,
    eps: float,
    norm_axes: Literal["rank", "all", "none"] = "rank",
    impl: str | None = None,
) -> Float[Array, "B P features"]:
    """Feature rows [B, P, Z J + scale features] in the latents' type; ``norm_axes`` "all" norms a row as one."""
    scales = 0 if scale_BZ is None else scale_BZ.shape[1]
    facts = dict(norm_axes=norm_axes, pairs=gain_ZJ.shape[0], scales=scales)
    call = choose("state_read.read", READ, impl, **facts).call
    return call(latent_BPI, gain_ZJ, a_BZJJ, scale_BZ, eps=eps, norm_axes=norm_axes)
