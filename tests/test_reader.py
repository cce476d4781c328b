"""The state reader against its equations in float64, for every value of every field, and its place in the drafter."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick
from flax import nnx

from ready_jax.config import ReaderConfig
from ready_jax.drafter import Drafter, blocks
from ready_jax.layers import rms_norm, rope_angles
from ready_jax.reader import StateReader
from ready_jax.state import init_state

BATCH, BLOCK, HIDDEN, HEADS, X, Y, RANK = 2, 7, 24, 3, 8, 12, 4
LAYERS = (2, 6)
DEFAULT = ReaderConfig(
    rank=RANK, state_layers=LAYERS, memory_heads=HEADS, key_dim=X, value_dim=Y, mlp_hidden=10
)  # fmt: skip

VARIANTS = {
    "defaults": {},
    "rms per row": dict(state_rms_axes="row", scale_feature="none"),
    "rms per layer": dict(state_rms_axes="layer"),
    "rms per layer, scale per layer": dict(state_rms_axes="layer", scale_feature="layer"),
    "scale per layer": dict(scale_feature="layer"),
    "raw scale": dict(scale_feature="raw"),
    "no scale": dict(scale_feature="none"),
    "maps per layer": dict(projection_sharing="layer"),
    "one map": dict(projection_sharing="all"),
    "latent per layer": dict(query_latent="layer"),
    "one latent": dict(query_latent="shared"),
    "norm over all latents": dict(query_norm_axes="all"),
    "norm over all of the layers' latents": dict(query_norm_axes="all", query_latent="layer"),
    "no query norm": dict(query_norm_axes="none"),
    "scaled by rank": dict(read_scale="rank"),
    "gelu": dict(mlp_act="gelu"),
    "relu": dict(mlp_act="relu"),
    "normed features": dict(f_norm=True),
    "some heads": dict(state_heads=(0, 2)),
    "some heads, shared": dict(
        state_heads=(2, 1), state_rms_axes="layer", projection_sharing="layer", query_latent="layer"
    ),
    "one layer": dict(state_layers=(6,)),
    "large epsilon": dict(eps=0.3),
}


def filled(make, seed: int, scale: float = 0.3):
    """The model with every parameter drawn by NumPy: initialisers compile for seconds."""
    leaves, structure = jax.tree.flatten(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)
    drawn = [jnp.asarray(scale * rng.standard_normal(x.shape) + (x.ndim == 1), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, drawn)


@functools.cache
def made(sites=1, seed=0, **changes) -> StateReader:
    config = replace(DEFAULT, **changes)
    return filled(lambda: StateReader(config, HIDDEN, sites, rngs=nnx.Rngs(0), dtype="float32"), seed)


def states_of(seed=0):
    """Committed states of very different sizes: s_BMXY by absolute layer, None where a layer has none."""
    rng = np.random.default_rng(seed)
    states: list[Any] = [None] * 8
    for layer in (0, 1, 2, 4, 5, 6):
        size = 10.0 ** rng.uniform(-3, 1, (BATCH, HEADS, 1, 1))
        states[layer] = jnp.asarray(size * rng.standard_normal((BATCH, HEADS, X, Y)), jnp.float32)
    return tuple(states)


def hidden_of(seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((BATCH, BLOCK, HIDDEN)), jnp.float32)


def activation(name, x):
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # jax.nn.gelu's default form


def direct(reader: StateReader, states, hidden, site=0):
    """Equations 3.2, pair by pair and position by position, on states turned to [value, key]."""
    c, w = reader.config, reader.sites[site]

    def weight(param):
        return np.asarray(param[...], np.float64)

    pairs = [(n, layer, head) for n, layer in enumerate(c.state_layers) for head in c.heads]
    w_q, gain, u, v = weight(w.w_q_DI), weight(w.gain_ZJ), weight(w.u_ZXJ), weight(w.v_ZYJ)

    def root_mean_square(s, axis=None):
        return np.sqrt(np.mean(s**2, axis=axis, keepdims=axis is not None) + c.eps)

    out = np.zeros(hidden.shape)
    for b in range(len(hidden)):
        memory = {
            (layer, head): np.asarray(states[layer], np.float64)[b, head].T
            for layer in c.state_layers
            for head in c.heads
        }
        of_layer = {
            layer: root_mean_square(np.stack([memory[layer, head] for head in c.heads])) for layer in c.state_layers
        }
        for p in range(hidden.shape[1]):
            h = np.asarray(hidden, np.float64)[b, p]
            latents = (h @ w_q).reshape(-1, c.rank)
            if c.query_norm_axes == "all":
                latents = latents / root_mean_square(latents)
            elif c.query_norm_axes == "rank":
                latents = latents / root_mean_square(latents, axis=1)
            reads, scales = [], []
            for m, (n, layer, head) in enumerate(pairs):
                s = memory[layer, head]
                rho = {"head": root_mean_square(s), "row": root_mean_square(s, axis=1), "layer": of_layer[layer]}
                rho = rho[c.state_rms_axes]
                z = gain[m] * latents[{"pair": m, "layer": n, "shared": 0}[c.query_latent]]
                place = {"pair": m, "layer": n, "all": 0}[c.projection_sharing]
                q = u[place] @ z
                t = v[place].T @ (s / rho)
                reads.append(t @ q / np.sqrt(c.key_dim if c.read_scale == "key_dim" else c.rank))
                if c.scale_feature in ("pair", "raw"):
                    scales.append(np.log(rho) if c.scale_feature == "pair" else rho)
            if c.scale_feature == "layer":
                scales = [np.log(of_layer[layer]) for layer in c.state_layers]
            feature = np.concatenate([*reads, np.array(scales)])
            if c.f_norm:
                assert w.norm_I is not None
                feature = feature / root_mean_square(feature) * weight(w.norm_I)
            out[b, p] = activation(c.mlp_act, feature @ weight(w.w_in_IU)) @ weight(w.w_out_UD)
    return out


@quick
def read(reader, states, hidden):
    prep = reader.prepare(states)
    return [reader(prep, hidden, site) for site in range(len(reader.sites))]


def close(found, wanted):
    assert np.abs(wanted).max() > 0.05  # else the bound would show nothing
    np.testing.assert_allclose(found, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()), rtol=0)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_equations(name):
    reader = made(**VARIANTS[name])
    close(read(reader, states_of(), hidden_of())[0], direct(reader, states_of(), hidden_of()))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("defaults", "one layer", "some heads")])
def test_every_variant_is_another_function(name):
    """The oracle itself tells the variants apart (same seed, so equal weights wherever shapes are equal)."""
    mine, default = (
        direct(made(**changes), states_of(), hidden_of()) for changes in (VARIANTS[name], VARIANTS["defaults"])
    )
    assert np.abs(mine - default).max() > 1e-3


def test_sites_have_their_own_weights_and_share_the_states():
    reader = made(sites=3)
    found = read(reader, states_of(), hidden_of())
    for site in range(3):
        close(found[site], direct(reader, states_of(), hidden_of(), site))
    assert np.abs(found[0] - found[1]).max() > 1e-2


def test_a_transposed_state_is_noticed():
    """Unequal widths raise; with equal widths the transposed state gives another update."""
    turned = [None if s is None else jnp.swapaxes(s, 2, 3) for s in states_of()]
    with pytest.raises(ValueError, match=r"states are 12 x 8 \(key x value\), the reader was made for 8 x 12"):
        made().prepare(turned)
    square = made(value_dim=X)
    states = [None if s is None else s[..., :X] for s in states_of()]
    turned = [None if s is None else jnp.swapaxes(s, 2, 3) for s in states]
    right = read(square, states, hidden_of())[0]
    close(right, direct(square, states, hidden_of()))
    assert np.abs(right - read(square, turned, hidden_of())[0]).max() > 1e-2


def test_layers_are_absolute_numbers():
    """A mapping from layer numbers serves as well as the tuple of all layers; exchanged layers are another input."""
    reader, states = made(), states_of()
    mapping = {layer: states[layer] for layer in LAYERS}
    wanted = np.asarray(read(reader, states, hidden_of())[0])
    np.testing.assert_array_equal(read(reader, mapping, hidden_of())[0], wanted)
    other = list(states)
    other[0], other[1], other[4], other[5] = (None,) * 4
    np.testing.assert_array_equal(read(reader, tuple(other), hidden_of())[0], wanted)
    exchanged = {2: states[6], 6: states[2]}
    assert np.abs(read(reader, exchanged, hidden_of())[0] - wanted).max() > 1e-3


@pytest.mark.parametrize(("layers", "named"), [((3,), r"\[3\]"), ((2, 7), r"\[7\]"), ((3, 6, 7), r"\[3, 7\]")])
def test_a_layer_without_a_state_is_refused(layers, named):
    """Field case B16: full attention at 3 and 7."""
    target = tiny.target_config(linear_key_head_dim=X, linear_value_head_dim=Y)
    states = init_state(target, BATCH, 8).recurrent
    made(memory_heads=6).prepare(states)
    with pytest.raises(ValueError, match=f"state_layers names {named}: .* hold no recurrent state"):
        made(memory_heads=6, state_layers=layers).prepare(states)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(state_heads=(3,)), r"state_heads names \[3\]: the target has memory heads 0..2"),
        (dict(state_heads=(-1,)), r"state_heads names \[-1\]"),
        (dict(state_layers=(6, 2)), "strictly increasing"),
        (dict(state_layers=(2, 2)), "strictly increasing"),
        (dict(state_layers=()), "non-empty"),
        (dict(rank=9), r"rank=9 must lie in 1..min\(key_dim, value_dim\)=8"),
        (dict(rank=0), "rank=0"),
        (dict(state_rms_axes="row"), "scale_feature must be 'none', found 'pair'"),
    ],
)
def test_a_reader_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(DEFAULT, **changes)
    replace(DEFAULT, state_heads=(2,))


def test_an_untrained_reader():
    """Orthonormal U and V, unit gain, zero output: what stage 1 of the training starts from."""
    site = quick(lambda: StateReader(DEFAULT, HIDDEN, rngs=nnx.Rngs(0), dtype="float32"))().sites[0]
    for columns, width in ((site.u_ZXJ, X), (site.v_ZYJ, Y)):
        matrix = np.asarray(columns[...])
        assert matrix.shape == (len(LAYERS) * HEADS, width, RANK)
        gram = np.einsum("zxi,zxj->zij", matrix, matrix)
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(RANK), gram.shape), atol=1e-5)
        assert np.abs(matrix[0] - matrix[1]).max() > 1e-2
    assert (np.asarray(site.gain_ZJ[...]) == 1).all()
    assert not np.asarray(site.w_out_UD[...]).any()


def test_the_states_are_read_in_fp32_and_the_update_comes_in_the_type_of_the_block():
    reader = jax.tree.map(lambda x: x.astype(jnp.bfloat16), made())
    assert all(a.dtype == jnp.float32 for a in reader.prepare(states_of()).a_BZJJ)
    found = read(reader, states_of(), hidden_of().astype(jnp.bfloat16))[0]
    assert found.dtype == jnp.bfloat16
    wanted = direct(reader, states_of(), hidden_of().astype(jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=0.05 * np.abs(wanted).max(), rtol=0)


# In the drafter

PLACES = {
    "default": {},
    "residual": dict(inject_target="residual"),
    "both": dict(inject_target="both"),
    "before attention": dict(inject_side="before_attention"),
    "before attention, residual": dict(inject_side="before_attention", inject_target="residual"),
    "before attention, both": dict(inject_side="before_attention", inject_target="both"),
    "first layer": dict(inject_layers=(0,)),
    "first and last": dict(inject_layers=(0, 2)),
    "every layer, before attention": dict(inject_layers=(0, 1, 2), inject_side="before_attention"),
}


@functools.cache
def drafter_of(reader: bool = True, **changes) -> Drafter:
    target = tiny.target_config(
        linear_key_head_dim=X, linear_value_head_dim=Y, linear_num_key_heads=1, linear_num_value_heads=HEADS
    )
    read = tiny.reader_config(target, **changes) if reader else None
    config = tiny.drafter_config(target, num_layers=3, own_embeddings=True, reader=read)
    return filled(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype="float32"), 3, 0.2)


def block_of(drafter: Drafter, seed=1):
    """A block of rows, its positions, a context of 5 tokens, and what the rows see."""
    c, rng = drafter.config, np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    context = [tuple(normal(BATCH, 5, c.num_key_value_heads, c.head_dim) for _ in "kv") for _ in drafter.layers]
    position = jnp.broadcast_to(5 + jnp.arange(BLOCK)[None], (BATCH, BLOCK))
    return normal(BATCH, BLOCK, c.hidden_size), position, context, blocks(jnp.ones((BATCH, 1, 5), bool))


def by_hand(drafter: Drafter, block, updates, side, into):
    """The drafter's layers written out; ``updates[i](h)`` is what joins layer i."""
    x, position, context, attend = block
    eps, angles = drafter.config.rms_norm_eps, rope_angles(position, drafter.config.rope)
    for i, layer in enumerate(drafter.layers):
        h = rms_norm(x, layer.norm_in_D[...], eps)
        if side == "before_attention" and i in updates:
            delta = updates[i](h)
            x = x + delta if into in ("residual", "both") else x
            h = h + delta if into in ("mlp_input", "both") else h
        x = x + layer.attend(h, angles, context[i], attend)
        h = rms_norm(x, layer.norm_post_D[...], eps)
        if side == "after_attention" and i in updates:
            delta = updates[i](h)
            x = x + delta if into in ("residual", "both") else x
            h = h + delta if into in ("mlp_input", "both") else h
        x = x + layer.mlp(h)
    return rms_norm(x, drafter.norm_D[...], eps)


