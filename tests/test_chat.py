"""Text in and out: templates, incremental text, stop strings."""

import itertools
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ready_jax.chat import Chat, StopMatcher, TextStream, load_tokenizer

TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{%- endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE tokenizer with almost no merges: most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat , the end ."] * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def chat(folder):
    return Chat(folder)


def test_no_torch_is_needed(chat):
    assert chat.encode_text("the")
    assert "torch" not in sys.modules


def test_a_string_is_one_user_turn(chat):
    messages = [{"role": "user", "content": "2 + 2?"}]
    expected = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render("2 + 2?") == chat.render(messages) == expected + "<think>\n"
    assert chat.render("2 + 2?", enable_thinking=False) == expected + "<think>\n\n</think>\n\n"
    assert chat.encode("2 + 2?", enable_thinking=False) == chat.encode_text(expected + "<think>\n\n</think>\n\n")
    assert chat.encode("2 + 2?")[0] == SPECIAL.index("<|im_start|>")  # one token, not its letters


def test_token_ids_pass_through(chat, tmp_path):
    assert chat.encode([5, np.int32(6)]) == [5, 6]
    assert Chat(tmp_path).encode([1, 2, 3]) == [1, 2, 3]  # no tokenizer there


def test_a_missing_tokenizer_is_an_error_only_for_text(tmp_path):
    chat = Chat(tmp_path)
    assert not chat.has_tokenizer
    for use in (lambda: chat.encode("text"), lambda: chat.decode([1]), lambda: load_tokenizer(tmp_path / "none")):
        with pytest.raises(ValueError, match=rf"{tmp_path}.*tokenizer\.json"):
            use()


def test_a_broken_tokenizer_names_its_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=str(tmp_path)):
        Chat(tmp_path).encode_text("x")


def test_a_missing_template_is_named(folder, tmp_path):
    for path in folder.iterdir():
        if path.suffix != ".jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        Chat(tmp_path).encode("hello")
    assert Chat(tmp_path).encode_text("the cat")


@pytest.mark.parametrize("messages", [[], [{"content": "x"}]])
def test_messages_need_roles(chat, messages):
    with pytest.raises(ValueError, match="role"):
        chat.render(messages)


def test_saving_tokenizer_and_template(chat, tmp_path):
    chat.save_pretrained(str(tmp_path))
    assert Chat(tmp_path).encode("the") == chat.encode("the")


# Text as it arrives

TEXTS = [
    "the cat , the end .",
    "naïve café 中文字 🙂🙃 done",
    "a\u0301 \u200d👩\u200d💻 x",
    "  two  spaces , and\n\n\tlines ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_pieces_join_to_the_whole_text_and_hold_whole_characters(chat, text, step):
    ids = chat.encode_text(text)
    stream = TextStream(chat)
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join([*pieces, stream.flush()]) == chat.decode(ids) == text


def test_any_tokens_at_all_join_to_their_decoding(chat):
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids = rng.integers(0, 280, 40).tolist()  # mostly no valid UTF-8, special tokens in between
        stream = TextStream(chat)
        pieces = [stream.push([token]) for token in ids]
        assert "".join([*pieces, stream.flush()]) == chat.decode(ids)


def test_special_tokens_are_left_out(chat):
    ids = [1, *chat.encode_text("the"), 2]
    stream = TextStream(chat)
    assert "".join(stream.push([token]) for token in ids) == chat.decode(ids) == "the"


def test_an_unfinished_character_waits_and_is_shown_at_the_end(chat):
    ids = chat.encode_text("a🙂")
    stream = TextStream(chat)
    assert [stream.push([token]) for token in ids[:-1]] == ["a", "", "", ""]
    assert stream.flush() == chat.decode(ids[:-1])[1:]
    assert stream.flush() == ""


def test_text_before_an_unfinished_character_does_not_wait(chat):
    stream = TextStream(chat)
    assert stream.push(chat.encode_text("ab🙂")[:4]) == "ab"
    assert stream.push(chat.encode_text("ab🙂")[4:]) == "🙂"


# Stop strings


class Pieces:
    """A detokenizer whose token i is the i-th piece."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, token_ids):
        return "".join(self.pieces[token] for token in token_ids)


def feed(pieces, stop):
    """(number of the completing token or None, all text shown) as a decoding loop does it."""
    stream, matcher = TextStream(Pieces(*pieces)), StopMatcher(stop)
    shown = []
    for token in range(len(pieces)):
        if matcher.push(stream.push([token])):
            return matcher.num_pushed, "".join([*shown, matcher.take()])
        shown.append(matcher.take())
    return None, "".join([*shown, matcher.take(last=True)])


@pytest.mark.parametrize(
    ("pieces", "stop", "count", "text"),
    [
        (["xE", "N", "Dy", "z"], ["END"], 3, "x"),  # field case A12
        (["a", "END", "b"], ["END"], 2, "a"),
        (["aENDb", "c"], ["END"], 1, "a"),
        (["E", "N", "END"], ["END"], 3, "EN"),
        (["EENND", "x"], ["END"], None, "EENNDx"),
        (["E", "E", "N", "D"], ["END"], 4, "E"),
        (["ab", "cd"], ["bcd", "bc"], 2, "a"),  # the one that is complete first
        (["one END two STOP"], ["STOP", "END"], 1, "one "),
        (["x", "\n", "\n", "y"], ["\n\n"], 3, "x"),
        (["x", "\n", "y"], ["\n\n"], None, "x\ny"),
        (["", "E", "", "N", "", "D"], ["END"], 6, ""),
        (["abc"], [], None, "abc"),
    ],
)
def test_stop_strings_end_the_text_at_the_token_that_completes_them(pieces, stop, count, text):
    assert feed(pieces, stop) == (count, text)


def test_where_tokens_are_cut_does_not_change_the_text():
    rng = np.random.default_rng(1)
    for _ in range(200):
        text = "".join(rng.choice(list("EENDx"), 30))
        cuts = [0, *sorted(rng.integers(0, 31, 12).tolist()), 30]
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        whole = feed(list(text), ["END", "NDE", "EEE"])
        count, shown = feed(pieces, ["END", "NDE", "EEE"])
        assert shown == whole[1]
        assert (count is None) == (whole[0] is None)
        if count is not None and whole[0] is not None:
            assert sum(map(len, pieces[: count - 1])) < whole[0] <= sum(map(len, pieces[:count]))


def test_nothing_is_shown_that_may_belong_to_a_stop_string():
    matcher = StopMatcher(["END"])
    matcher.push("abEN")
    assert matcher.take() == "ab"
    matcher.push("E")
    assert matcher.take() == "EN"
    assert matcher.take(last=True) == "E"


def test_stop_strings_of_no_use():
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["END", ""])
    matcher = StopMatcher(["x"])
    assert matcher.push("x")
    with pytest.raises(ValueError, match="already ended"):
        matcher.push("y")
