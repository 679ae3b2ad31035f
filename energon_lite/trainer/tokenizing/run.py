"""Tokenising of files into a prepared data set, in parallel and resumable.

A complete shard is never made again, so a killed run resumes, and ends with the same bytes as an uninterrupted one. The
settings are kept with the shards; a run with other settings is an error.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.documents import local_path, missing_file_fix
from energon_lite.errors import DatasetError, EmptyDatasetError, UsageError
from energon_lite.storage import (
    Ranks,
    ShardedJob,
    Work,
    is_prepared,
    parse_ratio,
    prepare_dataset,
    read_info,
    replacing,
    write_column,
)
from energon_lite.trainer.tokenizing.records import KINDS, Block, find_blocks
from energon_lite.trainer.tokenizing.shards import (
    MASK_PART,
    TOKENS_PART,
    ShardCounts,
    Tokenized,
    shard_name,
    total,
    write_shard,
)
from energon_lite.trainer.tokenizing.tasks import Task
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer, fingerprint_of

#: Folder of intermediate results and settings, and the file of the settings.
WORK_FOLDER = ".tokenize"
SETTINGS_FILE = "settings.json"
#: File with the settings and the counts of a finished data set.
DONE_FILE = "tokenize.json"
#: Columns of the tokens of each sample, and of those that the loss counts, by the names that batches and costs use.
LENGTH = "length"
LOSS_TOKENS = "loss_tokens"
#: Version of the format of shards.
_FORMAT = 1
#: Version of the results of shards.
_RESULTS = 2


Table = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]
#: Called with the number of finished records, an estimate of their total, and a short text.
Progress = Callable[[int, int, str], object]


@dataclass(frozen=True)
class Input:
    """Input files of one task.

    Args:
        files: paths, folders (all files of known kinds in them) or patterns with ``*``, ``?`` and ``**``.
        task: task that makes examples of their records.
        text_records: the record of a text file: the whole ``file``, or each ``line``.
    """

    files: tuple[str, ...]
    task: Task
    text_records: str = "file"


@dataclass
class TokenizeReport:
    """Result of a call of :func:`tokenize_files`.

    Attributes:
        path: folder of the data set.
        shards: number of shards.
        counts: counts over all shards.
        problems: the first broken records, as (path, record number, problem).
        made: number of shards that this run made; the others existed already.
    """

    path: str
    shards: int
    counts: ShardCounts
    problems: list[tuple[str, int, str]] = field(default_factory=list)
    made: int = 0


@dataclass(frozen=True)
class _Shard:
    """A shard to be made."""

    number: int
    block: Block = field(compare=False)
    task: Task = field(compare=False)


class _Shards(Work[_Shard, Tokenized]):
    """Work that makes shards; the tables of its results are counts. A shard without its tar is made again."""

    def __init__(self, root: str, settings: Mapping[str, Any], tokenizer: HuggingFaceTokenizer):
        super().__init__(os.path.join(root, WORK_FOLDER))
        self._root = root
        self._tokenizer = tokenizer
        self._settings = hashlib.sha256(json.dumps([settings, _RESULTS]).encode()).hexdigest()[:16]

    def name(self, unit: _Shard) -> str:
        return shard_name(unit.number)

    def where(self, unit: _Shard) -> str:
        return unit.block.paths[0]

    def inputs(self, unit: _Shard) -> str:
        return self._settings

    def belongs(self, unit: _Shard, inputs: str) -> bool:
        return inputs == self._settings and os.path.exists(os.path.join(self._root, self.name(unit)))

    def do(self, unit: _Shard) -> Tokenized:
        return write_shard(self._root, unit.number, unit.block, unit.task, self._tokenizer)

    def pack(self, result: Tokenized) -> tuple[dict[str, Any], Arrays]:
        return asdict(result.counts), {"lengths": result.lengths, "loss_tokens": result.loss_tokens}

    def unpack(self, table: Table, arrays: Arrays) -> Tokenized:
        return Tokenized(ShardCounts(**table), arrays["lengths"], arrays["loss_tokens"])


class _Records:
    """Reporter of progress in records. Their total is extrapolated from the finished shards."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._made = self._records = self._tokens = 0

    def __call__(self, shard: _Shard, table: Table | None, done: int, of: int) -> None:
        if table is None:
            return
        self._made += 1
        self._records, self._tokens = self._records + table["records"], self._tokens + table["tokens"]
        note = f"shard {done}/{of}, {self._tokens / 1e6:.1f} M tokens"
        self._progress(self._records, round(self._records / self._made * of), note)


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
    progress: Progress | None = None,
) -> TokenizeReport:
    """Tokenise records into a data set with ``tokens.npy`` (int32 ``[n]``) and, for ``sft``, ``mask.npy`` (uint8).

    The data set has a column ``length``, the number of tokens of each sample, for planning batches, and a column
    ``loss_tokens``, the number of tokens that the loss counts.

    Args:
        inputs: the files and their tasks.
        tokenizer: folder or file of a Hugging Face tokenizer.
        output: folder of the data set; created if missing.
        begin, end: texts of the tokens around each example; None: from the tokenizer's folder; "": none.
        split_ratio: shares of train, val and test in shards.
        records_per_shard: the most records of a shard.
        workers: number of processes; None: one per core.
        force_overwrite: start over if ``output`` holds another data set, or the same one.
        sqlite: also write ``index.sqlite`` for Energon's look-ups by key.
        ranks: the processes that share the work; rank 0 waits for the others, and prepares the data set.
        progress: see :data:`Progress`; records of earlier runs are included.

    Raises:
        UsageError: files of unknown kinds, no files, incompatible settings, or a folder with other data. A folder with
            the same data set is left unchanged.
        EmptyDatasetError: no record became an example; with the reasons.
        WorkerError: a worker process died.
        DatasetError: shards cannot be made, listed with their reasons; or another rank made no progress for too long.
    """
    ranks, root = ranks or Ranks(), os.path.abspath(os.path.expanduser(output))
    parse_ratio(split_ratio)  # errors in the call are raised before anything is written
    inputs = [replace(given, files=tuple(_expand(given.files))) for given in inputs]
    files = [path for given in inputs for path in given.files]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    settings = _settings_of(inputs, fingerprint_of(tokenizer), begin, end, records_per_shard)
    work = _Shards(root, settings, HuggingFaceTokenizer(tokenizer, begin=begin, end=end))
    shards = _shards_of(inputs, records_per_shard)
    finished = None if force_overwrite else _read_json(os.path.join(root, DONE_FILE))
    if finished is not None and finished["settings"] == settings and is_prepared(root):
        work.remove()  # an earlier run may have been killed just before this
        return _report(root, len(shards), [finished["counts"]], files)
    if not ranks.rank:
        _begin(root, work, settings, force_overwrite)
    elif not ranks.wait(lambda: _read_json(os.path.join(work.folder, SETTINGS_FILE)) == settings):
        raise DatasetError("rank 0 has not begun this data set", where=root, fix="see what rank 0 says")

    tick = _Records(progress) if progress else None
    job = ShardedJob(work, shards, ranks=ranks, workers=workers, where=root, tick=tick)
    job.run()
    job.raise_errors(DatasetError, "be made", "start again; finished shards are kept")
    tables = [job.done[shard] for shard in shards if shard in job.done]
    report = _report(root, len(tables), tables, files, made=len(job.made))
    if ranks.rank:
        return report
    _check_not_empty(report)
    prepare_dataset(root, split_ratio=split_ratio, crude=True, sqlite=sqlite, workers=workers, force_overwrite=True)
    by_name = {work.name(shard): shard for shard in shards}
    made = [job.read(by_name[name]) for name in read_info(root)]
    loss_tokens = np.concatenate([shard.loss_tokens for shard in made])
    write_column(root, LOSS_TOKENS, loss_tokens, maker={"by": "tokenize", "loss_tokens": MASK_PART})
    lengths = np.concatenate([shard.lengths for shard in made])
    write_column(root, LENGTH, lengths, maker={"by": "tokenize", "length": TOKENS_PART})
    finished = {"settings": settings, "counts": asdict(report.counts)}  # written last: marks it complete
    _write(os.path.join(root, DONE_FILE), json.dumps(finished, indent=1))
    work.remove()
    return report


