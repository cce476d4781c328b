"""Sections that the recipes of drafters are made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossConfig:
    """Weights of the three terms, the decay of later slots ``exp(-k / decay)``, and blocks per loss slice.

    DSpark: 0.1, 0.9, 1.0, decay 4; ReaDy's adaptation: 1.0, 0.1, 0.0. ``slice_blocks`` bounds memory only.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    slice_blocks: int = 512


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with torch's default betas, linear warm-up over a share of the steps, then cosine to 0; global clip."""

    learning_rate: float
    steps: int
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class RegenerateConfig:
    """Answers of the target to training prompts: greedy, and a share sampled at a temperature."""

    num_prompts: int = 81920
    max_per_source: int = 8000
    prompt_tokens: int = 384
    new_tokens: int = 256
    min_answer: int = 4
    sampled_share: float = 0.2
    temperature: float = 0.7
    batch: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class RowsConfig:
    """A training batch: packed rows and anchors per row; ``seed`` orders the rows, draws anchors and weights."""

    batch: int = 64
    length: int = 640
    anchors: int = 48
    seed: int = 0
