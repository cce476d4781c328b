"""``config.json`` of a target or a drafter, in and out.

Every key that changes shapes or mathematics must be there: the reference library's own defaults describe a 9B model,
so a missing key would silently give a wrong one. All faults of a file are reported together.
"""

from __future__ import annotations

from typing import Any

from ready_jax.config import FULL, LINEAR, DrafterConfig, TargetConfig
from ready_jax.config_fields import ConfigError, Fields, UnsupportedError, build, rope_config, rope_fields, rope_to_raw
from ready_jax.drafter_schema import drafter_config, drafter_to_raw

__all__ = ["ConfigError", "UnsupportedError", "check_pair", "drafter_config", "target_config", "to_raw"]

TARGET_TYPES = ("qwen3_5", "qwen3_5_text")
TARGET_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")


def _text_places(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Where the text model's settings stand: the nested ``text_config`` of a multimodal file, and the top level."""
    nested = raw.get("text_config")
    return {"text_config": nested, "": raw} if isinstance(nested, dict) else {"": raw}


def is_drafter(raw: dict[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to a block drafter, of whatever trainer."""
    named = any("DSpark" in str(name) or "DFlash" in str(name) for name in raw.get("architectures") or ())
    return named or "dflash_config" in raw or "speculators_model_type" in raw


def _refuse_other_targets(fields: Fields, raw: dict[str, Any]) -> None:
    """One clear reason for every well-known kind that is not this family."""
    types = [str(place["model_type"]) for place in reversed(fields.places.values()) if place.get("model_type")]
    architectures = [str(name) for name in raw.get("architectures") or ()]
    named = f"{fields.where}: model_type={types}, architectures={architectures}"
    family = f"known are model_type {list(TARGET_TYPES)} with architectures {list(TARGET_ARCHITECTURES)}"
    experts = fields.find("num_experts", "num_local_experts")
    if is_drafter(raw):
        raise ConfigError(f"{named}: this is a drafter, needed a target (ready_jax.load_drafter opens it)")
    if any("qwen3_next" in kind for kind in types) or any("Qwen3Next" in name for name in architectures):
        raise UnsupportedError(
            f"{named}: Qwen3-Next packs its projections per key head and is a mixture of experts; {family}"
        )
    if experts or any("moe" in name.lower() for name in types + architectures):
        raise UnsupportedError(
            f"{named}, num_experts={experts}: a mixture of experts, only dense MLPs are implemented; {family}"
        )
    if any(kind in ("qwen3", "qwen2", "qwen3_vl") for kind in types):
        raise UnsupportedError(f"{named}: a dense attention model without Gated DeltaNet layers; {family}")
    wrong = [kind for kind in types if kind not in TARGET_TYPES]
    wrong += [name for name in architectures if name not in TARGET_ARCHITECTURES]
    if wrong:
        raise UnsupportedError(f"{named}: found {wrong}; {family}")
    if not types:
        fields.missing.append("model_type")


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """``layer_types``, or from ``full_attention_interval``: every n-th layer is full attention."""
    count = fields.positive("num_hidden_layers")
    kinds = fields.find("layer_types")
    if kinds is None:
        interval = fields.find("full_attention_interval")
        if interval is None:
            fields.missing.append("layer_types (or full_attention_interval)")
            return ()
        if not isinstance(interval, int) or interval < 1:
            fields.wrong.append(f"full_attention_interval={interval!r}: needed an integer of at least 1")
            return ()
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
    if not isinstance(kinds, list) or len(kinds) != count:
        found = len(kinds) if isinstance(kinds, list) else repr(kinds)
        fields.wrong.append(f"layer_types has {found} entries, needed num_hidden_layers={count}")
        return ()
    return tuple(map(str, kinds))


def _eos_ids(fields: Fields, generation: dict[str, Any] | None) -> tuple[int, ...]:
    """Every end-of-sequence id that the files name, those of ``generation_config.json`` first.

    The union: a chat turn ends with another token than a document, and either file may name only one of them.
    """
    ids: list[int] = []
    for source in (generation or {}, *fields.places.values()):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    wrong = [i for i in ids if not isinstance(i, int)]
    if wrong:
        fields.wrong.append(f"eos_token_id={wrong}: needed whole numbers")
        return ()
    return tuple(dict.fromkeys(ids))


def target_config(raw: dict[str, Any], where: str, generation: dict[str, Any] | None = None) -> TargetConfig:
    """The target that ``config.json`` describes; ``where`` names the file in messages.

    ``generation`` is ``generation_config.json``, for its end-of-sequence ids. Raises ConfigError with every fault,
    UnsupportedError (also a NotImplementedError) for a kind of model that is not implemented.
    """
    fields = Fields(where, _text_places(raw))
    _refuse_other_targets(fields, raw)
    need, positive = fields.need, fields.positive
    head_dim = positive("head_dim")
    rotary = rope_fields(fields).need(float, "partial_rotary_factor") * head_dim
    if rotary != int(rotary):
        fields.wrong.append(f"partial_rotary_factor * head_dim = {rotary}: needed a whole number")
    activation = need(str, "hidden_act")
    if activation and activation != "silu":
        fields.wrong.append(f"hidden_act={activation!r}: needed 'silu', no other activation is implemented")
    fields.only([False], "attention_bias", "projections have no bias here")
    fields.only([True], "attn_output_gate", "attention without an output gate is another family")
    fields.only(["silu", "swish"], "output_gate_type", "the gate of a Gated DeltaNet output is SiLU here")
    values = dict(
        vocab_size=positive("vocab_size"),
        hidden_size=positive("hidden_size"),
        intermediate_size=positive("intermediate_size"),
        layer_types=_layer_types(fields),
        num_attention_heads=positive("num_attention_heads"),
        num_key_value_heads=positive("num_key_value_heads"),
        head_dim=head_dim,
        linear_num_key_heads=positive("linear_num_key_heads"),
        linear_num_value_heads=positive("linear_num_value_heads"),
        linear_key_head_dim=positive("linear_key_head_dim"),
        linear_value_head_dim=positive("linear_value_head_dim"),
        linear_conv_kernel_dim=positive("linear_conv_kernel_dim"),
        rms_norm_eps=need(float, "rms_norm_eps"),
        rope=rope_config(fields, int(rotary)),
        tie_word_embeddings=need(bool, "tie_word_embeddings"),
        max_position_embeddings=positive("max_position_embeddings"),
        eos_token_ids=_eos_ids(fields, generation),
    )
    return build(fields, TargetConfig, **values)


def eos_to_raw(ids: tuple[int, ...]) -> int | list[int] | None:
    return (ids[0] if len(ids) == 1 else list(ids)) if ids else None


def _target_to_raw(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` of a ``Qwen3_5ForCausalLM`` that ``target_config`` reads back as the same target."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "eos_token_id": eos_to_raw(config.eos_token_ids),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_value_head_dim": config.linear_value_head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "qwen3_5_text",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope_to_raw(config.rope, config.head_dim)},
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def to_raw(config: TargetConfig | DrafterConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """``config.json`` that the reference library opens and that reads back as the same configuration."""
    return _target_to_raw(config, dtype) if isinstance(config, TargetConfig) else drafter_to_raw(config, dtype)


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """ConfigError with every reason why this drafter cannot draft for this target.

    Position limits may differ: past the drafter's limit decoding goes on without proposals.
    """
    faults = [
        f"{name}: the drafter has {found}, needed {needed} as in the target"
        for name, found, needed in (
            ("hidden_size", drafter.hidden_size, target.hidden_size),
            ("vocab_size", drafter.vocab_size, target.vocab_size),
            ("num_target_layers", drafter.num_target_layers or target.num_layers, target.num_layers),
        )
        if found != needed
    ]
    last = target.num_layers - 2
    outside = [tap for tap in drafter.taps if not -1 <= tap <= last]
    if outside:
        faults.append(
            f"target_layer_ids names {outside}: the drafter may tap layers -1 (embedding) to {last} of the target"
        )
    reader = drafter.reader
    if reader is not None:
        without = [layer for layer in reader.state_layers if layer not in target.linear_layers]
        if without:
            faults.append(
                f"state_layers names {without}: these layers of the target have no recurrent state, it has one in "
                f"{list(target.linear_layers)} (absolute layer numbers)"
            )
        faults += [
            f"reader {name}: found {found}, needed {needed} as in the target"
            for name, found, needed in (
                ("memory_heads", reader.memory_heads, target.linear_num_value_heads),
                ("key_dim", reader.key_dim, target.linear_key_head_dim),
                ("value_dim", reader.value_dim, target.linear_value_head_dim),
            )
            if found != needed
        ]
    if faults:
        raise ConfigError("drafter and target do not fit: " + "; ".join(faults))
