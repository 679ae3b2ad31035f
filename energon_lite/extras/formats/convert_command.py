"""``energon-lite convert``: write a data set in another format."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import click

from energon_lite.cli import job_options, parse_bytes, progress
from energon_lite.cli.output import byte_size
from energon_lite.errors import DatasetError, UsageError, check_choice, counted
from energon_lite.extras.formats.convert_samples import Sample, open_samples, read_samples
from energon_lite.extras.formats.shard_writers import WRITERS, Mds, ShardWriter
from energon_lite.storage.files.atomic_file import remove_if_there, replacing, write_bytes
from energon_lite.storage.index import nv_meta
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.opened_source import SingleSource, data_digest
from energon_lite.storage.sharded_job import Progress, Ranks, ShardedJob
from energon_lite.storage.sharded_work import Arrays, Table, Work

# Units of work are runs of samples, each of which becomes a shard. Existing shards are not made again, so a run that
# was killed resumes there. The settings are kept next to the shards; a run with other settings is refused.

#: Folder of the results of units, in the folder of the shards.
WORK_FOLDER = ".convert"
#: File with the settings, in that folder.
SETTINGS_FILE = "settings.json"
#: Written last: digest of the settings and the data, and the counts of the result.
DONE_FILE = ".convert.json"
_FORMAT = 1
#: Samples of a shard if their size is unknown.
_USUAL = 10_000


@dataclass
class ConvertReport:
    """The outcome of a conversion.

    Attributes:
        path: the new data set.
        shards, samples: their numbers.
        size: bytes of all shards.
        made: number of shards that this run made; the others existed already.
    """

    path: str
    shards: int
    samples: int
    size: int
    made: int = 0


class _Shards(Work[int, tuple[int, int]]):
    """The making of shards by their number; a result is (samples, bytes)."""

    def __init__(
        self, root: str, settings: str, source: SingleSource, writer: ShardWriter, rows: int, without: frozenset[str]
    ):
        super().__init__(os.path.join(root, WORK_FOLDER))
        self.root = root
        self._settings = settings
        self._source = source
        self._writer = writer
        self._rows = rows
        self._without = without

    def name(self, unit: int) -> str:
        return f"shard-{unit:05d}{self._writer.extension}"

    def where(self, unit: int) -> str:
        return os.path.join(self.root, self.name(unit))

    def inputs(self, unit: int) -> str:
        return self._settings

    def belongs(self, unit: int, inputs: str) -> bool:
        return inputs == self._settings and os.path.exists(self.where(unit))

    def do(self, unit: int) -> tuple[int, int]:
        start = unit * self._rows
        samples = _chosen(self._source, start, min(len(self._source), start + self._rows), self._without)
        with replacing(self.where(unit)) as temporary:
            with open(temporary, "wb") as file:
                count = self._writer.write(file, samples)
            size = os.path.getsize(temporary)
        return count, size

    def pack(self, result: tuple[int, int]) -> tuple[dict[str, Any], Arrays]:
        return {"samples": result[0], "size": result[1]}, {}

    def unpack(self, table: Table, arrays: Arrays) -> tuple[int, int]:
        return table["samples"], table["size"]


def convert_dataset(
    path: str,
    output: str,
    to: str,
    *,
    split: str | None = None,
    shard_bytes: int = 1 << 26,
    samples_per_shard: int | None = None,
    without: tuple[str, ...] = (),
    look: int = 1000,
    workers: int | None = None,
    force_overwrite: bool = False,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the samples of a data set, in their order, in another format.

    Parts keep their names; ``docs/formats.md`` describes the conversion of their values. Only tars keep keys.

    Args:
        path: a data set: a prepared folder, a JSONL file, Parquet or Arrow files, an MDS folder, Megatron's files, ...
        output: a local folder; for ``jsonl`` also a file ``*.jsonl``, which then gets all lines.
        to: ``tar``, ``mds``, ``parquet`` or ``jsonl``.
        split: name of a split of the data set; None: the whole data set.
        shard_bytes: approximate bytes of samples in a shard: all shards have the same number of samples.
        samples_per_shard: number of samples in a shard; overrides ``shard_bytes``.
        without: parts that are left out.
        look: number of samples at the beginning that decide the types of columns.
        workers: processes; None: one per core.
        force_overwrite: start anew if ``output`` holds another data set.
        ranks: the processes that share the work.
        progress: called with the number of finished shards, the number of all, and a few words.

    Raises:
        UsageError: the format does not support a part; or the folder holds other data.
        DatasetError, ConfigError: the data set cannot be read; or shards cannot be made (the message has the reasons).
    """
    check_choice("to", to, tuple(WRITERS))
    ranks, target = ranks or Ranks(), os.path.abspath(os.path.expanduser(output))
    root = f"{target}.parts" if target.endswith(".jsonl") and to == "jsonl" else target
    source = open_samples(path, split)
    rows = samples_per_shard or (int(shard_bytes / source.mean_bytes) if source.mean_bytes else _USUAL)
    rows = max(1, min(rows, len(source)))
    settings = json.dumps([_FORMAT, data_digest(source), to, rows, sorted(without), look])
    settings = hashlib.sha256(settings.encode()).hexdigest()
    units = list(range(-(-len(source) // rows)))
    done = None if force_overwrite else _read_json(_done_path(target, root))
    if done is not None and done["settings"] == settings and os.path.exists(target):
        return ConvertReport(target, done["shards"], done["samples"], done["size"])
    first = list(islice(_chosen(source, 0, min(look, len(source)), frozenset(without)), look))
    work = _Shards(root, settings, source, WRITERS[to](first, path), rows, frozenset(without))
    if not ranks.rank:
        _begin(target, root, work, settings, force_overwrite)
    elif not ranks.wait(lambda: _read_json(os.path.join(work.folder, SETTINGS_FILE)) == settings):
        raise DatasetError("rank 0 has not begun this data set", where=root, fix="see what rank 0 says")

    def tick(unit: int, table: Table | None, finished: int, of: int) -> None:
        if progress is not None:
            progress(finished, of, work.name(unit))

    job = ShardedJob(work, units, ranks=ranks, workers=workers, alone=0.5, where=root, tick=tick)
    job.run()
    job.raise_errors(DatasetError, "be made", "start again; finished shards are kept")
    tables = [job.done[unit] for unit in units if unit in job.done]
    samples = sum(table["samples"] for table in tables)
    size = sum(table["size"] for table in tables)
    report = ConvertReport(target, len(units), samples, size, len(job.made))
    if not ranks.rank:
        _finish(path, target, root, work, [(work.name(unit), job.done[unit]) for unit in units], workers)
        finished = {"settings": settings, "shards": len(units), "samples": samples, "size": size}
        write_bytes(_done_path(target, root), json.dumps(finished).encode())
        work.remove()
        if root != target:
            shutil.rmtree(root)
    return report


def _chosen(source: SingleSource, start: int, stop: int, without: frozenset[str]) -> Iterator[Sample]:
    for key, parts in read_samples(source, start, stop):
        yield key, {name: value for name, value in parts.items() if name not in without}


def _begin(target: str, root: str, work: _Shards, settings: str, force_overwrite: bool) -> None:
    """Make the folder, unless a conversion with the same settings was begun there."""
    marker = os.path.join(work.folder, SETTINGS_FILE)
    if _read_json(marker) == settings:
        return
    there = [name for name in (os.listdir(root) if os.path.isdir(root) else []) if name != WORK_FOLDER]
    is_ours = _read_json(marker) is not None or _read_json(_done_path(target, root)) is not None
    if (there or os.path.isfile(target)) and not (is_ours and force_overwrite):
        what = "this conversion was begun with other settings or data" if is_ours else "the target exists already"
        fix = "give another folder" + (", or --force-overwrite to start from the beginning" if is_ours else "")
        raise UsageError(what, where=target, fix=fix)
    remove_if_there(_done_path(target, root))
    for name in glob.glob(os.path.join(glob.escape(root), "shard-[0-9]*.*")):
        remove_if_there(name)
    shutil.rmtree(os.path.join(root, nv_meta.META_FOLDER), ignore_errors=True)
    work.remove()
    work.make_folder()
    write_bytes(marker, json.dumps(settings).encode())


def _finish(
    path: str, target: str, root: str, work: _Shards, made: list[tuple[str, Table]], workers: int | None
) -> None:
    """Write the files that turn the shards into a data set."""
    writer = work._writer
    if isinstance(writer, Mds):
        entries = [writer.entry(name, table["size"], table["samples"]) for name, table in made]
        write_bytes(os.path.join(root, "index.json"), json.dumps({"shards": entries, "version": 2}).encode())
    elif writer.extension == ".tar":
        prepare_dataset(root, split_ratio="1,0,0", crude=True, workers=workers, sqlite=False, force_overwrite=True)
    elif root != target:
        with replacing(target) as temporary, open(temporary, "wb") as file:
            for name, _ in made:
                with open(os.path.join(root, name), "rb") as part:
                    shutil.copyfileobj(part, file, 1 << 22)
    document = nv_meta.meta_path(os.path.abspath(path), nv_meta.DATASET_YAML)
    # Parts of a tar keep their names, so dataset.yaml stays valid; columns of a table become other files in a tar.
    if root == target and nv_meta.is_prepared(path) and os.path.isfile(document) and writer.extension != ".jsonl":
        os.makedirs(os.path.join(root, nv_meta.META_FOLDER), exist_ok=True)
        shutil.copyfile(document, nv_meta.meta_path(root, nv_meta.DATASET_YAML))


def _done_path(target: str, root: str) -> str:
    return os.path.join(target, DONE_FILE) if root == target else f"{target}{DONE_FILE}"


def _read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@click.command(name="convert")
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--to", type=click.Choice(["tar", "mds", "parquet", "jsonl"]), required=True, help="The new format.")
@click.option("--split-parts", "split", metavar="NAME", help="Split to convert.  [default: the whole data set]")
@click.option("--shard-size", default="64MiB", show_default=True, help="Approximate size of a shard in bytes.")
@click.option("--samples-per-shard", type=click.IntRange(min=1), help="Samples in a shard, instead of --shard-size.")
@click.option("--without", multiple=True, metavar="PART", help="Leave a part out. May be given several times.")
@click.option(
    "--look",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Number of first samples from which the types of columns are chosen.",
)
@click.option("--force-overwrite", is_flag=True, help="Replace an earlier conversion.")
@job_options("Processes.")
def command(
    source: str, target: str, shard_size: str, num_workers: int | None, show_progress: bool, **others: Any
) -> None:
    """Write the samples of data set SOURCE into the folder TARGET, in another format.

    SOURCE is any path of a data set: a prepared folder, JSONL, Parquet or Arrow files ('data/*.parquet'), an MDS
    folder, Megatron's .bin and .idx, or a URL. A run that was killed continues when it is started again.

    \b
    Examples:
      energon-lite convert data/coco data/coco-mds --to mds
      energon-lite convert 'data/train-*.parquet' data/tars --to tar --shard-size 1GB
      energon-lite convert data/chats lines.jsonl --to jsonl --without jpg
    """
    size = parse_bytes(shard_size)
    with progress(show_progress, "Converting", "shards") as show:
        report = convert_dataset(source, target, shard_bytes=size, workers=num_workers, progress=show, **others)
    click.echo(
        f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}, {byte_size(report.size)}: "
        f"{report.path}"
    )
    if report.made < report.shards:
        click.echo(f"{counted(report.shards - report.made, 'shard')} of them there already.")
