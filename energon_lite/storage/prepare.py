"""Preparation of a folder of tar shards: index it, divide it into splits, describe its samples.

There are three steps; the caller controls the second, be it :func:`prepare_dataset` or a dialogue on the command line:

1. :class:`ShardScans` reads the headers of all new and changed shards (and writes each shard's ``.tar.idx``), and keeps
   the result for each shard in a file;
2. splits and the description of samples are made and checked in memory;
3. ``.nv-meta`` is written, its ``.info.json`` and ``index.sqlite`` last: an interrupted run leaves a folder that is not
   prepared, and running again completes it; shards that were scanned are not scanned again.

Several ranks can share the first step; rank 0 does the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from energon_lite.documents import parse_yaml
from energon_lite.documents.paths import absolute_path, is_url
from energon_lite.errors import UsageError, counted
from energon_lite.storage.dataset_scan import (
    DatasetScan,
    ShardScans,
    count_parts,
    find_shards,
    merge_scans,
    odd_sample_notes,
    remove_scans,
)
from energon_lite.storage.files.atomic_file import held_folder, remove_if_there, remove_leftovers
from energon_lite.storage.files.byte_ranges import remote_guest
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.index_cache import check_count, open_index
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare_choices import (
    Choice,
    collapse_names,
    divide,
    parse_pattern,
    sample_document,
    split_notes,
)
from energon_lite.storage.sharded_job import Progress, Ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareReport:
    """The outcome of a preparation.

    Attributes:
        path: the folder.
        shards: number of shards with samples.
        samples: number of samples.
        parts: number of parts by part name.
        splits: (shards, samples) by split.
        written: paths of the files in ``.nv-meta`` that were written.
        warnings: messages for the user.
        has_dataset_yaml: the folder now has a description of its samples.
    """

    path: str
    shards: int
    samples: int
    parts: Mapping[str, int]
    splits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    has_dataset_yaml: bool = False


def _share_report(scans: ShardScans) -> PrepareReport:
    """The report of a rank other than 0: it scanned its share, and wrote nothing that stays in ``.nv-meta``."""
    finished = [scans.read(name) for name in scans.done]
    broken = tuple(f"{name}: {error.what}" for name, error in scans.errors.items())
    samples = sum(scan.samples for scan in finished)
    return PrepareReport(scans.root, len(finished), samples, count_parts(finished), warnings=broken)


def write_prepared(scan: DatasetScan, choice: Choice | None, sqlite: bool) -> PrepareReport:
    """Write ``.nv-meta``; files of an earlier preparation are replaced.

    Args:
        scan: the contents of the folder.
        choice: its splits and the description of samples; None: the folder is prepared, and keeps them.
        sqlite: also write ``index.sqlite``, which Energon uses for look-ups by key.
    """
    root = scan.root
    counts = scan.index.shard_counts
    warnings = [*scan.notes, *odd_sample_notes(scan.index)]
    splits = {} if choice is None else choice.splits
    database, packed = (nv_meta.meta_path(root, name) for name in (nv_meta.SQLITE_INDEX, nv_meta.PACKED_INDEX))
    legacy = os.path.isfile(nv_meta.meta_path(root, nv_meta.INFO_YAML))
    keys = nv_meta.key_database()
    if sqlite and keys is None:
        warnings.append("no index.sqlite: the extra 'energon', which writes it for Energon's tools, is not installed")
    if choice:
        os.makedirs(os.path.join(root, nv_meta.META_FOLDER), exist_ok=True)
        # From here on the folder counts as not prepared, until the new .info.json exists. The database is removed
        # first and written last: Energon takes a folder with a database but no .info.json for another kind of data set.
        if keys.tables_of_others(database) if keys else os.path.isfile(database):
            os.replace(database, nv_meta.meta_path(root, nv_meta.SQLITE_KEPT))
        for name in (nv_meta.SQLITE_INDEX, nv_meta.INFO_JSON, nv_meta.INFO_YAML):
            remove_if_there(nv_meta.meta_path(root, name))
    written = [nv_meta.write_meta(root, nv_meta.UUID_FILE, scan.index.uuid), packed]
    scan.index.write(packed)
    if choice:
        warnings += split_notes(splits, scan.shard_names, choice.may_be_empty)
        written += _write_choice(root, choice, warnings)
    with keys.made(database, scan.scans, warnings, sqlite) if keys else nullcontext(list[str]()) as made:
        written += made
        if choice:
            # The database gets its name right after this, since Energon misinterprets a folder that has it but no
            # .info.json. The mark identifies a run that is killed between the two steps.
            nv_meta.mark_unfinished(root)
            written.append(nv_meta.write_info(root, counts, legacy=legacy))
    # The packed index has the contents of the scans' files: the next preparation takes unchanged shards from there.
    _remove_leftovers(root, scan.shard_names)
    remove_scans(root)
    dataset_yaml = nv_meta.meta_path(root, choice.dataset_yaml_name if choice else nv_meta.DATASET_YAML)
    return PrepareReport(
        path=root,
        shards=len(scan.scans),
        samples=scan.samples,
        parts=scan.parts,
        splits={name: (len(shards), sum(counts[shard] for shard in shards)) for name, shards in splits.items()},
        written=tuple(written),
        warnings=tuple(warnings),
        has_dataset_yaml=os.path.isfile(dataset_yaml),
    )


def _write_choice(root: str, choice: Choice, warnings: list[str]) -> list[str]:
    """Write ``split.yaml``, keeping its exclusions, and ``dataset.yaml``; return their paths."""
    kept, is_whole = _earlier_exclusions(root)
    if not is_whole:
        warnings.append("split.yaml: exclusions of the earlier preparation cannot be read, and are gone")
    if kept:
        warnings.append(f"split.yaml: kept {counted(len(kept), 'exclusion')} of the earlier preparation")
    collapsed = {name: collapse_names(shards) for name, shards in choice.splits.items()}
    written = [nv_meta.write_meta(root, nv_meta.SPLIT_YAML, {"split_parts": collapsed, "exclude": kept})]
    if choice.dataset_document is not None:
        written.append(nv_meta.write_meta(root, choice.dataset_yaml_name, choice.dataset_document))
    for name, text in choice.files.items():
        if os.path.exists(nv_meta.meta_path(root, name)):
            warnings.append(f"{name}: kept the one that is there")
        else:
            written.append(nv_meta.write_meta(root, name, text))
            warnings.append(
                f"{name}: complete it where it says TODO. Since it is code, it is run only with trust_code=True"
            )
    return written


def prepare_jsonl(path: str | os.PathLike[str]) -> PackedIndex:
    """Index a JSONL file before its first use, here and for Energon (``<path>.idx``); return the index.

    Raises:
        NotPreparedError: there is no such file.
        DatasetError: it cannot be read, is being written to, or the index cannot be written anywhere.

    Example:
        >>> len(prepare_jsonl("data/chats.jsonl"))
        200
    """
    file = absolute_path(path)
    index, _ = open_index(file)
    nv_meta.write_shard_index(file, index.scan(0))
    return index


def _remove_leftovers(root: str, shards: Sequence[str]) -> None:
    """Remove files that killed runs left, in ``.nv-meta`` and next to the shards."""
    for folder in sorted({nv_meta.META_FOLDER, *(os.path.dirname(name) for name in shards)}):
        for path in remove_leftovers(os.path.join(root, folder)):
            _log.info("removed %s, which a run that was killed has left", path)
    remove_if_there(nv_meta.meta_path(root, nv_meta.PACKED_INDEX + ".lock"))


def _earlier_exclusions(root: str) -> tuple[list[str], bool]:
    """``exclude`` of an existing split.yaml, and True if all of its entries could be read."""
    path = nv_meta.meta_path(root, nv_meta.SPLIT_YAML)
    if not os.path.isfile(path):
        return [], True
    try:
        with open(path, encoding="utf-8") as file:
            exclude = parse_yaml(file.read(), path, may_be_empty=True).entries().get("exclude")
        entries = [] if exclude is None or exclude.is_null else exclude.sequence()
    except ValueError:  # includes ConfigError
        return [], False
    names = [str(entry.value) for entry in entries if not isinstance(entry.value, (list, dict))]
    return names, len(names) == len(entries)


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a preparation.

    Args:
        exclude: regular expression; shards whose name it matches anywhere are left out.
        force_overwrite: prepare a folder that is prepared already.
        sqlite: also write ``index.sqlite`` for Energon's look-ups by key.
        workers: processes at most; None for one per core.
        rescan: read all shards again, also those that have not changed since the last preparation.
        skip_broken: leave out shards that cannot be indexed; the report names them. False: they are an error.
        ranks: the processes that share the work, such as ``Ranks.from_environment()`` under ``torchrun``; each must
            make the call, with equal arguments and the same folder. Rank 0 writes ``.nv-meta``; the reports of the
            others cover their own share. If ``torch.distributed`` is initialised, all return when the data set is
            prepared, otherwise the others return when their share is done. None: this process alone.
        progress: called with the number of finished shards, of all, and a few words.
        tmp_path: for a URL: a local folder for the small files until all are made; None: the user's cache.
    """

    exclude: str | None = None
    force_overwrite: bool = False
    sqlite: bool = True
    workers: int | None = None
    rescan: bool = False
    skip_broken: bool = False
    ranks: Ranks | None = None
    progress: Progress | None = None
    tmp_path: str | None = None


