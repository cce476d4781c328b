"""A target with (or without) a drafter: load, generate, compare. The host side of decoding.

Shapes are bucketed here and nowhere else: prompts to a power of two of at least 32 tokens, memory to multiples of
256 tokens. Lengths, budgets, stop ids and thresholds are runtime values, so a bucket compiles once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ready_jax import checkpoint, devices, lora, lossless, schema, sharding
from ready_jax.chat import Chat
from ready_jax.decode import Autoregressive, Decoding, DrafterShape, Limits, begin, decode
from ready_jax.drafter import Drafter
from ready_jax.generation import Generation, TextPiece, Timing
from ready_jax.programs import Program
from ready_jax.state import SPARE_ROWS, init_state
from ready_jax.streaming import Watch
from ready_jax.tensor_parallel import shard
from ready_jax.verify import FINISH_REASONS

NANO = Path(__file__).parent / "assets" / "nano"
PROMPT_BUCKET, CAPACITY_BUCKET, STOP_BUCKET = 32, 256, 8
AUTOREGRESSIVE, DSPARK, READY = "autoregressive", "dspark", "ready"


def _start(target, drafter, token_BT, num_B, limits, *, capacity, keep_logits):
    state = init_state(target.config, token_BT.shape[0], capacity, dtype=target.dtype)
    return begin(target, drafter, state, token_BT, num_B, limits, keep_logits=keep_logits)


def _continue(target, drafter, run, limits, max_rounds):
    return decode(target, drafter, run, limits, max_rounds)


def load(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    dtype: Any = "bfloat16",
    mesh: jax.sharding.Mesh | None = None,
    device: str | None = None,
    compile_cache: str | Path | None = None,
) -> Pair:
    """A pair from folders or hub names; without arguments the ``nano`` pair that ships with the package.

    ``mesh`` spreads the pair over the devices of its last axis (see ``tensor_parallel``): heads, MLP columns and
    vocabulary must divide; rows of a batch are split over the axes before. ``device`` ("cpu", "gpu") is required to be
    there; a model too large to be useful on a CPU is refused there unless ``device="cpu"`` says so. ``compile_cache``
    is a folder in which compiled programs outlive the process.

    Raises ``CheckpointError`` with every fault of a folder, ValueError if target and drafter do not fit.
    """
    if device is not None:
        devices.require_device(device)
    if compile_cache is not None:
        devices.enable_compile_cache(compile_cache)
    if target is None:
        target, drafter = NANO / "target", NANO / "dspark" if drafter is None else drafter
    devices.refuse_large_on_cpu(checkpoint.bytes_to_download(target, revision), device)
    folder = checkpoint.resolve(target, revision)[0]
    devices.refuse_large_on_cpu(checkpoint.parameter_bytes(folder), device)
    model = _read(checkpoint.load_target, folder, mesh, dtype=dtype)
    pair = Pair(model, chat=Chat(folder), mesh=mesh)
    return pair if drafter is None else pair.with_drafter(drafter, revision=draft_revision)


def _read(load: Callable, source, mesh, **options):
    """A model for ``mesh`` waits in the host's memory: no device may be able to hold it."""
    if mesh is None:
        return load(source, **options)
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return load(source, mesh=mesh, **options)
    with jax.default_device(host):
        return load(source, **options)


