"""Tokens as text, with token boundaries, and with those coloured that count in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch

from energon_lite.errors import counted
from energon_lite.extras.inspect.preview.element import Markup, tag
from energon_lite.extras.inspect.preview.shown_run import Decode

#: Names of fields with tokens, in order of preference.
TOKEN_FIELDS = ("tokens", "input_ids", "token_ids", "text_tokens", "tokens.npy", "npy")
#: Names of fields with labels, and with loss masks.
_LABELS = ("labels", "label_ids", "targets")
_MASKS = ("loss_mask", "mask", "labels_mask", "loss_weights")
#: The most tokens that make up one character.
_PARTS = 8


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens, and their weights in the loss.

    Args:
        tokens: the tokens, ``[n]``.
        weights: weight of each token as a label, ``[n]``; None if not given.
        fields: names of the fields that the row was read from.
        segments: start of each packed sample; the first is 0.
        learned: number of labels that count, including the last ones of segments, which are not tokens of the row.
        beyond: number of entries at the end of ``tokens`` that are only labels: the last token's, if labels are
            shifted.
    """

    tokens: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any] | None
    fields: frozenset[str]
    segments: tuple[int, ...] = ()
    learned: int | None = None
    beyond: int = 0


def find_tokens(fields: Mapping[str, Any]) -> TokenRow | None:
    """Find the tokens among the fields of a sample, or of a batch with one row; None if there are none."""
    for name in TOKEN_FIELDS:
        tokens = _row(fields.get(name))
        if tokens is None or tokens.dtype.kind not in "iu" or len(tokens) < 2:
            continue
        used = {name}
        values: list[np.ndarray[Any, Any] | None] = []
        for choices in (_LABELS, _MASKS):
            rows = {other: row for other in choices if (row := _row(fields.get(other), len(tokens))) is not None}
            used |= {*[*rows][:1]}
            values.append(next(iter(rows.values()), None))
        labels, mask = values
        if name.endswith("npy") and mask is None:
            mask = _row(fields.get("mask.npy"), len(tokens))
        segments = _segments(fields.get("cu_seqlens"), tokens)
        shown, weights, shifted = _learned(tokens, labels, mask)
        count = None if weights is None else int((weights > 0).sum())
        if weights is not None and shifted:  # the last label of a segment is not the first token of the next
            weights[list(segments[1:])] = 0
        return TokenRow(shown, weights, frozenset(used), segments, count, len(shown) - len(tokens))
    return None