@pytest.fixture(scope="module")
def without():
    drafter = drafter_of()
    return np.asarray(quick(lambda d, block: d.hidden(*block))(drafter, block_of(drafter)))


@pytest.mark.parametrize("name", list(PLACES))
def test_where_the_update_enters(name, without):
    drafter, states = drafter_of(**PLACES[name]), states_of(2)
    c = drafter.config.reader
    assert c is not None
    sites = {layer: n for n, layer in enumerate(c.inject_layers or (2,))}
    assert drafter.reader is not None
    assert len(drafter.reader.sites) == len(sites)

    @quick
    def both(drafter, block):
        def update(site):
            return lambda h: drafter.reader(drafter.reader.prepare(states), h, site)

        updates = {layer: update(n) for layer, n in sites.items()}
        found = drafter.hidden(*block, drafter.reader.prepare(states))
        return found, by_hand(drafter, block, updates, c.inject_side, c.inject_target)

    found, wanted = both(drafter, block_of(drafter))
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    assert np.abs(found - without).max() > 0.05


@quick
def propose(drafter, context, anchor, states):
    return drafter.propose(context, anchor, states, with_logits=True)


def context_of(drafter, seed=4):
    c = drafter.config
    taps = np.random.default_rng(seed).standard_normal((BATCH, 9, len(c.taps), c.hidden_size))
    num = jnp.array([9, 4], jnp.int32)
    return absorb(drafter, drafter.init_context(BATCH, 16), jnp.asarray(taps, jnp.float32), num)


