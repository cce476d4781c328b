"""Nano's base drafter: plain DSpark, trained from scratch on the answers of nano's own target."""

from ready_jax.configs.drafter_training import FilesConfig, OptimizerConfig, Recipe, RegenerateConfig
from ready_jax.configs.nano import NANO_DRAFTER


def nano_base() -> Recipe:
    """DSpark's recipe at nano's size: CE 0.1 + L1 0.9 + confidence 1.0, decay 4, on regenerated answers.

    `python -m ready_jax.train.loop nano_base files.target=ready_jax/assets/nano/target files.out=FOLDER`
    Cost on one H200: 138 s to regenerate 89,268 answers (5.8 M tokens), compile included, then 28 ms a step.
    Expected: the last hundred steps show loss 1.47, training top-1 0.78 at slot 1 and an expected acceptance length
    (`tau_probabilistic`) of 2.87. The drafter is written to `FOLDER/dspark`.
    """
    return Recipe(
        drafter=NANO_DRAFTER,
        optimizer=OptimizerConfig(learning_rate=2e-3, steps=6300),
        regenerate=RegenerateConfig(num_prompts=90_000, sampled_share=0.1),
        files=FilesConfig(out="out/nano_base", bigram=True),
    )


RECIPES = (nano_base,)