def _report(root: str, shards: int, tables: Sequence[Table], files: Sequence[str], *, made: int = 0) -> TokenizeReport:
    counts = total([ShardCounts(**table) for table in tables])
    problems = [(files[file], number, problem) for file, number, problem in counts.problems]
    return TokenizeReport(root, shards, counts, problems, made)


def _check_not_empty(report: TokenizeReport) -> None:
    if report.counts.examples:
        return
    why = "\n".join(f"  {path}, record {number}: {problem}" for path, number, problem in report.problems[:5])
    raise EmptyDatasetError(
        f"none of {report.counts.records} records became an example:\n{why}" if why else "there are no records",
        where=report.path,
        fix="name the fields that the records have (--prompt-field, --response-field, --text-field)",
    )


def _expand(patterns: Sequence[str]) -> list[str]:
    """Expand paths, folders and patterns to files, in the given order, those of one pattern sorted."""
    files: list[str] = []
    for pattern in patterns:
        path = os.path.expanduser(local_path(pattern))
        if os.path.isfile(path):
            files.append(path)
            continue
        if os.path.isdir(path):
            inside = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
            matches = [name for name in inside if os.path.splitext(name)[1].lower() in KINDS]
        else:
            matches = glob.glob(path, recursive=True)
        matches = sorted(name for name in matches if os.path.isfile(name))
        if not matches:
            cure = f"check the path; files named {', '.join(f'*{suffix}' for suffix in KINDS)} are read"
            if not os.path.isdir(path) and not glob.has_magic(path):
                cure = missing_file_fix(path, cure)
            raise UsageError("there are no files to tokenise", where=pattern, fix=cure)
        files += matches
    return [os.path.abspath(path) for path in files]


