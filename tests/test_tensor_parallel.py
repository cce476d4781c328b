"""Decoding over a mesh: the same tokens as on one device, bit-identical to autoregressive decoding on the same mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick
from jax.sharding import Mesh, PartitionSpec

from ready_jax import collectives, hlo
from ready_jax.baselines import Forced
from ready_jax.checkpoint import load_target
from ready_jax.config import FULL, LINEAR
from ready_jax.export import save_pretrained
from ready_jax.quantize import draft_fp8
from ready_jax.random_weights import random_target
from ready_jax.state import init_state
from ready_jax.tensor_parallel import Sharded, on_shards, shard

TWO = (LINEAR, FULL)
PROMPTS = [tiny.prompt(11), tiny.prompt(5)]


def mesh(shards: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:shards]), ("model",))


def target(dtype: str = "float32", **changes):
    """Eight memories of four key heads, eight query heads of two key/value heads; unused columns are zero."""
    fields = dict(layer_types=TWO, vocab_size=100, linear_num_key_heads=4, linear_num_value_heads=8)
    model = jax.tree.map(lambda x: x, tiny.target(dtype=dtype, **(fields | dict(num_attention_heads=8) | changes)))
    for layer in model.layers:
        if hasattr(layer.mixer, "conv_WC"):
            used = model.config.conv_channels + model.config.value_width + 2 * model.config.linear_num_value_heads
            layer.mixer.w_in_DI[...] = layer.mixer.w_in_DI[...].at[:, used:].set(0)
    return model


def drafter(model, dtype: str = "float32", reader=None, **changes):
    """Taps of a two-layer target; reads both kinds of scale by default."""
    read = tiny.reader_config(model.config, state_layers=(0,)) if reader is None else reader
    shape = dict(taps=(-1, 0), num_target_layers=model.config.num_layers)
    return tiny.drafter(dtype=dtype, config=model.config, reader=read, **(shape | changes))


def same(found, wanted) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)

    def bits(x):
        return np.atleast_1d(np.asarray(x)).view(np.uint8)

    return all(np.array_equal(bits(a), bits(b)) for a, b in pairs)


# Laying out


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("kind", ["untied", "tied", "drafter", "fp8"])
def test_whole_gives_the_very_bits_back(kind, shards):
    model = target(dtype="bfloat16", tie_word_embeddings=kind == "tied")
    if kind == "drafter":
        model = drafter(model, "bfloat16", own_embeddings=True)
    elif kind == "fp8":
        model = draft_fp8(drafter(model, "bfloat16"), model.w_out_DV[...])
    spread = shard(model, mesh(shards))
    assert isinstance(spread, Sharded)
    if kind == "fp8":  # in the order of threads it could not be cut
        whole = target(dtype="bfloat16")
        model = draft_fp8(drafter(whole, "bfloat16"), whole.w_out_DV[...], ordered=False)
    assert same(spread.whole(), model)
    assert jax.tree.structure(spread.whole()) == jax.tree.structure(model)
    halves = [leaf for leaf in jax.tree.leaves(spread) if leaf.sharding.spec != PartitionSpec()]
    assert sum(leaf.nbytes for leaf in halves) > 0.7 * sum(leaf.nbytes for leaf in jax.tree.leaves(spread))
    assert all(len(leaf.sharding.device_set) == shards for leaf in jax.tree.leaves(spread))


def test_a_shard_holds_its_own_fused_matrix():
    """Heads 1 of 2: queries with their gates, then keys, then values; gate columns, then up columns; zeros behind."""
    model = target()
    config, spread = model.config, shard(model, mesh(2)).shards
    linear, full = (layer.mixer.w_in_DI for layer in spread.layers)

    def second(array, axis=1):
        return np.split(np.asarray(array), 2, axis)[1]

    edges = np.cumsum([64, 64, 128, 128, 8, 8])
    parts = np.split(np.asarray(model.layers[0].mixer.w_in_DI[...]), edges, axis=1)[:-1]
    wanted = np.concatenate([second(part) for part in parts], axis=1)
    found = second(linear[...])
    assert np.array_equal(found[:, : wanted.shape[1]], wanted)
    assert found.shape[1] == 256
    assert not found[:, wanted.shape[1] :].any()
    parts = np.split(np.asarray(model.layers[1].mixer.w_in_DI[...]), [256, 256 + 32], axis=1)
    assert np.array_equal(second(full[...]), np.concatenate([second(part) for part in parts], axis=1))
    gate_up = model.layers[0].mlp.w_in_DI[...]
    wanted = np.concatenate([second(part) for part in np.split(np.asarray(gate_up), 2, axis=1)], axis=1)
    assert np.array_equal(second(spread.layers[0].mlp.w_in_DI[...]), wanted)
    assert config.num_key_value_heads == 2
    assert shard(model, mesh(4)).config.num_key_value_heads == 4  # each of the two is held twice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=97), r"vocab_size=97 must be a multiple of the 2 shards"),
        (dict(linear_num_value_heads=5, linear_num_key_heads=5), r"linear_num_value_heads=5 .*key_heads=5 .*divide it"),
        (dict(num_attention_heads=6, num_key_value_heads=3), r"num_key_value_heads=3 must be .* 2 shards, or"),
        (dict(intermediate_size=63), r"Target over 2 shards of axis 'model': intermediate_size=63"),
    ],
)  # fmt: skip
def test_a_count_that_does_not_divide_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        shard(target(**changes), mesh(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(state_heads=(0, 1)), r"reader: state_heads=\(0, 1\) must name the same heads of every shard"),
        (dict(scale_feature="layer"), r"reader: .*'layer' needs all heads of a layer"),
    ],
)
def test_a_reader_that_shards_cannot_share_is_refused(changes, message):
    model = target()
    with pytest.raises(ValueError, match=message):
        shard(drafter(model, reader=tiny.reader_config(model.config, state_layers=(0,), **changes)), mesh(2))


def test_a_model_drawn_on_a_mesh_has_shards_of_its_own():
    model = target(dtype="bfloat16")
    found = random_target(model.config, mesh=mesh(2), dtype="bfloat16")
    like = shard(model, mesh(2))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(like), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
        first, second = (np.asarray(part.data) for part in a.addressable_shards)
        constant = "norm" in str(path) or "conv" in str(path)
        assert np.array_equal(first, second) == (a.sharding.spec == PartitionSpec()) or constant, path
    assert jax.tree.structure(found) == jax.tree.structure(like)


def test_a_spread_model_is_no_module_and_can_be_saved(tmp_path):
    spread = shard(target(), mesh(2))
    with pytest.raises(AttributeError, match=r"'verify': this model is spread over a mesh.*whole\(\)"):
        spread.verify(jnp.zeros((1, 8), jnp.int32), None)
    save_pretrained(spread, tmp_path)
    assert same(load_target(tmp_path, dtype="float32"), target())


# Talking


@pytest.mark.parametrize("shards", [2, 4])
def test_the_lowest_index_of_equal_maxima_wins_over_all_shards(shards):
    logits_BV = np.zeros((5, 16), np.float32)
    logits_BV[0, [3, 9]] = 1  # equal in different shards
    logits_BV[1, [13, 14]] = 2
    logits_BV[2, 15] = np.nan
    logits_BV[3] = -np.inf

    def best(logits_BV):
        with collectives.axis("model"):
            return collectives.argmax(logits_BV)

    over = jax.shard_map(
        best, mesh=mesh(shards), in_specs=PartitionSpec(None, "model"), out_specs=PartitionSpec(), check_vma=False
    )
    assert jax.jit(over)(logits_BV).tolist() == [3, 13, 15, 0, 0]


class Own:
    """Somebody's reader: takes one state's mean over all heads."""

    def prepare(self, states):
        return jnp.mean(states[0], axis=(1, 2, 3))

    def __call__(self, prep, hidden_BPD, site=0):
        return hidden_BPD * prep[:, None, None].astype(hidden_BPD.dtype)


KINDS = {
    "vanilla": dict(),
    "gated, two sites, some heads": dict(markov_head_type="gated"),
    "rnn, own head": dict(markov_head_type="rnn", own_embeddings=True),
    "logits": dict(),
    "no Markov head": dict(markov_rank=0, confidence_head=False),
    "fp8": dict(),
    "own reader": dict(),
}


@pytest.mark.parametrize(("kind", "shards"), [(kind, 2 + 2 * (i % 2)) for i, kind in enumerate(KINDS)])
def test_every_drafter_proposes_what_it_does_on_one_device(kind, shards):
    model, changes = target(), dict(KINDS[kind])
    if "sites" in kind:
        parts = dict(state_heads=tuple(range(0, 8, 2)), inject_layers=(0, 1), projection_sharing="layer")
        changes["reader"] = tiny.reader_config(model.config, state_layers=(0, 2), **parts)
        model = target(layer_types=(LINEAR, FULL, LINEAR))
    one = drafter(model, **changes)
    one = draft_fp8(one, model.w_out_DV[...]) if kind == "fp8" else one
    over, many = shard(model, mesh(shards)), shard(one, mesh(shards))
    if kind == "own reader":
        one, many = one.with_reader(Own()), many.with_reader(Own())
    rng = np.random.default_rng(3)

    def noise(tree):
        return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), tree)

    state, context = noise(init_state(model.config, 2, 32, dtype="float32")), noise(one.init_context(2, 32))
    context = replace(context, length_B=jnp.array([9, 20]))
    copies = shards // 2  # of its two key/value heads
    key, value = (tuple(jnp.repeat(x, copies, axis=2) for x in each) for each in (context.key, context.value))
    memory = replace(init_state(over.config, 2, 32, dtype="float32"), recurrent=state.recurrent)
    spread = dict(target=over, drafter=many, state=memory, context=replace(context, key=key, value=value))
    anchor_B = jnp.array([7, 50], jnp.int32)

    def propose(target, drafter, state, context, anchor_B):
        borrowed = () if drafter.config.own_embeddings else (target.embed, target.unembed)
        return drafter.propose(context, anchor_B, state.recurrent, *borrowed, with_logits=kind == "logits")

    wanted = quick(propose)(model, one, state, context, anchor_B)
    found = quick(lambda a: on_shards(propose, a, wanted, batch=2))(spread | dict(anchor_B=anchor_B))
    assert np.array_equal(found.token_BP, wanted.token_BP)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# The whole loop


def generate(target, drafter, limit):
    return tiny.generate(target, drafter, PROMPTS, limit, keep_logits=True)


def test_rows_of_a_batch_are_split_over_the_axis_before():
    """Two rows on two pairs of devices, which finish after different numbers of rounds."""
    model, limit = target(), tiny.limits([30, 9])
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    found, wanted = generate(shard(model, square), None, limit), generate(model, None, limit)
    assert found.state.recurrent[0].sharding.spec[:2] == ("data", "model")
    assert [tiny.tokens(found, b) for b in range(2)] == [tiny.tokens(wanted, b) for b in range(2)]
    np.testing.assert_allclose(found.logits_BNV, wanted.logits_BNV, atol=1e-5)


WALK = (7, 0, 3, 3, 0, 0, 7, 7, 1, 5, 2)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 2), ("bfloat16", 4)])
def test_speculation_is_bit_identical_on_a_mesh_and_equal_to_one_device(dtype, shards):
    """Scripted proposals around the real drafter and reader; rows that finish apart."""
    model = target(dtype)
    inner = drafter(model, dtype)
    over, many = shard(model, mesh(shards)), shard(inner, mesh(shards))
    limit = tiny.limits([1 + sum(a + 1 for a in WALK), 17])
    begin, decode = tiny.shared_programs()
    token_BT, num_B = tiny.padded(PROMPTS)
    start = begin(
        target=over, drafter=many, token_BT=token_BT, num_B=num_B, limits=limit, capacity=256, keep_logits=True
    )

    def run(drafter, limit=limit, start=start):
        return decode(target=over, drafter=drafter, run=start, limits=limit, max_rounds=jnp.int32(2**31 - 1))

    plain = run(None, start=replace(start, context=None))
    texts = [tiny.tokens(plain, b) for b in range(2)]
    forced = Forced(many, tiny.script(PROMPTS, texts, [list(WALK), [7, 0, 3]], vocab=100))
    found = run(forced)
    assert tiny.per_round(found, "accepted") == list(WALK)
    none = run(forced, replace(limit, draft_B=0 * limit.draft_B))
    for other in (found, none):
        assert [tiny.tokens(other, b) for b in range(2)] == texts
        assert same(other.logits_BNV, plain.logits_BNV)
        assert tiny.memory_equal(other.state, plain.state)
    assert [len(text) for text in texts] == [1 + sum(a + 1 for a in WALK), 17]

    text = decode.compiled(
        **dict(target=over, drafter=forced, run=found, limits=limit, max_rounds=jnp.int32(1))
    ).as_text()
    count = {kind: n for kind, n in hlo.loop_launches(text or "").items() if kind.startswith("all-")}
    sums, gathers = 2 * (2 + 2), 1 + 1 + 7 + 1  # layers of both; the reader, the taps, seven slots, the verified rows
    assert count == ({"all-reduce": sums, "all-gather": gathers} if shards == 2 else {"all-gather": sums + gathers})

    if dtype == "float32":
        wanted = generate(model, None, limit)
        assert [tiny.tokens(wanted, b) for b in range(2)] == texts
        np.testing.assert_allclose(plain.logits_BNV, wanted.logits_BNV, atol=1e-5)
