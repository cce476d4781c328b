"""One optimizer step of a language model in mixed precision: fp32 masters, bf16 products, fp32 loss.

Parameters are a flat dict, `"layers.0.mixer.w_in_DI"` -> array: the form in which they are stored, masked and travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ready_jax.config import TargetConfig
from ready_jax.configs.nano import Optimizer
from ready_jax.deltanet import fused_columns
from ready_jax.target import Target

Flat = dict[str, jax.Array]


class Batch(NamedTuple):
    """Packed rows. `learn_BT` marks tokens to predict, `avoid_BT` tokens to make unlikely; segment 0 is padding."""

    token_BT: Any
    segment_BT: Any
    learn_BT: Any
    avoid_BT: Any


class MixedTarget(Target):
    """The target whose activations are bf16 whatever its parameters are: products cast their weights themselves."""

    def embed(self, token_BT):
        return super().embed(token_BT).astype(jnp.bfloat16)


def new_params(config: TargetConfig, seed: int) -> Flat:
    """Fresh fp32 parameters. Projections into the residual stream start smaller, by the root of their number."""
    shrink = (2 * config.num_layers) ** -0.5

    @jax.jit
    def draw():
        flat = flat_params(Target(config, rngs=nnx.Rngs(seed), dtype="float32"))
        return {key: value * shrink if ".w_out_" in key else value for key, value in flat.items()}

    return draw()


def flat_params(target: Target) -> Flat:
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(target))}


def num_params(config: TargetConfig, flat: dict[str, Any]) -> int:
    """Parameters that count: without the zero columns that pad the fused projections."""
    used = config.conv_channels + config.value_width + 2 * config.linear_num_value_heads
    padding = (fused_columns(config) - used) * config.hidden_size * len(config.linear_layers)
    return sum(x.size for x in flat.values()) - padding


def stored_dtype(key: str, matrices: str) -> str:
    """Decay parameters stay fp32 in every checkpoint."""
    return "float32" if key.endswith(("a_log_M", "dt_bias_M")) else matrices


def builder(config: TargetConfig, kind: type[Target] = MixedTarget) -> Callable[[Flat], Target]:
    """A function that puts parameters into a module; it holds the structure only, no arrays."""
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), dtype="float32")))
    leaves = [(path, ".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(state)]

    def build(flat: Flat) -> Target:
        filled = [(path, leaf.replace(flat[key])) for path, key, leaf in leaves]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    return build


def decoding_target(config: TargetConfig, flat: Flat) -> Target:
    """A bf16 module with these parameters, as a checkpoint of them would load."""
    return builder(config, Target)(_decoding_params(flat))


@jax.jit
def _decoding_params(flat: Flat) -> Flat:
    return {key: value.astype(stored_dtype(key, "bfloat16")) for key, value in flat.items()}


@jax.custom_vjp
def token_losses(hidden_ND, table_VD, label_N):
    """`-log p(label)` and `-log(1 - p(label))` of each row under a tied head, fp32.

    Logits are fp32 and are recomputed backward; their gradient meets the products in bf16.
    """
    return _token_losses_forward(hidden_ND, table_VD, label_N)[0]


def _logits(hidden_ND, table_VD):
    table_VD = table_VD.astype(hidden_ND.dtype)
    return jnp.einsum("ND,VD->NV", hidden_ND, table_VD, preferred_element_type=jnp.float32)


def _token_losses_forward(hidden_ND, table_VD, label_N):
    z_NV = _logits(hidden_ND, table_VD)
    hit_NV = label_N[:, None] == jnp.arange(z_NV.shape[1])[None]
    top_N = jnp.max(z_NV, axis=1)
    own_N = jnp.sum(jnp.where(hit_NV, z_NV, 0.0), axis=1) - top_N
    others_N = jnp.sum(jnp.where(hit_NV, 0.0, jnp.exp(z_NV - top_N[:, None])), axis=1)
    others_N = jnp.maximum(others_N, 1e-30)
    total_N = jnp.log(others_N + jnp.exp(own_N))
    losses = total_N - own_N, total_N - jnp.log(others_N)
    return losses, (hidden_ND, table_VD, label_N, top_N + total_N, jnp.exp(own_N) / others_N)


def _token_losses_backward(kept, gradient):
    hidden_ND, table_VD, label_N, normaliser_N, odds_N = kept
    learn_N, avoid_N = gradient
    z_NV = _logits(hidden_ND, table_VD)
    hit_NV = label_N[:, None] == jnp.arange(z_NV.shape[1])[None]
    p_NV = jnp.exp(z_NV - normaliser_N[:, None])
    d_NV = jnp.where(
        hit_NV,
        learn_N[:, None] * (p_NV - 1.0) + avoid_N[:, None] * p_NV,
        (learn_N - avoid_N * odds_N)[:, None] * p_NV,
    ).astype(hidden_ND.dtype)
    d_hidden_ND = jnp.einsum("NV,VD->ND", d_NV, table_VD.astype(d_NV.dtype))
    d_table_VD = jnp.einsum("NV,ND->VD", d_NV, hidden_ND, preferred_element_type=jnp.float32)
    return d_hidden_ND, d_table_VD.astype(table_VD.dtype), None


token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def targets(batch: Batch):
    """What follows each token [B, T], and where it is to be learned and to be avoided: within its segment only.

    Entry t belongs to the prediction of token t + 1. Padding is cut out here, whatever it holds.
    """

    def following(x_BT):
        return jnp.pad(x_BT[:, 1:], [(0, 0), (0, 1)])

    segment_BT = batch.segment_BT.astype(jnp.int32)
    exists_BT = (following(segment_BT) == segment_BT) & (segment_BT > 0)
    label_BT = jnp.where(exists_BT, following(batch.token_BT.astype(jnp.int32)), 0)
    return label_BT, exists_BT & following(batch.learn_BT), exists_BT & following(batch.avoid_BT)


def row_losses(target: Target, batch: Batch):
    """(`-log p`, where to learn) and (`-log(1 - p)`, where to avoid) of every token in `targets`, each [B, T]."""
    segment_BT = batch.segment_BT.astype(jnp.int32)
    token_BT = jnp.where(segment_BT > 0, batch.token_BT.astype(jnp.int32), 0)
    hidden_BTD = target.sequence(token_BT, segment_BT, precision=jax.lax.Precision.DEFAULT).hidden_BTD
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    label_BT, learn_BT, avoid_BT = targets(batch)
    learn_N, avoid_N = token_losses(hidden_ND, target.embed_VD[...], label_BT.reshape(-1))
    return (learn_N.reshape(label_BT.shape), learn_BT), (avoid_N.reshape(label_BT.shape), avoid_BT)


def summed(loss_BT, mask_BT):
    """(sum, count) of the marked entries; the others are dropped by select."""
    return jnp.sum(jnp.where(mask_BT, loss_BT, 0.0)), jnp.sum(mask_BT)


def optimizer(config: Optimizer) -> optax.GradientTransformation:
    """AdamW without its rate: the step multiplies it in, so that a schedule is a runtime value."""

    def decayed(flat):
        return {key: ".w_" in key or key in ("embed_VD", "w_out_DV") for key in flat}

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(config.beta1, config.beta2, eps=1e-10),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def make_step(model: TargetConfig, settings: Optimizer, alpha: float = 0.0):
    """`step((params, moments), batch, rate)` -> `(params, moments), metrics`; the first argument is donated."""
    build, transform = builder(model), optimizer(settings)

    def loss(flat: Flat, batch: Batch):
        learn, avoid = (summed(*pair) for pair in row_losses(build(flat), batch))
        learn_loss = learn[0] / jnp.maximum(learn[1], 1)
        avoid_loss = avoid[0] / jnp.maximum(avoid[1], 64)
        return learn_loss + alpha * avoid_loss, (learn_loss, avoid_loss)

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch: Batch, rate):
        flat, moments = state
        gradient, (learn_loss, avoid_loss) = jax.grad(loss, has_aux=True)(flat, batch)
        update, moments = transform.update(gradient, moments, flat)
        flat = jax.tree.map(lambda p, u: p - rate * u, flat, update)
        metrics = {"loss": learn_loss, "avoid": avoid_loss, "norm": optax.tree.norm(gradient)}
        return (flat, moments), metrics  # donated state first: after other outputs CUDA returns wrong values silently

    return step, transform.init


def make_losses(model: TargetConfig):
    """`losses(params, batch)` -> (sum, count) over the learned tokens and over all tokens that have one before."""
    build = builder(model)

    @jax.jit
    def losses(flat: Flat, batch: Batch):
        (loss_BT, learn_BT), (_, every_BT) = row_losses(build(flat), batch._replace(avoid_BT=batch.token_BT >= 0))
        return summed(loss_BT, learn_BT), summed(loss_BT, every_BT)

    return losses
