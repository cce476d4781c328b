"""``Pair``: what a prompt may be, budgets, stop strings, streaming, compiled programs, and the numbers of a result."""

import logging
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import quick

from ready_jax.baselines import Scripted
from ready_jax.chat import Chat
from ready_jax.config import FULL, LINEAR
from ready_jax.generation import (
    Generation,
    Timing,
    acceptance_length,
    draft_acceptance_rate,
    mean_accepted_drafts,
    survival,
)
from ready_jax.pair import AUTOREGRESSIVE, DSPARK, READY, Pair, as_batch
from ready_jax.pytree import register
from ready_jax.streaming import Watch

pytestmark = pytest.mark.usefixtures("quick_programs")
TWO = (LINEAR, FULL)
PROMPT = tiny.prompt(11, seed=4)
LONG = 40


class Stub(Chat):
    """A tokenizer whose token i is the bytes ``table[i]``, a letter where the table has nothing; prompts are bytes."""

    def __init__(self, table=None):
        self.table = table or {}

    @classmethod
    def of(cls, pair: Pair) -> "Stub":
        assert isinstance(pair.chat, cls)
        return pair.chat

    @property
    def has_tokenizer(self):
        return True

    def encode(self, prompt, *, enable_thinking=True, **template_options):
        text = prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)
        return [byte % tiny.PAD for byte in text.encode()] + [int(enable_thinking)]

    def decode(self, token_ids):
        return b"".join(self.table.get(t, b"%c" % (97 + t % 26)) for t in token_ids).decode(errors="replace")


def small(chat=None, **changes) -> Pair:
    """A two-layer pair without a drafter."""
    return Pair(tiny.target(layer_types=TWO, **changes), chat=chat)


@pytest.fixture(scope="module")
def plain() -> Pair:
    return small()


@pytest.fixture(scope="module")
def pair(plain) -> Pair:
    return plain.with_drafter(tiny.drafter(config=plain.target.config, taps=(-1, 0), num_target_layers=2))


@pytest.fixture(scope="module")
def greedy(plain) -> list[int]:
    """``AR`` of the field cases."""
    return plain.generate(PROMPT, max_new_tokens=LONG, stop_token_ids=()).token_ids


def scripted(plain: Pair, prompts, texts, accept) -> Pair:
    """The same target with a drafter that knows the text; every script has one width, so they share programs."""
    rows = [tiny.prompt(1) if p is None else p for p in prompts]
    padded = np.array([(text + [0] * 64)[:64] for text in texts], np.int32)
    counts = np.resize(np.array(accept, np.int32), (len(rows), 40))
    lengths = np.array([len(p) for p in rows], np.int32)
    return plain.with_drafter(Scripted.by_round(lengths, padded, counts, plain.target.config.vocab_size))


def talking(pair: Pair, table=None) -> Pair:
    """The same pair with a stub tokenizer."""
    return Pair(pair.target, pair.drafter, chat=Stub(table), programs=(pair._begin, pair._decode))


# Prompts


def test_token_ids_in_every_container_give_the_same_result(plain, greedy):
    wanted = greedy[:6]
    containers = (PROMPT, tuple(PROMPT), np.array(PROMPT), np.array(PROMPT, np.int64), jnp.array(PROMPT))
    for prompt in containers:
        result = plain.generate(prompt, max_new_tokens=6, stop_token_ids=())
        assert isinstance(result, Generation)
        assert result.token_ids == wanted
    for batch in ([PROMPT], [np.array(PROMPT)], [jnp.array(PROMPT)], np.array([PROMPT]), (tuple(PROMPT),)):
        result = plain.generate(batch, max_new_tokens=6, stop_token_ids=())
        assert isinstance(result, list)
        assert [r.token_ids for r in result] == [wanted]


def test_strings_and_messages_go_through_the_tokenizer(plain):
    speaking = talking(plain)
    ids = Stub.of(speaking).encode("hello", enable_thinking=False)
    options: dict[str, Any] = dict(max_new_tokens=6, enable_thinking=False)
    wanted = plain.generate(ids, max_new_tokens=6)
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        found = speaking.generate(prompt, **options)
        assert found.token_ids == wanted.token_ids
        assert found.text == Stub.of(speaking).decode(wanted.token_ids)
    assert wanted.text is None
    mixed = [PROMPT, "hello", [{"role": "user", "content": "hello"}]]
    results = speaking.generate(mixed, **options)
    assert [r.token_ids for r in results][1:] == [wanted.token_ids] * 2
    assert as_batch([mixed[1], mixed[2]])[0] is False


