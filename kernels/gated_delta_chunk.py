"""The gated delta rule in chunks: prefill and training, differentiable.

Within a chunk of ``C`` tokens the writes solve a unit lower triangular system (``I + A``); between chunks only the
state moves. Every exponent is at most zero and is masked before ``exp``, so strong decay neither overflows nor
poisons gradients. ``(I + A)`` is inverted by forward substitution in 16-row blocks merged pairwise: repeated keys
make the doubling form grow without bound (relative error 1e8 at key correlation 0.9).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ready_jax.kernels.gated_delta_reference import HIGHEST, l2_normalise

BLOCK = 16


class Chunk(NamedTuple):
    """Raw inputs of one chunk, heads before tokens; any axes may lead. Dead tokens hold zeros (g 0: no decay)."""

    q: jax.Array  # B K c X, raw
    k: jax.Array
    v: jax.Array  # B M c Y
    g: jax.Array  # B M c
    beta: jax.Array
    segment: jax.Array  # B c
    before: jax.Array  # B: the segment that the incoming state belongs to


class Solved(NamedTuple):
    """All of a chunk that does not depend on the incoming state ``S``.

    writes = ``write - forget S``; outputs = ``q_in S + reading writes``; state after = ``keep S + k_out^T writes``.
    """

    write: jax.Array
    forget: jax.Array
    reading: jax.Array
    q_in: jax.Array
    k_out: jax.Array
    keep: jax.Array


def _masked_exp(mask, exponent):
    """``exp`` where the mask holds and exact zero elsewhere; the exponent is masked first."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0.0)), 0.0)


def solve(chunk: Chunk, precision) -> Solved:
    """The triangular solve and the decays of one chunk (or, with leading axes, of many at once)."""
    q, k = l2_normalise(chunk.q) * chunk.q.shape[-1] ** -0.5, l2_normalise(chunk.k)
    group = chunk.v.shape[-3] // k.shape[-3]
    decay, beta, segment = jnp.cumsum(chunk.g, axis=-1), chunk.beta[..., None], chunk.segment
    last, before = segment[..., -1:], chunk.before[..., None]

    def product(spec, *operands):
        return jnp.einsum(spec, *operands, precision=precision)

    def per_memory(x):
        return jnp.repeat(x, group, axis=-3)

    same = (segment[..., :, None] == segment[..., None, :])[..., None, :, :]
    place = jnp.arange(segment.shape[-1])
    lower = same & (place[:, None] >= place[None]).reshape((1,) * (same.ndim - 2) + (place.size,) * 2)
    ratio = _masked_exp(lower, decay[..., :, None] - decay[..., None, :])
    overlap = beta * ratio * per_memory(product("...ix,...jx->...ij", k, k))
    inverse = unit_lower_inverse(jnp.tril(overlap, -1))
    from_start = _masked_exp((segment == before)[..., None, :], decay)[..., None]
    to_end = _masked_exp((segment == last)[..., None, :], decay[..., -1:] - decay)[..., None]
    keep = _masked_exp(last == before, decay[..., -1])[..., None, None]
    return Solved(
        write=product("...ij,...jy->...iy", inverse, beta * chunk.v),
        forget=product("...ij,...jx->...ix", inverse, beta * from_start * per_memory(k)),
        reading=ratio * per_memory(product("...ix,...jx->...ij", q, k)),
        q_in=per_memory(q) * from_start,
        k_out=per_memory(k) * to_end,
        keep=keep,
    )


def advance(s_BMXY, solved: Solved, precision):
    """(state after the chunk, outputs [B, M, c, Y], corrected writes [B, M, c, Y])."""

    def product(spec, *operands):
        return jnp.einsum(spec, *operands, precision=precision)

    new = solved.write - product("BMcx,BMxy->BMcy", solved.forget, s_BMXY)
    out = product("BMcx,BMxy->BMcy", solved.q_in, s_BMXY) + product("BMij,BMjy->BMiy", solved.reading, new)
    return s_BMXY * solved.keep + product("BMcx,BMcy->BMxy", solved.k_out, new), out, new


def _substitute(a):
    """Inverse of ``I + a`` for strictly lower ``a`` of at most 16 rows, one row at a time."""
    size, axis = a.shape[-1], a.ndim - 2
    eye = jnp.eye(size, dtype=a.dtype)

    def row(i, x):
        # Rows from i on are still those of I, and a[i] is zero there.
        a_i = jax.lax.dynamic_index_in_dim(a, i, axis)
        solved = jnp.broadcast_to(eye[i], a_i.shape) - jnp.matmul(a_i, x, precision=HIGHEST)
        return jax.lax.dynamic_update_slice_in_dim(x, solved, i, axis)

    return jax.lax.fori_loop(1, size, row, jnp.broadcast_to(eye, a.shape))


def _inverse(a):
    """Inverse of ``I + a``, ``a`` strictly lower triangular with ``16 * 2^n`` rows (or fewer than 16)."""
    size = a.shape[-1]
    if size <= BLOCK:
        return _substitute(a)
    half = size // 2
    top, bottom = _inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = jnp.matmul(jnp.matmul(bottom, a[..., half:, :half], precision=HIGHEST), top, precision=HIGHEST)
    return jnp.concatenate(
        [
            jnp.concatenate([top, jnp.zeros_like(corner)], axis=-1),
            jnp.concatenate([-corner, bottom], axis=-1),
        ],
        axis=-2,
    )


