"""The check of values at first use: right kernels pass, a wrong one is an error that says where."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import threads

from ready_jax.kernels import (
    attention,
    attention_inputs,
    causal_conv,
    coded_product,
    dispatch,
    gated_delta,
    markov_step,
    scaled_product,
    state_read,
)

KERNELS = {
    "gated_delta.rows": gated_delta.ROWS,
    "gated_delta.prefill": gated_delta.PREFILL,
    "attend_rows": attention.ROWS,
    "attend_ranges": attention.RANGES,
    "attention_inputs": attention_inputs.IMPLEMENTATIONS,
    "causal_conv": causal_conv.IMPLEMENTATIONS,
    "markov_step": markov_step.IMPLEMENTATIONS,
    "scaled_product": scaled_product.IMPLEMENTATIONS,
    "coded_product": coded_product.IMPLEMENTATIONS,
    "coded_weights": coded_product.DECODE,
    "state_read.prepare": state_read.PREPARE,
    "state_read.read": state_read.READ,
}

#: Kernels that no interpreter runs.
EMULATED = {
    "scaled_product": threads.scaled_product, "coded_product": threads.coded_product, "coded_weights": threads.decode
}  # fmt: skip


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.usefixtures("all_quick")
def test_the_interpreted_kernel_passes_the_check_and_a_wrong_one_does_not(op: str):
    """Inside a trace, as `choose` runs it."""
    checked = [i for i in KERNELS[op] if i.check is not None]
    assert checked, f"{op} has a fused kernel without a check"
    other = next((i.call for i in KERNELS[op] if i.name == "interpret"), EMULATED.get(op))
    passing = replace(checked[0], name="interpret", call=other)
    found = []
    jax.jit(lambda x: (found.append(dispatch.first_use(op, passing)), x)[1])(jnp.zeros(()))
    assert found == [None]

    (reference,) = checked[0].check.args  # compiles in less time than the kernel would

    class Wrong:
        """Every output some percent too large, and more."""

        def __call__(self, *arguments, **options):
            return jax.tree.map(lambda x: x * 1.07 + 1, reference(*arguments, **options))

        def rows(self, *arguments, **options):
            out, log = reference.rows(*arguments, **options)
            return out * 1.07 + 1, log

        commit = staticmethod(getattr(reference, "commit", id))

    failure = dispatch.first_use(op, replace(passing, call=Wrong()))
    assert isinstance(failure, dispatch.WrongValue)
    assert re.match(rf"{op}: 'interpret' on cpu: output \d of .* is off by", str(failure))


RESOURCES = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory")


@pytest.mark.parametrize("raised", [RESOURCES, NotImplementedError("no lowering"), ValueError("a shape")])
def test_a_kernel_that_fails_is_passed_over_with_one_warning_unless_named(raised, monkeypatch):
    """Field case C13; a wrong value is passed over by nobody."""

    def check(call):
        raise raised

    candidates = (
        dispatch.Implementation("fast", object(), dispatch.always, check),
        dispatch.Implementation("plain", object(), dispatch.always),
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(RuntimeWarning, match=f"'fast' on cpu is passed over: {type(raised).__name__}") as warned:
        assert [dispatch.choose("op", candidates).name for _ in range(3)] == ["plain"] * 3
    assert len(warned) == 1
    with pytest.raises(type(raised)):
        dispatch.choose("op", candidates, "fast")

    def wrong(call):
        raise dispatch.WrongValue("off")

    lying = (replace(candidates[0], check=wrong), candidates[1])
    with pytest.raises(dispatch.WrongValue, match="op: 'fast' on cpu: off"):
        dispatch.choose("op", lying)
