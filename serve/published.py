"""Published values of ReaDy and DSpark, with the conditions they were measured under.

Means over the seven benchmarks of arXiv 2610.20503 (ReaDy), its survival at proposal 7, and the ablations of its final
reader; milliseconds per round follow as acceptance length / throughput.
"""

from dataclasses import dataclass

SOURCE = "ReaDy, arXiv 2610.20503"
CONDITIONS = (
    "Qwen3.8-27B, one B200, SGLang, bf16 unquantised, concurrency 1, greedy, thinking on, at most 1,024 new tokens, "
    "16,384 tokens of context, block 7; acceptance length as SGLang counts it"
)


@dataclass(frozen=True)
class Published:
    """Decode tokens/s and acceptance length (None: not given); ``what`` names the ablation, "" the method itself."""

    method: str
    tokens_per_second: float | None
    acceptance_length: float | None
    what: str = ""

    @property
    def milliseconds_per_round(self) -> float | None:
        if self.tokens_per_second is None or self.acceptance_length is None:
            return None
        return 1e3 * self.acceptance_length / self.tokens_per_second


VALUES = (
    Published("autoregressive", 95.86, 1.0),
    Published("dspark", 280.42, 4.1739),
    Published("stateless", 286.50, 4.2732),
    Published("ready", 302.78, 4.5285),
    Published("ready", None, 4.5404, "rank 128 instead of 8"),
    Published("ready", None, 4.1739 * 1.0245, "state of layer 2 only"),
    Published("ready", None, 4.1739 * 1.0285, "state of layer 30 only"),
    Published("ready", None, 4.1739 * 1.0748, "state of layer 62 only"),
    Published("ready", 280.42 * 1.0622, 4.1739 * 1.0689, "states of layers 2, 30, 62"),
    Published("ready", 299.93, None, "injected into draft layers 0, 2, 4"),
    Published("ready", 297.35, None, "injected into all five draft layers"),
    Published("ready", 301.94, 4.4993, "injected before attention"),
)

#: Share of rounds with all seven proposals accepted: DSpark, ReaDy.
SURVIVAL_AT_7 = {"gsm8k": (0.4598, 0.5817), "humaneval": (0.2589, 0.3119), "mt_bench": (0.1259, 0.1611)}