@jax.custom_vjp
def unit_lower_inverse(a):
    """``(I + a)^-1`` for strictly lower triangular ``a`` [..., C, C]; fp32."""
    return _inverse(a)


def _inverse_forward(a):
    x = unit_lower_inverse(a)
    return x, x


def _inverse_backward(x, dx):
    # d (I+a)^-1 = -x da x, so the pull-back is -x^T dx x^T, restricted to where a is free.
    xt = jnp.swapaxes(x, -1, -2)
    return (-jnp.tril(jnp.matmul(jnp.matmul(xt, dx, precision=HIGHEST), xt, precision=HIGHEST), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def prefill(
    s_BMXY,
    q_BTKX,
    k_BTKX,
    v_BTMY,
    g_BTM,
    beta_BTM,
    *,
    live_BT=None,
    segment_BT=None,
    states_at_BA=None,
    chunk: int = 64,
    precision=HIGHEST,
    at_once: bool = False,
):
    """See :func:`ready_jax.kernels.gated_delta.prefill`."""
    batch, length = q_BTKX.shape[:2]
    if chunk % BLOCK or (chunk // BLOCK) & (chunk // BLOCK - 1):
        raise ValueError(f"chunk={chunk} must be {BLOCK} times a power of two: the solve merges blocks pairwise")
    chunk = min(chunk, max(BLOCK, 1 << (length - 1).bit_length()))
    count = -(-length // chunk)
    live_BT = jnp.ones((batch, length), bool) if live_BT is None else live_BT
    segment_BT = jnp.zeros((batch, length), jnp.int32) if segment_BT is None else segment_BT

    def padded(x, mode="constant"):
        return jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2), mode=mode)

    inputs_T = [padded(x) for x in (q_BTKX, k_BTKX, v_BTMY, g_BTM, beta_BTM)]
    live_BT, segment_BT = padded(live_BT), padded(segment_BT, "edge")

    def piece(number):
        """Chunk ``number``: cut where it is needed, so that no second copy of the inputs is ever held."""

        def part(x):
            return jax.lax.dynamic_slice_in_dim(x, number * chunk, chunk, axis=1)

        def heads_first(x):
            live = part(live_BT).reshape(live_BT.shape[:1] + (chunk,) + (1,) * (x.ndim - 2))
            return jnp.moveaxis(jnp.where(live, part(x), jnp.zeros((), x.dtype)).astype(jnp.float32), 1, 2)

        before_B = jax.lax.dynamic_index_in_dim(segment_BT, jnp.maximum(number * chunk - 1, 0), axis=1, keepdims=False)
        q, k, v, g, beta = (heads_first(x) for x in inputs_T)
        return Chunk(q, k, v, g, beta, part(segment_BT), before_B)

    def body(s, number_or_solved):
        solved = number_or_solved if at_once else solve(piece(number_or_solved), precision)
        after, out, new = advance(s, solved, precision)
        return after, (jnp.moveaxis(out, 1, 2), (s, new) if states_at_BA is not None else None)

    numbers = jnp.arange(count)
    inputs = solve(jax.vmap(piece)(numbers), precision) if at_once else numbers
    s_BMXY, (out, log) = jax.lax.scan(body, s_BMXY.astype(jnp.float32), inputs)
    out_BTMY = jnp.moveaxis(out, 0, 1).reshape((batch, count * chunk) + v_BTMY.shape[2:])[:, :length]
    if log is None:
        return out_BTMY, s_BMXY, None
    start, new = log
    boundary = jnp.concatenate([start, s_BMXY[None]])  # state before each chunk, and after the last
    return out_BTMY, s_BMXY, states_at(states_at_BA, boundary, new, jax.vmap(piece)(numbers), chunk, precision)


def states_at(states_at_BA, boundary, new, pieces: Chunk, chunk: int, precision):
    """States after prefixes: a chunk's incoming state, decayed, and the writes of its first tokens."""
    count, row = new.shape[0], jnp.arange(chunk)

    def one_sequence(at_A, boundary, k, new, g, segment, before):
        decay = jnp.cumsum(g, axis=-1)

        def one_prefix(at):
            inside = at % chunk
            c = jnp.minimum(at // chunk, count - 1)  # a prefix that ends on a border uses no token of its chunk
            last = jnp.maximum(inside - 1, 0)
            taken = ((row < inside) & (segment[c] == segment[c, last]))[None]
            weight = _masked_exp(taken, decay[c, :, last][:, None] - decay[c])
            whole = (inside == 0)[None]
            kept = jnp.where(whole, 1.0, _masked_exp((segment[c, last] == before[c])[None], decay[c, :, last]))
            k_MX = jnp.repeat(l2_normalise(k[c]), new.shape[1] // k.shape[1], axis=0) * weight[..., None]
            writes = jnp.einsum("Mcx,Mcy->Mxy", k_MX, new[c], precision=precision)
            return boundary[at // chunk] * kept[:, None, None] + writes

        return jax.vmap(one_prefix)(at_A)

    parts = (boundary, pieces.k, new, pieces.g, pieces.segment, pieces.before)
    return jax.vmap(one_sequence, in_axes=(0,) + (1,) * len(parts))(states_at_BA, *parts)