def test_a_batch_gives_what_its_prompts_give_alone(pair):
    prompts = [PROMPT, tiny.prompt(3), tiny.prompt(30)]
    for method in (None, AUTOREGRESSIVE):
        results = pair.generate(prompts, method=method, max_new_tokens=20)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == pair.generate(prompt, max_new_tokens=20).token_ids


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(prompts=[]), ValueError, "no prompt"),
        (dict(prompts=""), ValueError, r"prompts \[0\] are empty: decoding needs at least one token"),
        (dict(prompts=[PROMPT, []]), ValueError, r"prompts \[1\] are empty"),
        (dict(prompts=3), TypeError, "a prompt is a string, a list of token ids"),
        (dict(prompts=[1.5, 2.5]), TypeError, "a prompt is a string, a list of token ids"),
        (dict(prompts=[5, 97]), ValueError, r"token ids \[97\] are outside the vocabulary of 97"),
        (dict(prompts=[5, -1]), ValueError, r"token ids \[-1\] are outside"),
        (dict(prompts="hello"), ValueError, "without a tokenizer, which is needed to encode a prompt"),
        (dict(prompts=PROMPT, stop="END"), ValueError, "without a tokenizer, which is needed to stream text or find"),
        (dict(prompts=PROMPT, on_text=print), ValueError, "without a tokenizer"),
        (dict(prompts=PROMPT, max_new_tokens=0), ValueError, "max_new_tokens=0 must be at least 1"),
        (dict(prompts=PROMPT, max_new_tokens=1014), ValueError, "11 tokens and max_new_tokens=1014 need 1025.*=1024"),
        (dict(prompts=PROMPT, temperature=0.7), NotImplementedError, "temperature=0.7: only greedy"),
        (dict(prompts=PROMPT, method="medusa"), ValueError, "method='medusa': this pair can do 'autoregressive'"),
        (dict(prompts=PROMPT, method="speculative"), ValueError, "needs a drafter"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(plain, arguments, error, message):
    before = plain._cost()
    with pytest.raises(error, match=message):
        plain.generate(**arguments)
    assert plain._cost() == before


# Budgets, positions


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16])
def test_exactly_as_many_tokens_as_asked_for(plain, greedy, count):
    """Field case A10, all proposals right."""
    result = scripted(plain, [PROMPT], [greedy], 7).generate(PROMPT, max_new_tokens=count, stop_token_ids=())
    assert result.token_ids == greedy[:count]
    assert 1 + sum(result.emitted_per_round) == count
    assert result.finish_reason == "length"
    assert result.num_rounds == len(result.accepted_per_round) == -(-(count - 1) // 8)
    assert all(a <= e for a, e in zip(result.accepted_per_round, result.emitted_per_round, strict=True))


def test_nothing_is_drafted_past_the_drafters_own_positions(plain):
    """Field case A14: prompt 40, 20 new tokens, a drafter made for 48 positions.

    The target holds exactly 60: fewer than the 64 to which the prompt is padded, and the last round ends there.
    """
    short = small(max_position_embeddings=60)
    config = dict(taps=(-1, 0), num_target_layers=2, max_position_embeddings=48)
    drafting = short.with_drafter(tiny.drafter(config=short.target.config, **config))
    prompt = tiny.prompt(40)
    wanted = plain.generate(prompt, max_new_tokens=20, stop_token_ids=())
    found = drafting.generate(prompt, max_new_tokens=20, stop_token_ids=())
    assert found.token_ids == wanted.token_ids
    position, seen = 40, set()
    for proposed, emitted in zip(found.proposed_per_round, found.emitted_per_round, strict=True):
        assert proposed == (7 if position + 7 <= 48 else 0)
        position += emitted
        seen.add(proposed)
    assert seen == {0, 7}


# Stop strings, streaming


@pytest.fixture(scope="module")
def varied(plain) -> tuple[list[int], list[int]]:
    """A prompt whose first six new tokens all differ, so that a stub may give each its own text."""
    for seed in range(200):
        prompt = tiny.prompt(9, seed=seed)
        text = plain.generate(prompt, max_new_tokens=LONG, stop_token_ids=()).token_ids
        if len(set(text[:6])) == 6:
            return prompt, text
    raise AssertionError("no prompt of the tiny model begins with six different tokens")


def test_a_stop_string_ends_text_counts_and_memory_at_the_token_that_completes_it(plain, varied):
    """Field case A12: ``"xE" "N" "Dy" "z"`` in one accepted block, stop = "END"."""
    prompt, text = varied
    table = dict(zip(text[:6], [b"a", b"xE", b"N", b"Dy", b"z", b"q"], strict=True))
    speaking = talking(scripted(plain, [prompt], [text], 7), table)
    result = speaking.generate(prompt, max_new_tokens=LONG, stop_token_ids=(), stop="END")
    assert result.text == "ax"
    assert result.token_ids == text[:4]  # the prefill's token, then the three that hold the stop string
    assert result.finish_reason == "stop"
    assert (result.num_rounds, result.accepted_per_round, result.emitted_per_round) == (1, [3], [3])

    pieces = []
    watch = Watch(1, LONG, chat=speaking.chat, stop=("END",), on_text=pieces.append, progress=None)
    run, timing, _ = speaking._run([prompt], speaking.method, LONG, (), 0.0, False, watch)
    silent = Watch(1, 4, chat=None, stop=(), on_text=None, progress=None)
    wanted, *_ = plain._run([prompt], AUTOREGRESSIVE, 4, (), 0.0, False, silent)
    assert tiny.memory_equal(run.state, wanted.state)
    assert run.state.length_B.tolist() == [len(prompt) + 3]
    tiny.memory_close(run.state, tiny.Plain(plain.target).feed(prompt + text[:3])[1])
    assert timing.num_tokens == 4
    assert pieces == ["a", "x"]
    assert [p.token_ids for p in pieces] == [text[:1], text[1:4]]


def test_a_row_that_stops_leaves_the_others_as_they_are(plain, varied):
    prompt, text = varied
    other = tiny.prompt(20)
    (follow,) = plain.generate([other], max_new_tokens=20, stop_token_ids=())
    table = dict.fromkeys(range(97), b".") | {text[2]: b"#"}
    count = next((i + 1 for i, t in enumerate(follow.token_ids) if t == text[2]), 20)
    for accept in (0, 5):
        speaking = talking(scripted(plain, [prompt, other], [text, follow.token_ids + [0] * 9], accept), table)
        first, second = speaking.generate([prompt, other], max_new_tokens=20, stop_token_ids=(), stop=["#"])
        assert (first.text, first.token_ids, first.finish_reason) == ("..", text[:3], "stop")
        assert second.token_ids == follow.token_ids[:count]
        assert 1 + sum(second.emitted_per_round) == count


@pytest.mark.parametrize("accept", [0, 1, 7])
def test_pieces_join_to_the_text_and_hold_whole_characters(plain, varied, accept):
    """Field case E15: a four-byte character over several rounds."""
    prompt, text = varied
    table = dict(zip(text[1:5], ([byte] for byte in "🙂".encode()), strict=True))
    speaking = talking(scripted(plain, [prompt], [text], accept), {t: bytes(b) for t, b in table.items()})
    pieces = []
    result = speaking.generate(prompt, max_new_tokens=5, stop_token_ids=(), on_text=pieces.append)
    assert result.token_ids == text[:5]
    assert "".join(pieces) == result.text == Stub.of(speaking).decode(text[:5])
    assert result.text.endswith("🙂")
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) == result.num_rounds + 1
    assert [p.accepted for p in pieces] == [None, *result.accepted_per_round]
    assert [token for p in pieces for token in p.token_ids] == text[:5]
    assert {p.row for p in pieces} == {0}


