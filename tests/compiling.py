"""How tests compile what they check within a bound.

Compiling is most of the time that tests take. Less optimised code is built in about two thirds of it and rounds
otherwise: never for what must be equal bit for bit, nor for what users run through ``Program``.
"""

import functools

import jax

quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
