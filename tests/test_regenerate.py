"""Answers of the target: speculative ones equal those of one token at a time; killed runs go on to the same bytes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_run

from ready_jax import checkpoint
from ready_jax.baselines import Bigram
from ready_jax.configs.drafter_training import RegenerateConfig
from ready_jax.configs.named import recipe
from ready_jax.train import regenerate as module
from ready_jax.train.corpus import Corpus, read_corpus, sidecar, write_corpus
from ready_jax.train.regenerate import Parts, batches, choose_prompts, main, regenerate

NEW, STOP, COUNT = 12, 22, 8
CONFIG = RegenerateConfig(
    num_prompts=COUNT, max_per_source=COUNT, prompt_tokens=8, new_tokens=NEW, min_answer=2, sampled_share=0.0, batch=3
)
OPTIONS = "--num-prompts 8 --max-per-source 8 --prompt-tokens 8 --new-tokens 12 --min-answer 2 --sampled-share 0"
OPTIONS = [*OPTIONS.split(), "--batch", "3", "--dtype", "float32"]


@pytest.fixture(scope="module", autouse=True)
def _quickly(tmp_path_factory):
    with tiny_run.quickly(tiny_run.cache(tmp_path_factory)):
        yield


@pytest.fixture(scope="module")
def target():
    """The tiny run's, with an end token that stands in some answers."""
    fields = {name: getattr(tiny_run.TARGET, name) for name in tiny_run.TARGET.__dataclass_fields__}
    return tiny.target(**(fields | dict(eos_token_ids=(STOP,))))


@pytest.fixture(scope="module")
def plain(target) -> Corpus:
    """Answers of the one-token path."""
    return regenerate(target, tiny_run.corpus(), CONFIG, log=[].append)


@pytest.fixture(scope="module")
def drafter(plain) -> Bigram:
    """Of what the answers say: many proposals are right, not all."""
    return Bigram.count([plain.document(i) for i in range(len(plain))], tiny_run.TARGET.vocab_size)


