"""Low-rank updates of a drafter: nothing at first, merged what they were beside the base, saved bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick
from flax import nnx

from ready_jax import adapter, lora
from ready_jax.checkpoint import load_drafter, save_pretrained
from ready_jax.config import LoraConfig

CONFIG = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "up_proj"))


@quick
def logits(drafter, target):
    taps = jnp.asarray(np.random.default_rng(4).standard_normal((1, 9, 3, 48)), jnp.float32)
    context = drafter.absorb(drafter.init_context(1, 16), taps, jnp.array([9], jnp.int32))
    anchor = jnp.array([5], jnp.int32)
    return drafter.propose(context, anchor, None, target.embed, target.unembed, with_logits=True).logits_BPV[:, 0]


def trained() -> tuple[Any, Any]:
    """A base, and the same with updates that are not zero."""
    base = tiny.drafter()
    other = lora.attach(base, CONFIG, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(5)
    for module in lora.adapted(other):
        for up in module.up:
            up[...] = jnp.asarray(0.1 * rng.standard_normal(up.shape), jnp.float32)
    return base, other


def test_new_updates_change_nothing_and_trained_ones_do():
    base, other = trained()
    target = tiny.target()
    fresh = lora.attach(base, CONFIG, rngs=nnx.Rngs(3))
    wanted = logits(base, target)
    np.testing.assert_array_equal(logits(fresh, target), wanted)
    assert float(jnp.abs(logits(other, target) - wanted).max()) > 1e-3


def test_merged_weights_give_what_the_updates_gave():
    base, other = trained()
    merged = lora.merge(other)
    assert lora.adapted(merged) == []
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    target = tiny.target()
    np.testing.assert_allclose(logits(merged, target), logits(other, target), atol=2e-4, rtol=0)


def test_a_fused_matrix_is_adapted_part_by_part():
    """Values but not keys, up but not gate; the update is alpha / rank times the product of the factors."""
    base, other = trained()
    merged = lora.merge(other)
    for before, after, with_updates in zip(base.layers, merged.layers, other.layers, strict=True):
        for owner, name in ((lambda x: x, "w_kv_DI"), (lambda x: x.mlp, "w_in_DI")):
            old, new = (np.asarray(getattr(owner(x), name)[...], np.float64) for x in (before, after))
            half = old.shape[1] // 2
            np.testing.assert_array_equal(new[:, :half], old[:, :half])
            factors = getattr(owner(with_updates), name)
            (down,), (up,) = factors.down, factors.up
            update = 5.0 / 3 * np.asarray(down[...], np.float64) @ np.asarray(up[...], np.float64)
            np.testing.assert_allclose(new[:, half:] - old[:, half:], update, atol=1e-6)
        np.testing.assert_array_equal(before.w_out_OD[...], after.w_out_OD[...])


def test_an_adapter_beside_its_base_comes_back_bit_for_bit(tmp_path):
    base, other = trained()
    save_pretrained(base, tmp_path / "base")
    adapter.save_adapter(other, tmp_path / "adapter", base="../base", base_folder=tmp_path / "base", revision=None)
    found = load_drafter(tmp_path / "adapter", dtype="float32")
    assert lora.config_of(found) == lora.config_of(other)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_base_that_was_trained_on_is_noticed(tmp_path):
    base, other = trained()
    save_pretrained(base, tmp_path / "base")
    adapter.save_adapter(other, tmp_path / "adapter", base="../base", base_folder=tmp_path / "base", revision=None)
    save_pretrained(lora.merge(other), tmp_path / "base")
    with pytest.raises(ValueError, match="base"):
        load_drafter(tmp_path / "adapter", dtype="float32")


def test_what_cannot_be_adapted_is_refused():
    base, other = trained()
    with pytest.raises(ValueError, match="has LoRA updates already"):
        lora.attach(other, CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"LoRA targets \['in_proj'\] are not in this drafter"):
        lora.attach(base, LoraConfig(rank=3, alpha=5.0, targets=("in_proj",)), rngs=nnx.Rngs(0))
