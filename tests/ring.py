"""`decode_attention_gluon_source.py` run by NumPy, program after program: which bytes arrive where, and when.

A stage is NaN from the moment it is asked for until a thread waits for it, so what is read too early, or overwritten
while it is needed, shows in the result. A wait for what nobody asked for is an error, and so is a part written twice.
Layouts, and what threads of one program could do to each other, are not modelled.
"""

import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from ready_jax.kernels import decode_attention_gluon as kernel
from ready_jax.kernels.decode_attention import add_splits


class Value(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype) -> "Value":
        return self.astype(dtype).view(Value)

    type = SimpleNamespace(layout=None)


def value(x, dtype=None) -> Value:
    return np.asarray(x, dtype).view(Value)


class Pointer:
    def __init__(self, array, offset: Any = 0):
        self.array, self.offset = array, offset

    def __add__(self, more):
        return Pointer(self.array, self.offset + np.asarray(more))


class Shared:
    def __init__(self, array):
        self.array = array

    def index(self, i):
        assert 0 <= i < len(self.array)
        found = self.array[int(i)]
        return found if isinstance(found, Landed) else Shared(found)

    def slice(self, start, length):
        return Shared(self.array[start : start + length])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def load(self, _):
        return value(self.array.copy())

    def store(self, x):
        self.array[...] = x


class Landed:
    """A barrier of TMA."""

    def __init__(self):
        self.copies, self.expected, self.phases = [], 0, 0

    def wait(self, phase):
        if self.copies:
            assert sum(copy() for copy in self.copies) == self.expected
            self.copies, self.expected, self.phases = [], 0, self.phases + 1
        assert self.phases, "waits for ever"
        assert (self.phases - 1) % 2 == phase, "waits for ever"

    def expect(self, size, pred):
        assert not (pred and self.expected), "asked for twice"
        self.expected = size if pred else self.expected


class Tensor(NamedTuple):
    array: Any
    block: tuple[int, ...]
    layout: Any


def fetch(tensor, at, landed, stage, pred):
    def copy():
        part = tensor.array[at[0] : at[0] + tensor.block[0], at[1] : at[1] + tensor.block[1]]
        stage.array[...] = 0
        stage.array[: len(part)] = part
        return stage.array.nbytes

    if pred:
        stage.array[...] = np.nan
        landed.copies.append(copy)


def load(at, mask: Any = True, other: Any = 0):
    mask = np.broadcast_to(mask, np.shape(at.offset))
    return value(np.where(mask, at.array[np.where(mask, at.offset, 0)], np.asarray(other, at.array.dtype)))


def store(at, x, mask):
    offset, mask, x = np.broadcast_arrays(at.offset, mask, x)
    assert np.isnan(at.array[offset[mask]]).all(), "written twice"
    at.array[offset[mask]] = x[mask]


def allocate(dtype, shape, _, x: Any = None):
    if dtype is np.int64:
        return Shared([Landed() for _ in range(shape[0])])
    return Shared(np.full(shape, -1 if dtype is np.int32 else np.nan, dtype) if x is None else np.array(x))


def product(a, b, total, use_acc=True, is_async=False):
    left = a.array if isinstance(a, Shared) else a
    found = np.asarray(left, np.float32) @ np.asarray(b.array, np.float32)
    return value(total + found if use_acc else found)


def language(program: list[int], grid: tuple[int, ...]) -> dict[str, Any]:
    def nothing(*_, **__):
        return None

    def where(condition, x, y):
        return value(np.where(condition, x, np.asarray(y, None if isinstance(y, np.ndarray) else np.result_type(x))))

    gl = SimpleNamespace(
        BlockedLayout=nothing, SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
        SwizzledSharedLayout=nothing, thread_barrier=nothing, bfloat16=ml_dtypes.bfloat16, float32=np.float32,
        int32=np.int32, int64=np.int64, load=load, store=store, where=where, allocate_shared_memory=allocate,
        static_range=range, program_id=lambda axis: value(program[axis]), num_programs=lambda axis: grid[axis],
        convert_layout=lambda x, _: x,
        arange=lambda a, b, layout: value(np.arange(a, b)), abs=lambda x: value(np.abs(x)),
        minimum=lambda a, b: value(np.minimum(a, b)), maximum=lambda a, b: value(np.fmax(a, b)),
        max=lambda x, axis: value(np.fmax.reduce(x, axis=axis)), sum=lambda x, axis: value(np.sum(x, axis)),
        exp2=lambda x: value(np.exp2(x)), fma=lambda a, b, c: value(np.float64(a) * b + c, np.float32),
        broadcast=lambda *x: tuple(map(value, np.broadcast_arrays(*x))), zeros=lambda s, d, _: value(np.zeros(s, d)),
        full=lambda shape, x, dtype, _: value(np.full(shape, x, dtype)),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=nothing, init=nothing, expect=Landed.expect, wait=lambda landed, phase: landed.wait(phase)
    )
    return dict(
        gl=gl, mbarrier=mbarrier, tma=SimpleNamespace(async_copy_global_to_shared=fetch), jit=lambda function: function,
        fence_async_shared=nothing, warpgroup_mma=product, warpgroup_mma_wait=lambda _, deps: deps,
    )  # fmt: skip


def source(program: list[int], grid: tuple[int, ...]) -> dict[str, Any]:
    """The kernel's functions, for the program of this index in a grid."""
    path = Path(kernel.__file__).parent / "decode_attention_gluon_source.py"
    code = path.read_text()
    names = language(program, grid)
    exec(compile("from __future__ import annotations\n" + code[code.index("@jit\ndef") :], path.name, "exec"), names)
    return names


def call(*operands, out_type, grid, num_warps, kernel, **sizes):
    """In place of ``jax_triton.triton_call``; ``kernel`` is always ``splits``."""
    blocks = [x.block if isinstance(x, Tensor) else None for x in operands]

    def run(*arrays):
        outs = [np.full(math.prod(x.shape), np.nan, x.dtype) for x in out_type]
        given = [
            Tensor(np.asarray(x), block, None) if block else Pointer(np.asarray(x).ravel())
            for x, block in zip(arrays, blocks, strict=True)
        ]
        program: list[int] = [0, 0, 0]
        names = source(program, grid)
        for program[:] in itertools.product(*map(range, grid)):
            with np.errstate(all="ignore"):
                names["splits"](*given, *map(Pointer, outs), **sizes)
        return [x.reshape(like.shape) for x, like in zip(outs, out_type, strict=True)]

    return jax.pure_callback(run, out_type, *(x.array if isinstance(x, Tensor) else x for x in operands))


def decode_attention(*operands, **options):
    with (
        mock.patch.object(kernel.gluon, "call", return_value=call),
        mock.patch.object(kernel.gluon, "tensor", Tensor),
        mock.patch.object(kernel, "add_splits", partial(add_splits, interpret=True)),
    ):
        return kernel.decode_attention(*operands, **options)
