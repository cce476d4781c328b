"""Nano, the shipped pair: its dimensions and the recipes that train its target."""

from dataclasses import dataclass, field

from ready_jax.config import FULL, LINEAR, DrafterConfig, RopeConfig, TargetConfig

VOCAB_SIZE = 8192
# The tokenizer's added tokens stand at the end of the vocabulary.
ENDOFTEXT, IM_START, IM_END, MASK, THINK, END_THINK = range(VOCAB_SIZE - 6, VOCAB_SIZE)

NANO_TARGET = TargetConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=704,
    layer_types=((LINEAR,) * 3 + (FULL,)) * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, rotary_dim=32),
    tie_word_embeddings=True,
    max_position_embeddings=4096,
    eos_token_ids=(IM_END, ENDOFTEXT),
)
"""10.1 M parameters (8.0 M in layers), 20.3 MB in bf16."""

NANO_DRAFTER = DrafterConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, rotary_dim=64),
    max_position_embeddings=4096,
    block_size=7,
    taps=(1, 3, 5),
    mask_token_id=MASK,
    markov_rank=64,
    markov_head_type="vanilla",
    confidence_head=True,
    confidence_head_with_markov=True,
    own_embeddings=False,
    num_target_layers=8,
)
"""A DSpark drafter that borrows the target's embedding and head: 2.4 M parameters, 4.8 MB in bf16."""


@dataclass(frozen=True)
class Data:
    """Files that `ready_jax.train.data` writes, and the row length they are packed to."""

    pretrain: str = "out/data/pretrain.npy.xz"
    conversations: str = "out/data/sft.npz.xz"
    heldout: str = "out/data/heldout.npz.xz"
    prompts: str = "out/data/prompts.npz"
    row_length: int = 1024


@dataclass(frozen=True)
class Optimizer:
    """AdamW; decay on matrices only. The rate rises over `warmup_steps` and falls to zero in the last phase."""

    learning_rate: float
    warmup_steps: int
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """Shares of the supervised tokens by category, and how answers are chosen.

    A conversation whose longest answer exceeds `long_answer` tokens is drawn with `long_weight`, one of `rare`
    sources (small talk, bookings, one-word answers) with `rare_weight`; one that was cut before its end of turn is
    never drawn.
    """

    math: float = 0.27
    code: float = 0.27
    chat: float = 0.18
    instruction: float = 0.20
    reasoning: float = 0.08
    long_answer: int = 200
    long_weight: float = 0.4
    rare: tuple[str, ...] = (
        "sgd", "taskmaster4", "topical_chat", "natural_instructions", "gpteacher_toolformer", "wikisql",
        "openstax_exercises", "flan_cot_creak", "flan_cot_sensemaking",
    )  # fmt: skip
    rare_weight: float = 0.3


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of the two phases and the rows of a step.

    `max_seconds` counts from the first step: after `fit_after` steps both phases are shortened in proportion if
    their rate would exceed it, so that the schedule always completes.
    """

    pretrain: int
    sft: int
    batch_size: int = 64
    max_seconds: float = 420.0
    fit_after: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Output:
    """Where a run writes. `dtype` is the type of the stored matrices; `state` a folder for resumable state, or none."""

    folder: str = "out/nano"
    dtype: str = "float32"
    state: str = ""
    save_every: int = 1000
    log_every: int = 50
    eval_every: int = 1500
    loop_prompts: int = 1024
    new_tokens: int = 256


@dataclass(frozen=True)
class TargetRecipe:
    model: TargetConfig
    optimizer: Optimizer
    steps: Steps
    data: Data = field(default_factory=Data)
    mixture: Mixture = field(default_factory=Mixture)
    output: Output = field(default_factory=Output)


@dataclass(frozen=True)
class Unloop:
    """Greedy loops and what is done to them.

    Each of `rounds` decodes `prompts` greedy continuations and takes `steps` optimizer steps, half of each batch
    continuations, half supervised rows. In a continuation with more than `min_share` repeated 6-grams every token
    that completes a repeated `ngram`-gram is penalised by `-alpha log(1 - p)` (Welleck et al. 2020, 1908.04319).
    """

    rounds: int = 24
    prompts: int = 2048
    steps: int = 32
    batch_size: int = 64
    ngram: int = 4
    min_share: float = 0.1
    alpha: float = 1.0
    max_prompt: int = 256
    max_seconds: float = 150.0
    seed: int = 1


@dataclass(frozen=True)
class UnloopRecipe:
    model: TargetConfig
    start: str
    optimizer: Optimizer
    unloop: Unloop = field(default_factory=Unloop)
    data: Data = field(default_factory=Data)
    mixture: Mixture = field(default_factory=Mixture)
    output: Output = field(default_factory=Output)


def nano_target() -> TargetRecipe:
    """Nano's target from scratch: texts and conversations, then supervised answers while the rate falls to zero.

    `python -m ready_jax.train.target_lm nano_target output.folder=FOLDER`
    Cost: 449 s of one H200, compile included (measured with `output.dtype=bfloat16 output.loop_prompts=0
    steps.max_seconds=400`: 5222 steps, 342 M tokens, 855 k tokens/s). Reads the four files of `Data`; writes
    `params-N.safetensors`, `log.jsonl` and `result.json`.
    Expected: held-out answers 1.946 nats/token (1.915 at step 4500: the last phase overfits a little); greedy text
    on topic that loops in 49 % of benchmark continuations.
    """
    return TargetRecipe(
        model=NANO_TARGET,
        optimizer=Optimizer(learning_rate=3e-3, warmup_steps=200),
        steps=Steps(pretrain=4200, sft=2500),
    )


def nano_unloop() -> UnloopRecipe:
    """Repairs greedy loops of `nano_target` by unlikelihood on its own continuations.

    `python -m ready_jax.train.target_lm nano_unloop start=FOLDER output.folder=FOLDER2`
    Cost: 199 s of one H200, both measurements included (107 s for the 24 rounds). `start` is the folder that
    `nano_target` wrote. Writes the same files.
    Expected: loops in 8 % of benchmark continuations (49 % before); held-out answers 2.024 nats/token. The shipped
    target is the half-and-half blend with its start (`--export FOLDER --blend START 0.5`);
    docs/decisions.md says how that share was chosen.
    """
    return UnloopRecipe(
        model=NANO_TARGET,
        start="out/nano",
        optimizer=Optimizer(learning_rate=4e-4, warmup_steps=20, weight_decay=0.0),
        output=Output(folder="out/nano_unloop"),
    )


RECIPES = (nano_target, nano_unloop)
