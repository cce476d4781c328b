"""The shipped pair: it loads without arguments, decodes bit-identically, and its demo runs."""

import functools
from itertools import pairwise

import jax
import pytest
from flax import nnx

import ready_jax
from ready_jax import lora
from ready_jax.drafter import Drafter
from ready_jax.pair import NANO
from ready_jax.serve import demo, exact


@functools.cache
def loaded(dtype: str):
    """The pair, a loop that keeps its programs, and four prompts."""
    pair = ready_jax.load(dtype=dtype)
    return pair, exact.Loop(pair), exact.shipped_prompts(pair, 4)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_nano_speculates_bit_identically(dtype):
    """4 prompts x 64 tokens; ``make exact`` does 40 x 200, in both types, and every pair of acceptance counts."""
    pair, loop, prompts = loaded(dtype)
    found = exact.compare_drafter(pair, prompts, 64, loop)
    assert found.mismatches == dict(tokens=0, logits=0, lengths=0, memory=0)
    assert (found.prompts, found.tokens) == (4, 4 * 64)
    assert found.logits == 4 * 64 * pair.target.config.vocab_size
    assert found.memory > 0
    assert found.rounds < 4 * 63  # the drafter is right sometimes


def test_the_walk_over_acceptance_counts_holds_every_pair_once():
    walk = exact.every_pair(7)
    assert len(walk) == 65
    assert len(set(pairwise(walk))) == 64


def test_the_comparison_counts_what_differs():
    """One bit of one logit, one token, one memory value."""
    _, loop, prompts = loaded("bfloat16")
    run = loop.run(None, prompts, [4] * 4, 256)  # the shapes of the test above: nothing is compiled
    assert run.logits_BNV is not None
    other = jax.tree.map(lambda x: x, run)
    object.__setattr__(other, "logits_BNV", run.logits_BNV.at[0, 2, 5].multiply(1 + 2.0**-22))
    object.__setattr__(other, "token_BN", run.token_BN.at[0, 1].add(1))
    object.__setattr__(
        other.state, "recurrent", (other.state.recurrent[0].at[0, 0, 0, 0].add(1), *run.state.recurrent[1:])
    )
    result = exact.Comparison()
    result.add(other, run)
    assert result.mismatches == dict(tokens=1, logits=1, lengths=0, memory=1)


def test_the_demo(capsys):
    assert demo.main(["--max-new-tokens", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("device: cpu") == 1
    for part in (*demo.PROMPTS, "autoregressive", *demo.DRAFTERS, "about twelve million parameters", "bit for bit"):
        assert part in shown
    assert shown.count("yes") == len(demo.DRAFTERS)


@pytest.mark.parametrize("name", ["stateless", "ready"])
def test_trained_drafters_ship_as_adapters_over_the_base_and_decode_merged(name):
    pair, _, _ = loaded("bfloat16")
    adapted = ready_jax.load_drafter(NANO / name)
    settings = lora.config_of(adapted)
    assert settings is not None
    assert settings.rank == 16
    assert (adapted.reader is not None) == (name == "ready")
    drafting = pair.with_drafter(NANO / name).drafter
    assert isinstance(drafting, Drafter)
    assert isinstance(pair.drafter, Drafter)
    assert not lora.adapted(drafting)
    merged, base = (jax.tree.leaves(nnx.state(x.layers)) for x in (lora.merge(adapted), pair.drafter))
    changed = [bool((a != b).any()) for a, b in zip(merged, base, strict=True)]
    assert 0 < sum(changed) < len(changed)  # projections, not norms
    for a, b in zip(jax.tree.leaves(nnx.state(drafting.layers)), merged, strict=True):
        assert bool((a == b).all())