def same(a: Corpus, b: Corpus) -> None:
    for name in ("tokens", "offsets", "spans", "span_offsets", "category_ids", "source_ids"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


# Answers


def test_speculative_answers_equal_those_of_one_token_at_a_time(target, plain, drafter):
    lines: list[str] = []
    found = regenerate(target, tiny_run.corpus(), CONFIG, drafter=drafter, log=lines.append)
    same(found, plain)
    assert plain.info["acceptance_length"] is None
    assert 1.2 < found.info["acceptance_length"] < 8
    assert found.info | {"acceptance_length": None} == plain.info
    assert f"{found.info['acceptance_length']:.3f} tokens per round" in lines[-2]


def test_answers_end_are_cut_and_dropped_and_all_of_it_is_counted(target, plain):
    corpus = tiny_run.corpus()
    every = regenerate(target, corpus, replace(CONFIG, min_answer=1), log=[].append)
    asked = [corpus.document(x.document)[: x.length].tolist() for x in choose_prompts(corpus, CONFIG)]
    spans = every.spans.tolist()
    answers = [every.document(i)[begin:].tolist() for i, (begin, _) in enumerate(spans)]
    assert sorted(asked) == sorted(every.document(i)[:begin].tolist() for i, (begin, _) in enumerate(spans))
    assert [end for _, end in spans] == every.lengths.tolist()
    ended = [answer[-1] == STOP for answer in answers]
    assert all(STOP not in answer[:-1] for answer in answers)
    assert all(end or len(answer) == NEW for end, answer in zip(ended, answers, strict=True))
    long = [i for i, answer in enumerate(answers) if len(answer) >= CONFIG.min_answer]
    same(every.select(long), plain)
    info = plain.info
    assert 0 < COUNT - len(long) < sum(ended) < COUNT
    assert (info["prompts"], info["kept"], info["empty"]) == (COUNT, len(long), COUNT - len(long))
    assert (info["stopped"], info["truncated"]) == (sum(ended) / COUNT, COUNT - sum(ended))
    assert (info["supervised"], info["answer_tokens"]) == (plain.mask.mean(), plain.mask.sum())


def test_sampled_answers_are_left_to_the_one_token_path(target, plain, drafter):
    config = replace(CONFIG, sampled_share=0.5, temperature=3.0, min_answer=1)
    mixed = regenerate(target, tiny_run.corpus(), config, drafter=drafter, log=[].append)
    greedy_from = np.random.default_rng((config.seed, 1)).random(COUNT) >= 0.5
    prompts = sorted(choose_prompts(tiny_run.corpus(), config), key=lambda prompt: prompt.length)
    assert 0 < greedy_from.sum() < COUNT == len(mixed)
    texts = {tuple(plain.document(i)) for i in range(len(plain))}
    for i, (greedy, prompt) in enumerate(zip(greedy_from, prompts, strict=True)):
        text = tuple(mixed.document(i))
        assert mixed.document_spans(i)[0, 0] == prompt.length
        assert (text in texts) == greedy or len(text) - prompt.length < CONFIG.min_answer


def test_batches_keep_the_order_and_part_only_where_they_must():
    greedy_from = np.array([True, False, True, True, False])
    assert [x.tolist() for x in batches(greedy_from, 2, apart=False)] == [[0, 1], [2, 3], [4]]
    assert [x.tolist() for x in batches(greedy_from, 2, apart=True)] == [[0, 2], [3], [1, 4]]
    assert [x.tolist() for x in batches(np.ones(3, bool), 2, apart=True)] == [[0, 1], [2]]


def test_prompts_of_another_tokenizer_are_named(target):
    corpus = tiny_run.corpus()
    wrong = replace(corpus, tokens=np.where(corpus.tokens == corpus.tokens[5], 4000, corpus.tokens))
    with pytest.raises(ValueError, match="token 4000, the target knows 100"):
        regenerate(target, wrong, CONFIG)


def test_no_answer_long_enough_is_an_error(target):
    with pytest.raises(ValueError, match=r"min_answer=13 .* 8 shorter ones"):
        regenerate(target, tiny_run.corpus(), replace(CONFIG, min_answer=13), log=[].append)


# The command


@pytest.fixture
def command(target, drafter, tmp_path, monkeypatch):
    """Runs the command on the tiny target, the drafter put in the place of a folder's."""
    checkpoint.save_pretrained(target, tmp_path / "target")
    write_corpus(tmp_path / "corpus.npz.xz", tiny_run.corpus())
    monkeypatch.setattr(checkpoint, "load_drafter", lambda *_, **__: drafter)
    words = ["--target", str(tmp_path / "target"), "--draft-model", "D", "--corpus", str(tmp_path / "corpus.npz.xz")]

    def run(out: Path, *more: str) -> None:
        main([*words, "--out", str(out), *OPTIONS, *more])

    return run


def test_a_killed_run_goes_on_to_the_same_bytes(command, plain, tmp_path, monkeypatch, capsys):
    whole, killed = tmp_path / "whole" / "a.npz.xz", tmp_path / "killed" / "a.npz.xz"
    command(whole)
    same(read_corpus(whole), plain)
    assert "tokens/s" in capsys.readouterr().out

    write = Parts.write

    def dies(self, number, answers):
        if number == 1:
            (self.folder / "part.npz").write_bytes(b"half of it")
            raise KeyboardInterrupt
        write(self, number, answers)

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            command(killed)
    parts = killed.with_name("a.npz.xz.parts")
    assert sorted(path.name for path in parts.iterdir()) == ["000000.npz", "part.npz", "run.json"]
    with pytest.raises(ValueError, match=r"another run \(seed: found 0, this run has 1\): --no-resume"):
        command(killed, "--seed", "1")
    decoded, decode = [], module._batch
    monkeypatch.setattr(module, "_batch", lambda *args: decoded.append(args) or decode(*args))
    command(killed)
    assert len(decoded) == 2  # of three batches
    assert [path.name for path in sorted(killed.parent.iterdir())] == ["a.json", "a.npz.xz"]
    assert killed.read_bytes() == whole.read_bytes()
    assert sidecar(killed).read_bytes() == sidecar(whole).read_bytes()
    record = json.loads(sidecar(killed).read_text())
    assert (record["draft_model"], record["dtype"], record["config"]["batch"]) == ("D", "float32", 3)

    with pytest.raises(ValueError, match="a new one"):
        command(killed)
    command(killed, "--no-resume")
    assert len(decoded) == 5
    assert killed.read_bytes() == whole.read_bytes()


def test_a_recipe_gives_what_is_not_given(monkeypatch, tmp_path, capsys):
    """The folder of parts remembers what was asked for."""
    write_corpus(tmp_path / "corpus.npz.xz", tiny_run.corpus())
    monkeypatch.setattr(checkpoint, "load_target", lambda *_, **__: pytest.exit("loaded"))
    words = ["--corpus", str(tmp_path / "corpus.npz.xz"), "--out", str(tmp_path / "a.npz.xz")]
    with pytest.raises(pytest.exit.Exception):
        main([*words, "--recipe", "qwen3_8_27b_ready_stage1", "--batch", "5"])
    run = json.loads((tmp_path / "a.npz.xz.parts" / "run.json").read_text())
    assert (run["new_tokens"], run["sampled_share"], run["batch"]) == (1280, 0.0, 5)
    files = recipe("qwen3_8_27b_ready_stage1").files
    assert (run["target"], run["target_revision"]) == (files.target, files.target_revision)
    assert (run["draft_model"], run["draft_revision"]) == (files.from_pretrained, files.revision)
    with pytest.raises(SystemExit):
        main(words)
    assert "--target and --corpus are required" in capsys.readouterr().err
