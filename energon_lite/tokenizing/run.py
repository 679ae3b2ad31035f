"""Tokenise files into a prepared data set: all blocks, on all cores and ranks, as often as it takes.

A shard that is whole is never made again, so a run that was killed goes on where it was, and ends with the very bytes
of a run that was not. What was asked for is kept beside the shards; a run that asks for something else is refused.
"""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from energon_lite.documents.paths import local_path, missing_file_fix
from energon_lite.errors import DatasetError, EmptyDatasetError, UsageError, WorkerError
from energon_lite.storage.files.atomic_file import remove_if_there, write_bytes
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.columns import LENGTH, write_column
from energon_lite.storage.index.splits import parse_ratio
from energon_lite.storage.prepare.prepare import prepare_dataset
from energon_lite.storage.prepare.ranks import Ranks
from energon_lite.tokenizing.records import KINDS, Block, find_blocks
from energon_lite.tokenizing.shards import (
    TOKENS_PART,
    ShardCounts,
    counts_from,
    counts_path,
    read_counts,
    read_lengths,
    shard_name,
    write_shard,
)
from energon_lite.tokenizing.tasks import Task
from energon_lite.tokenizing.tokenizer import HuggingFaceTokenizer, fingerprint_of

__all__ = ["Input", "TokenizeReport", "tokenize_files"]

#: Where counts and settings are until the data set is whole.
WORK_FOLDER = ".tokenize"
#: What a data set was made of, and the counts.
DONE_FILE = "tokenize.json"
_FORMAT = 2


@dataclass(frozen=True)
class Input:
    """Files for one task.

    Args:
        files: paths, folders (all files of known kinds in them) or patterns with ``*``, ``?`` and ``**``.
        task: what their records become.
        text_records: what a record of a text file is: the whole ``file``, or each ``line``.
    """

    files: tuple[str, ...]
    task: Task
    text_records: str = "file"


@dataclass
class TokenizeReport:
    """What was done.

    Attributes:
        path: the data set.
        shards: number of shards.
        counts: over all shards.
        problems: the first broken records, as (path, record number, what is wrong).
        made: shards that this run made; the others were there already.
    """

    path: str
    shards: int
    counts: ShardCounts
    problems: list[tuple[str, int, str]] = field(default_factory=list)
    made: int = 0


