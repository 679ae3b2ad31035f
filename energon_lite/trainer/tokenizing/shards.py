"""A block of records becomes a tar shard: a pure function, written under its final name only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage.files.atomic_file import replacing
from energon_lite.trainer.tokenizing.array_tar import ArrayTar
from energon_lite.trainer.tokenizing.records import Block, read_block
from energon_lite.trainer.tokenizing.tasks import Example, Task, examples_of
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer

__all__ = ["MASK_PART", "TOKENS_PART", "ShardCounts", "Tokenized", "shard_name", "total", "write_shard"]

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
        problems: the first of the broken ones, as [file number, record number, what is wrong].
    """

    records: int = 0
    examples: int = 0
    tokens: int = 0
    longest: int = 0
    too_long: int = 0
    left_out: int = 0
    problems: list[list[Any]] = field(default_factory=list)


def total(counts: Sequence[ShardCounts]) -> ShardCounts:
    """The counts of several shards as those of one."""
    names = ("records", "examples", "tokens", "too_long", "left_out")
    return ShardCounts(
        **{name: sum(getattr(one, name) for one in counts) for name in names},
        longest=max((one.longest for one in counts), default=0),
        problems=[problem for one in counts for problem in one.problems],
    )


class Tokenized(NamedTuple):
    """What became of a block: the counts, and of each example, in the shard's order, its tokens and those that the loss
    counts, int64 ``[n]``."""

    counts: ShardCounts
    lengths: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]


def shard_name(number: int) -> str:
    """Name of a shard."""
    return f"tokens-{number:06d}.tar"


def write_shard(root: str, number: int, block: Block, task: Task, tokenizer: HuggingFaceTokenizer) -> Tokenized:
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
    loss_tokens: list[int] = []
    with replacing(os.path.join(root, shard_name(number))) as temporary, open(temporary, "wb") as file:
        tar = ArrayTar(file)
        for key, example in _examples(block, task, tokenizer, counts):
            tar.add(f"{key}.{TOKENS_PART}", example.tokens)
            if example.mask is not None:
                tar.add(f"{key}.{MASK_PART}", example.mask)
            lengths.append(len(example.tokens))
            loss_tokens.append(len(example.tokens) if example.mask is None else int(np.count_nonzero(example.mask)))
        tar.finish()
    counts.examples, counts.tokens, counts.longest = len(lengths), sum(lengths), max(lengths, default=0)
    return Tokenized(counts, np.array(lengths, dtype=np.int64), np.array(loss_tokens, dtype=np.int64))


def _examples(
    block: Block, task: Task, tokenizer: HuggingFaceTokenizer, counts: ShardCounts
) -> Iterator[tuple[str, Example]]:
    """The examples of a block, each with its key; records are counted on the way."""
    reader = read_block(block)
    while records := list(islice(reader, _TOGETHER)):
        counts.records += len(records)
        fields = [record.problem if record.fields is None else record.fields for record in records]
        outcomes = examples_of(fields, task, tokenizer)
        for record, (examples, problem, too_long) in zip(records, outcomes, strict=True):
            counts.too_long += too_long
            counts.left_out += not examples
            if problem and len(counts.problems) < _TOLD:
                counts.problems.append([record.file, record.number, problem])
            name = f"{record.file:05d}-{record.number:09d}"
            for part, example in enumerate(examples):
                yield name if len(examples) == 1 else f"{name}-{part:05d}", example
