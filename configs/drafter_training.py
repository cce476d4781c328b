"""Sections that the recipes of drafters are made of; `Recipe` is what `ready_jax.train.loop` runs."""

from dataclasses import dataclass, field

from ready_jax.config import DrafterConfig, LoraConfig, ReaderConfig


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
    """AdamW with torch's default betas, linear warm-up over a share of the steps, then cosine to 0; global clip.

    ``reader_learning_rate`` (None: the same) is the reader's. ``accumulate`` micro-batches make a batch.
    ``max_nonfinite`` steps in a row whose loss or gradient is not finite end the run.
    """

    learning_rate: float
    steps: int
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    reader_learning_rate: float | None = None
    accumulate: int = 1
    max_nonfinite: int = 5


@dataclass(frozen=True)
class AdaptConfig:
    """How the drafter differs from the one it starts as, and what of it trains.

    ``trains``: of "drafter" (all but reader, embedding and head), "reader", "lora". ``reader`` and ``lora`` are added
    where the starting drafter has none. ``window``: tokens of context before the anchor (None: as it starts).
    """

    trains: tuple[str, ...] = ("drafter",)
    window: int | None = None
    reader: ReaderConfig | None = None
    lora: LoraConfig | None = None


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
    """A training batch: packed rows and anchors per row; ``seed`` orders the rows, draws anchors and weights.

    ``first``: where in the stream of rows the run begins, so that a second stage takes others than the first.
    ``group``: anchors of a row that pass through the drafter at once and are recomputed backward; 0 keeps all.
    """

    batch: int = 64
    length: int = 640
    anchors: int = 48
    seed: int = 0
    first: int = 0
    group: int = 0


@dataclass(frozen=True)
class MeshConfig:
    """Devices: ``data * shard`` of them. Rows are spread over all; weights and moments are split over ``shard``."""

    data: int = 1
    shard: int = 1


@dataclass(frozen=True)
class EvaluateConfig:
    """Real acceptance on held-out prompts every ``every`` steps and at the end (0: never), greedy.

    ``prompts``: benchmark prompts (.npz of `train.data`); ``heldout``: a corpus; either may be "".
    """

    every: int = 0
    prompts: str = ""
    heldout: str = ""
    max_samples: int = 32
    batch: int = 64
    prompt_tokens: int = 384
    new_tokens: int = 128


@dataclass(frozen=True)
class FilesConfig:
    """What is read and written; "" is none.

    ``from_pretrained``: weights to start from (a folder or hub name, LoRA and reader beside a base included);
    ``resume_from``: a run to go on with ("auto": the one in ``out``, if there is one). Rows come from ``shards`` (a
    glob of packed rows), else ``tokens`` (a corpus of regenerated answers), else ``conversations`` (a corpus that is
    regenerated now, unless ``regenerate.num_prompts=0``).
    """

    target: str = "ready_jax/assets/nano/target"
    target_revision: str = ""
    from_pretrained: str = ""
    revision: str = ""
    resume_from: str = ""
    shards: str = ""
    tokens: str = ""
    conversations: str = "out/data/sft.npz.xz"
    out: str = "out/run"
    save_tokens: bool = False
    bigram: bool = False


@dataclass(frozen=True)
class LogConfig:
    """How often things are logged and saved, in steps (``save_every=0``: at the end only), and where to.

    ``metrics.jsonl`` is always written. ``wandb`` names a project ("": off). ``keep`` recent states stay.
    """

    every: int = 100
    save_every: int = 1000
    keep: int = 2
    tensorboard: bool = True
    wandb: str = ""
    progress: bool = True


@dataclass(frozen=True)
class Recipe:
    """A training run of a drafter. ``drafter`` is one to start from scratch, None with ``files.from_pretrained``.

    ``preset`` names the dimensions of `configs/qwen3_8_27b.py` for estimates where no weights are.
    """

    optimizer: OptimizerConfig
    drafter: DrafterConfig | None = None
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    rows: RowsConfig = field(default_factory=RowsConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    log: LogConfig = field(default_factory=LogConfig)
    preset: str = ""
