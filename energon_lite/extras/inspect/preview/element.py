"""HTML with escaping by construction: text becomes markup only through :func:`element`, which escapes it.

Samples contain untrusted text, so pages are never concatenated from strings: every value that is not :class:`Markup` is
escaped on insertion, as text or as an attribute, and only this file makes Markup from a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from urllib.parse import quote

__all__ = ["Child", "Markup", "document", "element", "joined", "raw", "url_path"]

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "source", "wbr"})
#: Characters that HTML forbids, lone surrogates among them. Newlines and tabs are allowed.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NAME = re.compile(r"[a-z][a-zA-Z0-9-]*\Z")


class Markup(str):
    """A piece of HTML, already escaped."""

    __slots__ = ()


#: Types of an element's children.
Child = Markup | str | int | float | None | Iterable["Child"]


def element(tag: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Make an element, with its children and attributes escaped.

    Args:
        tag: name of the element.
        children: contents; text is escaped, None is skipped.
        attributes: ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; None and False are skipped, True
            makes an attribute without a value.

    Example:
        >>> element("a", "<b>", href="x?a=1&b=2", class_="key")
        '<a href="x?a=1&amp;b=2" class="key">&lt;b&gt;</a>'
    """
    assert _NAME.match(tag)
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        assert _NAME.match(name), name
        parts.append(f" {name}" if value is True else f' {name}="{_text(value)}"')
    parts.append(">")
    if tag not in _VOID:
        _add(parts, children)
        parts.append(f"</{tag}>")
    return Markup("".join(parts))


def joined(*children: Child) -> Markup:
    """Concatenate pieces."""
    parts: list[str] = []
    _add(parts, children)
    return Markup("".join(parts))


def raw(text: str) -> Markup:
    """Mark our own style sheet or script as HTML, without escaping; never use it for data."""
    return Markup(text)


def document(*children: Child, lang: str = "en") -> bytes:
    """Return a whole page as bytes."""
    return ("<!doctype html>\n" + element("html", *children, lang=lang)).encode("utf-8", "replace")


def url_path(*segments: object) -> str:
    """Join segments of a URL, each quoted as a whole, so that a slash in a name is no separator.

    (The caller must handle dots: a browser treats a segment of one or two dots, quoted or not, as a parent folder.)

    Example:
        >>> url_path("media", "../a b")
        'media/..%2Fa%20b'
    """
    return "/".join(quote(str(segment), safe="", errors="surrogatepass") for segment in segments)


def _add(parts: list[str], children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(_text(child))
        else:
            _add(parts, child)


def _text(value: object) -> str:
    return escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True)