def test_pieces_of_a_batch_come_in_commit_order(pair):
    speaking, pieces = talking(pair), []
    prompts = [PROMPT, tiny.prompt(5), tiny.prompt(30)]
    results = speaking.generate(prompts, max_new_tokens=9, on_text=pieces.append)
    for index, result in enumerate(results):
        mine = [p for p in pieces if p.row == index]
        assert "".join(mine) == result.text
        assert len(mine) == result.num_rounds + 1


def test_a_callback_that_raises_ends_the_call_and_nothing_else(pair):
    speaking = talking(pair)
    wanted = speaking.generate(PROMPT, max_new_tokens=9)
    for after in (0, 1):
        seen = []

        def fail(piece, seen=seen, after=after):
            seen.append(piece)
            if len(seen) > after:
                raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            speaking.generate(PROMPT, max_new_tokens=9, on_text=fail)
        assert len(seen) == after + 1
    again = speaking.generate(PROMPT, max_new_tokens=9)
    assert again.token_ids == wanted.token_ids
    assert again.timing.num_compiles == 0


def test_progress_is_told_how_many_tokens_exist(pair):
    calls = []
    result = pair.generate(
        PROMPT, max_new_tokens=9, stop_token_ids=(), progress=lambda done, total: calls.append((done, total))
    )
    assert [total for _, total in calls] == [9] * (result.num_rounds + 1)
    assert [done for done, _ in calls] == np.cumsum([1, *result.emitted_per_round]).tolist()


