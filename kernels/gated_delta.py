"""The gated delta rule (Yang et al. 2025, Gated Delta Networks, eq. 10) on ``M`` memories ``S`` [X, Y]:

    S   <- exp(g) S                 decay, g <= 0
    u    = beta (v - S^T k)         the write, corrected by what S already returns for k
    S   <- S + k u^T
    out  = S^T q                    read after the write

``q`` and ``k`` arrive raw and are L2-normalised here (epsilon 1e-6 on the sum), ``q`` is scaled by ``X^-1/2``. Key
head ``h`` serves memories ``h * M/K .. (h + 1) * M/K - 1``. State, gates and arithmetic are fp32.

``rows`` is what a layer does with the few rows of a decoding pass, from its fused projection to its gated norm, and
``commit_rows`` keeps a prefix of them in all layers at once; what a pass leaves for that belongs to the implementation
(``verify`` and ``commit`` are the recurrence alone). Keeping n rows gives the very bits that n single-row passes would.
``prefill`` runs any length in chunks, is differentiable, and keeps no per-token state.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ready_jax.kernels import (
    first_use,
    gated_delta_chunk,
    gated_delta_fused,
    gated_delta_gluon,
    gated_delta_prefill_fused,
    gated_delta_reference,
    gated_delta_rows,
)
from ready_jax.kernels.dispatch import Implementation, always, choose, platform

VERIFY = (Implementation("scan", gated_delta_reference, always),)
PREFILL = (
    Implementation("fused", gated_delta_prefill_fused.prefill, gated_delta_prefill_fused.why_not,
                   partial(first_use.gated_delta_prefill, gated_delta_chunk.prefill)),
    Implementation("chunk", gated_delta_chunk.prefill, always),
    Implementation("interpret", partial(gated_delta_prefill_fused.prefill, interpret=True),
                   gated_delta_prefill_fused.why_not_interpreted),
)  # fmt: skip
CHECK = partial(first_use.gated_delta_rows, gated_delta_rows)
ROWS = (
    Implementation("gluon", gated_delta_gluon, gated_delta_gluon.why_not, CHECK),
    Implementation("fused", gated_delta_fused, gated_delta_fused.why_not, CHECK),
    Implementation("scan", gated_delta_rows, always),
    Implementation("interpret", gated_delta_fused.Interpreted, gated_delta_fused.why_not_interpreted),
)
#: Elements of ``v`` whose chunks a GPU solves together by default: 5461 tokens of a 27B layer, 128 MiB each in fp32.
AT_ONCE = 1 << 25
IMPLEMENTATIONS = {"verify": VERIFY, "prefill": PREFILL, "rows": ROWS}


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


def _facts(s_BMXY, tail_BWC, **facts):
    key_dim, value_dim = s_BMXY.shape[2:]
    return dict(dtype=tail_BWC.dtype, key_dim=key_dim, value_dim=value_dim, window=tail_BWC.shape[1] + 1, **facts)


def rows(
    s_BMXY: Float[Array, "B M X Y"],
    p_BTI: Float[Array, "B T I"],
    tail_BWC: Array,
    conv_WC: Float[Array, "W C"],
    a_log_M: Float[Array, "M"],
    dt_bias_M: Float[Array, "M"],
    norm_Y: Float[Array, "Y"],
    eps: float,
    *,
    keys: int,
    following: Array | None = None,
    impl: str | None = None,
):
    """Gated outputs [B, T, M*Y] of ``T`` rows after the committed memory, and what ``commit_rows`` needs.

    ``p_BTI``: the rows' projections q, k, v (these are convolved, window ``W``), z, b, a side by side, then padding;
    ``tail_BWC``: the ``W - 1`` conv inputs before them; decay ``g = -exp(a_log) softplus(a + dt_bias)`` and
    ``beta = sigmoid(b)``; the output is ``rms_norm(out) * norm * silu(z)``, norm over each memory's ``Y``.
    ``following``: the weights that the outputs meet next; an implementation may have the cache fetch its beginning.
    """
    check_heads(keys, s_BMXY.shape[1])
    call = choose("gated_delta.rows", ROWS, impl, **_facts(s_BMXY, tail_BWC, tokens=p_BTI.shape[1])).call
    return call.rows(s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps, keys=keys, following=following)


def commit_rows(states, tails, pending, num_B: Int[Array, "B"], *, impl: str | None = None):
    """(states, conv tails) of every layer after the first ``num_B[b]`` rows of a pass; 0 changes no bit.

    What ``rows`` left decides who can commit it: the kernels replay their log, the scan has kept its states.
    """
    logged = isinstance(pending[0], gated_delta_fused.Log)
    able = tuple(each for each in ROWS if (each.call is not gated_delta_rows) == logged)
    call = choose("gated_delta.commit_rows", able, impl, **_facts(states[0], tails[0])).call
    return call.commit(states, tails, pending, num_B)


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
    at_once: bool | None = None,
    impl: str | None = None,
):
    """Outputs [B, T, M, Y], the last state, and the states after ``states_at_BA`` tokens (or None).

    Dead tokens (``live_BT`` false) write nothing. ``segment_BT`` marks packed sequences by equal, contiguous ids:
    the state is forgotten where the id changes (at dead tokens too), and the incoming state belongs to the first id.
    ``precision`` lowers the products for training; by default they are IEEE fp32, or for bf16 q, k and v those of the
    GPU kernel, whose operands and outputs (held in fp32) are rounded to bf16. ``at_once`` solves all chunks together
    before the states move: a hundred times fewer kernels on an accelerator, but memory then grows with the length.
    None: on a GPU, up to ``AT_ONCE`` values. The kernel has no use for it but in its gradient.
    """
    if at_once is None:
        at_once = (platform.value or jax.default_backend()) == "gpu" and v_BTMY.size <= AT_ONCE
    check_heads(q_BTKX.shape[2], v_BTMY.shape[2])
    facts = dict(
        dtype=jnp.result_type(q_BTKX, k_BTKX, v_BTMY), key_dim=q_BTKX.shape[3], value_dim=v_BTMY.shape[3],
        chunk=chunk, precision=precision,
    )  # fmt: skip
    call = choose("gated_delta.prefill", PREFILL, impl, **facts).call
    return call(
        s_BMXY, q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM,
        live_BT=live_BT, segment_BT=segment_BT, states_at_BA=states_at_BA,
        chunk=chunk, precision=precision, at_once=at_once,
    )  # fmt: skip