class Pair:
    """A target, perhaps a drafter, perhaps a tokenizer. ``target`` and ``drafter`` are modules: use them directly.

    With ``mesh`` they are spread over it and become ``tensor_parallel.Sharded``; ``whole()`` gives the modules back.
    """

    def __init__(self, target, drafter=None, *, chat: Chat | None = None, mesh=None, programs=None):
        if mesh is not None:
            target, drafter = shard(target, mesh), shard(drafter, mesh)
        if drafter is not None:
            if drafter.config.taps:
                schema.check_pair(target.config, drafter.config)
            sharding.check_same_mesh(target, drafter)
            if drafter.config.block_size + 1 > SPARE_ROWS:
                raise NotImplementedError(
                    f"block_size={drafter.config.block_size} needs {drafter.config.block_size + 1} verify rows; "
                    f"{SPARE_ROWS} are supported"
                )
        self.target, self.drafter, self.chat, self.mesh = target, drafter, chat, mesh
        self._begin, self._decode = programs or (
            Program(_start, static=("capacity", "keep_logits")),
            Program(_continue),
        )

    def with_drafter(self, drafter, *, revision: str | None = None) -> Pair:
        """The same target with another drafter: a folder, a hub name, or a module (None: no drafter).

        LoRA updates that a folder holds beside their base are merged: a round then launches nothing for them.
        """
        if isinstance(drafter, str | Path):
            options = dict(revision=revision, dtype=self.target.dtype)
            drafter = lora.merge(_read(checkpoint.load_drafter, drafter, self.mesh, **options))
        return Pair(self.target, drafter, chat=self.chat, mesh=self.mesh, programs=(self._begin, self._decode))

    def compressed(self, matrices: Iterable[str] = lossless.MATRICES) -> Pair:
        """The same pair with bf16 matrices in 12 bits a weight, exactly (see ``lossless.compress``): the target's
        groups that ``matrices`` names, and all of the drafter's. Decoding reads a quarter less of them."""
        drafter = lossless.compress(self.drafter) if isinstance(self.drafter, Drafter) else self.drafter
        programs = (self._begin, self._decode)
        return Pair(
            lossless.compress(self.target, matrices), drafter, chat=self.chat, mesh=self.mesh, programs=programs
        )

    @property
    def method(self) -> str:
        """What ``generate`` does by default."""
        if self.drafter is None:
            return AUTOREGRESSIVE
        return DSPARK if getattr(self.drafter, "reader", None) is None else READY

    def memory(self) -> dict[str, int]:
        """Bytes of the parameters, by part."""
        parts = {"target": self.target, "drafter": self.drafter}
        return {name: sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for name, part in parts.items()}

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Bytes that ``batch`` sequences of ``capacity`` tokens take: states, keys and values, draft context."""

        def make():
            context = self.drafter.init_context(batch, capacity) if self.drafter is not None else None
            return init_state(self.target.config, batch, capacity, dtype=self.target.dtype), context

        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))

    def generate(
        self,
        prompts,
        *,
        method: str | None = None,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        enable_thinking: bool = True,
        on_text: Callable[[TextPiece], Any] | None = None,
        progress: bool | Callable[[int, int], Any] | None = None,
        temperature: float = 0.0,
        confidence_threshold: float = 0.0,
        keep_logits: bool = False,
        pad_prompts_to: int | None = None,
    ) -> Any:
        """Greedy text after one prompt (-> Generation) or a list of prompts (-> list), decoded as one batch.

        A prompt is a string (one user turn), token ids, or chat messages. ``method``: None or "speculative" uses the
        drafter, "autoregressive" does not; the tokens are the same. ``stop``: the text ends before the first of
        these strings, the token ids with the token that completes it. ``stop_token_ids`` None: the target's own.
        ``on_text`` is called once for the prefill and once per round and prompt, in commit order.
        ``progress``: True for a bar, or a function of (tokens so far, tokens asked for). ``pad_prompts_to``: tokens
        that prompts are padded to (None: the power of two that holds the longest), so that batches share programs.
        """
        if temperature > 0:
            raise NotImplementedError(f"temperature={temperature}: only greedy decoding (0) exists so far")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        single, batch = as_batch(prompts)
        ids = [self._encode(prompt, enable_thinking) for prompt in batch]
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        text = self._chat("stream text or find stop strings") if stop or on_text else None
        watch = Watch(len(ids), max_new_tokens, chat=text, stop=stop, on_text=on_text, progress=progress)
        with sharding.isolated():
            run, timing, done = self._run(
                ids, self._method(method), max_new_tokens, stop_token_ids, confidence_threshold, keep_logits, watch,
                pad_prompts_to,
            )  # fmt: skip
            results = self._results(run, timing, done, watch)
        return results[0] if single else results

    def warm_up(
        self, batch: int, prompt_tokens: int, *, method: str | None = None, max_new_tokens: int = 256, rounds: int = 2
    ) -> Timing:
        """Compile what ``generate`` needs for ``batch`` prompts padded to ``prompt_tokens``, and run some rounds.

        A later call with ``pad_prompts_to=prompt_tokens`` and the same ``max_new_tokens`` compiles nothing.
        """
        watch = Watch(batch, max_new_tokens, chat=None, stop=(), on_text=None, progress=None)
        with sharding.isolated():
            ids = [[0]] * batch
            return self._run(
                ids, self._method(method), max_new_tokens, (), 0.0, False, watch, prompt_tokens, rounds=rounds
            )[1]

    def _encode(self, prompt, enable_thinking) -> list[int]:
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            return self._chat("encode a prompt").encode(prompt, enable_thinking=enable_thinking)
        ids = [int(token) for token in prompt]
        wrong = [token for token in ids if not 0 <= token < self.target.config.vocab_size]
        if wrong:
            raise ValueError(f"token ids {wrong[:5]} are outside the vocabulary of {self.target.config.vocab_size}")
        return ids

    def _chat(self, purpose: str) -> Chat:
        if self.chat is None:
            raise ValueError(f"this pair was made without a tokenizer, which is needed to {purpose}: pass token ids")
        return self.chat

    def _method(self, method: str | None) -> str:
        if method in (None, "speculative", self.method):
            if method == "speculative" and self.drafter is None:
                raise ValueError('method="speculative" needs a drafter: load one, or use with_drafter')
            return self.method
        if method == AUTOREGRESSIVE:
            return method
        raise ValueError(f"method={method!r}: this pair can do {AUTOREGRESSIVE!r} and {self.method!r} (None)")

    def _limits(self, ids, width, drafter, max_new_tokens, stop_token_ids, threshold) -> tuple[Limits, int]:
        """The runtime limits, and how many tokens the memory must hold for prompts padded to ``width``."""
        config = self.target.config
        longest = max(len(prompt) for prompt in ids)
        needed = longest + max_new_tokens
        if needed > config.max_position_embeddings:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} need {needed} positions, the "
                f"target was made for max_position_embeddings={config.max_position_embeddings}"
            )
        bucket = -(-(width + max_new_tokens) // CAPACITY_BUCKET) * CAPACITY_BUCKET
        capacity = min(bucket, config.max_position_embeddings)
        stops = list(config.eos_token_ids if stop_token_ids is None else stop_token_ids)
        entries = max(STOP_BUCKET, -(-len(stops) // STOP_BUCKET) * STOP_BUCKET)
        draft_limit = getattr(drafter.config, "max_position_embeddings", config.max_position_embeddings)
        none = isinstance(drafter, Autoregressive)
        return Limits(
            budget_B=jnp.full((len(ids),), max_new_tokens, jnp.int32),
            stop_L=jnp.array(stops + [-1] * (entries - len(stops)), jnp.int32),
            draft_B=jnp.full((len(ids),), 0 if none else drafter.config.block_size, jnp.int32),
            threshold=jnp.float32(threshold),
            draft_limit=jnp.int32(draft_limit),
        ), capacity

    def _drafter(self, method: str):
        if method != AUTOREGRESSIVE:
            return self.drafter
        return Autoregressive(DrafterShape(self.drafter.config.block_size)) if self.drafter else Autoregressive()

    def _run(
        self, ids, method, max_new_tokens, stop_token_ids, threshold, keep_logits, watch, width=None,
        rounds: int = 2**31 - 1,
    ) -> tuple:  # fmt: skip
        drafter = self._drafter(method)
        longest = max(map(len, ids))
        width = prompt_bucket(longest) if width is None else width
        if longest > width:
            raise ValueError(f"pad_prompts_to={width} is too short for a prompt of {longest} tokens")
        limits, capacity = self._limits(ids, width, drafter, max_new_tokens, stop_token_ids, threshold)
        token_BT = np.zeros((len(ids), width), np.int32)
        for row, prompt in zip(token_BT, ids, strict=True):
            row[: len(prompt)] = prompt
        num_B = np.array([len(prompt) for prompt in ids], np.int32)
        before = self._cost()
        start = time.perf_counter()
        arguments = dict(target=self.target, drafter=drafter, limits=limits)
        run = self._begin(
            token_BT=jnp.asarray(token_BT),
            num_B=jnp.asarray(num_B),
            capacity=capacity,
            keep_logits=keep_logits,
            **arguments,
        )
        jax.block_until_ready(run)
        prefill = time.perf_counter() - start - (self._cost()[0] - before[0])
        middle, start = self._cost(), time.perf_counter()
        if watch.needed:

            def one_round(run, limits):
                return self._decode(run=run, max_rounds=jnp.int32(1), **(arguments | dict(limits=limits)))

            run = watch.follow(run, limits, one_round)
        else:
            run = self._decode(run=run, max_rounds=jnp.int32(rounds), **arguments)
        jax.block_until_ready(run)
        after = self._cost()
        timing = Timing(
            prefill_seconds=prefill,
            decode_seconds=time.perf_counter() - start - (after[0] - middle[0]),
            compile_seconds=after[0] - before[0],
            num_compiles=after[1] - before[1],
            num_prompts=len(ids),
            num_tokens=int(np.sum(run.num_emitted_B)),
        )
        return run, timing, method

    def _cost(self) -> tuple[float, int]:
        programs = (self._begin, self._decode)
        return sum(p.trace_seconds + p.compile_seconds for p in programs), sum(p.num_compiles for p in programs)

    def _results(self, run: Decoding, timing: Timing, method: str, watch) -> list[Generation]:
        memory = ("state", "context")
        host = SimpleNamespace(**jax.device_get({k: v for k, v in vars(run).items() if k not in memory}))
        results = []
        for b in range(host.num_emitted_B.shape[0]):
            rounds, emitted = int(host.num_rounds_B[b]), int(host.num_emitted_B[b])
            token_ids = host.token_BN[b, :emitted].tolist()
            results.append(
                Generation(
                    text=self._text(watch, b, token_ids),
                    token_ids=token_ids,
                    finish_reason=FINISH_REASONS[int(host.finish_B[b])] or "abandoned",
                    method=method,
                    num_rounds=rounds,
                    proposed_per_round=host.proposed_BN[b, :rounds].tolist(),
                    accepted_per_round=host.accepted_BN[b, :rounds].tolist(),
                    emitted_per_round=host.emitted_BN[b, :rounds].tolist(),
                    timing=timing,
                    logits=None if host.logits_BNV is None else host.logits_BNV[b, :emitted],
                )
            )
        return results

    def _text(self, watch: Watch, index: int, token_ids: list[int]) -> str | None:
        streamed = watch.text(index)
        if streamed is not None or self.chat is None or not self.chat.has_tokenizer:
            return streamed
        return self.chat.decode(token_ids)


def prompt_bucket(tokens: int) -> int:
    """The width that a prompt of so many tokens is padded to."""
    return max(PROMPT_BUCKET, 1 << (tokens - 1).bit_length())


def as_batch(prompts) -> tuple[bool, list]:
    """Whether one prompt was given, and the list of prompts: strings, token-id sequences or message lists.

    Raises ValueError for an empty prompt or an empty batch, TypeError for anything else.
    """

    def wrong(found):
        return TypeError("a prompt is a string, a list of token ids or of chat messages; found " + repr(found)[:80])

    if not isinstance(prompts, Iterable):
        raise wrong(prompts)
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = np.asarray(prompts).tolist()
    if isinstance(prompts, str):
        single, batch = True, [prompts]
    else:
        prompts = list(prompts)
        if not prompts:
            raise ValueError("there is no prompt: decoding needs at least one token to start from")
        single = isinstance(prompts[0], int | np.integer | dict)
        batch = [prompts] if single else prompts
    batch = [np.asarray(p).tolist() if isinstance(p, np.ndarray | jax.Array) else p for p in batch]
    if any(not isinstance(p, str | list | tuple) for p in batch):
        raise wrong(batch)
    empty = [i for i, p in enumerate(batch) if len(p) == 0]
    if empty:
        raise ValueError(f"prompts {empty} are empty: decoding needs at least one token to start from")
    return single, batch