def test_a_progress_bar(pair, capsys):
    assert len(pair.generate(PROMPT, max_new_tokens=5, stop_token_ids=(), progress=True).token_ids) == 5
    assert "5/5" in capsys.readouterr().err


# Programs


def test_a_bucket_compiles_once(caplog):
    """Field case E01, and the counters agree with what JAX logs."""
    fresh = small(intermediate_size=56)  # a shape of its own: jax.jit shares what another pair compiled

    def compiled(prompt, **options) -> list[str]:
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            result = fresh.generate(prompt, **options)
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling ")]
        ours = [name for line in lines for name in ("_start", "_continue") if f"jit({name})" in line]
        assert result.timing.num_compiles == len(ours)
        assert (result.timing.compile_seconds > 0) == bool(ours)
        return ours

    assert compiled(tiny.prompt(5), max_new_tokens=10) == ["_start", "_continue"]
    for length in (5, 6, 17, 31, 32):
        for budget in (10, 50):
            for stops in ((1, 2), (3,), tuple(range(8))):
                assert compiled(tiny.prompt(length), max_new_tokens=budget, stop_token_ids=stops) == []
    assert compiled(tiny.prompt(33), max_new_tokens=10) == ["_start"]
    assert compiled(tiny.prompt(64), max_new_tokens=50) == []
    assert fresh._cost()[1] == 3


def test_another_drafter_of_the_same_shape_uses_the_compiled_programs(pair):
    config = dict(config=pair.target.config, taps=(-1, 0), num_target_layers=2)
    first = pair.generate(PROMPT, max_new_tokens=12)
    other = pair.with_drafter(tiny.drafter(seed=7, **config))
    result = other.generate(PROMPT, max_new_tokens=12)
    assert result.timing.num_compiles == 0
    assert result.token_ids == first.token_ids
    assert other.target is pair.target
    assert pair.with_drafter(None).method == AUTOREGRESSIVE


def test_after_a_warm_up_nothing_is_compiled(pair):
    found = pair.warm_up(2, 64, max_new_tokens=9)
    assert (found.num_compiles, found.num_prompts) == (2, 2)
    result = pair.generate([PROMPT, tiny.prompt(40)], max_new_tokens=9, stop_token_ids=(), pad_prompts_to=64)
    assert result[0].timing.num_compiles == 0
    assert result[0].token_ids == pair.generate(PROMPT, max_new_tokens=9, stop_token_ids=()).token_ids
    with pytest.raises(ValueError, match="pad_prompts_to=8 is too short for a prompt of 11 tokens"):
        pair.generate(PROMPT, pad_prompts_to=8)


def test_the_public_decode_is_the_function_and_not_the_file_of_that_name():
    import ready_jax.decode

    assert ready_jax.decode is sys.modules["ready_jax.decode"].decode


# A user's own reader


@register
@dataclass(frozen=True)
class NormReader:
    """Moves every draft position along one direction, as far as the norm of one layer's states says."""

    direction_D: jax.Array

    def prepare(self, states):
        return jnp.sqrt(jnp.mean(jnp.square(states[0]), axis=(1, 2, 3)))

    def __call__(self, prep, hidden_BPD):
        update = prep[:, None, None] * self.direction_D[None, None]
        return jnp.broadcast_to(update, hidden_BPD.shape).astype(hidden_BPD.dtype)


