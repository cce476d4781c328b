"""Text in and out: the checkpoint's own tokenizer and chat template, text as it arrives, and stop strings.

The tokenizer is ``transformers``' (no torch needed) and is loaded when text must first be encoded or decoded: token
ids go through without one. Prompts are rendered by the template that the checkpoint ships, never by one of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
#: What a decoder puts in the place of bytes that are no whole character (yet).
_REPLACEMENT = "\ufffd"


def load_tokenizer(folder: str | Path) -> Any:
    """The ``transformers`` tokenizer of a local folder. Raises ValueError naming folder and files if there is none."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise ValueError(
            f"{folder}: found no tokenizer ({found}), needed {' or '.join(_TOKENIZER_FILES)} to encode or decode text; "
            "token ids work without"
        )
    try:
        return _auto_tokenizer().from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ValueError(f"{folder}: its tokenizer files could not be read: {error}") from error


def _auto_tokenizer() -> Any:
    """Imported late, since it is slow, and without the advice to install PyTorch, which is not needed here."""

    def relevant(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(relevant)
    try:
        from transformers import AutoTokenizer
    finally:
        logger.removeFilter(relevant)
    return AutoTokenizer


class Chat:
    """Renders, encodes and decodes with the tokenizer of one folder.

    >>> Chat(folder).encode("What is 2 + 2?", enable_thinking=False)  # one user turn, ready to be answered
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds one; nothing is loaded."""
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)

    def render(
        self, prompt: str | Sequence[Mapping[str, Any]], *, enable_thinking: bool = True, **template_options: Any
    ) -> str:
        """The prompt text that the model sees, up to where its answer begins.

        ``prompt``: one user turn, or chat messages. ``template_options`` reach the template (``tools``,
        ``reasoning_effort``, ...).
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        wrong = [turn for turn in messages if "role" not in turn]
        if wrong or not messages:
            raise ValueError(f"chat messages: found {wrong[:1] or 'none'}, needed dicts with a role and content")
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.folder}: found no chat template, needed chat_template.jinja (or chat_template in "
                "tokenizer_config.json) to render a prompt; token ids work without"
            )
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking, **template_options
        )

    def encode(
        self,
        prompt: str | Sequence[Any],
        *,
        enable_thinking: bool = True,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a rendered prompt (a string or messages); token ids pass through."""
        if not isinstance(prompt, str) and not any(isinstance(item, Mapping) for item in prompt):
            return [int(token) for token in prompt]
        return self.encode_text(self.render(prompt, enable_thinking=enable_thinking, **template_options))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text: no template, nothing added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones left out, spaces as they are."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def save_pretrained(self, folder: str) -> None:
        """Write tokenizer and template to another folder."""
        self.tokenizer.save_pretrained(folder)


@runtime_checkable
class Decodes(Protocol):
    """All that :class:`TextStream` needs of a :class:`Chat`."""

    def decode(self, token_ids: list[int], /) -> str: ...


class TextStream:
    """Text as tokens arrive, whole characters only; the pieces and ``flush`` join to the decoding of all tokens."""

    def __init__(self, chat: Decodes):
        self._chat = chat
        self._shown: list[int] = []  # tokens of complete characters: decoded again as context of what follows
        self._held: list[int] = []  # tokens after them, which end inside a character
        self._told = 0  # characters of the held tokens that were given out already

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain; empty while the next character is incomplete."""
        self._held += token_ids
        text = self._held_text()
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._told :]
        if certain == text:
            self._shown, self._held, self._told = (self._held if text else self._shown + self._held), [], 0
        else:
            self._told = len(certain)
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character are shown as replacement characters."""
        piece = self._held_text()[self._told :]
        self._told += len(piece)
        return piece

    def _held_text(self) -> str:
        if not self._held:
            return ""
        before = self._chat.decode(self._shown) if self._shown else ""
        return self._chat.decode(self._shown + self._held)[len(before) :]


class StopMatcher:
    """Finds the first stop string to be completed in text that arrives token by token, in commit order.

    The text ends before the stop string. ``num_pushed`` counts pushes (one per token), so after a match it is the
    number of tokens to keep: the one that completes the stop string is the last of them.
    """

    def __init__(self, stop: Iterable[str] = ()):
        self.stop = tuple(stop)
        if any(not text for text in self.stop):
            raise ValueError(f"stop={list(self.stop)}: an empty stop string would end every text at once")
        self.num_pushed = 0
        self.matched: str | None = None
        self._text = ""  # not taken yet; never begins inside a stop string

    def push(self, text: str) -> bool:
        """Add the text of one token (often empty); True if a stop string is now complete."""
        if self.matched is not None:
            raise ValueError(f"the text already ended with the stop string {self.matched!r}")
        self.num_pushed += 1
        old = len(self._text)
        self._text += text
        ends = []
        for stop in self.stop:
            start = self._text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if not ends:
            return False
        _, start, self.matched = min(ends)
        self._text = self._text[:start]
        return True

    def take(self, last: bool = False) -> str:
        """Text that may be shown: all of it at the end or after a match, else without what may begin a stop string."""
        held = 0
        if not last and self.matched is None:
            longest = max((len(stop) for stop in self.stop), default=1) - 1
            sizes = range(min(longest, len(self._text)), 0, -1)
            held = next((n for n in sizes if any(stop.startswith(self._text[-n:]) for stop in self.stop)), 0)
        shown = self._text[: len(self._text) - held]
        self._text = self._text[len(shown) :]
        return shown
