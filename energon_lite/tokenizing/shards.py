"""A block of records becomes a tar shard: a pure function, written under its final name only when it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.atomic_file import replacing, write_bytes
from energon_lite.tokenizing.array_tar import ArrayTar, npy
from energon_lite.tokenizing.records import Block, Record, read_block
from energon_lite.tokenizing.tasks import Example, Task, TextTokenizer, examples_of

__all__ = [
    "MASK_PART",
    "TOKENS_PART",
    "ShardCounts",
    "counts_from",
    "counts_path",
    "read_counts",
    "read_lengths",
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


def shard_name(number: int) -> str:
    """Name of a shard."""
    return f"tokens-{number:06d}.tar"


def counts_path(folder: str, number: int) -> str:
    """Where a shard's counts are while the data set is being made."""
    return os.path.join(folder, f"tokens-{number:06d}.json")


def read_counts(path: str) -> ShardCounts:
    """The counts of a shard that is done.

    Raises:
        FileNotFoundError: it is not done.
    """
    with open(path, encoding="utf-8") as file:
        return counts_from(json.load(file))


def read_lengths(folder: str, number: int) -> NDArray[np.int64]:
    """Tokens of each example of a shard that is done, in the order of the shard."""
    lengths: NDArray[np.int64] = np.load(_lengths_path(folder, number), allow_pickle=False)
    return lengths


def counts_from(plain: Mapping[str, Any]) -> ShardCounts:
    """Counts that went through JSON."""
    return ShardCounts(**{**plain, "problems": [tuple(problem) for problem in plain["problems"]]})


def write_shard(root: str, work: str, number: int, block: Block, task: Task, tokenizer: TextTokenizer) -> ShardCounts:
    """Tokenise a block into the shard of this number.

    Args:
        root: folder of the data set.
        work: folder for lengths and counts. Counts are written last: a shard that has them is whole.
        number: of the block.
        block: the records.
        task: what examples are.
        tokenizer: see there.
    """
    counts = ShardCounts()
    lengths: list[int] = []
    with replacing(os.path.join(root, shard_name(number))) as temporary:
        with open(temporary, "wb") as file:
            tar = ArrayTar(file)
            for key, example in _examples(block, task, tokenizer, counts):
                tar.add(f"{key}.{TOKENS_PART}", example.tokens)
                if example.mask is not None:
                    tar.add(f"{key}.{MASK_PART}", example.mask)
                lengths.append(len(example.tokens))
            tar.finish()
    write_bytes(_lengths_path(work, number), npy(np.array(lengths, dtype=np.int64)))
    write_bytes(counts_path(work, number), json.dumps(asdict(counts)).encode())
    return counts


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


def _lengths_path(folder: str, number: int) -> str:
    return os.path.join(folder, f"tokens-{number:06d}.lengths.npy")