def test_a_users_own_reader_takes_the_place_of_ours(pair):
    assert pair.method == DSPARK
    before = pair.generate(PROMPT, max_new_tokens=LONG, stop_token_ids=())
    proposals = {}
    for scale in (0.0, 300.0):
        drafter = jax.tree.map(lambda x: x, pair.drafter)
        drafter.reader = NormReader(scale * jnp.arange(48, dtype=jnp.float32))
        reading = pair.with_drafter(drafter)
        assert reading.method == READY
        result = reading.generate(PROMPT, max_new_tokens=LONG, stop_token_ids=())
        assert result.token_ids == before.token_ids
        proposals[scale] = result
    assert proposals[0.0].accepted_per_round == before.accepted_per_round
    assert proposals[300.0].timing.num_compiles == 0

    context = pair.drafter.init_context(1, 32)
    states = [jnp.ones((1, 6, 16, 16)), None]
    borrowed = (pair.target.embed, pair.target.unembed)
    anchor_B = jnp.array([3], jnp.int32)

    @quick
    def logits(drafter):
        return drafter.propose(context, anchor_B, states, *borrowed, with_logits=True).logits_BPV

    assert np.abs(np.asarray(logits(pair.drafter)) - np.asarray(logits(drafter))).max() > 1e-2


# Numbers


def timing(**changes) -> Timing:
    fields: dict[str, Any] = dict(
        prefill_seconds=0.5, decode_seconds=2.0, compile_seconds=30.0, num_compiles=2, num_prompts=1, num_tokens=201
    )
    return Timing(**(fields | changes))


def test_tokens_per_second():
    """Field case F07: 201 tokens, prefill 0.5 s, decode 2.0 s, compile 30 s."""
    assert timing().decode_tokens_per_second == 100.0
    assert timing().tokens_per_second == pytest.approx(80.4)
    assert timing().compile_seconds == 30.0
    assert timing(num_prompts=3, num_tokens=303).decode_tokens_per_second == 150.0
    assert timing(num_tokens=1, decode_seconds=0.0).decode_tokens_per_second == 0.0


def generation(accepted: list[int], emitted: list[int] | None = None) -> Generation:
    emitted = emitted or [a + 1 for a in accepted]
    return Generation(
        text=None, token_ids=[0] * (1 + sum(emitted)), finish_reason="length", method=DSPARK, num_rounds=len(accepted),
        proposed_per_round=[7] * len(accepted), accepted_per_round=accepted, emitted_per_round=emitted, timing=timing(),
    )  # fmt: skip


def test_acceptance_over_rounds():
    """Field case A24: accepted 7, 3, 0, 7, 1 with block 7."""
    whole = generation([7, 3, 0, 7, 1])
    assert whole.acceptance_length == acceptance_length([whole]) == pytest.approx(4.6)
    assert mean_accepted_drafts([whole]) == pytest.approx(3.6)
    assert draft_acceptance_rate([whole]) == pytest.approx(18 / 35)
    assert whole.survival == pytest.approx([0.8, 0.6, 0.6, 0.4, 0.4, 0.4, 0.4])
    assert 1 + sum(whole.survival) == pytest.approx(4.6)
    parts = [generation([7, 3, 0]), generation([7, 1])]  # pooled over rounds, not a mean of means
    assert acceptance_length(parts) == pytest.approx(4.6)
    assert survival(parts) == pytest.approx(whole.survival)


def test_a_cut_round_counts_what_it_emitted():
    assert generation([7, 3], [8, 3]).acceptance_length == 5.5
    assert len(generation([7, 3], [8, 3]).token_ids) == 12


def test_no_rounds_give_no_number():
    empty = generation([], [])
    assert np.isnan([empty.acceptance_length, *empty.survival, draft_acceptance_rate([empty])]).all()
    assert np.isnan([acceptance_length([]), mean_accepted_drafts([])]).all()


def test_numbers_of_a_real_run_belong_together(pair):
    batch = [PROMPT, tiny.prompt(3), tiny.prompt(30)]
    results = pair.generate(batch, max_new_tokens=20, stop_token_ids=())
    for result in results:
        assert 1 + sum(result.emitted_per_round) == len(result.token_ids) == 20
        assert len(result.emitted_per_round) == result.num_rounds
        assert max(result.proposed_per_round) <= 7
    assert {id(r.timing) for r in results} == {id(results[0].timing)}
    assert results[0].timing.num_tokens == 60
    assert results[0].timing.num_prompts == 3
