"""The check of values at first use: right kernels pass, a wrong one is an error that says where."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ready_jax.kernels import attention, attention_inputs, dispatch, gated_delta, markov_step, state_read

KERNELS = {
    "gated_delta.rows": gated_delta.ROWS,
    "attend_rows": attention.IMPLEMENTATIONS,
    "attention_inputs": attention_inputs.IMPLEMENTATIONS,
    "markov_step": markov_step.IMPLEMENTATIONS,
    "state_read.prepare": state_read.PREPARE,
    "state_read.read": state_read.READ,
}


@pytest.mark.parametrize("op", KERNELS)
def test_the_interpreted_kernel_passes_the_check_and_a_wrong_one_does_not(op: str):
    """Inside a trace, as `choose` runs it."""
    checked = [i for i in KERNELS[op] if i.check is not None]
    assert checked, f"{op} has a fused kernel without a check"
    interpret = next(i for i in KERNELS[op] if i.name == "interpret")
    passing = replace(interpret, check=checked[0].check)
    jax.jit(lambda x: (dispatch.check_values(op, passing), x)[1])(jnp.zeros(()))

    class Wrong:
        """Every output one percent too large, and more."""

        def __call__(self, *arguments, **options):
            return jax.tree.map(lambda x: x * 1.07 + 1, interpret.call(*arguments, **options))

        def rows(self, *arguments, **options):
            out, log = interpret.call.rows(*arguments, **options)
            return out * 1.07 + 1, log

        commit = getattr(interpret.call, "commit", None)

    with pytest.raises(RuntimeError, match=rf"{op}: 'interpret' on cpu: output \d of .* is off by"):
        dispatch.check_values(op, replace(passing, call=Wrong()))
