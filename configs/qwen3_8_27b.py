"""Qwen3.8-27B's text model, its public DSpark drafters, and ReaDy's readers, as configurations without weights.

For timing a model of full size with random weights (`ready_jax.serve.bench`) and for compiling it without a device.
A checkpoint's own `config.json` goes through `ready_jax.schema`; nothing here is used to load one.
Sources: Qwen/Qwen3.8-27B revision 1d4bf0f2 and RadixArk/Qwen3.8-27B-DSpark (revisions below), `config.json` each.
`LOOKALIKE` has the structure at a size for the CPU.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ready_jax.config import FULL, LINEAR, DrafterConfig, ReaderConfig, RopeConfig, TargetConfig, YarnConfig


@dataclass(frozen=True)
class Preset:
    """A target, drafters for it by revision, and the target layers whose states a reader may take.

    `reader_layers`: an early, a middle and the last Gated DeltaNet layer; ReaDy's final reader takes the latter two.
    """

    name: str
    target: TargetConfig
    drafters: dict[str, DrafterConfig]
    reader_layers: tuple[int, ...]
    revisions: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def reader(self, **changes) -> ReaderConfig:
        """ReaDy's final reader: rank 8, two state layers, one injection in the last draft layer, after attention."""
        c = self.target
        fields: dict[str, Any] = dict(
            rank=8, state_layers=self.reader_layers[1:], memory_heads=c.linear_num_value_heads
        )
        fields |= dict(key_dim=c.linear_key_head_dim, value_dim=c.linear_value_head_dim)
        return ReaderConfig(**(fields | changes))

    def drafter(self, revision: str, reader: ReaderConfig | None = None) -> DrafterConfig:
        """Raises ValueError for a revision that is not one of `drafters`."""
        if revision not in self.drafters:
            raise ValueError(f"drafter {revision!r} is not known: {self.name} has {', '.join(self.drafters)}")
        return replace(self.drafters[revision], reader=reader)

    def ablation(self, revision: str) -> dict[str, ReaderConfig]:
        """The published ablation around the final reader, one change at a time."""
        early, middle, last = self.reader_layers
        layers = self.drafter(revision).num_layers
        return {
            "final": self.reader(),
            "rank 128": self.reader(rank=self.target.linear_key_head_dim),
            "early state": self.reader(state_layers=(early,)),
            "middle state": self.reader(state_layers=(middle,)),
            "last state": self.reader(state_layers=(last,)),
            "three states": self.reader(state_layers=self.reader_layers),
            "three injections": self.reader(inject_layers=tuple(range(0, layers, 2))),
            "all injections": self.reader(inject_layers=tuple(range(layers))),
            "before attention": self.reader(inject_side="before_attention"),
        }


TARGET = TargetConfig(
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 16,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e7, rotary_dim=64),  # partial_rotary_factor 0.25
    tie_word_embeddings=False,
    max_position_embeddings=262144,
    eos_token_ids=(248046, 248044),
)

DRAFTER_V1 = DrafterConfig(
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=10240,
    num_layers=5,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(
        theta=1e7,
        rotary_dim=128,
        yarn=YarnConfig(
            factor=32.0,
            original_max_position_embeddings=8192,
            beta_fast=32.0,
            beta_slow=1.0,
            attention_factor=1.3465735902799727,  # 0.1 ln 32 + 1
        ),
    ),
    max_position_embeddings=262144,
    block_size=7,
    taps=(4, 16, 28, 40, 52),
    mask_token_id=248077,
    markov_rank=256,
    markov_head_type="vanilla",
    confidence_head=True,
    confidence_head_with_markov=True,
    own_embeddings=False,
    num_target_layers=64,
)

DRAFTER_V2 = replace(
    DRAFTER_V1,
    intermediate_size=17408,
    num_attention_heads=32,
    taps=(5, 19, 33, 47, 61),
    mask_token_id=248070,
)

QWEN3_8_27B = Preset(
    name="qwen3_8_27b",
    target=TARGET,
    drafters={"v1": DRAFTER_V1, "v2": DRAFTER_V2},
    reader_layers=(2, 30, 62),
    revisions={
        "v1": ("923ed3a8572615643f0137e424e4ce4edd7f1cda", "85ef153be924f17ce4bf62726954eeaa4a73e854"),
        "v2": ("b9a5dbdf03bc999c6c73c426b19c2d9041cea393", "b3c9910194dc7ae53fea3d95a1959b654f495416"),
    },
)

_SMALL = replace(
    DRAFTER_V2,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope=replace(DRAFTER_V2.rope, rotary_dim=16),
    max_position_embeddings=4096,
    taps=(0, 1),
    mask_token_id=500,
    markov_rank=16,
    num_target_layers=4,
)

LOOKALIKE = Preset(
    name="lookalike",
    target=replace(
        TARGET,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope=RopeConfig(theta=1e4, rotary_dim=8),
        max_position_embeddings=4096,
        eos_token_ids=(),
    ),
    drafters={"v1": replace(_SMALL, num_attention_heads=6, intermediate_size=64), "v2": _SMALL},
    reader_layers=(0, 1, 2),
)

PRESETS = {preset.name: preset for preset in (QWEN3_8_27B, LOOKALIKE)}
