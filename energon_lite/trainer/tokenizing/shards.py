"""Making of a tar shard from a block of records: a pure function that writes atomically.

Tar files of many small arrays are byte-identical to those of ``tarfile`` and ``numpy.save``, and written ten times as
fast. Tar headers of regular files with short names differ in name, size and checksum only, and ``.npy`` headers in type
and length. So both are filled in from templates, instead of being built for each array.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.storage import replacing
from energon_lite.trainer.tokenizing.records import Block, read_block
from energon_lite.trainer.tokenizing.tasks import Example, Task, examples_of
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer

#: Bytes of the size and of the checksum in a tar header.
_SIZE = slice(124, 136)
_CHECKSUM = slice(148, 156)
#: A header without name, size and checksum; the checksum counts as spaces.
_TEMPLATE = bytearray(tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT))
_TEMPLATE[_SIZE] = bytes(12)
_TEMPLATE[_CHECKSUM] = b" " * 8
_TEMPLATE_SUM = sum(_TEMPLATE)
_PADDING = bytes(tarfile.BLOCKSIZE)


class ArrayTar:
    """Writer of arrays into a tar file, in the USTAR format.

    Args:
        file: an empty file open for writing.

    Example:
        >>> with open("shard.tar", "wb") as file:
        ...     tar = ArrayTar(file)
        ...     tar.add("00001.tokens.npy", np.arange(3))
        ...     tar.finish()
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._size = 0

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Add an array as a member.

        Args:
            name: name of the member: ASCII, at most 100 characters.
        """
        data = npy(array)
        padding = -len(data) % tarfile.BLOCKSIZE
        self._file.write(_header(name, len(data)))
        self._file.write(data)
        self._file.write(_PADDING[:padding])
        self._size += tarfile.BLOCKSIZE + len(data) + padding

    def finish(self) -> None:
        """Write the end of the archive. The file stays open."""
        end = 2 * tarfile.BLOCKSIZE
        self._file.write(bytes(end + -(self._size + end) % tarfile.RECORDSIZE))


def npy(array: NDArray[Any]) -> bytes:
    """Return an array as the contents of an ``.npy`` file."""
    return _npy_header(array.dtype.str, array.shape) + array.tobytes()


@lru_cache(maxsize=1 << 14)
def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def _header(name: str, size: int) -> bytes:
    """Return the header of a regular file, with mode 644 and without date."""
    own_name, own_size = name.encode("ascii"), b"%011o\0" % size
    if len(own_name) > 100:
        raise ValueError(f"a name of {len(own_name)} characters")
    header = bytearray(_TEMPLATE)
    header[: len(own_name)] = own_name
    header[_SIZE] = own_size
    header[_CHECKSUM] = b"%06o\0 " % (_TEMPLATE_SUM + sum(own_name) + sum(own_size))
    return bytes(header)


#: Parts of a sample with its tokens, and with its loss mask.
TOKENS_PART = "tokens.npy"
MASK_PART = "mask.npy"

#: Most records that are tokenised by one call.
_TOGETHER = 512
#: The most problems of a shard that are listed.
_TOLD = 5


@dataclass
class ShardCounts:
    """Counts of a block's records and examples.

    Attributes:
        records: number of records read.
        examples: number of examples written.
        tokens: number of tokens in them.
        longest: tokens of the longest example.
        too_long: number of records that were truncated, dropped or split.
        left_out: number of records without an example: broken and dropped ones.
        problems: the first broken records, as [file number, record number, problem].
    """

    records: int = 0
    examples: int = 0
    tokens: int = 0
    longest: int = 0
    too_long: int = 0
    left_out: int = 0
    problems: list[list[Any]] = field(default_factory=list)


def total(counts: Sequence[ShardCounts]) -> ShardCounts:
    """Sum the counts of several shards."""
    names = ("records", "examples", "tokens", "too_long", "left_out")
    return ShardCounts(
        **{name: sum(getattr(shard, name) for shard in counts) for name in names},
        longest=max((shard.longest for shard in counts), default=0),
        problems=[problem for shard in counts for problem in shard.problems],
    )


class Tokenized(NamedTuple):
    """Result of a block: the counts, and tokens and counted tokens of each example in order, int64 ``[n]``."""

    counts: ShardCounts
    lengths: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]


def shard_name(number: int) -> str:
    """Return the name of a shard."""
    return f"tokens-{number:06d}.tar"


def write_shard(root: str, number: int, block: Block, task: Task, tokenizer: HuggingFaceTokenizer) -> Tokenized:
    """Tokenise a block into the shard of its number.

    Args:
        root: folder of the data set.
        number: number of the block.
        block: the records.
        task: task that makes examples.
        tokenizer: the tokenizer.
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
    """Yield the examples of a block with their keys, and count the records."""
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
