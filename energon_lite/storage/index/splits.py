"""Division of shards into splits, and the notation of lists of shards as brace patterns.

Splits consist of whole shards. The ratio is applied as in Energon (the n-th split ends at the integer part of its
cumulated share), but with exact fractions: 0.7,0.2,0.1 of ten shards are seven, two and one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from energon_lite.documents.paths import expand_braces
from energon_lite.errors import UsageError, counted

#: The splits that a ratio divides shards among.
RATIO_SPLITS = ("train", "val", "test")
_NUMBER = re.compile(r"([0-9]+)")
#: The seed with which Energon shuffles shards, so that both libraries make the same splits.
_SHUFFLE_SEED = 42


def parse_ratio(ratio: str | Sequence[float]) -> tuple[Fraction, ...]:
    """Parse the shares of train, val and test: ``"8,1,1"``, ``"0.8, 0.1, 0.1"`` or numbers.

    Raises:
        UsageError: not three numbers >= 0 with a sum > 0.
    """
    values = ratio.split(",") if isinstance(ratio, str) else list(ratio)
    try:
        shares = tuple(Fraction(str(value).strip()) for value in values)
    except (ValueError, ZeroDivisionError):
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or not sum(shares):
        raise UsageError(
            f"{ratio!r} is not a ratio of train, val and test",
            fix='give three numbers >= 0 like "8,1,1" or "0.9,0.1,0"; for other splits use --split-parts name:regex',
        )
    return shares


def divide_by_ratio(
    shards: Sequence[str], ratio: str | Sequence[float], *, shuffle: bool = False
) -> dict[str, list[str]]:
    """Divide shards among train, val and test.

    Args:
        shards: names, in order.
        ratio: see :func:`parse_ratio`; counted in shards.
        shuffle: mix the shards first (always in the same way).

    Example:
        >>> divide_by_ratio(["a", "b", "c", "d"], "2,1,1")
        {'train': ['a', 'b'], 'val': ['c'], 'test': ['d']}
    """
    shares = parse_ratio(ratio)
    order = list(shards)
    if shuffle:
        random.Random(_SHUFFLE_SEED).shuffle(order)
    stops = [int(len(order) * until / sum(shares)) for until in accumulate(shares, initial=Fraction(0))]
    return {name: order[start:stop] for name, (start, stop) in zip(RATIO_SPLITS, pairwise(stops), strict=True)}


def meant_to_be_empty(ratio: str | Sequence[float]) -> tuple[str, ...]:
    """Return the splits without a share in a ratio.

    Example:
        >>> meant_to_be_empty("9,1,0")
        ('test',)
    """
    return tuple(name for name, share in zip(RATIO_SPLITS, parse_ratio(ratio), strict=True) if not share)


def parse_pattern(text: str) -> tuple[str, str]:
    """Parse ``"name:regex"`` into (name, regex).

    Raises:
        UsageError: the name or the regex is missing.
    """
    name, colon, pattern = text.partition(":")
    if not name.strip() or not colon or not pattern.strip():
        raise UsageError(
            f"{text!r} is not of the form name:regex",
            fix='write --split-parts "train:train/.*" --split-parts "val:val/.*"',
        )
    return name.strip(), pattern


def divide_by_patterns(shards: Sequence[str], patterns: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Divide shards by regular expressions that match from the start of their names.

    Args:
        shards: names, in order.
        patterns: (split, regular expression); braces such as ``{00..12}`` are expanded. A split may appear repeatedly.

    Raises:
        UsageError: an expression is invalid, or matches no shard.

    Example:
        >>> divide_by_patterns(["a/0.tar", "b/0.tar"], [("train", "a/.*"), ("val", "b/.*")])
        {'train': ['a/0.tar'], 'val': ['b/0.tar']}
    """
    chosen: dict[str, set[str]] = {}
    for split, pattern in patterns:
        try:
            expressions = [re.compile(text) for text in expand_braces(pattern)]
        except (re.error, ValueError, RecursionError) as error:
            words = error if isinstance(error, re.error) else f"its braces {error}"
            raise UsageError(
                f"{pattern!r} (for split {split!r}) is not a regular expression: {words}",
                fix="a pattern is a regular expression, not a glob: write '.*' for any text, '\\.' for a dot",
            ) from None
        matching = {name for name in shards if any(expression.match(name) for expression in expressions)}
        if not matching:
            raise UsageError(
                f"{pattern!r} (for split {split!r}) matches none of the {counted(len(shards), 'shard')}",
                fix="it is a regular expression (not a glob) matched from the start of the name; shards are called "
                + ", ".join(repr(name) for name in shards[:3]),
            )
        chosen[split] = chosen.get(split, set()) | matching
    return {split: [name for name in shards if name in selected] for split, selected in chosen.items()}