@quick
def absorb(drafter, context, taps, num):
    return drafter.absorb(context, taps, num)


ANCHOR = jnp.array([5, 80], jnp.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_zero_output_changes_nothing_bit_for_bit(dtype):
    """One program reads the states with W_out = 0 and, beside it, drafts without a reader."""
    drafter = jax.tree.map(lambda x: x.astype(dtype), drafter_of())
    context, states = context_of(drafter), states_of(2)
    fresh = jax.tree.map(lambda x: x, drafter)
    fresh.reader.sites[0].w_out_UD[...] = jnp.zeros_like(fresh.reader.sites[0].w_out_UD[...])
    bare = jax.tree.map(lambda x: x, drafter)
    bare.reader = None

    @jax.jit
    def together(fresh, bare, context, states):
        read = fresh.propose(context, ANCHOR, states, with_logits=True)
        plain = bare.propose(context, ANCHOR, with_logits=True)
        return (read.logits_BPV, read.confidence_BP), (plain.logits_BPV, plain.confidence_BP)

    for a, b in zip(*together(fresh, bare, context, states), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    trained = together(drafter, bare, context, states)
    assert np.abs(np.asarray(trained[0][0]) - np.asarray(trained[1][0])).max() > 1e-2


def test_the_reader_needs_states():
    with pytest.raises(ValueError, match="propose needs the committed recurrent states"):
        drafter_of().propose(context_of(drafter_of()), ANCHOR)


class Mine:
    """A user's reader: no weights, no base class."""

    def prepare(self, states):
        return jnp.mean(states[2], axis=(1, 2, 3))

    def __call__(self, prep, hidden_BPD):
        return jnp.broadcast_to(10 * prep[:, None, None], hidden_BPD.shape) * jnp.sign(hidden_BPD)


class MineWithWeights(nnx.Module):
    def __init__(self, hidden: int):
        self.w_D = nnx.Param(jnp.linspace(-1, 1, hidden))

    def prepare(self, states):
        return jnp.mean(states[6], axis=(1, 2, 3))

    def __call__(self, prep, hidden_BPD):
        return prep[:, None, None] * self.w_D[...][None, None]


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("kind", ["plain object", "module"])
def test_a_users_own_reader_plugs_in(kind, replaces):
    """Over a built-in reader and into a drafter that had none. Under jit a plain object must be static."""
    drafter, states = jax.tree.map(lambda x: x, drafter_of(reader=replaces)), states_of(2)
    context = context_of(drafter)
    reader = Mine() if kind == "plain object" else MineWithWeights(drafter.config.hidden_size)
    block = block_of(drafter)
    drafter.reader = reader
    prep = reader.prepare(states)
    last = drafter.config.num_layers - 1

    @quick
    def both(block):
        wanted = by_hand(drafter, block, {last: lambda h: reader(prep, h)}, "after_attention", "mlp_input")
        return drafter.hidden(*block, prep), wanted

    np.testing.assert_allclose(*both(block), atol=1e-5, rtol=0)
    if kind == "plain object":
        drafter.reader = nnx.static(reader)
    found = propose(drafter, context, ANCHOR, states).logits_BPV
    other = propose(drafter, context, ANCHOR, jax.tree.map(jnp.negative, states)).logits_BPV
    assert np.abs(found - other).max() > 1e-3
