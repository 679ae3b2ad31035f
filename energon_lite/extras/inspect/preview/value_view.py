"""Values as HTML: texts, numbers, images, audio, video, tokens, and nested values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from energon_lite.errors import counted
from energon_lite.extras.inspect.preview.element import Child, Markup, tag
from energon_lite.extras.inspect.preview.media import (
    fields_of,
    is_film,
    is_sound,
    part_bytes,
    part_size,
    pixels_of,
    sound_rate,
    stored_media,
)
from energon_lite.extras.inspect.preview.shown_run import Decode
from energon_lite.extras.inspect.preview.token_text import TokenRow, find_tokens, token_figure
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.part_decoder import MediaFile

#: Largest depth of nested values that is drawn.
_DEEPEST = 5
#: Extensions of parts that are text, whatever their bytes.
_TEXTS = frozenset(
    (
        *("txt", "text", "json", "jsonl", "html", "htm", "svg", "xml", "md", "csv", "tsv", "yaml", "yml", "py", "tex"),
        *("srt", "vtt", "cls", "cls2", "index", "inx", "id"),
    )
)
#: Extensions of parts that are decoded as arrays.
_ARRAYS = frozenset({"npy", "npz", "pt", "pth", "ten", "tb", "pyd", "pickle", "pkl", "mp", "msg", "msgpack"})
#: The largest part in bytes that is decoded as an array.
_LARGEST_PART = 16 << 20


@dataclass(frozen=True)
class Amount:
    """Limits on the shown part of a value.

    Args:
        text: characters of a text.
        tokens: tokens of a row; None for all.
        items: entries of a list, or images.
    """

    text: int = 1200
    tokens: int | None = 400
    items: int = 8


@dataclass(frozen=True)
class ValueView:
    """Renderer of the values of one sample or batch.

    Args:
        name: name of the sample, for alternative texts.
        media: function from a path to the address of its media; None if not available.
        amount: limits on the shown part.
        decode: function from tokens to text.
        more: address of the page with the whole value.
    """

    name: str
    media: Callable[[Sequence[str]], str | None]
    amount: Amount = Amount()
    decode: Decode | None = None
    more: str | None = None

    # -- samples after the hooks ----------------------------------------------------------------------------------

    def fields(self, value: Any) -> Markup:
        """Draw the fields of a sample or a batch, one below the other."""
        return self._entries(dict(fields_of(value)), (), 0)

    def _entries(self, fields: Mapping[str, Any], path: tuple[str, ...], depth: int) -> Markup:
        row = find_tokens(fields)
        rows: list[Markup] = []
        for name, value in fields.items():
            if value is None or (name == "__subflavors__" and not _says_anything(value)):
                continue
            if row is not None and name in row.fields:
                rows += self._tokens(row, name, fields)
            else:
                rows.append(_field(name, self.value(name, value, (*path, name), depth, fields)))
        return _field_list(rows, "no fields")

    def _tokens(self, row: TokenRow, name: str, fields: Mapping[str, Any]) -> Iterator[Markup]:
        """Draw the fields that make up a row of tokens, once for all of them."""
        names = [other for other in fields if other in row.fields]
        if name == names[0]:
            label = f"{', '.join(names)} of {self.name}"
            drawn = token_figure(row, label, self.decode, self.amount.tokens, self.more)
            yield _field([tag("span", other) for other in names], drawn)

    def value(
        self, name: str, value: Any, path: tuple[str, ...], depth: int = 0, beside: Mapping[str, Any] | None = None
    ) -> Markup:
        """Draw a value.

        Args:
            name: name of its field.
            path: its path in the sample.
            depth: its level of nesting.
            beside: all fields of the object that contains it.
        """
        if value is None or isinstance(value, (bool, int, float)):
            return tag("code", str(value))
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (bytes, bytearray)):
            return self._as_stored(stored_media(value), name, path) or _bytes_words(bytes(value))
        if isinstance(value, MediaFile):
            return self._as_stored(_media_of(value), name, path) or tag("code", short_text(repr(value)))
        if (pixels := pixels_of(value)) is not None:
            return self._picture(name, pixels.shape, value, path)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._array(name, value, path, beside or {})
        if depth >= _DEEPEST:
            return tag("code", short_text(repr(value)))
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            return self._entries(dict(fields_of(value)), path, depth + 1)
        if isinstance(value, (list, tuple)):
            return self._list(name, value, path, depth)
        return tag("code", short_text(repr(value)))

    def text(self, text: str, kind: str = "text") -> Markup:
        """Draw a text up to the limit."""
        most = self.amount.text
        if len(text) <= most:
            return tag("div", text, class_=kind, dir="auto")
        rest: Child = f" … {len(text):,} characters"
        if self.more:
            rest = [" … ", tag("a", f"show all {len(text):,} characters", href=self.more)]
        return tag("div", text[:most], tag("span.muted", rest), class_=kind, dir="auto")

    def _list(self, name: str, value: Sequence[Any], path: tuple[str, ...], depth: int) -> Markup:
        if not value:
            return tag("span.muted", "empty")
        if _is_plain(value) and not all(isinstance(item, str) for item in value):
            return tag("code", short_text(repr(list(value[:64])), 400) + (" …" if len(value) > 64 else ""))
        most = self.amount.items
        is_chat = all(isinstance(item, Mapping) and isinstance(item.get("content"), str) for item in value)
        most = max(8, most) if is_chat else most
        items: list[Child] = [
            [tag("span.role", str(item.get("role", ""))), self.text(item["content"])]
            if is_chat
            else self.value(name, item, (*path, str(number)), depth + 1)
            for number, item in enumerate(value[:most])
        ]
        rest = tag("li.muted", f"and {len(value) - most:,} more") if len(value) > most else None
        rows = [tag("li", item) for item in items]
        return tag("ol.chat", rows, rest) if is_chat else tag("ol.items", rows, rest, start=0)

    def _array(self, name: str, value: Any, path: tuple[str, ...], beside: Mapping[str, Any]) -> Markup:
        words = tag("code", tensor_words(value))
        if is_film(value):
            return self._film(name, value, path)
        if is_sound(name, value) or (len(path) > 1 and is_sound(path[-2], value)):
            rate = sound_rate(beside)
            known = None if rate or (len(path) > 1 and "clips" in path[-2]) else "played at 16 kHz: its rate is unknown"
            address = self.media((*path, "sound"))
            player = _player("audio", address, f"{name} of {self.name}") if address else tag("span.muted", "a sound")
            return tag("figure", player, tag("figcaption", words, known))
        if value.ndim == 4 and pixels_of(value[0] if len(value) else value) is not None:
            most = self.amount.items
            pictures = [self._picture(name, None, value[n], (*path, str(n))) for n in range(min(most, len(value)))]
            return tag("figure", tag("div.sheet", pictures), tag("figcaption", words))
        return words

    # -- images, audio, video ----------------------------------------------------------------------------------------

    def _picture(self, name: str, shape: Sequence[int] | None, value: Any, path: tuple[str, ...]) -> Markup:
        address = self.media(path)
        words = tensor_words(value) if not hasattr(value, "getbands") else f"image {value.size[0]}×{value.size[1]}"
        if address is None:
            return tag("code", words)
        picture = _player("image", address, f"{name} of {self.name}, {words}")
        return tag("figure.picture", picture, None if shape is None else tag("figcaption", words))

    def _film(self, name: str, value: torch.Tensor, path: tuple[str, ...]) -> Markup:
        most = min(len(value), self.amount.items)
        chosen = [round(n * (len(value) - 1) / max(1, most - 1)) for n in range(most)]
        frames = [
            _player("image", address, f"frame {n} of {name} of {self.name}")
            for n in dict.fromkeys(chosen)
            if (address := self.media((*path, str(n)))) is not None
        ]
        address = self.media((*path, "film"))
        label = f"{name} of {self.name}, {tensor_words(value)}"
        player = _player("video", address, label) if address else None
        caption = tag("figcaption", tag("code", tensor_words(value)), f" {len(frames)} of {len(value)} frames")
        return tag("figure.film", player, tag("div.sheet", frames), caption)

    def _as_stored(self, media: Any, name: str, path: tuple[str, ...]) -> Markup | None:
        """Draw an image, audio or video that a browser gets as stored; None for other media."""
        if media is None:
            return None
        address, kind = self.media(path), media.content_type.partition("/")[0]
        words = f"{media.content_type}, {_size(media.size)}"
        if address is None:
            return tag("span.muted", words)
        shown = _player(kind, address, f"{name} of {self.name}", preload="metadata")
        return tag("figure", shown, tag("figcaption", words), class_="picture" if kind == "image" else kind)

    # -- stored parts ---------------------------------------------------------------------------------------------

    def parts(self, parts: Mapping[str, Any]) -> Markup:
        """Draw the parts of a sample as stored."""
        rows: list[Markup] = []
        row = find_tokens({name: _array_of(name, part) for name, part in parts.items() if name.endswith(".npy")})
        for name, part in parts.items():
            size = part_size(part)
            if row is not None and name in row.fields:
                rows += self._tokens(row, name, parts)
            elif size is None:
                rows.append(_field(name, self.value(name, part, (name,))))
            else:
                rows.append(_field([name, " ", tag("small.muted", _size(size))], self._part(name, part, size)))
        return _field_list(rows, "no parts")

    def _part(self, name: str, part: Any, size: int) -> Markup:
        if not size:
            return tag("span.muted", "empty")
        player = self._as_stored(stored_media(part), name, (name,))
        if player is not None:
            return player
        extension = name.rpartition(".")[2].lower()
        if extension in _ARRAYS and size <= _LARGEST_PART:
            try:
                decoded = SampleDecoder().decode(name, part_bytes(part, 0, size))  # runs no code that is in it
            except Exception as error:
                what = getattr(error, "what", str(error))
                return tag("p.problem", short_text(f"{type(error).__name__}: {what}"))
            if hasattr(decoded, "shape"):
                return tag("code", tensor_words(decoded))
            plain = {k: tensor_words(v) if hasattr(v, "shape") else v for k, v in dict(fields_of(decoded)).items()}
            return tag("code", short_text(repr(plain), 800))
        # More bytes than characters: formatting may add white space to JSON.
        head = part_bytes(part, 0, min(size, max(4096, 8 * self.amount.text)))
        text = _as_text(head, extension in _TEXTS, is_whole=len(head) == size)
        if text is None:
            return _bytes_words(head, size)
        return self.text(_pretty(text) if extension == "json" and len(head) == size else text, "text source")


def _field(name: Child, drawn: Markup) -> Markup:
    """Draw the name of a field, and its value next to it, or below it if that is wide."""
    is_wide = drawn.startswith(("<figure", "<div", "<dl", "<ol"))
    return tag("div", tag("dt", name), tag("dd", drawn), class_="wide" if is_wide else None)


def _field_list(rows: Sequence[Markup], none: str) -> Markup:
    return tag("dl.fields", rows) if rows else tag("p.muted", none)


def _player(kind: str, address: str, label: str, preload: str = "none") -> Markup:
    """Draw media of a kind: ``image``, ``audio`` or ``video``."""
    if kind == "image":
        return tag("img", src=address, alt=label, loading="lazy", decoding="async")
    return tag(kind, src=address, controls=True, preload=preload, aria_label=label)


def _says_anything(labels: Any) -> bool:
    return any(labels) if isinstance(labels, (list, tuple)) else bool(labels)


def _is_plain(values: Sequence[Any]) -> bool:
    """Return whether all values are numbers and short words."""
    return all(
        item is None or isinstance(item, (bool, int, float)) or (isinstance(item, str) and len(item) < 40)
        for item in values
    )


def _media_of(value: Any) -> Any:
    try:
        return stored_media(value)
    except Exception:  # a stream that cannot be read is shown as a value
        return None


def _array_of(name: str, part: Any) -> Any:
    """Decode a stored array; None if it is none."""
    size = part_size(part)
    if not size or size > _LARGEST_PART:
        return None
    try:
        return SampleDecoder().decode(name, part_bytes(part, 0, size))  # runs no code that is in it
    except Exception:  # the view of the part shows the error
        return None


def _as_text(data: bytes, is_named: bool, *, is_whole: bool) -> str | None:
    """Decode bytes as text; None if they are not text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if not is_whole and error.start > len(data) - 4:  # cut within a character
            return data[: error.start].decode("utf-8")
    return data.decode("utf-8", "replace") if is_named else None


