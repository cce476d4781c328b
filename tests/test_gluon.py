"""The door to Gluon, with and without triton."""

import functools
import sys
from types import ModuleType, SimpleNamespace

from ready_jax.kernels import gluon


def plain(x):
    return x


@functools.wraps(plain)
def checked(*arguments):
    return plain(*arguments)


def test_a_function_is_compiled_as_it_is_written(monkeypatch):
    """Gluon looks names up where a function was written; what a type checker wraps around it was written elsewhere."""
    experimental = ModuleType("triton.experimental")
    experimental.__dict__["gluon"] = SimpleNamespace(jit=lambda function: ("compiled", function))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.experimental", experimental)
    assert gluon.jit(checked) == ("compiled", plain)


def test_without_gluon_a_function_stays_what_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    assert gluon.jit(checked) is checked
