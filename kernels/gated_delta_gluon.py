"""The kernels of `gated_delta_fused.py` in Gluon, through jax-triton: the same operations with layouts said outright.

Pallas' Triton backend lays a state tile over warps along the key axis, so that every row of a pass pays two
reductions across warps, through shared memory and barriers. Here a warp holds all keys of its columns: reductions are
three shuffles, and rows already normalised wait in shared memory. Two programs share a memory, as one cluster, and
exchange what the norm needs. The roundings of scoring and commit are one and the
same sequence, ``fma(k, u, S * decay)``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from ready_jax.kernels import gated_delta_fused
from ready_jax.kernels.gated_delta_fused import Log

#: Layers that one commit launch covers.
LAYERS = 16
#: Programs that share a memory, as one cluster.
PARTS = 2
#: Equal ranges of the following matrix whose first MiB is fetched while the rows run: XLA's product of 8 rows begins
#: at as many places. More was slower: it is the state's memory traffic, too.
RANGES = 8


def why_not(*, key_dim=None, value_dim=None, window=None, **facts) -> str | None:
    for name in ("triton", "jax_triton"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name.replace('_', '-')} is missing; pip install 'ready-jax[triton]'"
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size not in (None, 128):
            return f"{name} width {size}; needs 128: its layouts are written for that"
    if window not in (None, 4):
        return f"convolution window {window}; needs 4: its taps are written out"
    return gated_delta_fused.why_not(key_dim=key_dim, value_dim=value_dim, **facts)


class _Layouts:
    """A CUDA backend of triton that leaves a Gluon module's layouts alone."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def make_ttir(self, module, *_):
        return module

    def make_ttgir(self, module, metadata, options, capability):
        return self.backend.gluon_to_ttgir(module, metadata, options, capability)


@cache
def _kernels() -> SimpleNamespace:
    """jax-triton and the compiled functions, imported when first needed, with three of its gaps closed.

    jax-triton 0.4.1 looks up a constant of triton 3.7 that nothing here uses. It compiles Gluon modules as if they were
    Triton's: passes that choose layouts then replace those that the source states (correct, and 7 times slower). And
    it launches clusters only for modules whose arrays are spread over one.
    """
    import triton.backends.nvidia.driver as driver

    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = 11
    import jax_triton
    from jax_triton import triton_lib

    from ready_jax.kernels import gated_delta_gluon_source as source

    compile_triton = triton_lib.compile_ttir_to_ptx_inplace

    def compile_either(module, backend, *rest):
        has_layouts = "ttg.num-warps" in str(module)
        return compile_triton(module, _Layouts(backend) if has_layouts else backend, *rest)

    triton_lib.compile_ttir_to_ptx_inplace = compile_either

    def in_clusters(name, warps, _, shared, binary, ttir, *rest, make=triton_lib.triton_kernel_call_lib.TritonKernel):
        clusters = PARTS if "barrier.cluster" in ttir else 1
        return make(name, warps, clusters, shared, binary, ttir, *rest)

    triton_lib.triton_kernel_call_lib.TritonKernel = in_clusters
    return SimpleNamespace(call=jax_triton.triton_call, rows=source.rows, commit=source.commit)


def rows(s_BMXY, p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, eps, *, keys: int, next_OD=None, warps: int = 8):
    """Gated outputs [B, T, M*Y] of the rows, and their log. See :func:`ready_jax.kernels.gated_delta.rows`."""
    batch, tokens, columns = p_BTI.shape
    memories, width, values = s_BMXY.shape[1:]
    k = _kernels()
    following = norm_Y if next_OD is None else next_OD
    span = following.size // RANGES // 16 * 16  # elements; the fetch needs multiples of 16 bytes
    fetch = following.dtype.itemsize == 2 and span * 2 >= PARTS * 2048 * 32 * warps

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    key, u, decay, out, _ = k.call(
        p_BTI, tail_BWC, conv_WC, a_log_M, dt_bias_M, norm_Y, s_BMXY, following,
        kernel=k.rows,
        out_type=[
            f32(batch, tokens, keys, width), f32(batch, tokens, memories, values), f32(batch, tokens, memories),
            jax.ShapeDtypeStruct((batch, tokens, memories * values), p_BTI.dtype), f32(batch, memories, PARTS, tokens),
        ],
        grid=(memories + (RANGES if fetch else 0), batch), num_warps=warps,
        RANGE=span, PARTS=PARTS,
        ROW=columns, C=conv_WC.shape[1], K=keys, M=memories, X=width, Y=values, T=tokens, WARPS=warps, EPS=eps,
    )  # fmt: skip
    return out, Log(key, u, decay, p_BTI)


def commit(states, tails, logs, num_B, *, block: int = 32, warps: int = 4):
    """(states, conv tails) of all layers after the first ``num_B[b]`` rows; in place, ``LAYERS`` layers a launch."""
    k = _kernels()
    new_states, new_tails = [], []
    for first in range(0, len(states), LAYERS):
        some = slice(first, first + LAYERS)
        s, tail, log = states[some], tails[some], logs[some]
        layers, (batch, memories, width, values) = len(s), s[0].shape
        tokens, keys = log[0].k_BTKX.shape[1:3]
        found = k.call(
            num_B, *(tuple(x) for x in zip(*log, strict=True)), tuple(s), tuple(tail),
            kernel=k.commit,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*s, *tail)],
            grid=(memories * (values // block) + -(-tail[0].shape[2] // 1024), layers, batch),
            num_warps=warps, input_output_aliases={1 + 4 * layers + i: i for i in range(2 * layers)},
            LAYERS=layers, ROW=log[0].p_BTI.shape[2], C=tail[0].shape[2], K=keys, M=memories, X=width, Y=values,
            T=tokens, BLOCK=block, WARPS=warps,
        )  # fmt: skip
        new_states += found[:layers]
        new_tails += found[layers:]
    return new_states, new_tails
