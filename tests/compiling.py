"""How tests compile what they check within a bound.

Compiling is most of the time that tests take. Less optimised code is built in about two thirds of it and rounds
otherwise: never for what must be equal bit for bit, nor for what is compared with the reference as users run it.
"""

import functools

import jax

LEVEL = {"xla_backend_optimization_level": 0}
quick = functools.partial(jax.jit, compiler_options=LEVEL)