def tokenize_files(
    inputs: Sequence[Input],
    tokenizer: str,
    output: str,
    *,
    begin: str | None = None,
    end: str | None = None,
    split_ratio: str = "1,0,0",
    records_per_shard: int = 10_000,
    workers: int | None = None,
    force_overwrite: bool = False,
    sqlite: bool = False,
    ranks: Ranks | None = None,
    progress: Callable[[int, int, ShardCounts], None] | None = None,
) -> TokenizeReport:
    """Tokenise records into a data set with ``tokens.npy`` (int32 ``[n]``) and, for ``sft``, ``mask.npy`` (uint8).

    The data set has a column ``length``, the number of tokens of each sample, by which batches can be planned.

    Args:
        inputs: the files and their tasks.
        tokenizer: folder or file of a Hugging Face tokenizer.
        output: folder of the data set; made if it is not there.
        begin, end: texts of the tokens around each example; None: as the tokenizer's folder says; "": none.
        split_ratio: shares of train, val and test in shards.
        records_per_shard: at most.
        workers: processes; None: one per core.
        force_overwrite: begin anew if ``output`` holds something else, or the same already.
        sqlite: also write ``index.sqlite`` for Energon's look-ups by key.
        ranks: the processes that do this together; rank 0 waits for the others, and prepares.
        progress: called with the number of this rank's shards that are done (also before this run), of those it shall
            make, and their counts.

    Raises:
        UsageError: files of unknown kinds, no files, settings that do not fit together, or a folder that holds other
            data. A folder that holds the very same already is left as it is.
        EmptyDatasetError: not one record became an example; says why.
        WorkerError: a worker process died.
        DatasetError: another rank made no progress for too long.
    """
    ranks = ranks or Ranks()
    root = os.path.abspath(os.path.expanduser(output))
    work = os.path.join(root, WORK_FOLDER)
    parse_ratio(split_ratio)  # what is wrong with the call is known before anything is written
    inputs = [replace(one, files=tuple(_expand(one.files))) for one in inputs]
    HuggingFaceTokenizer(tokenizer, begin=begin, end=end)
    blocks = _blocks_of(inputs, records_per_shard)
    settings = _settings_of(inputs, tokenizer, begin, end, records_per_shard)
    files = [path for one in inputs for path in one.files]
    finished = None if force_overwrite else _read_json(os.path.join(root, DONE_FILE))
    if finished is not None and finished["settings"] == settings and nv_meta.is_prepared(root):
        shutil.rmtree(work, ignore_errors=True)  # the earlier run may have been killed just before
        counts = counts_from(finished["counts"])
        return TokenizeReport(root, len(blocks), counts, _named(counts, files))
    if not ranks.rank:
        _begin(root, work, settings, force_overwrite)
    elif not _wait_for(lambda: _is_begun(work, settings), ranks.timeout):
        raise DatasetError("rank 0 has not begun this data set", where=root, fix="see what rank 0 says")

    mine = ranks.share(range(len(blocks)))
    have, counts = [], ShardCounts()
    for number in mine:
        if os.path.exists(counts_path(work, number)) and os.path.exists(os.path.join(root, shard_name(number))):
            have.append(number)
            counts.add(read_counts(counts_path(work, number)))
    missing = sorted(set(mine) - set(have))
    done = len(have)
    if progress:
        progress(done, len(mine), counts)
    for made in _make(missing, blocks, inputs, (tokenizer, begin, end), root, work, workers):
        done += 1
        counts.add(made)
        if progress:
            progress(done, len(mine), counts)
    if ranks.rank:
        return TokenizeReport(root, done, counts, _named(counts, files), len(missing))

    _wait_for_ranks(work, len(blocks), ranks)
    counts = ShardCounts()
    for number in range(len(blocks)):
        counts.add(read_counts(counts_path(work, number)))
    report = TokenizeReport(root, len(blocks), counts, _named(counts, files), len(missing))
    if not counts.examples:
        why = "\n".join(f"  {path}, record {number}: {problem}" for path, number, problem in report.problems[:5])
        raise EmptyDatasetError(
            f"none of {counts.records} records became an example:\n{why}" if why else "there are no records",
            where=root,
            fix="name the fields that the records have (--prompt-field, --response-field, --text-field)",
        )
    prepare_dataset(root, split_ratio=split_ratio, crude=True, sqlite=sqlite, workers=workers, force_overwrite=True)
    _write_lengths(root, work)
    finished = {"settings": settings, "counts": asdict(counts)}  # written last: who finds it leaves all as it is
    write_bytes(os.path.join(root, DONE_FILE), json.dumps(finished, indent=1).encode())
    shutil.rmtree(work)
    return report


def _write_lengths(root: str, work: str) -> None:
    """The column of lengths, shard by shard in the order of the prepared data set."""
    numbers = {shard_name(number): number for number in range(len(_shards_in(root)))}
    parts = [read_lengths(work, numbers[name]) for name in nv_meta.read_info(root)]
    write_column(root, LENGTH, np.concatenate(parts), maker={"by": "tokenize", "length": TOKENS_PART})


def _expand(patterns: Sequence[str]) -> list[str]:
    """Files that are meant by paths, folders and patterns; in the order given, those of one pattern sorted."""
    found: list[str] = []
    for pattern in patterns:
        path = os.path.expanduser(local_path(pattern))
        if os.path.isfile(path):
            found.append(path)
            continue
        if os.path.isdir(path):
            inside = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
            matches = [one for one in inside if os.path.splitext(one)[1].lower() in KINDS]
        else:
            matches = glob.glob(path, recursive=True)
        matches = sorted(one for one in matches if os.path.isfile(one))
        if not matches:
            cure = f"check the path; files named {', '.join(f'*{suffix}' for suffix in KINDS)} are read"
            if not os.path.isdir(path) and not glob.has_magic(path):
                cure = missing_file_fix(path, cure)
            raise UsageError("there are no files to tokenise", where=pattern, fix=cure)
        found += matches
    return [os.path.abspath(path) for path in found]


def _blocks_of(inputs: Sequence[Input], records: int) -> list[Block]:
    if records < 1:
        raise UsageError(f"records_per_shard is {records}", fix="give at least 1")
    blocks: list[Block] = []
    files = 0
    for number, one in enumerate(inputs):
        blocks += find_blocks(one.files, records=records, text_records=one.text_records, first_file=files, task=number)
        files += len(one.files)
    return blocks


