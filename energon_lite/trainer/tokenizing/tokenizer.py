"""Tokenizers: the bytes of UTF-8, and those of Hugging Face, without downloads and without running code from them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

from energon_lite.documents import missing_file_fix
from energon_lite.errors import ConfigError, DatasetError, UsageError

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


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


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer in the form of the ``tokenizers`` library. Rows are padded with the end token.

    Args:
        path: a folder with ``tokenizer.json`` (and, for special tokens and chats, ``tokenizer_config.json``), or the
            file ``tokenizer.json`` itself.
        begin: text of the token at the start of each example; None: that of the folder, if any; "": none.
        end: the same for the end.

    Raises:
        UsageError: there is no tokenizer, or it lacks the token.

    Example:
        >>> tokenizer = HuggingFaceTokenizer("models/llama")
        >>> tokenizer.encode_texts(["Hello"])
        [[15043]]
    """

    def __init__(self, path: str, *, begin: str | None = None, end: str | None = None):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UsageError("tokenising needs the package tokenizers", fix="pip install 'energon-lite[hf]'") from None
        self._folder, file = _find(path)
        try:
            self._tokenizer = Tokenizer.from_file(file)
        except Exception as error:  # the library raises Exception itself
            raise DatasetError(f"this is not a tokenizer: {error}", where=file, fix="check the file") from error
        # Truncation and padding settings of the file are for models that need texts of one length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _settings(self._folder)
        self.bos = self._special("begin", settings.get("bos_token") if begin is None else begin, file)
        self.eos = self._special("end", settings.get("eos_token") if end is None else end, file)
        self.pad = self.eos or 0
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        #: True if the folder has a chat template.
        self.has_chat_template = bool(settings.get("chat_template")) or os.path.isfile(
            os.path.join(self._folder, _FILES[-1])
        )
        self._anew = partial(HuggingFaceTokenizer, path, begin=begin, end=end)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the file itself: that is as fast, and a chat template may not be picklable.
        return self._anew, ()

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        return self.encode_texts([text])[0]

    def decode_plain(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], mark: str | None = None) -> list[tuple[list[int], bool]]:
        """Use the folder's chat template, if any (requires transformers); otherwise, the default format."""
        return self.templated_chat(messages, mark) if self.has_chat_template else super().chat(messages, mark)

    def templated_chat(
        self, messages: Sequence[Mapping[str, Any]], mark: str | None = None
    ) -> list[tuple[list[int], bool]]:
        """Return the tokens of a conversation in pieces, each with a flag for the assistant's words.

        For each answer, the template is rendered without it, as for generation, and with it: the difference of the two
        texts is the answer. The whole text is tokenised once; a token belongs to the piece in which its text begins.

        Args:
            messages: messages as ``{"role": "user", "content": "Hi"}``.
            mark: a placeholder in a text, such as that of an image: it becomes -1.

        Raises:
            ValueError: the template rejects the messages, or changes earlier text when a message is added; or a text
                has a lone surrogate.
        """
        steps: list[tuple[int, bool]] = []  # number of messages, and whether a generation prompt follows
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                steps += [(place, True), (place + 1, False)] if place else [(1, False)]
        if not steps or steps[-1][0] < len(messages):
            steps.append((len(messages), False))
        text = ""
        ends = [0]
        answers = []
        for count, asked in steps:
            before, text = text, self._templated(list(messages[:count]), asked)
            if not text.startswith(before):
                raise ValueError(
                    f"the chat template changes earlier messages when message {count} is added: the speaker of "
                    "a text is unknown"
                )
            ends.append(len(text))
            answers.append(not asked and messages[count - 1]["role"] == "assistant")
        text.encode()  # a lone surrogate, which no tokenizer takes, is a ValueError
        tokens, starts = self._with_starts(text, mark)
        edges = [bisect_left(starts, end) for end in ends]
        return [(tokens[first:last], answer) for (first, last), answer in zip(pairwise(edges), answers, strict=True)]

    def _with_starts(self, text: str, mark: str | None) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the character at which each begins."""
        tokens: list[int] = []
        starts: list[int] = []
        at, marked = 0, len(mark or "")
        for place, part in enumerate(text.split(mark) if mark else [text]):
            if place:
                tokens.append(-1)
                starts.append(at - marked)
            encoded = self._tokenizer.encode(part, add_special_tokens=False)
            tokens += encoded.ids
            # Some tokenizers report a single space as starting after itself.
            starts += [at + min(start, max(stop - 1, 0)) for start, stop in encoded.offsets]
            at += len(part) + marked
        return tokens, list(accumulate(starts, max))

    def _templated(self, messages: list[Mapping[str, Any]], asked: bool) -> str:
        tokenizer = self._chat
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
        except Exception as error:  # errors of jinja, or of the template
            raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from None
        return text

    @cached_property
    def _chat(self) -> Any:
        """The tokenizer of transformers, with its chat template."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UsageError("chat templates need transformers", fix="pip install 'energon-lite[hf]'") from None
        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        if not tokenizer.chat_template:
            raise UsageError(
                "the tokenizer has no chat template",
                where=self._folder,
                fix="add chat_template.jinja to the folder, or name a prompt and a response field",
            )
        return tokenizer

    def _special(self, what: str, token: Any, file: str) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        if not text:
            return None
        number = self._tokenizer.token_to_id(text)
        if number is None:
            raise UsageError(f"the tokenizer has no token {text!r} for the {what}", where=file, fix="name one it has")
        return int(number)


def fingerprint_of(path: str) -> str:
    """Return a digest of the files that make up a tokenizer."""
    folder, file = _find(path)
    digest = hashlib.sha256()
    for path in dict.fromkeys((file, *(os.path.join(folder, name) for name in _FILES[1:]))):
        if os.path.isfile(path):
            with open(path, "rb") as handle:
                digest.update(os.path.basename(path).encode() + b"\0" + hashlib.sha256(handle.read()).digest())
    return digest.hexdigest()[:16]


def _find(path: str) -> tuple[str, str]:
    """Return the folder, and the file ``tokenizer.json``."""
    file = os.path.join(path, _FILES[0]) if os.path.isdir(path) else path
    if not os.path.isfile(file):
        cure = "give a folder with tokenizer.json, or that file itself"
        fix = cure if os.path.exists(path) else missing_file_fix(path, cure)
        raise UsageError("there is no tokenizer here", where=file, fix=fix)
    return os.path.dirname(file) or ".", file


def _settings(folder: str) -> dict[str, Any]:
    """Read the folder's settings of special tokens."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            continue
        try:
            with open(file, encoding="utf-8") as handle:
                settings |= {key: value for key, value in json.load(handle).items() if value is not None}
        except (ValueError, AttributeError) as error:
            raise DatasetError(f"this is not a JSON object: {error}", where=file, fix="check the file") from None
    return settings


def make_tokenizer(path: str | None, vocab_size: int) -> Tokenizer:
    """Make the tokenizer of a run: that of a path, or the bytes of UTF-8.

    Raises:
        ConfigError: the tokenizer has more tokens than the model.
        UsageError: the tokenizer does not exist.
    """
    tokenizer = ByteTokenizer() if path is None else HuggingFaceTokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            at="model.vocab_size",
            fix=f"set it to {tokenizer.vocab_size}, or name the model's own tokenizer: data.tokenizer",
        )
    return tokenizer
