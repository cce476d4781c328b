"""Samples to tokens with supervised spans, or to the prompts that answers are regenerated for.

A conversation is rendered once, whole, with the tokenizer's own chat template, and tokenised once; a label
is a token of an assistant message or of the end of turn after it, not of the header nor an empty think block.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from ready_jax.train.samples import Messages, Sample, unit_hash

EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")
BATCH = 512  # samples tokenised together


@dataclass(frozen=True)
class Document:
    """A tokenised sample; `spans` holds the (begin, end) of its labels, in tokens, end excluded."""

    token_T: NDArray[np.integer]
    spans: NDArray[np.int32]
    source: str = ""
    category: str = "text"

    @property
    def mask_T(self) -> NDArray[np.bool_]:
        position_T = np.arange(len(self.token_T))
        return ((position_T >= self.spans[:, :1]) & (position_T < self.spans[:, 1:])).any(axis=0)

    @property
    def num_labels(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())


@dataclass
class Stats:
    """What `encode` saw: counted while it runs, complete when it is exhausted."""

    samples: int = 0
    kept: int = 0
    bytes: int = 0  # of the kept samples as rendered, before any cut
    tokens_uncut: int = 0
    tokens: int = 0
    labels: int = 0
    truncated: int = 0  # longer than the limit, and kept
    cut_away: int = 0  # dropped: all labels lay behind the limit
    empty: int = 0  # dropped: no label in the whole rendering
    malformed: int = 0  # dropped: no text, its own words hold a special token or a header, or the template refuses it

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.kept} kept, {self.tokens} tokens"
            f" ({self.labels / max(self.tokens, 1):.1%} supervised),"
            f" {self.bytes / max(self.tokens_uncut, 1):.3f} bytes/token,"
            f" empty {self.empty} ({self.empty / max(self.samples, 1):.1%}),"
            f" truncated {self.truncated}, cut away {self.cut_away}, malformed {self.malformed}"
        )


@dataclass(frozen=True)
class ChatFormat:
    """Where a chat template puts an assistant's words: after `header`, up to and with `end`."""

    header: str
    end: str

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatFormat":
        """Read both off the template: the generation prompt up to any think block, and an answer's tail."""
        user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "@answer@"}
        plain = render(tokenizer, [user], True)
        prompt = render(tokenizer, [user], True, add_generation_prompt=True)
        header = prompt.removeprefix(plain).split("<think>")[0]
        _, found, tail = render(tokenizer, [user, answer], True).rpartition("@answer@")
        return cls(header, tail.strip() if found else "")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Supervised (begin, end), in characters."""
        spans: list[tuple[int, int]] = []
        at = 0
        while self.header and self.end and (found := text.find(self.header, at)) >= 0:
            begin = found + len(self.header)
            if think := EMPTY_THINK.match(text, begin):
                begin = think.end()
            end = text.find(self.end, begin)
            if end < 0:
                break
            at = end + len(self.end)
            spans.append((begin, at))
        return spans


def render(tokenizer: Any, messages: Messages, thinking: bool, *, add_generation_prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, enable_thinking=thinking, add_generation_prompt=add_generation_prompt
    )


def cut(document: Document, length: int | None) -> Document:
    """The first `length` tokens with the labels that lie in them; no end of turn is invented at the cut."""
    if length is None or len(document.token_T) <= length:
        return document
    spans = np.minimum(document.spans, length)
    spans = spans[spans[:, 0] < spans[:, 1]]
    return Document(document.token_T[:length], spans, document.source, document.category)


def encode(
    samples: Iterable[Sample],
    tokenizer: Any,
    max_tokens: int | None = None,
    *,
    thinking: bool | None = None,
    seed: int = 0,
    check_first: int = 1000,
    stats: Stats | None = None,
) -> Iterator[Document]:
    """Tokenise samples, cut to `max_tokens`; those left without a label are counted in `stats` and dropped.

    `thinking` chooses the rendering of every conversation; None lets the hash of (seed, sample id) choose,
    half each. A text is supervised whole and ends with the padding token, Qwen's end of document too.

    Raises:
        ValueError: none of the first `check_first` conversations has a supervised token.
    """
    stats = Stats() if stats is None else stats
    chat = ChatFormat.of(tokenizer) if tokenizer.chat_template else ChatFormat("", "")
    chats = labelled = 0
    for sample, text, encoding in _tokenised(samples, tokenizer, stats, lambda s: _text(s, tokenizer, thinking, seed)):
        document = None if encoding is None else _document(sample, text, encoding, tokenizer, chat, stats)
        if sample.text is None:
            chats += 1
            labelled += document is not None and document.num_labels > 0
        if chats == check_first and not labelled:
            raise ValueError(_no_labels(tokenizer, chat, chats, stats))
        if document is not None and (document := _keep(document, text, max_tokens, stats)) is not None:
            yield document
    if chats and not labelled:
        raise ValueError(_no_labels(tokenizer, chat, chats, stats))


def encode_prompts(
    samples: Iterable[Sample],
    tokenizer: Any,
    max_tokens: int | None = None,
    *,
    thinking: bool = True,
    seed: int = 0,
    stats: Stats | None = None,
) -> Iterator[Document]:
    """What the target is asked in an evaluation: conversations up to one answer, with the generation prompt.

    The hash of (seed, sample id) chooses the answer. A document's one span is empty: it says where an answer belongs.
    Conversations without an answer are counted as empty, prompts longer than `max_tokens` as cut away.
    """
    stats = Stats() if stats is None else stats

    def asked(sample: Sample) -> str:
        messages = sample.messages or []
        answers = [i for i, message in enumerate(messages) if i and message.get("role") == "assistant"]
        if not answers:
            return ""
        before = messages[: answers[int(unit_hash(seed, sample.id) * len(answers))]]
        return render(tokenizer, before, thinking, add_generation_prompt=True)

    for sample, text, encoding in _tokenised(samples, tokenizer, stats, asked):
        size = 0 if encoding is None else len(encoding.ids)
        if encoding is None or size == 0 or (max_tokens is not None and size > max_tokens):
            stats.empty += encoding is not None and size == 0
            stats.cut_away += size > 0
            continue
        stats.kept += 1
        stats.bytes += len(text.encode())
        stats.tokens_uncut += size
        stats.tokens += size
        token_T = np.array(encoding.ids, _dtype(tokenizer))
        yield Document(token_T, np.array([[size, size]], np.int32), sample.source, sample.category)


def _no_labels(tokenizer: Any, chat: ChatFormat, chats: int, stats: Stats) -> str:
    name = tokenizer.name_or_path or type(tokenizer).__name__
    return (
        f"none of the first {chats} conversations has a supervised token under the chat template of {name}: "
        f"found {chat} ({stats}); needed a generation prompt that begins assistant messages, and an end. "
        f"The template begins: {(tokenizer.chat_template or '')[:200]!r}"
    )


def _tokenised(
    samples: Iterable[Sample], tokenizer: Any, stats: Stats, text_of: Callable[[Sample], str]
) -> Iterator[tuple[Sample, str, Any]]:
    """Samples, counted, with their text and its tokens; None instead of tokens for malformed ones, counted too."""
    for batch in itertools.batched(samples, BATCH):
        texts: list[str | None] = []
        for sample in batch:
            words = [sample.text] if sample.messages is None else [m.get("content") for m in sample.messages]
            plain = all(isinstance(part, str) for part in words)
            if not plain or any(special in part for part in words for special in tokenizer.all_special_tokens):
                texts.append(None)
                continue
            try:
                texts.append(text_of(sample))
            except TemplateError:  # such as roles that it does not know
                texts.append(None)
        encodings = tokenizer.backend_tokenizer.encode_batch([x or "" for x in texts], add_special_tokens=False)
        for sample, text, encoding in zip(batch, texts, encodings, strict=True):
            stats.samples += 1
            stats.malformed += text is None
            yield sample, text or "", None if text is None else encoding


def _text(sample: Sample, tokenizer: Any, thinking: bool | None, seed: int) -> str:
    if sample.text is not None:
        return sample.text
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path
        raise ValueError(f"sample {sample.id} is a conversation, but the tokenizer {name} has no chat template")
    flag = unit_hash(seed, sample.id) < 0.5 if thinking is None else thinking
    return render(tokenizer, sample.messages or [], flag)


def _dtype(tokenizer: Any) -> type[np.integer]:
    return np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32


def _document(
    sample: Sample, text: str, encoding: Any, tokenizer: Any, chat: ChatFormat, stats: Stats
) -> Document | None:
    dtype = _dtype(tokenizer)
    if sample.text is not None:
        token_T = np.array([*encoding.ids, tokenizer.pad_token_id], dtype)
        return Document(token_T, np.array([[0, len(token_T)]], np.int32), sample.source, sample.category)
    spans = chat.spans(text)
    answers = sum(message["role"] == "assistant" for message in sample.messages or [])
    if spans and len(spans) != answers:
        stats.malformed += 1
        return None
    inside = [(encoding.char_to_token(a), encoding.char_to_token(b - 1) + 1) for a, b in spans]
    label_spans = np.array(inside, np.int32).reshape(-1, 2)
    return Document(np.array(encoding.ids, dtype), label_spans, sample.source, sample.category)


def _keep(document: Document, text: str, max_tokens: int | None, stats: Stats) -> Document | None:
    kept = cut(document, max_tokens)
    if kept.num_labels == 0:
        stats.empty += document.num_labels == 0
        stats.cut_away += document.num_labels > 0
        return None
    stats.kept += 1
    stats.bytes += len(text.encode())
    stats.tokens_uncut += len(document.token_T)
    stats.tokens += len(kept.token_T)
    stats.labels += kept.num_labels
    stats.truncated += len(kept.token_T) < len(document.token_T)
    return kept
