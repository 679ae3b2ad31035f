"""Tokenizers of a run: texts to tokens and back."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.errors import ConfigError
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer


class Tokenizer(ABC):
    """Interface of a tokenizer: texts to tokens and back.

    Attributes:
        bos, eos: tokens that begin and end a text, if the tokenizer has them.
        pad: the token that rows are padded with; it may have another meaning too, as the loss ignores padding.
        vocab_size: one more than the largest token.
    """

    bos: int | None
    eos: int | None
    pad: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with begin and end tokens."""
        begin, end = ([] if token is None else [token] for token in (self.bos, self.eos))
        return [*begin, *self.encode_plain(text), *end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to the first end token, without other special tokens."""
        return self.decode_plain(list(itertools.takewhile(lambda token: token != self.eos, tokens)))

    def chat(self, messages: Sequence[Mapping[str, Any]], mark: str | None = None) -> list[tuple[list[int], bool]]:
        """Return the tokens of a conversation in pieces, each with a flag for the assistant's words.

        Each message is ``role``, a colon and a line end, then the content, then a line end; the assistant's content
        ends with the end token instead. A tokenizer with its own chat template uses that.

        Args:
            messages: ``{"role": "user", "content": "Hi"}`` each.
            mark: a placeholder in a content, such as that of an image: it becomes -1.
        """
        pieces = [([] if self.bos is None else [self.bos], False)]
        for message in messages:
            answers = message["role"] == "assistant"
            end = [self.eos] if answers and self.eos is not None else self.encode_plain("\n")
            pieces.append((self.encode_plain(f"{message['role']}:\n"), False))
            for place, text in enumerate(message["content"].split(mark) if mark else [message["content"]]):
                pieces += [([-1], False)] * (place > 0) + [(self.encode_plain(text), answers)]
            pieces.append((end, answers))
        return pieces

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""

    @abstractmethod
    def decode_plain(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as tokens 0..255, then begin, end and padding. It needs no download and has no unknown tokens.

    Example:
        >>> ByteTokenizer().encode("Hi")
        [256, 72, 105, 257]
    """

    bos, eos, pad, vocab_size = 256, 257, 258, 259

    def encode_plain(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8"))

    def decode_plain(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; invalid UTF-8 becomes replacement characters."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class FileTokenizer(Tokenizer):
    """A Hugging Face tokenizer, from a folder or file, without downloads. Rows are padded with the end token.

    Args:
        path: a folder with ``tokenizer.json``, or that file.

    Raises:
        UsageError: there is no tokenizer at the path.
    """

    def __init__(self, path: str):
        self._inner = HuggingFaceTokenizer(path)
        self.vocab_size = self._inner.vocab_size
        self.bos = self._inner.begin
        self.eos = self._inner.end
        self.pad = self.eos or 0

    def chat(self, messages: Sequence[Mapping[str, Any]], mark: str | None = None) -> list[tuple[list[int], bool]]:
        """Use the folder's chat template, if any (requires transformers); otherwise, the default format."""
        if self._inner.has_chat_template:
            return self._inner.chat(messages, mark)
        return super().chat(messages, mark)

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        return self._inner.encode([text])[0]

    def decode_plain(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._inner.decode(tokens)


def make_tokenizer(path: str | None, vocab_size: int) -> Tokenizer:
    """Make the tokenizer of a run: that of a path, or the bytes of UTF-8.

    Raises:
        ConfigError: the tokenizer has more tokens than the model.
        UsageError: the tokenizer does not exist.
    """
    tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            at="model.vocab_size",
            fix=f"set it to {tokenizer.vocab_size}, or name the model's own tokenizer: data.tokenizer",
        )
    return tokenizer
