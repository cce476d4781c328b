"""``state_read`` in one launch each: no gathered copy of the states, a pair's state stays in registers.

Any sizes: what is no power of two is padded under masks. The gradient is the reference's.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ready_jax.kernels import state_read_reference as reference
from ready_jax.kernels.pallas_triton import WHOLE, kernel_call, load, store

MAX_ELEMENTS = 2**15  # of one padded state: 64 fp32 registers a thread with 16 warps


def why_not_prepare(*, rms_axes="head", feature="pair", elements=0, **_: object) -> str | None:
    if rms_axes != "head":
        return f"state_rms_axes={rms_axes!r}; needs 'head': a program sees one state, and scales it by one number"
    if feature == "layer":
        return "scale_feature='layer'; needs 'pair', 'raw' or 'none': a program sees one state of its layer"
    if elements > MAX_ELEMENTS:
        return f"a state has {elements} elements; needs at most {MAX_ELEMENTS}, which fit in registers"
    return None


def why_not_read(*, norm_axes="rank", pairs=0, scales=0, **_: object) -> str | None:
    if norm_axes == "all":
        return "query_norm_axes='all'; needs 'rank' or 'none': a program sees one latent"
    return None if scales in (0, pairs) else f"{scales} scale features for {pairs} pairs; needs none or one per pair"


def differentiable(fast, backward):
    """``fast`` with cotangents ``backward(arguments, found, cotangent)``."""

    def forward(*arguments):
        found = fast(*arguments)
        return found, (arguments, found)

    call = jax.custom_vjp(fast)
    call.defvjp(forward, lambda kept, cotangent: backward(*kept, cotangent))
    return call


def _padded(size: int):
    """Indices 0 .. next power of two."""
    return jnp.arange(pl.next_power_of_2(size))


def _tile(ref, where: tuple, sizes: tuple[int, ...]):
    """``ref[where + (0:a, 0:b)]`` as fp32, padded to powers of two with zeros."""
    index = [_padded(size) for size in sizes]
    if len(sizes) == 2:
        index = [index[0][:, None], index[1][None, :]]
    inside = jnp.broadcast_to(True, jnp.broadcast_shapes(*(i.shape for i in index)))
    for i, size in zip(index, sizes, strict=True):
        inside &= i < size
    return load(ref.at[where + tuple(index)], mask=inside, other=0).astype(jnp.float32)


def _prepare_body(*refs, layers, heads, picked, sizes, columns, factor, eps, feature):
    """One program: ``columns`` columns of one pair's ``A``."""
    (s_refs, refs), (x_size, y_size, rank) = (refs[:layers], refs[layers:]), sizes
    (head_ref, u_ref, v_ref, a_ref), scale_ref = refs[:4], refs[4] if feature != "none" else None
    pair, first, batch = pl.program_id(0), pl.program_id(1) * columns, pl.program_id(2)
    head = load(head_ref.at[pair % heads]) if picked else pair % heads
    pairs = layers * heads
    u_at, v_at = pair // (pairs // u_ref.shape[0]), pair // (pairs // v_ref.shape[0])
    x, j = _padded(x_size), _padded(rank)
    tiles = [partial(_tile, s_ref, (batch, head), (x_size, y_size)) for s_ref in s_refs]
    s_XY = jax.lax.switch(pair // heads, tiles)
    v_YJ = _tile(v_ref, (v_at,), (y_size, rank))
    rho = jnp.sqrt(jnp.sum(s_XY * s_XY) / (x_size * y_size) + eps)
    if scale_ref is not None:  # the same number from every program of the pair
        store(scale_ref.at[batch, pair], jnp.log(rho) if feature == "pair" else rho)
    for i in (first + n for n in range(columns)):
        u_X = load(u_ref.at[u_at, x, i], mask=(x < x_size) & (i < rank), other=0).astype(jnp.float32)
        t_Y = jnp.sum(s_XY * u_X[:, None], axis=0)
        a_J = jnp.sum(v_YJ * t_Y[:, None], axis=0) * (factor / rho)
        store(a_ref.at[batch, pair, j, i], a_J, mask=(j < rank) & (i < rank))


def prepare(
    states, u_ZXJ, v_ZYJ, *, width, eps, heads, rms_axes, feature,
    columns: int | None = None, warps: int = 8, interpret=False,
):  # fmt: skip
    """See ``state_read.prepare``. ``columns`` of a pair's ``A`` are left to one program."""
    del rms_axes
    rank, (batch, memory, x_size, y_size) = u_ZXJ.shape[2], states[0].shape
    number = memory if heads is None else len(heads)
    pairs = len(states) * number
    columns = min(columns or max(4, rank // 8), rank)
    out_shape = [jax.ShapeDtypeStruct((batch, pairs, rank, rank), jnp.float32)]
    if feature != "none":
        out_shape.append(jax.ShapeDtypeStruct((batch, pairs), jnp.float32))
    body = partial(
        _prepare_body, layers=len(states), heads=number, picked=heads is not None, sizes=(x_size, y_size, rank),
        columns=columns, factor=width**-0.5, eps=eps, feature=feature,
    )  # fmt: skip
    call = kernel_call(
        body, name="state_read_prepare", grid=(pairs, pl.cdiv(rank, columns), batch), out_shape=out_shape,
        in_specs=[WHOLE] * (len(states) + 3), out_specs=[WHOLE] * len(out_shape), num_warps=warps, interpret=interpret,
    )  # fmt: skip

    def fast(states, u_ZXJ, v_ZYJ):
        out = call(*states, jnp.array(heads or (0,), jnp.int32), u_ZXJ, v_ZYJ)
        return out[0], out[1] if feature != "none" else None

    backward = partial(reference.prepare_gradient, width=width, eps=eps, heads=heads, feature=feature)
    return differentiable(fast, backward)(tuple(states), u_ZXJ, v_ZYJ)


def _read_body(*refs, sizes, eps, norm):
    """One program: one pair's part of all ``P`` rows."""
    latent_ref, gain_ref, a_ref, *rest = refs
    (scale_ref, out_ref), (pairs, rank, positions, latents) = (rest if len(rest) == 2 else (None, *rest)), sizes
    pair, batch = pl.program_id(0), pl.program_id(1)
    j = _padded(rank)
    a_JJ, gain_J = _tile(a_ref, (batch, pair), (rank, rank)), _tile(gain_ref, (pair,), (rank,))
    scale = None if scale_ref is None else load(scale_ref.at[batch, pair]).astype(out_ref.dtype)
    at = pair // (pairs // latents) * rank + j
    places = [jnp.int32(i) for i in range(positions)]  # a plain number beside index arrays: not when interpreted
    # All loads before the first store: the compiler lifts none over it.
    found = [load(latent_ref.at[batch, i, at], mask=j < rank, other=0).astype(jnp.float32) for i in places]
    for position, z_J in zip(places, found, strict=True):
        if norm:
            z_J = z_J * jax.lax.rsqrt(jnp.sum(z_J * z_J) / rank + eps)
        u_J = jnp.sum(a_JJ * (z_J * gain_J)[None, :], axis=1)
        store(out_ref.at[batch, position, pair * rank + j], u_J.astype(out_ref.dtype), mask=j < rank)
        if scale is not None:
            store(out_ref.at[batch, position, pairs * rank + pair], scale)


def read(latent_BPI, gain_ZJ, a_BZJJ, scale_BZ, *, eps, norm_axes, warps: int | None = None, interpret=False):
    """See ``state_read.read``."""
    (batch, positions, inputs), (pairs, rank) = latent_BPI.shape, gain_ZJ.shape
    features = pairs * rank + (0 if scale_BZ is None else pairs)
    sizes = (pairs, rank, positions, inputs // rank)
    call = kernel_call(
        partial(_read_body, sizes=sizes, eps=eps, norm=norm_axes == "rank"), name="state_read_read",
        grid=(pairs, batch), out_shape=[jax.ShapeDtypeStruct((batch, positions, features), latent_BPI.dtype)],
        in_specs=[WHOLE] * (3 if scale_BZ is None else 4), out_specs=[WHOLE],
        num_warps=warps or max(1, min(8, rank * rank // 1024)), interpret=interpret,
    )  # fmt: skip

    def fast(latent_BPI, gain_ZJ, a_BZJJ, scale_BZ):
        return call(latent_BPI, gain_ZJ, a_BZJJ, *(() if scale_BZ is None else (scale_BZ,)))[0]

    def backward(arguments, _, cotangent):
        return jax.vjp(partial(reference.read, eps=eps, norm_axes=norm_axes), *arguments)[1](cotangent)

    return differentiable(fast, backward)(latent_BPI, gain_ZJ, a_BZJJ, scale_BZ)
