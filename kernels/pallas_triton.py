"""The one door to Pallas' Triton backend, so that a move to another kernel language changes one file.

Bodies keep to what raw Triton can say too: loads, stores, ``dot``, reductions, counted loops. Every array a body
makes has power-of-two sizes. With ``interpret`` a kernel runs anywhere, as plain XLA operations.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Deprecated since jax 0.11, and still the default GPU backend; docs/decisions.md has the plan.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

#: Where a whole operand stays in device memory and the body loads what it needs.
WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def kernel_call(
    body: Callable,
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    num_warps: int = 4,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Callable:
    """A function from arrays to a tuple of arrays; ``aliases`` maps operands to the outputs that overwrite them."""
    return pl.pallas_call(
        body,
        out_shape=tuple(out_shape),
        grid=grid,
        in_specs=list(in_specs),
        out_specs=tuple(out_specs),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        name=name,
    )


def fma(a, b, c, *, interpret: bool = False):
    """``a * b + c`` with one rounding, whatever the compiler would contract elsewhere; fp32.

    Interpreted kernels leave the rounding to XLA: bit-identity across programs is a property of the GPU kernel.
    """
    if interpret:
        return a * b + c
    a, b, c = jnp.broadcast_arrays(a, b, c)
    shape = jax.ShapeDtypeStruct(c.shape, jnp.float32)
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=[a, b, c], constraints="=f,f,f,f", pack=1, result_shape_dtypes=[shape]
    )[0]


def _special(instruction: str, x):
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return plt.elementwise_inline_asm(
        f"{instruction}.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )[0]


def exp2(x, *, interpret: bool = False):
    """``2^x`` by the special function unit alone: two units in the last place, results below 2^-126 are zero."""
    return jnp.exp2(x) if interpret else _special("ex2", x)


def log2(x, *, interpret: bool = False):
    """By the special function unit alone: off by 2^-22 at most around 1, by 2^-21 of itself elsewhere."""
    return jnp.log2(x) if interpret else _special("lg2", x)


def load(ref, *, mask=None, other=None, evict: str | None = None):
    """A (masked) load; inside a counted loop it becomes part of the software pipeline."""
    return plt.load(ref, mask=mask, other=other, eviction_policy=evict)


def store(ref, value, *, mask=None) -> None:
    plt.store(ref, value, mask=mask)


def on_hopper() -> bool:
    """Whether the GPU that is traced for is an H100, H200 or GH200."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return re.search(r"\bG?H\d00\b", device.device_kind) is not None


def gpu_only(platform: str, *, partitioned: bool = False, **_: object) -> str | None:
    """The ``why_not`` of a kernel that needs one GPU to itself and nothing else."""
    if platform != "gpu":
        return f"platform is {platform}; needs gpu (impl='interpret' runs it anywhere)"
    if partitioned:
        return "operands are spread over a mesh; XLA would gather them for a kernel"
    return None


def barrier(*, interpret: bool = False) -> None:
    """All threads of a program wait here; what they stored to memory before is visible to all of them after."""
    if not interpret:
        plt.debug_barrier()


def count_up(counter_ref, at, *, interpret: bool = False):
    """Adds one to ``counter_ref[at]`` and returns what was there before.

    What this program stored before is visible to whoever sees the count: all its threads pass a barrier first, and
    the addition releases and acquires at device scope.
    """
    barrier(interpret=interpret)
    if interpret:  # the interpreter knows atomics on slices only
        return jnp.sum(plt.atomic_add(counter_ref, (pl.ds(at, 1),), jnp.ones((1,), jnp.int32)))
    return plt.atomic_add(counter_ref, (at,), jnp.int32(1))