def divide(
    shards: Sequence[str],
    ratio: str | Sequence[float] | None,
    patterns: Sequence[tuple[str, str]] = (),
    *,
    shuffle: bool = False,
) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Divide shards by a ratio, or by patterns if that is None; return the splits, and those that may be empty.

    Raises:
        UsageError: as :func:`divide_by_ratio`, :func:`divide_by_patterns`.
    """
    if ratio is None:
        return divide_by_patterns(shards, patterns), ()
    return divide_by_ratio(shards, ratio, shuffle=shuffle), meant_to_be_empty(ratio)


def split_notes(
    splits: Mapping[str, Sequence[str]], shards: Sequence[str], may_be_empty: Collection[str] = ()
) -> list[str]:
    """Describe oddities of a division: splits without shards, shards in two splits or in none."""
    notes = []
    empty = [name for name, chosen in splits.items() if not chosen and name not in may_be_empty]
    if empty:
        notes.append(
            f"split {', '.join(map(repr, empty))} got no shard, because {len(shards)} whole shards are divided: write "
            "more and smaller shards, or choose with --split-parts name:regex"
        )
    owner: dict[str, str] = {}
    for name, chosen in splits.items():
        shared = [(owner[shard], shard) for shard in chosen if shard in owner]
        if shared:
            notes.append(
                f"splits {shared[0][0]!r} and {name!r} share {counted(len(shared), 'shard')}, such as {shared[0][1]!r}"
            )
        owner |= dict.fromkeys(chosen, name)
    unused = [shard for shard in shards if shard not in owner]
    if unused:
        notes.append(f"{counted(len(unused), 'shard')} in no split, such as {unused[0]!r}")
    return notes


def collapse_names(names: Sequence[str]) -> list[str]:
    """Write runs of names that differ in one ascending number as brace patterns, in the same order.

    Example:
        >>> collapse_names(["a/000.tar", "a/001.tar", "a/002.tar", "b.tar"])
        ['a/{000..002}.tar', 'b.tar']
    """
    #: For each run the words of its first and of its last name, and the position of the ascending number.
    runs: list[tuple[list[str], list[str], int | None]] = []
    for words in map(_NUMBER.split, names):
        first, last, place = runs[-1] if runs else ([], [], None)
        changed = _counted_up(last, words)
        if changed is None or place not in (None, changed):
            runs.append((words, words, None))
        else:
            runs[-1] = first, words, changed
    return [
        "".join(first if place is None else [*first[:place], f"{{{first[place]}..{last[place]}}}", *first[place + 1 :]])
        for first, last, place in runs
    ]


def _counted_up(before: list[str], after: list[str]) -> int | None:
    """The only position where ``after`` has the next number in the same width; None if there is none."""
    if len(before) != len(after):
        return None
    places = [place for place, (earlier, later) in enumerate(zip(before, after, strict=True)) if earlier != later]
    if len(places) != 1 or places[0] % 2 == 0:  # text stands at even places, numbers at odd ones
        return None
    earlier, later = before[places[0]], after[places[0]]
    return places[0] if len(earlier) == len(later) and int(later) == int(earlier) + 1 else None
