"""The one place where an implementation of an op is chosen: at trace time, by reason.

A door file (`gated_delta.py`, ...) lists its implementations in order of preference in a module-level tuple
`IMPLEMENTATIONS` and calls `choose`. Nothing falls back in silence: an implementation is passed over only for the
reason that its own `why_not` states, and one that was asked for by name runs or raises that reason.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

#: `with platform("gpu"):` traces as if JAX's default backend were that one: to compile for a device that is not here,
#: or to time a reference ("cpu") on one that is. Part of JAX's tracing key: no trace is shared with another platform.
platform = jax.make_user_context(default_value=None)

#: `with partitioned(True):` traces for operands that are spread over a mesh: XLA partitions its own operations, but
#: would gather whole operands for a kernel.
partitioned = jax.make_user_context(default_value=False)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op. `call` is the function, or a module where a door has several that belong together.

    `why_not(**facts)` returns None where the implementation runs, else a sentence that says what was found and what
    is needed ("platform is cpu; needs gpu"). Facts are what is known while tracing: platform, dtypes, sizes. It takes
    the facts that it does not care about in `**_`, and gives every fact but `platform` a default that means "not
    known, no objection": the doctor asks with the platform alone. `check(call)` compares its values with a reference
    (`first_use.py`) and raises; it runs once per process, when the implementation is first taken on a GPU.
    """

    name: str
    call: Any
    why_not: Callable[..., str | None]
    check: Callable[[Any], None] | None = None


def always(**_: object) -> None:
    """The `why_not` of an implementation that runs everywhere, such as a reference in plain jax.numpy."""


def explain(candidates: Sequence[Implementation], **facts: Any) -> dict[str, str | None]:
    """Why each candidate would not run, in order of preference; None marks those that would.

    `platform` is `jax.default_backend()` unless it is among the facts, or set around the call by `platform` (either
    of which starts no backend).
    """
    if "platform" not in facts:
        facts["platform"] = platform.value or jax.default_backend()
    facts.setdefault("partitioned", partitioned.value)
    return {candidate.name: candidate.why_not(**facts) for candidate in candidates}


def choose(op: str, candidates: Sequence[Implementation], impl: str | None = None, **facts: Any) -> Implementation:
    """The implementation to trace: the first candidate without an objection, or the one named `impl`.

    The choice is made in Python while tracing, so it is part of the compiled program and costs nothing at run time.
    On a GPU a candidate with a `check` is tried first; one that does not compile or run there is passed over with a
    warning, unless it was asked for by name.

    Raises:
        ValueError: `impl` is not the name of a candidate.
        NotImplementedError: the named candidate cannot run with these facts, or none can; the message has the reasons.
        WrongValue: a candidate computes wrong values on this device; nothing is passed over for that.
    """
    reasons = explain(candidates, **facts)
    if impl is not None and impl not in reasons:
        raise ValueError(f"{op}: impl={impl!r} is unknown; known, in order of preference: {', '.join(reasons)}")
    if impl is not None and reasons[impl] is not None:
        raise NotImplementedError(f"{op}: impl={impl!r} was asked for by name and cannot run: {reasons[impl]}")
    on_device = platform.value is None and jax.default_backend() == "gpu"
    for candidate in candidates:
        if candidate.name == impl or (impl is None and reasons[candidate.name] is None):
            failure = first_use(op, candidate) if on_device and candidate.check else None
            if failure is None:
                return candidate
            if impl is not None or isinstance(failure, WrongValue):
                raise failure
            reasons[candidate.name] = f"it fails on this device: {failure}"
    listed = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items()) or " it has none"
    raise NotImplementedError(f"{op}: no implementation can run here:{listed}")


class WrongValue(RuntimeError):
    """A kernel computes something else than its reference."""


@cache
def first_use(op: str, candidate: Implementation) -> Exception | None:
    """What is wrong with an implementation on this device, found by its check outside whatever is being traced.

    Anything but a wrong value is also warned of, once.
    """
    assert candidate.check is not None
    where = f"{op}: {candidate.name!r} on {jax.devices()[0].device_kind}"
    try:
        with ThreadPoolExecutor(1) as pool:  # what is being traced is a matter of the thread
            pool.submit(candidate.check, candidate.call).result()
    except WrongValue as error:
        return WrongValue(f"{where}: {error}")
    except Exception as error:  # compilers and drivers raise what they like
        warnings.warn(f"{where} is passed over: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
        return error
    return None
