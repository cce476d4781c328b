"""The one door to Gluon through jax-triton: its compiler's gaps closed, its absence explained."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from functools import cache


def missing() -> str | None:
    """What has to be installed; None if nothing."""
    for name in ("triton", "jax_triton"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name.replace('_', '-')} is missing; pip install 'ready-jax[triton]'"
    return None


def jit(function):
    """Gluon's ``jit`` of the function as it is written, not as a type checker has wrapped it; itself without triton."""
    try:
        from triton.experimental import gluon
    except ImportError:
        return function
    return gluon.jit(inspect.unwrap(function))


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
def call() -> Callable:
    """``jax_triton.triton_call``, imported when first needed, with three gaps closed.

    jax-triton 0.4.1 looks up a constant of triton 3.7 that nothing here uses. It compiles Gluon modules as if they were
    Triton's: passes that choose layouts then replace those that the source states (correct, and 7 times slower). And
    it launches clusters only for modules whose arrays are spread over one.
    """
    import triton.backends.nvidia.driver as driver

    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = 11
    import jax_triton
    from jax_triton import triton_lib

    compile_triton = triton_lib.compile_ttir_to_ptx_inplace

    def compile_either(module, backend, *rest):
        has_layouts = "ttg.num-warps" in str(module)
        return compile_triton(module, _Layouts(backend) if has_layouts else backend, *rest)

    triton_lib.compile_ttir_to_ptx_inplace = compile_either

    def in_clusters(name, warps, _, shared, binary, ttir, *rest, make=triton_lib.triton_kernel_call_lib.TritonKernel):
        cluster = re.search(r"cluster of (\d+)", ttir)  # a word of the kernel's own barrier
        return make(name, warps, int(cluster[1]) if cluster else 1, shared, binary, ttir, *rest)

    triton_lib.triton_kernel_call_lib.TritonKernel = in_clusters
    return jax_triton.triton_call
