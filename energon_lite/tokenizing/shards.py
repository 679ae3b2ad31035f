"""A block of records becomes a tar shard: a pure function, written under its final name only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.atomic_file import replacing
from energon_lite.tokenizing.array_tar import ArrayTar
from energon_lite.tokenizing.records import Block, Record, read_block
from energon_lite.tokenizing.tasks import Example, Task, TextTokenizer, examples_of

__all__ = [
    "MASK_PART",
    "TOKENS_PART",
    "ShardCounts",
    "Tokenized",
    "counts_from",
    "shard_name",
    "write_shard",
]

TOKENS_PART, MASK_PART = "tokens.npy", "mask.npy"

#: Records tokenised by one call.
_TOGETHER = 512
#: Problems that a shard tells one by one.
_TOLD = 5


@dataclass
class ShardCounts:
    """What became of a block's records.

    Attributes:
        records: read.
        examples: written.
        tokens: in them.
        longest: tokens of the longest example.
        too_long: records that were truncated, dropped or split.
        left_out: records without an example: broken ones, and dropped ones.
        problems: the first of the broken ones, as (file number, record number, what is wrong).
    """

    records: int = 0
    examples: int = 0
    tokens: int = 0
    longest: int = 0
    too_long: int = 0
    left_out: int = 0
    problems: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, other: ShardCounts) -> None:
        """Add the counts of another shard."""
        for name in ("records", "examples", "tokens", "too_long", "left_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.problems = [*self.problems, *other.problems]


class Tokenized(NamedTuple):
    """What became of a block: the counts, and the tokens of each example (int64 ``[n]``), in the shard's order."""

    counts: ShardCounts
    lengths: NDArray[np.int64]


def shard_name(number: int) -> str:
    """Name of a shard."""
    return f"tokens-{number:06d}.tar"


def counts_from(plain: Mapping[str, Any]) -> ShardCounts:
    """Counts that went through JSON."""
    return ShardCounts(**{**plain, "problems": [tuple(problem) for problem in plain["problems"]]})


def write_shard(root: str, number: int, block: Block, task: Task, tokenizer: TextTokenizer) -> Tokenized:
    """Tokenise a block into the shard of this number.

    Args:
        root: folder of the data set.
        number: of the block.
        block: the records.
        task: what examples are.
        tokenizer: see there.
    """
    counts = ShardCounts()
    lengths: list[int] = []
    with replacing(os.path.join(root, shard_name(number))) as temporary, open(temporary, "wb") as file:
        tar = ArrayTar(file)
        for key, example in _examples(block, task, tokenizer, counts):
            tar.add(f"{key}.{TOKENS_PART}", example.tokens)
            if example.mask is not None:
                tar.add(f"{key}.{MASK_PART}", example.mask)
            lengths.append(len(example.tokens))
        tar.finish()
    return Tokenized(counts, np.array(lengths, dtype=np.int64))


def _examples(block: Block, task: Task, tokenizer: TextTokenizer, counts: ShardCounts) -> Iterator[tuple[str, Example]]:
    reader = read_block(block)
    while records := list(islice(reader, _TOGETHER)):
        counts.records += len(records)
        good = [record for record in records if record.fields is not None]
        outcomes = iter(examples_of([record.fields or {} for record in good], task, tokenizer))
        for record in records:
            if record.fields is None:
                _leave_out(record, record.problem, counts)
                continue
            outcome = next(outcomes)
            counts.too_long += outcome.too_long
            if not outcome.examples:
                _leave_out(record, outcome.problem, counts)
            for part, example in enumerate(outcome.examples):
                counts.examples += 1
                counts.tokens += len(example.tokens)
                counts.longest = max(counts.longest, len(example.tokens))
                name = f"{record.file:05d}-{record.number:09d}"
                yield name if len(outcome.examples) == 1 else f"{name}-{part:05d}", example


def _leave_out(record: Record, problem: str, counts: ShardCounts) -> None:
    counts.left_out += 1
    if problem and len(counts.problems) < _TOLD:
        counts.problems.append((record.file, record.number, problem))