#: ``(url, choose, options)``: :func:`prepare_folder` for a URL; without ``choose``, :func:`index_again`. Entry
#: ``prepare_url`` of the table ``STORAGE_GUESTS``.
UrlPreparer = Callable[[str, Callable[[DatasetScan], Choice] | None, PrepareOptions], PrepareReport]


def _url_preparer(url: str) -> UrlPreparer:
    fix = "prepare a local copy, and upload .nv-meta and the .tar.idx files with the shards"
    return remote_guest("prepare_url", "data sets at URLs are prepared", url, fix)


def index_again(root: str, options: PrepareOptions | None = None) -> PrepareReport:
    """Make the indexes of a prepared data set again; shards, splits and ``dataset.yaml`` do not change.

    Args:
        root: the folder, or a URL.
        options: of these, ``sqlite``, ``workers``, ``progress`` and ``tmp_path`` matter.

    Raises:
        NotPreparedError: the folder is not prepared.
        MissingShardError: a shard does not exist.
        ShardChangedError: the numbers of samples in the shards differ from ``.info.json``.
    """
    options = options or PrepareOptions()
    if is_url(root):
        return _url_preparer(root)(root, None, options)
    root = os.path.abspath(root)
    counts = nv_meta.read_info(root)
    names = [name for name in counts if counts[name]]
    nv_meta.check_writable(root)
    with held_folder(root, "prepares"):
        scans = ShardScans(root, names, workers=options.workers, rescan=True, progress=options.progress)
        scans.run()
        scan = merge_scans(scans)
        found = scan.index.shard_counts
        for name in names:
            check_count(root, name, found.get(name, 0), counts[name])
        return write_prepared(scan, None, options.sqlite)


