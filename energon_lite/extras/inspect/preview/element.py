"""HTML with escaping by construction, and charts as SVG.

Text becomes markup only through :func:`tag`, which escapes it. Samples contain untrusted text, so pages are never
concatenated from strings: every value that is not :class:`Markup` is escaped on insertion, as text or as an attribute,
and only this file makes Markup from a string."""

from __future__ import annotations

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


def tag(selector: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Make an element, with its children and attributes escaped.

    Args:
        selector: name of the element, followed by its classes, each after a dot.
        children: contents; text is escaped, None is skipped.
        attributes: ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; None and False are skipped, True
            makes an attribute without a value.

    Example:
        >>> tag("a.key", "<b>", href="x?a=1&b=2")
        '<a class="key" href="x?a=1&amp;b=2">&lt;b&gt;</a>'
    """
    element, _, classes = selector.partition(".")
    assert _NAME.match(element)
    parts = [f"<{element}"]
    for name, value in {"class": classes.replace(".", " ") or None, **attributes}.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        assert _NAME.match(name), name
        parts.append(f" {name}" if value is True else f' {name}="{_text(value)}"')
    parts.append(">")
    if element not in _VOID:
        _add(parts, children)
        parts.append(f"</{element}>")
    return Markup("".join(parts))


def linked(child: Child, address: str | None) -> Child:
    """Make a link of a child; without an address it stays as it is."""
    return tag("a", child, href=address) if address else child


def details(summary: Child, *children: Child, open: bool = False) -> Markup:
    """Make a block that opens on a click on its summary."""
    return tag("details", tag("summary", summary), children, open=open)


def table(
    heads: Iterable[Child], rows: Child, selector: str = "table", caption: Child = None, **attributes: str
) -> Markup:
    """Make a table; heads that are text become cells of the first row."""
    cells = [head if isinstance(head, Markup) else tag("th", head, scope="col") for head in heads]
    return tag(selector, caption, tag("thead", tag("tr", cells)), tag("tbody", rows), **attributes)


def pairs_list(pairs: Iterable[tuple[Child, Child]]) -> Markup:
    """Make a list of names and values, without those that are None."""
    rows = (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value is not None)
    return tag("dl.fields.run", rows)


def raw(text: str) -> Markup:
    """Mark our own style sheet or script as HTML, without escaping; never use it for data."""
    return Markup(text)


def document(*children: Child) -> bytes:
    """Return a whole page as bytes."""
    return ("<!doctype html>\n" + tag("html", *children, lang="en")).encode("utf-8", "replace")


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
#: Largest ratio of the largest number to the median with which all bins have the same width.
_SKEWED = 12


def colour_of(leaf: int) -> str:
    """Return the CSS class of a data set's colour."""
    return f"c{leaf % COLOURS}"


def dot(leaf: int) -> Markup:
    """Draw a dot in a data set's colour, in front of a name."""
    return tag(f"span.dot.{colour_of(leaf)}", aria_hidden="true")


def share_bar(share: float, leaf: int | None = None) -> Markup:
    """Draw a bar whose length is a share of 1; the number is written next to it."""
    width = max(0.6, 100 * min(1.0, share)) if share > 0 else 0
    colour = "all" if leaf is None else colour_of(leaf)
    bar = tag(f"rect.{colour}", width=f"{width:.2f}", height=8, rx=1)
    back = tag("rect.back", width=100, height=8, rx=1)
    return tag("svg.share", back, bar, aria_hidden="true", viewBox="0 0 100 8", preserveAspectRatio="none")


def segments_bar(parts: Sequence[tuple[int, int, str]], capacity: int | None) -> Markup:
    """Draw a pack to scale.

    Args:
        parts: length in tokens, data set (for its colour) and name of each segment.
        capacity: the most tokens of a pack; None if not known.
    """
    used = sum(length for length, _, _ in parts)
    total = max(1, capacity or 0, used)
    place, rects = 0.0, []
    for length, leaf, name in parts:
        width = 1000 * length / total
        title = tag("title", f"{name}: {counted(length, 'token')}")
        size = f"{width - min(1.2, width / 4):.2f}"
        rects.append(tag(f"rect.{colour_of(leaf)}", title, x=f"{place:.2f}", width=size, height=28, rx=2))
        place += width
    label = f"A pack of {counted(len(parts), 'segment')}, {counted(used, 'token')}"
    label += f" of {capacity:,}, {100 * used / capacity:.1f}% full" if capacity else ""
    back = tag("rect.back", width=1000, height=28, rx=2)
    box = {"viewBox": "0 0 1000 28", "preserveAspectRatio": "none"}
    return tag("svg.pack", back, rects, role="img", aria_label=label, **box)


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
    most, width = max(counts), 480 / len(counts)
    bars, rows = [], []
    for number, count in enumerate(counts):
        if count:
            name, height = _range(edges[number], edges[number + 1], whole), 96 * count / most
            place = {"x": f"{width * number + 1:.2f}", "y": f"{100 - height:.2f}"}
            size = {"width": f"{max(1.0, width - 2):.2f}", "height": f"{height:.2f}"}
            bars.append(tag("rect.all", tag("title", f"{name} {unit}: {count:,}"), **place, **size))
            rows.append(tag("tr", tag("td", name), tag("td.number", f"{count:,}")))
    line = tag("rect.axis", x=0, y=100, width=480, height=1)
    first, last, mean = (_number(value) for value in (low, high, float(numbers.mean())))
    words = f"{title}: {len(numbers):,} from {first} to {last} {unit}, mean {mean}"
    scale = "logarithmic" if is_skewed else None
    return tag(
        "figure.chart",
        tag("figcaption", tag("strong", title), tag("span.muted", f"mean {mean} {unit}")),
        tag("svg.histogram", bars, line, viewBox="0 0 480 102", role="img", aria_label=words),
        tag("div.ends", tag("span", first), tag("span", scale), tag("span", last)),
        details("as a table", table([unit, tag("th.number", "count", scope="col")], rows)),
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"


def _range(first: float, last: float, whole: bool) -> str:
    if not whole:
        return f"{_number(first)} to {_number(last)}"
    low, high = int(np.ceil(first)), int(np.ceil(last)) - 1
    return f"{low:,}" if low >= high else f"{low:,} to {high:,}"
