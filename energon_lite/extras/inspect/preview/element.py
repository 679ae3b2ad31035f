"""HTML with escaping by construction, and charts as SVG.

Text becomes markup only through :func:`element`, which escapes it. Samples contain untrusted text, so pages are never
concatenated from strings: every value that is not :class:`Markup` is escaped on insertion, as text or as an attribute,
and only this file makes Markup from a string."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from html import escape
from urllib.parse import quote

import numpy as np

from energon_lite.errors import counted

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


def linked(child: Child, address: str | None) -> Child:
    """Make a link of a child; without an address it stays as it is."""
    return element("a", child, href=address) if address else child


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


#: Number of colours of data sets in the style sheet.
COLOURS = 12
#: Ratio of the largest number to the median above which bins have logarithmic widths.
_SKEWED = 12


def colour_of(leaf: int) -> str:
    """Return the CSS class of a data set's colour."""
    return f"c{leaf % COLOURS}"


def dot(leaf: int) -> Markup:
    """Draw a dot in a data set's colour, in front of a name."""
    return element("span", class_=f"dot {colour_of(leaf)}", aria_hidden="true")


def share_bar(share: float, leaf: int | None = None) -> Markup:
    """Draw a bar whose length is a share of 1; the number is written next to it."""
    width = max(0.6, 100 * min(1.0, share)) if share > 0 else 0
    bar = element("rect", width=f"{width:.2f}", height=8, rx=1, class_="all" if leaf is None else colour_of(leaf))
    back = element("rect", width=100, height=8, rx=1, class_="back")
    box = {"viewBox": "0 0 100 8", "preserveAspectRatio": "none"}
    return element("svg", back, bar, class_="share", aria_hidden="true", **box)


def segments_bar(parts: Sequence[tuple[int, int, str]], capacity: int | None) -> Markup:
    """Draw a pack to scale.

    Args:
        parts: length in tokens, data set (for its colour) and name of each segment.
        capacity: the most tokens of a pack; None if not known.
    """
    total = max(1, capacity or 0, sum(length for length, _, _ in parts))
    place, rects = 0.0, []
    for length, leaf, name in parts:
        width = 1000 * length / total
        title = element("title", f"{name}: {counted(length, 'token')}")
        gap = min(1.2, width / 4)
        rects.append(
            element(
                "rect", title, x=f"{place:.2f}", width=f"{width - gap:.2f}", height=28, rx=2, class_=colour_of(leaf)
            )
        )
        place += width
    used = sum(length for length, _, _ in parts)
    label = f"A pack of {counted(len(parts), 'segment')}, {counted(used, 'token')}"
    label += f" of {capacity:,}, {100 * used / capacity:.1f}% full" if capacity else ""
    back = element("rect", width=1000, height=28, rx=2, class_="back")
    box = {"viewBox": "0 0 1000 28", "preserveAspectRatio": "none"}
    return element("svg", back, rects, role="img", aria_label=label, class_="pack", **box)


def histogram(values: Sequence[int] | np.ndarray, title: str, unit: str, *, bins: int = 24) -> Markup | None:
    """Draw a histogram; None if there are no values.

    Args:
        values: any numbers of one kind.
        title: description of the numbers.
        unit: unit of the numbers.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return None
    low, high = float(numbers.min()), float(numbers.max())
    is_skewed = False
    whole = bool((numbers == np.round(numbers)).all())
    if whole and high - low < bins:
        edges = np.arange(low, high + 2) - 0.5
    elif is_skewed := low > 0 and high > _SKEWED * float(np.median(numbers)):
        edges = np.geomspace(low, high, bins + 1)
        edges[-1] = high + (1 if whole else 0)
    else:
        edges = np.histogram_bin_edges(numbers, bins=bins)
    counts = np.histogram(numbers, edges)[0].tolist()
    names = [_range(first, last, whole) for first, last in itertools.pairwise(edges)]
    most, width = max(counts), 480 / len(counts)
    bars = [
        element(
            "rect",
            element("title", f"{name} {unit}: {count:,}"),
            x=f"{width * number + 1:.2f}",
            y=f"{100 - 96 * count / most:.2f}",
            width=f"{max(1.0, width - 2):.2f}",
            height=f"{96 * count / most:.2f}",
            class_="all",
        )
        for number, (name, count) in enumerate(zip(names, counts, strict=True))
        if count
    ]
    line = element("rect", x=0, y=100, width=480, height=1, class_="axis")
    mean = float(numbers.mean())
    words = f"{title}: {len(numbers):,} from {_number(low)} to {_number(high)} {unit}, mean {_number(mean)}"
    rows = [
        element("tr", element("td", name), element("td", f"{count:,}", class_="number"))
        for name, count in zip(names, counts, strict=True)
        if count
    ]
    head = element("tr", element("th", unit, scope="col"), element("th", "count", scope="col", class_="number"))
    scale = "logarithmic" if is_skewed else None
    ends = element(
        "div", element("span", _number(low)), element("span", scale), element("span", _number(high)), class_="ends"
    )
    return element(
        "figure",
        element(
            "figcaption", element("strong", title), element("span", f"mean {_number(mean)} {unit}", class_="muted")
        ),
        element("svg", bars, line, viewBox="0 0 480 102", role="img", aria_label=words, class_="histogram"),
        ends,
        element(
            "details",
            element("summary", "as a table"),
            element("table", element("thead", head), element("tbody", rows)),
        ),
        class_="chart",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"


def _range(first: float, last: float, whole: bool) -> str:
    if not whole:
        return f"{_number(first)} to {_number(last)}"
    low, high = int(np.ceil(first)), int(np.ceil(last)) - 1
    return f"{low:,}" if low >= high else f"{low:,} to {high:,}"