def already_prepared(root: str) -> UsageError:
    """Return the error for a data set that is prepared, if it is not to be prepared again."""
    return UsageError(
        "the data set has already been prepared",
        where=os.path.join(root, nv_meta.META_FOLDER),
        fix="use --force-overwrite (in Python: force_overwrite=True) to prepare it again; its splits are then replaced",
    )


def prepare_folder(
    path: str, choose: Callable[[DatasetScan], Choice], options: PrepareOptions | None = None
) -> PrepareReport:
    """Prepare a folder of tar shards, so that it can be loaded here and in Megatron-Energon.

    Args:
        path: the folder, or a URL. Shards are found in all of its subfolders.
        choose: makes the choices when the samples are known, on rank 0. Only files that save work for the next
            attempt have been written by then.
        options: None: the defaults.

    Raises:
        DatasetError: another rank failed or exceeded the timeout; or another process prepares the folder.
        UsageError: the folder is prepared already.
        ShardFormatError: shards cannot be indexed; the message names all of them with the reasons.
        EmptyDatasetError: there are no shards, or no samples in them.
    """
    options = options or PrepareOptions()
    ranks = options.ranks or Ranks()
    if is_url(path):
        if ranks.world_size > 1:
            raise UsageError(
                "a data set behind a URL is prepared by one process, which reads many shards at the same time",
                where=path,
                fix="add --world-size 1 --rank 0, on one process (in Python: leave out ranks)",
            )
        return _url_preparer(path)(path, choose, options)
    root = os.path.abspath(path)
    with ExitStack() as held:
        with ranks.together():
            shards = find_shards(root, options.exclude)
            if not ranks.rank:
                held.enter_context(held_folder(root, "prepares"))
                if nv_meta.is_prepared(root) and not nv_meta.is_unfinished(root) and not options.force_overwrite:
                    raise already_prepared(root)
                nv_meta.check_writable(root)
        workers, progress = options.workers, options.progress
        scans = ShardScans(root, shards, ranks=ranks, workers=workers, rescan=options.rescan, progress=progress)
        scans.run()
        with ranks.together():
            if ranks.rank:
                return _share_report(scans)
            scan = merge_scans(scans, skip_broken=options.skip_broken)
            return write_prepared(scan, choose(scan), options.sqlite)


