"""How tests compile what they check within a bound.

Compiling is most of the time that tests take. Less optimised code is built in about two thirds of it and rounds
otherwise: never for what must be equal bit for bit, nor for what is compared with the reference as users run it.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax

LEVEL = {"xla_backend_optimization_level": 0}
quick = functools.partial(jax.jit, compiler_options=LEVEL)


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Everything that is compiled inside is compiled so: for functions that the library jits itself."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
