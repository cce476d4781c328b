"""Hugging Face tensor names as one table: which stored tensors fill which leaf, and how; used to load and to save.

Stored names are written without a model prefix (``canonical_target`` and ``canonical_drafter`` strip it). A leaf is
filled by one stored tensor, or by several whose rows become column ranges side by side; columns left over are zero.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ready_jax.config import LINEAR, DrafterConfig, ReaderConfig, TargetConfig

#: How a stored tensor lies in its leaf: same element order; [out, in] as columns [in, out]; conv [C, 1, W] as [W, C].
Form = Literal["same", "transposed", "conv"]


@dataclass(frozen=True)
class Piece:
    """One stored tensor: its name without prefix and its stored shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One parameter of a module, by attribute path, and the stored tensors that fill it from column 0 on."""

    path: tuple[str | int, ...]
    form: Form
    pieces: tuple[Piece, ...]


def column_ranges(leaf: Leaf) -> list[tuple[Piece, slice]]:
    """The columns of a fused leaf that each stored tensor fills."""
    ranges, first = [], 0
    for piece in leaf.pieces:
        ranges.append((piece, slice(first, first + piece.shape[0])))
        first += piece.shape[0]
    return ranges


# (attribute path, form, {stored name: stored shape}); letters as in ready_jax/dims.py, products written with "*".
_BLOCK = [
    ("norm_in_D", "same", {"input_layernorm.weight": "D"}),
    ("norm_post_D", "same", {"post_attention_layernorm.weight": "D"}),
    ("mlp.w_in_DI", "transposed", {"mlp.gate_proj.weight": "F D", "mlp.up_proj.weight": "F D"}),
    ("mlp.w_out_FD", "transposed", {"mlp.down_proj.weight": "D F"}),
]
_DELTANET = [
    (
        "mixer.w_in_DI",
        "transposed",
        {
            "linear_attn.in_proj_qkv.weight": "C D",
            "linear_attn.in_proj_z.weight": "M*Y D",
            "linear_attn.in_proj_b.weight": "M D",
            "linear_attn.in_proj_a.weight": "M D",
        },
    ),
    ("mixer.conv_WC", "conv", {"linear_attn.conv1d.weight": "C 1 W"}),
    ("mixer.a_log_M", "same", {"linear_attn.A_log": "M"}),
    ("mixer.dt_bias_M", "same", {"linear_attn.dt_bias": "M"}),
    ("mixer.norm_Y", "same", {"linear_attn.norm.weight": "Y"}),
    ("mixer.w_out_OD", "transposed", {"linear_attn.out_proj.weight": "D M*Y"}),
]
_GATED_ATTENTION = [
    (
        "mixer.w_in_DI",
        "transposed",
        {
            "self_attn.q_proj.weight": "Q*2*H D",  # per head [query | gate]
            "self_attn.k_proj.weight": "G*H D",
            "self_attn.v_proj.weight": "G*H D",
        },
    ),
    ("mixer.w_out_OD", "transposed", {"self_attn.o_proj.weight": "D Q*H"}),
    ("mixer.q_norm_H", "same", {"self_attn.q_norm.weight": "H"}),
    ("mixer.k_norm_H", "same", {"self_attn.k_norm.weight": "H"}),
]
_TARGET = [
    ("embed_VD", "same", {"embed_tokens.weight": "V D"}),
    ("norm_D", "same", {"norm.weight": "D"}),
]
_HEAD = [("w_out_DV", "transposed", {"lm_head.weight": "V D"})]


def _resolve(rows, sizes: dict[str, int], path: tuple[str | int, ...] = (), prefix: str | None = None) -> list[Leaf]:
    """Table rows with letters replaced by numbers, for the module at ``path`` (also the stored prefix if None)."""
    if prefix is None:
        prefix = "".join(f"{part}." for part in path)

    def count(word: str) -> int:
        return math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in word.split("*"))

    return [
        Leaf(
            path + tuple(attribute.split(".")),
            form,
            tuple(Piece(prefix + name, tuple(map(count, shape.split()))) for name, shape in stored.items()),
        )
        for attribute, form, stored in rows
    ]


def target_leaves(config: TargetConfig) -> list[Leaf]:
    """Every parameter of :class:`ready_jax.target.Target`."""
    sizes = dict(
        V=config.vocab_size,
        D=config.hidden_size,
        F=config.intermediate_size,
        C=config.conv_channels,
        M=config.linear_num_value_heads,
        Y=config.linear_value_head_dim,
        W=config.linear_conv_kernel_dim,
        Q=config.num_attention_heads,
        G=config.num_key_value_heads,
        H=config.head_dim,
    )
    leaves = _resolve(_TARGET + ([] if config.tie_word_embeddings else _HEAD), sizes)
    for i, kind in enumerate(config.layer_types):
        leaves += _resolve(_BLOCK + (_DELTANET if kind == LINEAR else _GATED_ATTENTION), sizes, ("layers", i))
    return leaves


_DRAFTER = [
    ("w_fuse_ID", "transposed", {"fc.weight": "D E*D"}),
    ("norm_fuse_D", "same", {"hidden_norm.weight": "D"}),
    ("norm_D", "same", {"norm.weight": "D"}),
]
_DRAFT_ATTENTION = [
    ("w_q_DO", "transposed", {"self_attn.q_proj.weight": "Q*H D"}),
    ("w_kv_DI", "transposed", {"self_attn.k_proj.weight": "G*H D", "self_attn.v_proj.weight": "G*H D"}),
    ("w_out_OD", "transposed", {"self_attn.o_proj.weight": "D Q*H"}),
    ("q_norm_H", "same", {"self_attn.q_norm.weight": "H"}),
    ("k_norm_H", "same", {"self_attn.k_norm.weight": "H"}),
]
_MARKOV = [
    ("markov.w1_VR", "same", {"markov_head.markov_w1.weight": "V R"}),
    ("markov.w2_RV", "transposed", {"markov_head.markov_w2.weight": "V R"}),
]
_MARKOV_KIND = {
    "vanilla": [],
    "gated": [
        ("markov.w_mix", "transposed", {"markov_head.gate_proj.weight": "R mix"}),
        ("markov.b_mix", "same", {"markov_head.gate_proj.bias": "R"}),
    ],
    "rnn": [
        ("markov.w_mix", "transposed", {"markov_head.joint_proj.weight": "3*R mix"}),
        ("markov.b_mix", "same", {"markov_head.joint_proj.bias": "3*R"}),
    ],
}
_CONFIDENCE = [
    ("confidence.w_I", "same", {"confidence_head.proj.weight": "1 confidence"}),
    ("confidence.b", "same", {"confidence_head.proj.bias": "1"}),
]
#: Reader weights stand under this prefix, so that a plain DSpark consumer can leave them out by one rule.
READER_PREFIX = "ready_reader."
_READ_SITE = [
    ("w_q_DI", "transposed", {"q_proj.weight": "latents*J D"}),
    ("gain_ZJ", "same", {"gain": "Z J"}),
    ("u_ZXJ", "same", {"u": "maps X J"}),
    ("v_ZYJ", "same", {"v": "maps Y J"}),
    ("w_in_IU", "transposed", {"in_proj.weight": "U features"}),
    ("w_out_UD", "transposed", {"out_proj.weight": "D U"}),
]
_READ_NORM = [("norm_I", "same", {"norm.weight": "features"})]


def drafter_leaves(config: DrafterConfig) -> list[Leaf]:
    """Every parameter of :class:`ready_jax.drafter.Drafter`."""
    rank, hidden = config.markov_rank, config.hidden_size
    sizes = dict(
        V=config.vocab_size,
        D=hidden,
        E=len(config.taps),
        F=config.intermediate_size,
        Q=config.num_attention_heads,
        G=config.num_key_value_heads,
        H=config.head_dim,
        R=rank,
        mix=hidden + (2 * rank if config.markov_head_type == "rnn" else rank),
        confidence=hidden + (rank if config.confidence_head_with_markov else 0),
    )
    rows = list(_DRAFTER)
    if config.own_embeddings:
        rows += _TARGET[:1] + _HEAD
    if rank:
        rows += _MARKOV + _MARKOV_KIND[config.markov_head_type]
    if config.confidence_head:
        rows += _CONFIDENCE
    leaves = _resolve(rows, sizes)
    for i in range(config.num_layers):
        leaves += _resolve(_BLOCK + _DRAFT_ATTENTION, sizes, ("layers", i))
    if config.reader is not None:
        for i in range(len(config.inject_layers)):
            leaves += _site_leaves(config.reader, hidden, i)
    return leaves


def _site_leaves(reader: ReaderConfig, hidden: int, site: int) -> list[Leaf]:
    layers, pairs = len(reader.state_layers), reader.num_pairs
    scales = {"pair": pairs, "raw": pairs, "layer": layers, "none": 0}[reader.scale_feature]
    sizes = dict(
        D=hidden,
        J=reader.rank,
        U=reader.mlp_hidden,
        X=reader.key_dim,
        Y=reader.value_dim,
        Z=pairs,
        maps={"pair": pairs, "layer": layers, "all": 1}[reader.projection_sharing],
        latents={"pair": pairs, "layer": layers, "shared": 1}[reader.query_latent],
        features=pairs * reader.rank + scales,
    )
    rows = _READ_SITE + (_READ_NORM if reader.f_norm else [])
    return _resolve(rows, sizes, ("reader", "sites", site), f"{READER_PREFIX}sites.{site}.")


# Keys are matched from their start: `mtp.layers.0.mlp...` must not pass for a layer of the text model.
_SKIP = [
    ("visual", re.compile(r"(model\.)?(visual|vision_tower)\.")),
    ("mtp", re.compile(r"(model\.|language_model\.)?mtp\.")),
]
_TARGET_PREFIX = re.compile(r"model\.language_model\.|language_model\.model\.|model\.")
_TARGET_HEAD = re.compile(r"(language_model\.|model\.language_model\.|model\.)?(?=lm_head\.)")

_REFUSE = [
    (
        re.compile(r"\.linear_attn\.in_proj_(qkvz|ba)\."),
        "Qwen3-Next packs q, k, v, z (and b, a) of a Gated DeltaNet layer per key head: another family, not supported",
    ),
    (
        re.compile(r"\.mlp\.(experts|shared_expert|shared_expert_gate|gate)\."),
        "a mixture-of-experts layer: only dense MLPs are supported",
    ),
    (
        re.compile(r"(_scale|_scale_inv|_scale_2|\.scales|\.qweight|\.qzeros|\.g_idx|\.weight_packed)$|(\.|_)scale_"),
        "a scale of a quantised (FP8, NVFP4, GPTQ, MLX) export: load the bf16 checkpoint instead",
    ),
    (
        re.compile(r"\.lora_[AB]\.|^base_model\."),
        "a LoRA adapter: merge it into its base checkpoint first",
    ),
]


def refused(key: str) -> str | None:
    """Why a stored tensor says that the checkpoint is of a kind that is not supported; None if it does not."""
    return next((reason for pattern, reason in _REFUSE if pattern.search(key)), None)


def skipped(key: str) -> str | None:
    """The rule by which a stored tensor is left out: ``visual`` or ``mtp``; None if it must be used."""
    return next((rule for rule, pattern in _SKIP if pattern.match(key)), None)


def canonical_target(key: str) -> str:
    """A target's stored name without its prefix; NeMo's detour for fp32 parameters is taken out."""
    head = _TARGET_HEAD.match(key)
    prefix = head or _TARGET_PREFIX.match(key)
    return key[prefix.end() if prefix else 0 :].replace(".linear_attn._fp32_params.", ".linear_attn.")


def canonical_drafter(key: str) -> str:
    """A drafter's stored name without a prefix; some trainers put the heads under ``logit_head.``."""
    return re.sub(r"^(model\.)?(logit_head\.)?", "", key)


def stored_target(name: str) -> str:
    """The name that ``Qwen3_5ForCausalLM`` gives a tensor."""
    return name if name.startswith("lm_head.") else f"model.{name}"