def _settings_of(
    inputs: Sequence[Input], tokenizer: str, begin: str | None, end: str | None, records: int
) -> dict[str, Any]:
    """All that the bytes of the shards depend on, as plain data."""
    return {
        "format": _FORMAT,
        "tokenizer": fingerprint_of(tokenizer),
        "begin": begin,
        "end": end,
        "records_per_shard": records,
        "inputs": [
            {
                "task": json.loads(json.dumps(asdict(one.task))),
                "text_records": one.text_records,
                "files": [[path, *_stamp(path)] for path in one.files],
            }
            for one in inputs
        ],
    }


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _begin(root: str, work: str, settings: Mapping[str, Any], force_overwrite: bool) -> None:
    """Make the folder, or find that it was begun with the same settings. What holds no example is in nobody's way."""
    begun = _read_json(os.path.join(work, "settings.json"))
    if begun is not None and begun != settings:
        different = sorted(name for name in settings if begun.get(name) != settings[name])
        if not force_overwrite and _holds_examples(root):
            raise UsageError(
                f"this data set was begun with other settings or files: {', '.join(different)} differ",
                where=root,
                fix="call with the same ones to go on, or with --force-overwrite to begin anew",
            )
        begun, force_overwrite = None, True
    if begun is None:
        if not force_overwrite and (nv_meta.is_prepared(root) or _holds_examples(root)):
            raise UsageError(
                "there is another data set here already", where=root, fix="give another folder, or --force-overwrite"
            )
        for path in (os.path.join(root, DONE_FILE), *_shards_in(root)):  # what says that they are whole goes first
            remove_if_there(path)
        shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work, exist_ok=True)
    for name in os.listdir(root):  # what a killed run left half-written
        if name.startswith(".tokens-") and name.endswith(".tmp"):
            os.unlink(os.path.join(root, name))
    if begun is None:
        write_bytes(os.path.join(work, "settings.json"), json.dumps(settings).encode())


def _is_begun(work: str, settings: Mapping[str, Any]) -> bool:
    return _read_json(os.path.join(work, "settings.json")) == settings


def _read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def _shards_in(root: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(root), "tokens-*.tar*")))


def _holds_examples(root: str) -> bool:
    """Whether any shard has a member; an archive without one is nothing but zeros."""
    for path in _shards_in(root):
        with open(path, "rb") as file:
            if file.read(1) != b"\0":
                return True
    return False


def _wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout:
            return False
        time.sleep(0.1)
    return True


def _wait_for_ranks(work: str, blocks: int, ranks: Ranks) -> None:
    """Wait until all shards are there; give up when none has come for too long."""
    missing = set(range(blocks))
    while missing:
        waiting = frozenset(missing)

        def one_came(waiting: frozenset[int] = waiting) -> bool:
            return any(os.path.exists(counts_path(work, number)) for number in waiting)

        if not _wait_for(one_came, ranks.timeout):
            late = sorted({number % ranks.world_size for number in missing})
            raise DatasetError(
                f"rank(s) {', '.join(map(str, late))} made no shard for {ranks.timeout:g} s",
                where=work,
                fix="see what they say, and start again: what is done stays",
            )
        missing = {number for number in missing if not os.path.exists(counts_path(work, number))}


def _named(counts: ShardCounts, files: Sequence[str]) -> list[tuple[str, int, str]]:
    return [(files[file], number, problem) for file, number, problem in counts.problems]


# -- worker processes -----------------------------------------------------------------------------------------------

_tokenizer: HuggingFaceTokenizer | None = None


def _make(
    numbers: Sequence[int],
    blocks: Sequence[Block],
    inputs: Sequence[Input],
    tokenizer: tuple[str, str | None, str | None],
    root: str,
    work: str,
    workers: int | None,
) -> Any:
    """Make shards; yields their counts as they are done."""
    workers = min(max(1, workers or os.cpu_count() or 1), len(numbers))
    if workers <= 1:
        _start_worker(*tokenizer)
        for number in numbers:
            yield _run(root, work, number, blocks[number], inputs[blocks[number].task].task)
        return
    # Spawned, because a tokenizer may have threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, tokenizer)
    left = iter(numbers)
    running: set[Future[ShardCounts]] = set()
    try:
        while True:
            # Few at a time: an error then ends the run soon, and so does Ctrl-C.
            for number in islice(left, 2 * workers - len(running)):
                block = blocks[number]
                running.add(pool.submit(_run, root, work, number, block, inputs[block.task].task))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died",
            where=root,
            fix="if memory was short, use fewer workers or smaller shards; start again: what is done stays",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(path: str, begin: str | None, end: str | None) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = HuggingFaceTokenizer(path, begin=begin, end=end)


def _run(root: str, work: str, number: int, block: Block, task: Task) -> ShardCounts:
    assert _tokenizer is not None  # _start_worker has run
    return write_shard(root, work, number, block, task, _tokenizer)
