"""`python -m ready_jax.serve.demo` (`make demo`): the shipped pair answers three prompts, then says how it got there.

Compiling takes most of the time and is shown apart; the table's speeds are of calls that compiled nothing.
"""

import argparse
from collections.abc import Sequence

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import ready_jax
from ready_jax import devices
from ready_jax.generation import Generation, TextPiece, acceptance_length, survival
from ready_jax.pair import AUTOREGRESSIVE, NANO, Pair

PROMPTS = (
    "What is 17 + 25?",
    "Write a Python function that returns the larger of two numbers.",
    "Why is the sky blue?",
)
DRAFTERS = ("dspark", "stateless", "ready")
ABOUT = (
    "nano is about twelve million parameters, trained for minutes on one H200, thinking off: it shows real acceptance "
    "and exact losslessness, not right answers."
)


def ask(pair: Pair, prompt: str, budget: int, method: str | None = None, on_text=None) -> Generation:
    return pair.generate(
        prompt, method=method, max_new_tokens=budget, enable_thinking=False, keep_logits=True, on_text=on_text
    )


def answer(pair: Pair, method: str | None, budget: int) -> tuple[list[Generation], float]:
    """One generation per prompt, of calls that compile nothing, and the seconds that compiling took before."""
    first = [ask(pair, prompt, budget, method) for prompt in PROMPTS]
    return [ask(pair, prompt, budget, method) for prompt in PROMPTS], sum(g.timing.compile_seconds for g in first)


def stream(pair: Pair, budget: int) -> float:
    """Show the answers as they arrive, and give the seconds that compiling took."""

    def show(piece: TextPiece) -> None:
        print(piece, end="", flush=True)

    compiling = ask(pair, PROMPTS[0], budget).timing.compile_seconds
    for prompt in PROMPTS:
        print(f"\n> {prompt}")
        compiling += ask(pair, prompt, budget, on_text=show).timing.compile_seconds
        print()
    return compiling


def same_bits(found: list[Generation], wanted: list[Generation]) -> bool:
    """Whether tokens and logits are equal, logits as bit patterns."""
    return all(
        a.token_ids == b.token_ids and np.array_equal(_bits(a), _bits(b)) for a, b in zip(found, wanted, strict=True)
    )


def _bits(generation: Generation) -> np.ndarray:
    return np.ascontiguousarray(generation.logits).view(np.uint32)


def decode_speed(generations: list[Generation]) -> float:
    """Tokens per second of decoding, pooled over calls."""
    tokens = sum(len(g.token_ids) - 1 for g in generations)
    return tokens / sum(g.timing.decode_seconds for g in generations)


def table(by_method: dict[str, list[Generation]]) -> tuple[Table, bool]:
    """The table of all methods, and whether every one equals the autoregressive run."""
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    view.add_column("method")
    for name in ("rounds", "acceptance\nlength", "survival at\n1..7, %", "decode\ntokens/s", "bit-\nidentical"):
        view.add_column(name, justify="right", no_wrap=True)
    wanted, exact = by_method[AUTOREGRESSIVE], True
    for name, generations in by_method.items():
        same = same_bits(generations, wanted)
        exact &= same
        alone = name == AUTOREGRESSIVE
        view.add_row(
            name,
            str(sum(g.num_rounds for g in generations)),
            f"{acceptance_length(generations):.2f}",
            "" if alone else " ".join(f"{100 * share:.0f}" for share in survival(generations)),
            f"{decode_speed(generations):.1f}",
            "(itself)" if alone else "yes" if same else "NO",
        )
    return view, exact


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt (default 128)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--device", choices=devices.PLATFORMS, help="refuse to run on anything else")
    parser.add_argument("--compile-cache", metavar="DIR", help="keep compiled programs here: the next run starts fast")
    options = parser.parse_args(arguments)

    on_cpu = jax.default_backend() == "cpu"
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    pair = ready_jax.load(dtype=dtype, device=options.device, compile_cache=options.compile_cache)
    print(f"device: {jax.default_backend()} ({jax.devices()[0].device_kind}), {dtype}")
    print(ABOUT)
    print("compiling the decode loop ...", flush=True)
    budget = options.max_new_tokens
    compiling = stream(pair, budget)
    print("\nthe same prompts again, without streaming, under every method ...", flush=True)

    methods: dict[str, tuple[Pair, str | None]] = {AUTOREGRESSIVE: (pair, AUTOREGRESSIVE)}
    for name in DRAFTERS:
        methods[name] = (pair.with_drafter(NANO / name), None)
    by_method = {}
    for name, (chosen, method) in methods.items():
        by_method[name], seconds = answer(chosen, method, budget)
        compiling += seconds
    view, exact = table(by_method)
    Console().print(view)
    wanted = by_method[AUTOREGRESSIVE]
    tokens, logits = sum(len(g.token_ids) for g in wanted), sum(g.logits.size for g in wanted if g.logits is not None)
    verdict = "equal the autoregressive run's bit for bit" if exact else "DIFFER from the autoregressive run's"
    print(f"bit-identical: all {tokens} tokens and the {logits:,} logits behind them {verdict}.")
    print(f"compiling took {compiling:.1f} s and is in none of the speeds.")
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
