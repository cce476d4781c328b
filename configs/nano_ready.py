"""ReaDy's two stages at nano's size, over the shipped base drafter, and the controls that belong to them.

Controls are fields of the same recipes: `adapt.reader.reads=zero`, `=shuffled` or `=identity` (a reader of the same
size that sees no state) in both stages; `nano_stateless` trains the LoRA alone for the steps of both stages on the
same rows. `adapt.window=16` cuts the draft context in all of them. Feasibility (`docs/decisions.md`): no gain from
the reader is expected at this size with an unrestricted context.
"""

from ready_jax.config import LoraConfig, ReaderConfig
from ready_jax.configs.drafter_training import (
    AdaptConfig,
    FilesConfig,
    LossConfig,
    OptimizerConfig,
    Recipe,
    RegenerateConfig,
    RowsConfig,
)

#: Steps of 64 rows of 640 tokens (4.2 answers each); the stages stand to each other as 20k to 50k samples. Together
#: they see the 89 k answers 2.5 times: three times the samples of the published recipe.
STAGE1, STAGE2 = 240, 600
BATCH = 64
LOSS = LossConfig(ce=1.0, l1=0.1, confidence=0.0)
READER = ReaderConfig(rank=8, state_layers=(2, 6), memory_heads=4, key_dim=128, value_dim=128, mlp_hidden=128)
LORA = LoraConfig(rank=16, alpha=32.0)
REGENERATE = RegenerateConfig(num_prompts=90_000, sampled_share=0.1)
BASE = "ready_jax/assets/nano/dspark"


def nano_ready_stage1() -> Recipe:
    """The reader alone, over the frozen base drafter: CE + 0.1 L1, no confidence loss.

    `python -m ready_jax.train.loop nano_ready_stage1 files.tokens=TOKENS files.out=FOLDER`
    `TOKENS` is `regenerated.npz.xz` of a `nano_base` run with `files.save_tokens=True`, or written by
    `python -m ready_jax.train.regenerate --recipe nano_ready_stage1 --out TOKENS` (its conversations by
    `train.data`); without it the answers are made again (138 s of an H200). Writes `FOLDER/adapter` (reader beside
    the base) and `FOLDER/merged`.
    Cost: 16 ms a step on one H200, 4 s in all (`results/nano_training.json`, run `ready_stage1`); its program took
    about a minute to compile.
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=1e-3, steps=STAGE1),
        adapt=AdaptConfig(trains=("reader",), reader=READER),
        loss=LOSS,
        regenerate=REGENERATE,
        files=FilesConfig(from_pretrained=BASE, out="out/nano_ready_stage1"),
    )


def nano_ready_stage2() -> Recipe:
    """Reader and LoRA together, from stage 1's adapter, on the rows that follow those of stage 1.

    `python -m ready_jax.train.loop nano_ready_stage2 files.from_pretrained=STAGE1/adapter files.tokens=TOKENS
    files.out=FOLDER`
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=2e-4, reader_learning_rate=3e-4, steps=STAGE2),
        adapt=AdaptConfig(trains=("reader", "lora"), reader=READER, lora=LORA),
        loss=LOSS,
        regenerate=REGENERATE,
        rows=RowsConfig(batch=BATCH, first=STAGE1 * BATCH),
        files=FilesConfig(from_pretrained="out/nano_ready_stage1/adapter", out="out/nano_ready_stage2"),
    )


def nano_stateless() -> Recipe:
    """The control without states: LoRA alone, on the rows and for the steps of both stages together.

    `python -m ready_jax.train.loop nano_stateless files.tokens=TOKENS files.out=FOLDER`
    """
    return Recipe(
        optimizer=OptimizerConfig(learning_rate=2e-4, steps=STAGE1 + STAGE2),
        adapt=AdaptConfig(trains=("lora",), lora=LORA),
        loss=LOSS,
        regenerate=REGENERATE,
        files=FilesConfig(from_pretrained=BASE, out="out/nano_stateless"),
    )


RECIPES = (nano_ready_stage1, nano_ready_stage2, nano_stateless)