def _row(value: Any, length: int | None = None) -> np.ndarray[Any, Any] | None:
    """Return a value as a single row of numbers; None if it is not one, or has another length."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype.is_floating_point else value).numpy()
    elif isinstance(value, (list, tuple)) and value and all(type(number) in (int, float, bool) for number in value):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return None
    value = value[0] if value.ndim == 2 and len(value) == 1 else value
    return value if value.ndim == 1 and length in (None, len(value)) else None


def _learned(
    tokens: np.ndarray[Any, Any], labels: np.ndarray[Any, Any] | None, mask: np.ndarray[Any, Any] | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None, bool]:
    """Return the tokens, their weights as labels, and whether labels are shifted.

    Labels are for the same position or, if shifted, for the next one; then the last label is the last token.
    """
    weights = None if mask is None else mask.astype(np.float64)
    if labels is None:
        return tokens, weights, False
    known = labels >= 0
    weights = known.astype(np.float64) if weights is None else weights * known
    here, ahead = (labels == tokens)[known].sum(), (labels[:-1] == tokens[1:])[known[:-1]].sum()
    if ahead <= here:
        return tokens, weights, False
    last = [labels[-1]] if known[-1] else []
    ahead_of = np.concatenate([[0.0], weights[: len(tokens) - 1 + len(last)]])
    return np.concatenate([tokens, last]).astype(np.int64), ahead_of, True


def _segments(value: Any, tokens: np.ndarray[Any, Any]) -> tuple[int, ...]:
    edges = _row(value)
    if edges is None or len(edges) < 2 or edges[0] or (np.diff(edges) <= 0).any() or edges[-1] > len(tokens):
        return ()
    return tuple(edges.tolist()[:-1])


def pieces_of(tokens: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """Return the text of tokens in pieces, with the number of tokens of each piece.

    A piece has several tokens if each of them is a part of a character. An empty piece is a token without text.
    """
    pieces: list[tuple[str, int]] = []
    start = 0
    while start < len(tokens):
        pieces.append(_piece(tokens, start, decode))
        start += pieces[-1][1]
    return pieces


def _piece(tokens: Sequence[int], start: int, decode: Decode) -> tuple[str, int]:
    """Return the text that starts at a token, and the number of tokens that complete its characters."""
    lead = tokens[max(0, start - 1) : start]
    before = decode(lead) if lead else ""
    for count in range(1, min(_PARTS, len(tokens) - start) + 1):
        piece = tokens[start : start + count]
        # The text of a token depends on the one before it, unless that has no text, such as an end token.
        whole = decode([*lead, *piece]) if before else ""
        text = whole[len(before) :] if before and whole.startswith(before) else decode(piece)
        if not text.endswith("\ufffd"):
            return text, count
    return decode(tokens[start : start + 1]), 1


def token_figure(row: TokenRow, label: str, decode: Decode | None, most: int | None, more: str | None = None) -> Markup:
    """Draw tokens as text.

    Args:
        label: label for screen readers.
        decode: function from tokens to text; None to show token ids.
        most: the most tokens to show; None for all.
        more: address of the page with all tokens.
    """
    count = len(row.tokens)
    shown = row.tokens[:most].tolist()
    weights = None if row.weights is None else row.weights[:most].tolist()
    try:
        pieces = None if decode is None else pieces_of(shown, decode)
    except Exception:  # the user's tokenizer may not match these tokens
        pieces = None
    words = counted(count - row.beyond, "token") + (" and the label of the last" if row.beyond else "")
    if row.weights is not None:
        words += f", of which {row.learned:,} are learned"
    if len(row.segments) > 1:
        words += f", in {counted(len(row.segments), 'segment')}"
    spans, place = list[tuple[float, Markup]](), 0
    for text, size in pieces or [(str(token), 1) for token in shown]:
        weight = 0.0 if weights is None else weights[place]
        begins = place in row.segments and place > 0
        spans.append((weight, _span(text, shown[place], pieces is None, begins)))
        place += size
    runs = [
        tag("mark" if learned else "span", [span for _, span in group], class_="learned" if learned else "given")
        for learned, group in groupby(spans, key=lambda pair: pair[0] > 0)
    ]
    legend = None
    if row.weights is not None:
        legend = tag("span.legend", tag("mark.learned", "coloured"), " is learned")
    rest = None
    if len(shown) < count:
        rest = f"the first {len(shown):,} are shown"
        rest = tag("a", f"show all {count:,}", href=more) if more else rest
    numbers = "tokens numbers" if pieces is None else "tokens"
    box = tag(
        "div",
        runs,
        class_=numbers,
        role="group",
        tabindex=0,
        aria_label=f"{label}: {words}",
        data_ids=_ids(shown, pieces),
    )
    return tag("figure.token-figure", tag("figcaption", tag("span", words), legend, rest), box)


def _ids(shown: Sequence[int], pieces: Sequence[tuple[str, int]] | None) -> str | None:
    """Return the token ids of each piece, for the mouse pointer."""
    if pieces is None:
        return None
    ends = accumulate(size for _, size in pieces)
    places = zip(pieces, ends, strict=True)
    return " ".join("+".join(map(str, shown[end - size : end])) for (_, size), end in places)


def _span(text: str, token: int, is_number: bool, begins: bool) -> Markup:
    kind = "begins" if begins else None
    if is_number:
        return tag("span", text, class_=kind)
    if not text:
        return tag("span", f"⟨{token}⟩", class_=f"{kind} special" if kind else "special")
    return tag("span", text.replace("\n", "↵\n"), class_=kind)