def prepare_dataset(
    path: str | os.PathLike[str],
    *,
    split_ratio: str | Sequence[float] | None = None,
    split_parts: Mapping[str, str] | Sequence[str] | None = None,
    shuffle_tars: bool = False,
    sample_type: str | None = None,
    field_map: Mapping[str, str] | None = None,
    crude: bool = False,
    dataset_yaml_name: str = nv_meta.DATASET_YAML,
    **options: Any,
) -> PrepareReport:
    """Prepare a folder with choices that are given as arguments.

    Args:
        path: the folder.
        split_ratio: shares of train, val and test in shards, such as ``"8,1,1"``. Either this or ``split_parts``.
        split_parts: regular expression by split name, or texts of the form ``"name:regex"``.
        shuffle_tars: mix the shards before the ratio is applied.
        sample_type: name of a sample class such as ``"CaptioningSample"``; without it (and without ``crude``) no
            ``dataset.yaml`` is written.
        field_map: part by field, such as ``{"image": "jpg,png", "caption": "json[text]"}``.
        crude: the user's code gets samples as dicts of their parts.
        dataset_yaml_name: name of the ``dataset.yaml``.
        options: fields of :class:`PrepareOptions`.

    Raises:
        UsageError: the arguments do not fit together.
        ConfigError: ``field_map`` does not fit the sample type, or the parts that the samples have.
        DatasetError: as :func:`prepare_folder`.

    Example:
        >>> report = prepare_dataset("data/coco", split_ratio="8,1,1", sample_type="CaptioningSample",
        ...                          field_map={"image": "jpg", "caption": "txt"})
        >>> report.splits["train"]
        (16, 16000)
    """
    if (split_ratio is None) == (split_parts is None):
        raise UsageError("either split_ratio or split_parts must be given", fix='split_ratio="8,1,1", for example')

    def choose(scan: DatasetScan) -> Choice:
        parts = split_parts or ()
        patterns = parts.items() if isinstance(parts, Mapping) else map(parse_pattern, parts)
        splits, may_be_empty = divide(scan.shard_names, split_ratio, list(patterns), shuffle=shuffle_tars)
        document = sample_document(scan, sample_type=sample_type, field_map=field_map, crude=crude)
        return Choice(splits, may_be_empty, document, dataset_yaml_name)

    report = prepare_folder(os.path.expanduser(os.fspath(path)), choose, PrepareOptions(**options))
    for warning in report.warnings if report.written else ():  # rank 0 logs them for all
        _log.warning("%s: %s", report.path, warning)
    return report
