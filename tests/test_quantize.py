"""fp8 draft weights: what is stored, how far logits move, and that the text does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick

from ready_jax.export import save_pretrained
from ready_jax.kernels import scaled_product, scaled_weights
from ready_jax.layers import Scaled, linear, product
from ready_jax.quantize import draft_fp8, fp8


def drawn(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_a_stored_matrix_is_the_nearest_of_its_columns_scale():
    w = drawn(40, 6) * 10.0 ** jnp.arange(-6, 6, 2)[None]
    w = w.at[:, 5].set(0.0)
    stored = fp8(w)
    assert (stored.weight.dtype, stored.scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    back = np.asarray(stored.weight, np.float64).T * np.asarray(stored.scale)
    top = np.abs(w).max(axis=0)
    np.testing.assert_allclose(np.abs(back).max(axis=0), top, rtol=1e-6)
    # 3 bits of mantissa: within 2^-4 of the entry, or within half the smallest step 2^-9 near zero
    bound = np.maximum(np.abs(w) * 2**-4, np.asarray(stored.scale) * 2**-10) * (1 + 1e-6)
    assert (np.abs(back - w) <= bound).all()
    assert not back[:, 5].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_a_stored_matrix(dtype):
    """Activations are not quantised; the scale meets the fp32 sum, so even tiny scales lose nothing."""
    x, stored = drawn(2, 3, 40, dtype=dtype), fp8(drawn(40, 6, seed=1) * 1e-6)
    weight = np.asarray(stored.weight, np.float64).T * np.asarray(stored.scale, np.float64)
    wanted = np.asarray(x, np.float64) @ weight
    found = quick(product)(x, stored)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    rounded = quick(linear)(x, stored)
    assert rounded.dtype == x.dtype
    np.testing.assert_array_equal(rounded, found.astype(dtype))


@pytest.mark.parametrize(("rows", "terms", "columns"), [(1, 64, 16), (7, 512, 192), (16, 192, 64)])
def test_the_order_of_threads_changes_nothing(rows, terms, columns):
    """All numbers of e4m3 come back, and products are those of the plain matrix."""
    stored = fp8(drawn(terms, columns) * 30)
    every = jax.lax.bitcast_convert_type((jnp.arange(columns * terms) % 256).astype(jnp.uint8), jnp.float8_e4m3fn)
    for w in (stored.weight, every.reshape(columns, terms)):
        back = scaled_weights.decode(scaled_weights.encode(w))
        np.testing.assert_array_equal(np.asarray(back).view(np.uint8), np.asarray(w).view(np.uint8))
    ordered = fp8(drawn(terms, columns) * 30, ordered=True)
    assert ordered.weight.nbytes == stored.weight.nbytes
    x = drawn(rows, terms, seed=1, dtype="bfloat16")
    np.testing.assert_array_equal(quick(product)(x, ordered), quick(product)(x, stored))


def test_a_size_without_that_order_is_stored_plainly():
    assert fp8(drawn(48, 32), ordered=True).weight.shape == (32, 48)
    reason = scaled_product.why_not(platform="gpu", ordered=False)
    assert "stored plainly" in str(reason)


def stored_bytes(model) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


@pytest.mark.parametrize("own", [True, False])
def test_what_a_quantised_drafter_stores(own):
    drafter, head = tiny.drafter(own_embeddings=own, dtype="bfloat16"), drawn(48, 97, dtype="bfloat16")
    found: Any = draft_fp8(drafter, None if own else head)
    large = [found.w_fuse_ID, found.w_out_DV, found.markov.w2_RV]
    for layer in found.layers:
        large += [layer.w_q_DO, layer.w_kv_DI, layer.w_out_OD, layer.mlp.w_in_DI, layer.mlp.w_out_FD]
    assert all(isinstance(weight[...], Scaled) for weight in large)
    number = sum(isinstance(x, Scaled) for x in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Scaled)))
    assert number == len(large)
    kept = sum(weight[...].weight.nbytes for weight in large)
    before = stored_bytes(drafter) + (0 if own else head.nbytes)
    scales = sum(weight[...].scale.nbytes for weight in large)
    assert stored_bytes(found) == before - kept + scales
    assert found.dtype == jnp.bfloat16
    assert not any(isinstance(x, Scaled) for x in jax.tree.leaves(drafter, is_leaf=lambda x: isinstance(x, Scaled)))


def test_fp8_matrices_are_not_saved(tmp_path):
    drafter = tiny.drafter()
    with pytest.raises(ValueError, match=r"found fp8 matrices .*needs the model that they were made from"):
        save_pretrained(draft_fp8(drafter), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_logits_stay_near_and_the_draft_head_is_preferred():
    target: Any = tiny.target()
    drafter = tiny.drafter()
    stored = draft_fp8(drafter, target.w_out_DV[...])
    assert draft_fp8(drafter).head(target.unembed) == target.unembed
    assert stored.head(target.unembed) != target.unembed

    @quick
    def draft(drafter, target):
        taps = drawn(1, 9, 3, 48, seed=4)
        context = drafter.absorb(drafter.init_context(1, 16), taps, jnp.array([9], jnp.int32))
        rest = (jnp.array([5], jnp.int32), None, target.embed, target.unembed)
        return drafter.propose(context, *rest, with_logits=True), drafter.propose(context, *rest).token_BP

    wanted, (found, token_BP) = draft(drafter, target)[0], draft(stored, target)
    np.testing.assert_array_equal(token_BP, found.token_BP)
    first = wanted.logits_BPV[:, 0]  # later slots may follow another token
    error = float(jnp.sqrt(jnp.mean(jnp.square(found.logits_BPV[:, 0] - first))) / jnp.std(first))
    assert 0 < error < 0.1


@pytest.mark.slow
def test_the_text_is_the_targets_own():
    target: Any = tiny.target()
    limit = tiny.limits(24)
    alone = tiny.generate(target, None, [tiny.prompt(9)], limit)
    run = tiny.generate(target, draft_fp8(tiny.drafter(reader=True), target.w_out_DV[...]), [tiny.prompt(9)], limit)
    assert tiny.tokens(run) == tiny.tokens(alone)


@pytest.mark.slow
def test_nano_accepts_about_as_much_and_writes_the_same_text(capsys):
    import ready_jax

    pair: Any = ready_jax.load(dtype="float32")
    head = pair.target.w_out_DV[...] if pair.target.w_out_DV is not None else pair.target.embed_VD[...].T
    other = pair.with_drafter(draft_fp8(pair.drafter, head))
    prompts = ["What is 12 + 30?", "Name three colours.", "Write a short story about a dog."]
    options: dict[str, Any] = dict(enable_thinking=False, max_new_tokens=96)
    full, stored = (p.generate(prompts, **options) for p in (pair, other))
    alone = pair.generate(prompts, method="autoregressive", **options)
    assert [g.token_ids for g in stored] == [g.token_ids for g in alone] == [g.token_ids for g in full]
    found = [sum(sum(g.emitted_per_round) for g in x) / sum(g.num_rounds for g in x) for x in (full, stored)]
    with capsys.disabled():
        print(f"\nacceptance length of nano: {found[0]:.3f}, with fp8 draft weights {found[1]:.3f}")  # noqa: T201
    assert found[1] > 0.7 * found[0]