def _shards_of(inputs: Sequence[Input], records: int) -> list[_Shard]:
    if records < 1:
        raise UsageError(f"records_per_shard is {records}", fix="give at least 1")
    shards: list[_Shard] = []
    files = 0
    for given in inputs:
        blocks = find_blocks(given.files, records=records, text_records=given.text_records, first_file=files)
        shards += [_Shard(number, block, given.task) for number, block in enumerate(blocks, start=len(shards))]
        files += len(given.files)
    return shards


def _settings_of(
    inputs: Sequence[Input], fingerprint: str, begin: str | None, end: str | None, records: int
) -> dict[str, Any]:
    """Return all settings that determine the bytes of the shards, as plain data."""
    settings = {
        "format": _FORMAT,
        "tokenizer": fingerprint,
        "begin": begin,
        "end": end,
        "records_per_shard": records,
        "inputs": [asdict(given) | {"files": [[path, *_stamp(path)] for path in given.files]} for given in inputs],
    }
    return json.loads(json.dumps(settings))


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _begin(root: str, work: _Shards, settings: Mapping[str, Any], force_overwrite: bool) -> None:
    """Make the folder, or check that it was begun with the same settings. Shards without examples are replaced."""
    path = os.path.join(work.folder, SETTINGS_FILE)
    begun = _read_json(path)
    if begun == settings:
        return
    if begun is not None:
        different = sorted(name for name in settings if begun.get(name) != settings[name])
        if not force_overwrite and _holds_examples(root):
            raise UsageError(
                f"this data set was begun with other settings or files: {', '.join(different)} differ",
                where=root,
                fix="call with the same ones to continue, or with --force-overwrite to start from the beginning",
            )
    elif not force_overwrite and (is_prepared(root) or _holds_examples(root)):
        raise UsageError(
            "there is another data set here already", where=root, fix="give another folder, or --force-overwrite"
        )
    for old in (os.path.join(root, DONE_FILE), *_shards_in(root)):  # the mark of completeness is removed first
        Path(old).unlink(missing_ok=True)
    work.remove()
    work.make_folder()
    _write(path, json.dumps(settings))


def _write(path: str, text: str) -> None:
    with replacing(path, flush=True) as temporary:
        Path(temporary).write_text(text)


def _read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def _shards_in(root: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(root), "tokens-*.tar*")))


def _holds_examples(root: str) -> bool:
    """Return whether any shard has a member; an empty archive consists of zeros."""
    for path in _shards_in(root):
        with open(path, "rb") as file:
            if file.read(1) != b"\0":
                return True
    return False
