"""Nano's base drafter: plain DSpark, trained from scratch on the answers of nano's own target."""

from dataclasses import dataclass, field

from ready_jax.config import DrafterConfig
from ready_jax.configs.drafter_training import LossConfig, OptimizerConfig, RegenerateConfig, RowsConfig
from ready_jax.configs.nano import NANO_DRAFTER


@dataclass(frozen=True)
class Files:
    """Where things are read and written. ``tokens``: regenerated answers to reuse ("" regenerates them)."""

    target: str = ".carry/target"
    conversations: str = ".carry/sft.npz.xz"
    tokens: str = ""
    out: str = "out/nano_base"
    save_tokens: bool = False
    log_every: int = 100


@dataclass(frozen=True)
class Recipe:
    drafter: DrafterConfig
    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=LossConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    rows: RowsConfig = field(default_factory=RowsConfig)
    files: Files = field(default_factory=Files)


def nano_base() -> Recipe:
    """DSpark's recipe at nano's size: CE 0.1 + L1 0.9 + confidence 1.0, decay 4, on regenerated answers.

    `python -m ready_jax.train.drafter_base nano_base files.target=FOLDER files.out=FOLDER`
    Cost: about 6 minutes of one H200 (2 to regenerate, 4 to train).
    Expected: greedy acceptance length near 3 over the seven prompt sets, flattered by loops; 2.4 without them.
    """
    return Recipe(drafter=NANO_DRAFTER, optimizer=OptimizerConfig(learning_rate=1.5e-3, steps=7000))


RECIPES = (nano_base,)
