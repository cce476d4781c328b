"""ReaDy's two stages over the public DSpark drafter of Qwen3.8-27B, the control without states, and DSpark itself.

Data: answers of the target, thinking on, to the prompts of `mlabonne/open-perfectblend`. `TOKENS` is a corpus of them,
which two commands write, the second speculatively with the public drafter and resumable:

    python -m ready_jax.train.data --dataset mlabonne/open-perfectblend --prompts --max-tokens 768 --max-samples 100000
        --tokenizer Qwen/Qwen3.8-27B --out out/perfectblend.npz.xz
    python -m ready_jax.train.regenerate --recipe qwen3_8_27b_ready_stage1 --out TOKENS

It is split into rows of 2048 tokens; a row counts as a sample. A micro-batch is one row, whose 512 blocks pass the
drafter at once and are kept for the gradient: with the target (50 GiB) that is about 75 GiB, of 134 that an H200 has.
Smaller devices set `rows.group` (anchors that pass together and are recomputed).

Where the publication of ReaDy (arXiv 2610.20503) is silent the values are this project's: LoRA's rank and targets,
learning rates, batch, warm-up, anchors (as in DSpark, arXiv 2607.05147). `python -m ready_jax.train.bench` times a
step without any checkpoint.
"""

from dataclasses import replace

from ready_jax.config import LoraConfig
from ready_jax.configs.drafter_training import (
    AdaptConfig,
    FilesConfig,
    LossConfig,
    OptimizerConfig,
    Recipe,
    RegenerateConfig,
    RowsConfig,
)
from ready_jax.configs.qwen3_8_27b import QWEN3_8_27B, Preset

#: Samples of the two stages (published), in batches of 64 rows: 313 and 782 steps.
SAMPLES1, SAMPLES2, BATCH = 20_000, 50_000, 64
STEPS1, STEPS2 = -(-SAMPLES1 // BATCH), -(-SAMPLES2 // BATCH)
LOSS = LossConfig(ce=1.0, l1=0.1, confidence=0.0, slice_blocks=128)
LORA = LoraConfig(rank=32, alpha=64.0)
ROWS = RowsConfig(batch=BATCH, length=2048, anchors=512)
TARGET = "Qwen/Qwen3.8-27B"
TARGET_REVISION = "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0"
DRAFTER = "RadixArk/Qwen3.8-27B-DSpark"
#: Prompts are regenerated in batches whose memory fits beside the target.
REGENERATE = RegenerateConfig(
    num_prompts=SAMPLES1 + SAMPLES2,
    max_per_source=SAMPLES1 + SAMPLES2,
    prompt_tokens=768,
    new_tokens=1280,
    sampled_share=0.0,
    batch=64,
)


def _files(out: str, start: str = DRAFTER) -> FilesConfig:
    revision = QWEN3_8_27B.revisions["v2"][-1] if start == DRAFTER else ""
    return FilesConfig(
        target=TARGET,
        target_revision=TARGET_REVISION,
        from_pretrained=start,
        revision=revision,
        conversations="out/perfectblend.npz.xz",
        save_tokens=True,
        out=out,
    )


def qwen3_8_27b_ready_stage1(preset: Preset = QWEN3_8_27B) -> Recipe:
    """The reader alone, over the frozen public drafter: CE + 0.1 L1, no confidence loss, 20k samples.

    `python -m ready_jax.train.loop qwen3_8_27b_ready_stage1 files.tokens=TOKENS files.out=FOLDER`
    Cost: 3.62 rows a second on one H200, 1.5 h (`results/train_27b_h200.json`: random weights, steps of four rows,
    60.1 GiB at most). Writes `FOLDER/adapter` and `FOLDER/merged`.
    Expected: starts exactly at the public drafter; no result of ours yet.
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=1e-3, steps=STEPS1, accumulate=BATCH),
        adapt=AdaptConfig(trains=("reader",), reader=preset.reader()),
        loss=LOSS,
        regenerate=REGENERATE,
        rows=ROWS,
        files=_files("out/qwen3_8_27b_ready_stage1"),
        preset=preset.name,
    )


def qwen3_8_27b_ready_stage2(preset: Preset = QWEN3_8_27B) -> Recipe:
    """Reader and LoRA together, from stage 1's adapter, 50k samples that follow those of stage 1.

    `python -m ready_jax.train.loop qwen3_8_27b_ready_stage2 files.from_pretrained=STAGE1/adapter files.tokens=TOKENS
    files.out=FOLDER`
    Cost: 2.94 rows a second on one H200, 4.7 h (the same file, 73.4 GiB at most).
    Expected of the published recipe: 4.5285 tokens per round on seven benchmarks (4.1739 before); no result of ours.
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=2e-4, reader_learning_rate=3e-4, steps=STEPS2, accumulate=BATCH),
        adapt=AdaptConfig(trains=("reader", "lora"), reader=preset.reader(), lora=LORA),
        loss=LOSS,
        regenerate=REGENERATE,
        rows=replace(ROWS, first=STEPS1 * BATCH),
        files=_files("out/qwen3_8_27b_ready_stage2", "out/qwen3_8_27b_ready_stage1/adapter"),
        preset=preset.name,
    )


def qwen3_8_27b_stateless(preset: Preset = QWEN3_8_27B) -> Recipe:
    """The control without states: LoRA alone, on the rows and for the steps of both stages together.

    `python -m ready_jax.train.loop qwen3_8_27b_stateless files.tokens=TOKENS files.out=FOLDER`
    Cost: one H200, 8.7 h at 35 % of its peak, not measured. Published without states: 4.2732 tokens per round.
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=2e-4, steps=STEPS1 + STEPS2, accumulate=BATCH),
        adapt=AdaptConfig(trains=("lora",), lora=LORA),
        loss=LOSS,
        regenerate=REGENERATE,
        rows=ROWS,
        files=_files("out/qwen3_8_27b_stateless"),
        preset=preset.name,
    )


def qwen3_8_27b_base(preset: Preset = QWEN3_8_27B) -> Recipe:
    """DSpark from scratch: CE 0.1 + L1 0.9 + confidence 1.0, batches of 512, one pass over 1.3 M samples.

    `python -m ready_jax.train.loop qwen3_8_27b_base files.tokens=TOKENS files.out=FOLDER`
    The publication runs ten passes over answers of up to 4096 tokens. Cost: days on several H200 (`mesh.data=8
    optimizer.accumulate=64 --dry-run` says how many), not measured. The drafter is written to `FOLDER/dspark`.
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=6e-4, steps=1_300_000 // 512, accumulate=512),
        drafter=preset.drafter("v2"),
        loss=replace(LOSS, ce=0.1, l1=0.9, confidence=1.0),
        regenerate=replace(REGENERATE, num_prompts=1_300_000, max_per_source=1_300_000),
        rows=replace(ROWS, batch=512),
        files=_files("out/qwen3_8_27b_base", ""),
        preset=preset.name,
    )


RECIPES = (qwen3_8_27b_ready_stage1, qwen3_8_27b_ready_stage2, qwen3_8_27b_stateless, qwen3_8_27b_base)
