"""Frozen descriptions of a target, a drafter and a state reader.

Nothing here has a default that would change shapes or mathematics of a loaded checkpoint: the classes are filled
by :mod:`ready_jax.schema` from a checkpoint's ``config.json`` (which names every missing key) or by the presets in
``configs/``. Each class checks its own consistency when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class YarnConfig:
    """YaRN frequency scaling (Peng et al. 2023); ``attention_factor`` multiplies cos and sin."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over the first ``rotary_dim`` entries of a head, half-split pairs (i, i + rotary_dim/2)."""

    theta: float
    rotary_dim: int
    yarn: YarnConfig | None = None

    def __post_init__(self):
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even: entries are rotated in pairs")


@dataclass(frozen=True)
class TargetConfig:
    """The ``qwen3_5`` text family (Qwen3.5, 3.6 and 3.8 dense): names follow the Hugging Face configuration."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        unknown = sorted(set(self.layer_types) - {FULL, LINEAR})
        if unknown:
            raise ValueError(f"layer_types holds {unknown}: only {LINEAR!r} and {FULL!r} layers are known")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}: each key head serves the same number of memories"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: each key/value head serves a group of query heads"
            )
        if not 0 < self.rope.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim={self.rope.rotary_dim} must lie in 1..head_dim={self.head_dim}")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Absolute numbers of the layers that hold a recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def conv_channels(self) -> int:
        """q, k and v side by side: what the causal convolution runs over."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_width

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class ReaderConfig:
    """ReaDy state reader: which committed states are read, how, and where the result enters the drafter.

    Field by field these are the readings A1..A14 of the published description; the defaults are the ones chosen in
    ``docs/decisions.md``. ``state_layers`` are absolute decoder-layer numbers of the target.

    ``reads`` other than "own" makes a control of the same size: states that are zero, those of the sequence half a
    batch away ("shuffled"), or one identity matrix for all ("identity": an MLP on the draft's hidden state alone).
    """

    rank: int
    state_layers: tuple[int, ...]
    memory_heads: int
    key_dim: int
    value_dim: int
    state_heads: tuple[int, ...] | None = None
    inject_layers: tuple[int, ...] | None = None  # None: the last draft layer
    inject_side: Literal["after_attention", "before_attention"] = "after_attention"
    inject_target: Literal["mlp_input", "residual", "both"] = "mlp_input"
    state_rms_axes: Literal["head", "row", "layer"] = "head"
    scale_feature: Literal["pair", "layer", "raw", "none"] = "pair"
    projection_sharing: Literal["pair", "layer", "all"] = "pair"
    query_latent: Literal["pair", "layer", "shared"] = "pair"
    query_norm_axes: Literal["rank", "all", "none"] = "rank"
    read_scale: Literal["key_dim", "rank"] = "key_dim"
    mlp_hidden: int = 256
    mlp_act: Literal["silu", "gelu", "relu"] = "silu"
    f_norm: bool = False
    eps: float = 1e-6
    reads: Literal["own", "zero", "shuffled", "identity"] = "own"

    def __post_init__(self):
        if self.rank < 1 or self.rank > min(self.key_dim, self.value_dim):
            raise ValueError(
                f"rank={self.rank} must lie in 1..min(key_dim, value_dim)={min(self.key_dim, self.value_dim)}: "
                "U and V have orthonormal columns"
            )
        if not self.state_layers or list(self.state_layers) != sorted(set(self.state_layers)):
            raise ValueError(f"state_layers={self.state_layers} must be a strictly increasing, non-empty tuple")
        wrong = [h for h in self.state_heads or () if not 0 <= h < self.memory_heads]
        if wrong:
            raise ValueError(f"state_heads names {wrong}: the target has memory heads 0..{self.memory_heads - 1}")
        if self.state_rms_axes == "row" and self.scale_feature != "none":
            raise ValueError(
                f"state_rms_axes='row' gives one scale per value row, not per pair: scale_feature must be 'none', "
                f"found {self.scale_feature!r}"
            )

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(range(self.memory_heads)) if self.state_heads is None else self.state_heads

    @property
    def num_pairs(self) -> int:
        return len(self.state_layers) * len(self.heads)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank updates ``alpha / rank * x A B`` of a drafter's projections, named as in a checkpoint (``q_proj``)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")

    def __post_init__(self):
        if self.rank < 1 or not self.targets:
            raise ValueError(f"LoRA needs a rank of at least 1 and targets: found {self.rank} and {self.targets}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class DrafterConfig:
    """A DSpark block drafter (Qwen3-style backbone, injected context, sequential Markov head).

    ``taps`` are absolute target layers (-1: the embedding output); ``own_embeddings`` says whether the checkpoint
    carries its own embedding and head (DeepSpec's layout) or borrows the target's at run time.
    ``sliding_window`` (tokens of context before the anchor that a block row sees; None: all of them).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"]
    confidence_head: bool
    confidence_head_with_markov: bool
    own_embeddings: bool
    sliding_window: int | None = None
    num_target_layers: int | None = None
    reader: ReaderConfig | None = None

    def __post_init__(self):
        if list(self.taps) != sorted(set(self.taps)) or not self.taps:
            raise ValueError(f"target_layer_ids={list(self.taps)} must be strictly increasing and not empty")
        if self.num_target_layers is not None and self.taps[-1] >= self.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids={list(self.taps)} must stay below the last layer {self.num_target_layers - 1}: "
                "the reference library returns that layer only after the final norm"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} has no embedding row: vocab_size is {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1")
        if self.markov_rank == 0 and self.confidence_head and self.confidence_head_with_markov:
            raise ValueError(
                "markov_rank=0 with confidence_head_with_markov=true: the confidence head would read a Markov "
                "embedding that does not exist"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1 token, or null")
        wrong = [i for i in (self.reader.inject_layers or ()) if not 0 <= i < self.num_layers] if self.reader else []
        if wrong:
            raise ValueError(f"inject_layers names {wrong}: the drafter has layers 0..{self.num_layers - 1}")

    @property
    def inject_layers(self) -> tuple[int, ...]:
        """Draft layers that take the reader's update."""
        if self.reader is None:
            return ()
        return (self.num_layers - 1,) if self.reader.inject_layers is None else self.reader.inject_layers