def _pretty(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _bytes_words(data: bytes, size: int | None = None) -> Markup:
    size = len(data) if size is None else size
    return tag("code", f"{counted(size, 'byte')}: {data[:32].hex(' ')}" + (" …" if size > 32 else ""))


def tensor_words(value: Any) -> str:
    """Describe a tensor or an array in a few words.

    Example:
        >>> tensor_words(torch.arange(3))
        'int64 [3]: 0, 1, 2'
    """
    shape = "×".join(map(str, value.shape)) or "single"
    words = f"{str(value.dtype).removeprefix('torch.')} [{shape}]"
    size = int(np.prod(value.shape)) if len(value.shape) else 1
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if not size or str(value.dtype) in ("object", "torch.complex64", "torch.complex128"):
        return words
    if len(value.shape) <= 1:
        first = value.reshape(-1)[:12].tolist()
        return f"{words}: {', '.join(_plain(number) for number in first)}" + (" …" if size > 12 else "")
    try:
        return f"{words}, {_plain(value.min().item())} to {_plain(value.max().item())}"
    except (RuntimeError, TypeError, ValueError):
        return words


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def short_text(text: str, most: int = 240) -> str:
    """Cut a text, and say how long it is."""
    return text if len(text) <= most else f"{text[:most]} … {len(text):,} characters"


def _size(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):,.1f} {unit}"
    return counted(size, "byte")
