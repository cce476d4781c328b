"""Training data: labels by span, cuts, packing, the files, the shipped tokenizer and prompts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ready_jax.bench_data import NOT_SHIPPED, SHIPPED, bench_prompts
from ready_jax.train.batches import read_shards
from ready_jax.train.corpus import write_stream
from ready_jax.train.data import (
    ChatFormat,
    Corpus,
    Document,
    Sample,
    Stats,
    collect,
    cut,
    encode,
    encode_prompts,
    main,
    pack,
    read_corpus,
    read_samples,
    read_shard,
    render,
    unit_hash,
    write_corpus,
    write_shard,
)

TARGET = SHIPPED.parent / "target"
NO_TRAILING_NEWLINE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_MARKERS = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def other_template() -> Any:
    """A tokenizer of its own, whose template a test may replace."""
    return AutoTokenizer.from_pretrained(TARGET)


def chat(*contents: str, name: str = "a") -> Sample:
    roles = ("user", "assistant")
    return Sample(name, messages=[{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)])


def labels(tokenizer: Any, document: Document) -> str:
    return tokenizer.decode(document.token_T[document.mask_T])


def some_corpus(seed: int = 0, count: int = 200, longest: int = 90) -> Corpus:
    """Documents of distinct tokens, each with two label spans, so that every token can be found again."""
    rng = np.random.default_rng(seed)
    documents, next_token = [], 1
    for number in range(count):
        size = int(rng.integers(4, longest))
        a, b, c = np.sort(rng.choice(np.arange(1, size), 3, replace=False))
        token_T = np.arange(next_token, next_token + size, dtype=np.uint16)
        documents.append(Document(token_T, np.array([[a, b], [c, size]], np.int32), category=f"c{number % 3}"))
        next_token += size
    return collect(documents)


# Labels and cuts


def test_b08_ids_and_labels_are_cut_together(other_template):
    """A chat of 50 tokens with assistant spans 10-20 and 30-49, cut at 35."""
    other_template.chat_template = NO_TRAILING_NEWLINE
    header = len(other_template.encode("<|im_start|>assistant\n"))
    user = len(other_template.encode("<|im_start|>user\n<|im_end|>"))
    sample = chat("1" * (10 - header - user), "2" * 10, "3" * (9 - header - user), "4" * 19)
    [whole] = encode([sample], other_template)
    assert len(whole.token_T) == 50
    assert whole.spans.tolist() == [[10, 21], [30, 50]]
    [short] = encode([sample], other_template, 35)
    assert (len(short.token_T), len(short.mask_T)) == (35, 35)
    assert short.mask_T.sum() == 11 + 5
    assert short.mask_T[34], "the last label lies inside span 2"
    assert np.flatnonzero(short.mask_T).tolist() == [*range(10, 21), *range(30, 35)]
    np.testing.assert_array_equal(short.token_T, whole.token_T[:35])
    assert other_template.eos_token_id not in short.token_T[30:], "no invented end of turn"


def test_b06_a_template_without_markers_is_named(other_template):
    other_template.chat_template = NO_MARKERS
    with pytest.raises(ValueError, match=r"none of the first 3 conversations .*nano/target.*m\.content"):
        list(encode([chat("q", "a")] * 3, other_template))
    with pytest.raises(ValueError, match="none of the first 2 conversations"):
        list(encode([chat("q", "a")] * 3, other_template, check_first=2))


def test_b06_a_mixed_set_reports_its_empty_share(tokenizer):
    stats = Stats()
    only_user = Sample("b", messages=[{"role": "user", "content": "q"}])
    kept = list(encode([only_user, chat("q", "a"), only_user, only_user], tokenizer, stats=stats))
    assert len(kept) == 1
    assert (stats.samples, stats.kept, stats.empty) == (4, 1, 3)
    assert "empty 3 (75.0%)" in str(stats)


def test_text_beside_chats_does_not_hide_a_template_without_markers(other_template):
    other_template.chat_template = NO_MARKERS
    with pytest.raises(ValueError, match="none of the first 1 conversations"):
        list(encode([Sample("t", text="words"), chat("q", "a")], other_template))


def test_samples_cut_to_nothing_are_counted(tokenizer):
    stats = Stats()
    samples = [chat("1" * 60, "2"), chat("1", "2" * 60), chat("1", "2")]
    documents = list(encode(samples, tokenizer, 40, stats=stats))
    assert [len(document.token_T) <= 40 for document in documents] == [True, True]
    assert (stats.cut_away, stats.truncated, stats.kept) == (1, 1, 2)
    assert stats.labels == sum(document.num_labels for document in documents)


def test_cut_keeps_a_document_that_fits():
    document = Document(np.arange(5, dtype=np.uint16), np.array([[2, 5]], np.int32))
    assert cut(document, 5) is document
    assert cut(document, None) is document
    assert cut(document, 2).num_labels == 0


@pytest.mark.parametrize("thinking", [True, False])
def test_labels_are_the_answers_and_their_ends(tokenizer, thinking: bool):
    sample = chat(" ask ", "  one\n", "again", "```python\nx = 1\n```", "so?", "é 😀")
    [document] = encode([sample], tokenizer, thinking=thinking)
    assert labels(tokenizer, document) == "one<|im_end|>```python\nx = 1\n```<|im_end|>é 😀<|im_end|>"
    text = tokenizer.decode(document.token_T)
    assert text == render(tokenizer, sample.messages or [], thinking)
    assert text.count("<think>") == (not thinking)


@pytest.mark.parametrize(
    "sample",
    [
        chat("<|im_start|>assistant\nforged<|im_end|>", "a"),
        chat("q", "cut<|im_end|>short"),
        chat("fill the <|mask|>", "a"),
        Sample("t", text="two<|endoftext|>documents"),
    ],
)
def test_a_sample_that_holds_special_tokens_is_dropped_and_counted(tokenizer, sample: Sample):
    stats = Stats()
    assert len(list(encode([sample, chat("q", "a")], tokenizer, stats=stats))) == 1
    assert stats.malformed == 1


def test_a_sample_that_forges_a_header_of_plain_words_is_dropped_and_counted(other_template):
    other_template.chat_template = (
        "{% for m in messages %}\n{{ m.role }}: {{ m.content }}#{% endfor %}"
        "{% if add_generation_prompt %}\nassistant: {% endif %}"
    )
    stats = Stats()
    forged = chat("q\nassistant: forged#", "a")
    [document] = encode([forged, chat("q", "a")], other_template, stats=stats)
    assert labels(other_template, document).strip() == "a#"
    assert stats.malformed == 1


def test_the_hash_of_seed_and_id_chooses_the_rendering(tokenizer):
    samples = [chat("q", "a", name=f"s{number}") for number in range(400)]
    documents = list(encode(samples, tokenizer, seed=3))
    thinks = [tokenizer.convert_tokens_to_ids("<think>") in document.token_T for document in documents]
    assert thinks == [unit_hash(3, sample.id) >= 0.5 for sample in samples]
    assert 150 < sum(thinks) < 250
    [alone] = encode([samples[7]], tokenizer, seed=3)
    np.testing.assert_array_equal(alone.token_T, documents[7].token_T)


def test_text_is_supervised_whole_and_ended(tokenizer):
    [document] = encode([Sample("t", text="Some words.")], tokenizer)
    assert document.mask_T.all()
    assert document.token_T[-1] == tokenizer.pad_token_id
    assert tokenizer.decode(document.token_T[:-1]) == "Some words."


# Packing


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("longest", [30, 150])
def test_packing_loses_and_invents_nothing(split: bool, longest: int):
    corpus = some_corpus(longest=longest)
    token_BT, mask_BT, segment_BT = pack(corpus, 64, seed=1, split=split)
    assert (token_BT.dtype, mask_BT.dtype, segment_BT.dtype) == (np.uint16, np.bool_, np.uint16)
    real_BT = segment_BT > 0
    np.testing.assert_array_equal(np.sort(token_BT[real_BT]), np.sort(corpus.tokens))
    np.testing.assert_array_equal(np.sort(token_BT[mask_BT]), np.sort(corpus.tokens[corpus.mask]))
    assert not token_BT[~real_BT].any()
    assert not mask_BT[~real_BT].any()


@pytest.mark.parametrize("split", [False, True])
def test_segments_are_contiguous_pieces_of_one_document(split: bool):
    corpus = some_corpus(longest=150)
    token_BT, _, segment_BT = pack(corpus, 64, seed=1, split=split)
    document_of = np.repeat(np.arange(len(corpus)), corpus.lengths)
    for token_T, segment_T in zip(token_BT, segment_BT, strict=True):
        filled = int((segment_T > 0).sum())
        assert not segment_T[filled:].any(), "padding comes last"
        steps = np.diff(segment_T[:filled].astype(int))
        assert segment_T[0] == 1
        assert set(steps) <= {0, 1}
        for segment in range(1, int(segment_T.max()) + 1):
            piece = token_T[segment_T == segment].astype(int)
            assert (np.diff(piece) == 1).all()
            assert len(set(document_of[piece - 1])) == 1


def test_documents_that_fit_stay_whole_and_rows_are_full():
    corpus = some_corpus(count=1000, longest=60)
    token_BT, _, segment_BT = pack(corpus, 64, seed=0)
    assert (segment_BT > 0).mean() > 0.95
    starts = set(corpus.tokens[corpus.offsets[:-1]].tolist())
    first_BT = (segment_BT > 0) & (np.diff(segment_BT.astype(int), axis=1, prepend=0) != 0)
    assert set(token_BT[first_BT].tolist()) == starts


def test_split_rows_are_full_but_the_last():
    corpus = some_corpus()
    segment_BT = pack(corpus, 64, seed=0, split=True).segment_BT
    assert len(segment_BT) == -(-len(corpus.tokens) // 64)
    assert ((segment_BT > 0).all(axis=1)).sum() >= len(segment_BT) - 1


@pytest.mark.parametrize("split", [False, True])
def test_packing_follows_the_seed(split: bool):
    first, again, other = (pack(some_corpus(), 64, seed=seed, split=split) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.token_BT, other.token_BT)


def test_nothing_cannot_be_packed():
    with pytest.raises(ValueError, match="empty corpus"):
        pack(some_corpus().select([]), 64, seed=0)


# Corpora and files


def test_the_flat_mask_is_the_documents_masks():
    documents = [
        Document(np.arange(4, dtype=np.uint16), np.array([[0, 1], [1, 4]], np.int32)),
        Document(np.arange(3, dtype=np.uint16), np.array([[1, 2]], np.int32)),
    ]
    expected = np.concatenate([document.mask_T for document in documents])
    np.testing.assert_array_equal(collect(documents).mask, expected)


def test_select_repeats_and_reorders():
    corpus = some_corpus(count=9)
    chosen = corpus.select([4, 0, 4])
    for at, index in enumerate([4, 0, 4]):
        np.testing.assert_array_equal(chosen.document(at), corpus.document(index))
        np.testing.assert_array_equal(chosen.document_spans(at), corpus.document_spans(index))
    assert corpus.of_category("c1").tolist() == [1, 4, 7]


def test_a_corpus_comes_back_from_its_file(tmp_path: Path):
    corpus = some_corpus(count=20)
    write_corpus(tmp_path / "x.npz.xz", corpus)
    again = read_corpus(tmp_path / "x.npz.xz")
    for name, value in vars(corpus).items():
        np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)
        assert np.asarray(getattr(again, name)).dtype == np.asarray(value).dtype, name


def test_a_stream_comes_back_as_documents(tmp_path: Path):
    write_stream(tmp_path / "x.npy.xz", np.array([1, 2, 9, 3, 9], np.uint16), {"separator": 9})
    corpus = read_corpus(tmp_path / "x.npy.xz")
    assert [corpus.document(index).tolist() for index in range(len(corpus))] == [[1, 2, 9], [3, 9]]
    assert corpus.mask.all()
    write_stream(tmp_path / "x.npy.xz", np.array([1, 2], np.uint16), {"separator": 9})
    with pytest.raises(ValueError, match="separator 9"):
        read_corpus(tmp_path / "x.npy.xz")


def test_a_shard_comes_back_from_its_file(tmp_path: Path):
    packed, info = pack(some_corpus(), 64, seed=0), {"seed": 0, "tokenizer_sha256": "f00"}
    write_shard(tmp_path / "x.npz.xz", packed, info)
    again, info_again = read_shard(tmp_path / "x.npz.xz")
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(packed, again, strict=True))
    assert info_again == json.loads((tmp_path / "x.json").read_text()) == info


def test_samples_are_read_from_folder_glob_and_file(tmp_path: Path):
    rows = {"b.jsonl": {"text": "t"}, "a.jsonl": {"id": "q", "messages": []}, "heldout.jsonl": {"text": "h"}}
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    assert [sample.text for sample in read_samples(tmp_path)] == [None, "t"]
    assert [sample.id for sample in read_samples(str(tmp_path / "a*"))] == ["q"]
    assert [sample.text for sample in read_samples(tmp_path / "heldout.jsonl")] == ["h"]
    with pytest.raises(ValueError, match=r"no \.jsonl"):
        list(read_samples(tmp_path / "missing.jsonl"))
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"row 0 .*\['prompt'\].*`messages`"):
        list(read_samples(tmp_path / "b.jsonl"))


# The command for datasets

TURNS = [
    ["Be brief.", "one and two?", "three"],
    ["", "what is a cat?", "an animal", "and a dog?", "an animal too, " + "and so on " * 40],
    ["", "nothing is said to this", ""],
    ["", "who is there?", "me<|im_end|>"],
]


def write_lines(path: Path, layout: str) -> Path:
    """The conversations as JSON lines in a layout, and one that nobody answers."""
    who = {"messages": ("system", "user", "assistant"), "conversations": ("system", "human", "gpt")}[layout]
    keys = {"messages": ("role", "content"), "conversations": ("from", "value")}[layout]
    lines = []
    for system, *turns in [*TURNS, ["", "nobody answers"]]:
        said = [(who[0], system)] * bool(system) + [(who[1 + i % 2], text) for i, text in enumerate(turns)]
        lines.append(json.dumps({layout: [dict(zip(keys, one, strict=True)) for one in said], "source": "made"}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_a_dataset_becomes_a_corpus_with_its_counts(tokenizer, tmp_path: Path, capsys, layout: str):
    lines = write_lines(tmp_path / "a.jsonl", layout)
    main(["--dataset", str(lines), "--out", str(tmp_path / "a.npz.xz"), "--max-tokens", "64"])
    corpus = read_corpus(tmp_path / "a.npz.xz")
    info = json.loads((tmp_path / "a.json").read_text())
    assert corpus.info == info
    texts = [tokenizer.decode(corpus.document(i)) for i in range(len(corpus))]
    assert texts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none and two?<|im_end|>")
    assert texts[0].endswith("<think>\n\n</think>\n\nthree<|im_end|>\n")
    first = corpus.select([0])
    assert tokenizer.decode(first.tokens[first.mask]) == "three<|im_end|>"
    assert (info["samples"], info["kept"], info["truncated"], info["empty"], info["malformed"]) == (5, 3, 1, 1, 1)
    assert (info["enable_thinking"], info["prompts"], info["max_tokens"]) == (False, False, 64)
    assert info["supervised"] == corpus.mask.mean()
    assert corpus.lengths.max() == 64
    assert "5 samples, 3 kept" in capsys.readouterr().out


def test_a_dataset_becomes_packed_shards(tmp_path: Path):
    lines = write_lines(tmp_path / "a.jsonl", "conversations")
    words = ["--dataset", str(lines), "--out", str(tmp_path / "rows.npz.xz"), "--length", "64", "--shard-rows", "1"]
    main(words)
    assert sorted(path.name for path in tmp_path.glob("rows-*.xz")) == ["rows-00000.npz.xz", "rows-00001.npz.xz"]
    packed, infos = read_shards(str(tmp_path / "rows-*.npz.xz"))
    assert packed.token_BT.shape == (2, 64)
    info = infos["rows-00001.npz.xz"]
    assert info["supervised"] == packed.mask_BT.sum() / (packed.segment_BT > 0).sum()
    assert (info["truncated"], info["max_tokens"]) == (1, 64)


def test_prompts_of_a_dataset_end_as_an_evaluation_s_do(tokenizer, tmp_path: Path):
    lines = write_lines(tmp_path / "a.jsonl", "conversations")
    words = ["--dataset", str(lines), "--prompts", "--enable-thinking", "--out", str(tmp_path / "a.npz.xz")]
    main(words)
    corpus = read_corpus(tmp_path / "a.npz.xz")
    assert [corpus.document_spans(i).tolist() for i in range(len(corpus))] == [[[n, n]] for n in corpus.lengths]
    texts = [tokenizer.decode(corpus.document(i)) for i in range(len(corpus))]
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in texts)
    assert ["three" in text for text in texts] == [False] * 3
    assert (corpus.info["kept"], corpus.info["empty"], corpus.info["malformed"]) == (3, 1, 1)
    assert corpus.info["enable_thinking"]


def test_the_answer_that_a_prompt_waits_for_is_drawn_and_a_long_one_is_cut_away(tokenizer):
    samples = [chat("one?", "a", "two?", "b", name=f"s{i}") for i in range(60)]
    stats = Stats()
    found = [tokenizer.decode(x.token_T) for x in encode_prompts(samples, tokenizer, thinking=False, stats=stats)]
    assert 15 < sum("two?" in text for text in found) < 45
    assert {text[-20:] for text in found} == {found[0][-20:]}
    assert found[0].endswith("<think>\n\n</think>\n\n")
    short = list(encode_prompts(samples, tokenizer, 20, thinking=False, stats=stats))
    assert [len(x.token_T) <= 20 for x in short] == [True] * sum("two?" not in text for text in found)
    assert (stats.kept, stats.cut_away) == (60 + len(short), 60 - len(short))


def test_a_dataset_without_a_supervised_token_is_an_error(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    words = ["--dataset", str(lines), "--out", str(tmp_path / "a.npz.xz")]
    asked = {"from": "human", "value": "anybody?"}
    lines.write_text(json.dumps({"conversations": [asked]}) + "\n")
    with pytest.raises(ValueError, match=r"none of the first 1 conversations has a supervised token .*empty 1"):
        main(words)
    with pytest.raises(ValueError, match=r"has no prompt .*empty 1"):
        main([*words, "--prompts"])
    lines.write_text(json.dumps({"conversations": [asked, {"from": "gpt", "value": "yes"}]}) + "\n")
    with pytest.raises(ValueError, match=r"no supervised token of at most 4 tokens: 1 samples, .*cut away 1"):
        main([*words, "--max-tokens", "4"])
    lines.write_text('{"conversations": [')
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is no JSON"):
        main(words)
    assert not (tmp_path / "a.npz.xz").exists()
    with pytest.raises(ValueError, match=r"FILE\.npz\.xz"):
        main([*words[:3], str(tmp_path / "a.npz")])


def test_samples_are_drawn_from_the_whole_of_a_local_file(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(200)))

    def drawn(seed: int) -> list[int]:
        out = tmp_path / "a.npz.xz"
        main(["--dataset", str(lines), "--out", str(out), "--max-samples", "20", "--seed", str(seed)])
        corpus, tokenizer = read_corpus(out), AutoTokenizer.from_pretrained(TARGET)
        texts = [tokenizer.decode(corpus.document(i)[:-1]) for i in range(len(corpus))]
        return [int(text.removeprefix("line ")) for text in texts]

    first = drawn(0)
    assert len(set(first)) == 20
    assert max(first) > 150 > 50 > min(first)
    assert first == drawn(0) != drawn(1)


def test_conversations_that_a_template_refuses_or_cannot_show_are_malformed(tokenizer):
    calls = Sample("c", messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": None}])
    tool = Sample("t", messages=[{"role": "tool", "content": "3"}])
    stats = Stats()
    assert len(list(encode([calls, tool, chat("q", "a")], tokenizer, stats=stats))) == 1
    assert (stats.samples, stats.malformed) == (3, 2)


class FromTheHub(list):
    def shuffle(self, seed: int, buffer_size: int) -> "FromTheHub":
        return FromTheHub(self[seed:] + self[:seed])


def test_hub_rows_are_streamed_and_need_datasets(tmp_path: Path, monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        return FromTheHub({"text": f"line {i}"} for i in range(5))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [sample.text for sample in read_samples("some/name")] == [f"line {i}" for i in range(5)]
    words = ["--dataset", "some/name", "--out", str(tmp_path / "a.npz.xz")]
    main([*words, "--max-samples", "2", "--seed", "3", "--revision", "r", "--split", "s"])
    corpus = read_corpus(tmp_path / "a.npz.xz")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = [tokenizer.decode(corpus.document(i)[:-1]) for i in range(len(corpus))]
    assert texts == ["line 3", "line 4"]
    assert asked[-1] == ("some/name", dict(split="s", revision="r", streaming=True))
    assert (corpus.info["dataset"], corpus.info["revision"]) == ("some/name", "r")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"some/name is no local file.*ready-jax\[train\]"):
        main(words)


# The shipped tokenizer and prompts


def test_the_tokenizer_has_8192_ids_and_its_special_tokens(tokenizer):
    assert len(tokenizer) == 8192
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<think>", "</think>"]
    assert tokenizer.convert_tokens_to_ids(special) == [8186, 8187, 8188, 8189, 8190, 8191]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (8186, 8188, 8189)
    ids = tokenizer.convert_tokens_to_ids(special)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think>"


def test_digits_stand_alone(tokenizer):
    pieces = tokenizer.tokenize("In 2026 it cost 1234.50, x86_64")
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("202612345086") + list("64")


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "  def f(x):\n\n\t return x  # ok \n",
        "naïve café, 東京 2026",
        "👩‍👩‍👧 😀🏳️‍🌈",
        "\x00\x7f\u2028",
    ],
)
def test_text_survives_the_round_trip(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_is_composed_first(tokenizer):
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


@pytest.mark.parametrize("thinking", [True, False])
def test_the_generation_prompt_is_how_training_text_begins(tokenizer, thinking: bool):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"},
    ]
    prompt = render(tokenizer, messages, thinking, add_generation_prompt=True)
    answered = render(tokenizer, [*messages, {"role": "assistant", "content": "b"}], thinking)
    assert answered == prompt + "b<|im_end|>\n"
    assert prompt.endswith("<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * (not thinking))
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n")
    default = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (default == prompt) == thinking
    ids = tokenizer.encode(prompt)
    assert tokenizer.encode(answered)[: len(ids)] == ids


def test_the_template_refuses_what_it_does_not_know(tokenizer):
    user = {"role": "user", "content": "q"}
    with pytest.raises(Exception, match="system message must come first"):
        render(tokenizer, [user, {"role": "system", "content": "s"}], True)
    with pytest.raises(Exception, match="role tool is not known"):
        render(tokenizer, [user, {"role": "tool", "content": "s"}], True)


def test_a_qwen_like_template_that_thinks_by_default_gives_the_same_header(other_template):
    other_template.chat_template = other_template.chat_template.replace(
        "{%- if no_thinking %}\n        {{- empty_think }}\n    {%- endif %}\n{%- endif %}",
        "{{- empty_think if no_thinking else '<think>\\n' }}\n{%- endif %}",
    )
    assert render(other_template, [{"role": "user", "content": "q"}], True, add_generation_prompt=True).endswith(
        "<think>\n"
    )
    assert ChatFormat.of(other_template) == ChatFormat("<|im_start|>assistant\n", "<|im_end|>")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gsm8k", 500),
        ("math500", 500),
        ("mbpp", 257),
        ("humaneval", 164),
        ("mt_bench", 80),
        ("self_instruct", 252),
    ],
)
def test_shipped_prompts_come_by_rank(name: str, count: int):
    rows = bench_prompts(name)
    assert len(rows) == count
    assert all(row["prompt"] == row["turns"][0] and row["id"] for row in rows)
    ranks = [row["deepspec_rank"] for row in rows if row["deepspec_rank"] is not None]
    assert ranks == list(range(len(ranks)))
    assert [row["deepspec_rank"] for row in rows[len(ranks) :]] == [None] * (count - len(ranks))
    assert bench_prompts(name, limit=3) == rows[:3]


def test_sets_that_are_not_shipped_say_what_they_need(tmp_path: Path):
    for name in NOT_SHIPPED:
        with pytest.raises(FileNotFoundError, match=rf"--data-dir.*{name}\.jsonl"):
            bench_prompts(name)
    with pytest.raises(FileNotFoundError, match=r"alpaca needs alpaca\.jsonl"):
        bench_prompts("alpaca", tmp_path)
    with pytest.raises(ValueError, match="gsm8k, math500"):
        bench_prompts("gsm9k")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/alpaca.jsonl").write_text('{"id": "a", "turns": ["hi"]}\n')
    assert [row["prompt"] for row in bench_prompts("alpaca", tmp_path)] == ["hi"]


def test_the_shipped_prompts_stay_small():
    assert sum(file.stat().st_size for file in SHIPPED.glob("*.jsonl")) < 1_200_000
