"""The gated delta rule (Yang et al. 2025, Gated Delta Networks, eq. 10) on ``M`` memories ``S`` [X, Y]:

    S   <- exp(g) S                 decay, g <= 0
    u    = beta (v - S^T k)         the write, corrected by what S already returns for k
    S   <- S + k u^T
    out  = S^T q                    read after the write

``q`` and ``k`` arrive raw and are L2-normalised here (epsilon 1e-6 on the sum), ``q`` is scaled by ``X^-1/2``. Key
head ``h`` serves memories ``h * M/K .. (h + 1) * M/K - 1``. State, gates and arithmetic are fp32.

``verify`` scores the few rows of a decoding pass and returns what ``commit`` needs to keep a prefix of them; what
that is belongs to the implementation. Keeping n rows gives the very bits that n single-row passes would leave.
``prefill`` runs any length in chunks, is differentiable, and keeps no per-token state.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float, Int

from ready_jax.kernels import gated_delta_chunk, gated_delta_reference
from ready_jax.kernels.dispatch import Implementation, always, choose

VERIFY = (Implementation("scan", gated_delta_reference, always),)
PREFILL = (Implementation("chunk", gated_delta_chunk.prefill, always),)
IMPLEMENTATIONS = {"verify": VERIFY, "prefill": PREFILL}


def check_heads(key_heads: int, memory_heads: int) -> None:
    """Raises ValueError unless each key head serves a whole number of memories."""
    if memory_heads % key_heads:
        raise ValueError(
            f"memory_heads={memory_heads} must be a multiple of key_heads={key_heads}: "
            "each key head serves memory_heads/key_heads memories"
        )


def verify(
    s_BMXY: Float[Array, "B M X Y"],
    q_BTKX: Float[Array, "B T K X"],
    k_BTKX: Float[Array, "B T K X"],
    v_BTMY: Float[Array, "B T M Y"],
    g_BTM: Float[Array, "B T M"],
    beta_BTM: Float[Array, "B T M"],
    *,
    impl: str | None = None,
):
    """Outputs [B, T, M, Y] (fp32) of ``T`` rows after the committed state, and the pending writes."""
    check_heads(q_BTKX.shape[2], v_BTMY.shape[2])
    module = choose("gated_delta.verify", VERIFY, impl).call
    return module.verify(s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM)


def commit(s_BMXY: Float[Array, "B M X Y"], pending, num_B: Int[Array, "B"], *, impl: str | None = None):
    """The state after the first ``num_B[b]`` rows of the pass; 0 leaves it as it was, bit for bit."""
    return choose("gated_delta.commit", VERIFY, impl).call.commit(s_BMXY, pending, num_B)


def prefill(
    s_BMXY: Float[Array, "B M X Y"],
    q_BTKX: Float[Array, "B T K X"],
    k_BTKX: Float[Array, "B T K X"],
    v_BTMY: Float[Array, "B T M Y"],
    g_BTM: Float[Array, "B T M"],
    beta_BTM: Float[Array, "B T M"],
    *,
    live_BT: Bool[Array, "B T"] | None = None,
    segment_BT: Int[Array, "B T"] | None = None,
    states_at_BA: Int[Array, "B A"] | None = None,
    chunk: int = 64,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
    at_once: bool = False,
    impl: str | None = None,
):
    """Outputs [B, T, M, Y], the last state, and the states after ``states_at_BA`` tokens (or None).

    Dead tokens (``live_BT`` false) write nothing. ``segment_BT`` marks packed sequences by equal, contiguous ids:
    the state is forgotten where the id changes (at dead tokens too), and the incoming state belongs to the first id.
    ``precision`` lowers the products for training; the default is IEEE fp32. ``at_once`` solves all chunks together
    before the states move: faster on an accelerator, but memory then grows with the length.
    """
    check_heads(q_BTKX.shape[2], v_BTMY.shape[2])
    call = choose("gated_delta.prefill", PREFILL, impl).call
    return call(
        s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM,
        live_BT=live_BT, segment_BT=segment_BT, states_at_BA=states_at_BA,
        chunk=chunk, precision=precision, at_once=at_once,
    )  # fmt: skip
