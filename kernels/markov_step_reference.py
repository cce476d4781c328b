"""``markov_step`` in plain jax.numpy: the specification."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def step(base_BPV, slot, latent_BR, w2, w1_VR, scale_V, gather=None):
    w2_RV = w2 if scale_V is None else w2.T
    precision = jax.lax.Precision.HIGHEST if latent_BR.dtype == jnp.float32 else None
    bias_BV = jnp.matmul(
        latent_BR, w2_RV.astype(latent_BR.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    logits_BV = base_BPV[:, slot] + (bias_BV if scale_V is None else bias_BV * scale_V[None])
    token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if gather is not None:
        best_B1 = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)
        value_BN, token_BN = gather(best_B1, token_B[:, None])
        first_B1 = jnp.argmax(value_BN, axis=1, keepdims=True)
        token_B = jnp.take_along_axis(token_BN, first_B1, axis=1)[:, 0]
    return token_B, w1_VR[token_B].astype(latent_BR.dtype)
