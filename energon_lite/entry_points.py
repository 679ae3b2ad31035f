"""Entry points: what guests add to the core, as tables that name code without importing it.

A guest is a package in ``energon_lite/extras``, the trainer, or a module that another distribution names in its package
metadata, in the group ``energon_lite``. It has one or more of the tables :data:`TABLES`, each of which is described by
the function here that returns its entries. A guest that is deleted takes its entries with it.

Example:
    A command of your own. In ``my_package/entry_points.py``::

        from energon_lite.entry_points import Command

        COMMANDS = {"thumbnails": Command("my_package.thumbnails:command", "Write small pictures of a data set.")}

    and in your ``pyproject.toml``::

        [project.entry-points.energon_lite]
        my_package = "my_package.entry_points"
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from energon_lite.errors import ConfigError, UsageError

#: Packages whose folders are guests, and guests by themselves.
_FOLDERS = "energon_lite.extras"
_TRAINER = "energon_lite.trainer"
#: Group of the packaging metadata of other distributions.
_GROUP = "energon_lite"
#: Names of all tables.
TABLES = {
    *("COMMANDS", "SOURCES", "COLUMNS", "COST_MODELS", "DECODERS", "PREPARE_STEPS", "STATE_READERS", "OBSERVERS"),
    *("BATCH_PATHS", "METADATASET_KEYS", "KEYWORDS", "BLEND_OPENERS", "STORAGE_GUESTS", "WORKERS", "UNIT_RUNNERS"),
}


class Command(NamedTuple):
    """A command of ``energon-lite``. Table ``COMMANDS``, by name; ``checkpoint NAME`` is a subcommand.

    Args:
        target: ``module:object`` of a :class:`click.Command`; imported when the command is called.
        help: one line.
        group: the heading under which ``--help`` lists it.
    """

    target: str
    help: str
    group: str = "Commands of extras"


class SourceFormat(NamedTuple):
    """A format of data sets. Table ``SOURCES``, by URL scheme.

    Args:
        target: ``module:function``, called as ``function(path, split_part)``; returns a
            :class:`~energon_lite.storage.Source`.
        extensions: endings of paths that have this format: ``(".parquet",)``.
        marker: name of a file; folders that hold it have this format.
    """

    target: str
    extensions: tuple[str, ...] = ()
    marker: str = ""


class ColumnOption(NamedTuple):
    """Option of ``measure`` and ``prepare`` that requests columns; see :class:`Columns`.

    Args:
        help: one line.
        metavar: form of its value; empty: it is a flag.
    """

    help: str
    metavar: str = ""


class Columns(NamedTuple):
    """Columns that ``measure`` and ``prepare`` compute from stored parts. Table ``COLUMNS``, by any name.

    Args:
        target: ``module:function``, called with the values of the options, by name, if one of them is given: a text or
            None, or a bool for a flag; returns :class:`~energon_lite.loading.part_columns.RequestedColumns`.
        names: names of the columns, none of which ``--column`` can store at the same time.
        options: by name, one word: ``{"images": ...}`` is ``--images``.
    """

    target: str
    names: tuple[str, ...]
    options: Mapping[str, ColumnOption]


class Decoder(NamedTuple):
    """A decoder of parts of samples. Table ``DECODERS``, by name. The form that the decoder ``av`` gives to parts is
    :class:`~energon_lite.storage.SampleDecoder`'s argument ``av_decode``.

    Args:
        target: ``module:function``, called with
            :class:`~energon_lite.storage.samples.part_decoder.DecoderSettings`; returns a
            :class:`~energon_lite.storage.samples.part_decoder.PartDecoder`, or None if the parts are to stay bytes.
        extensions: last extensions of the names of parts, in lower case: ``("las", "laz")``. Extensions that the core
            decodes have no effect.
    """

    target: str
    extensions: tuple[str, ...]


class PrepareStep(NamedTuple):
    """A step at the end of ``energon-lite prepare``. Table ``PREPARE_STEPS``, by the command that does it alone.

    Args:
        add_options: ``module:decorator``, which adds options of click to the command.
        begin: ``module:function``, called with the values of all options by name before anything is read; returns a
            function that is called with the prepared folder, on rank 0. None: the step was not requested.
        options: its options, for messages.
    """

    add_options: str
    begin: str
    options: str


class UnitRunner(NamedTuple):
    """A runner elsewhere of the units of sharded jobs, as ``prepare`` has them. Table ``UNIT_RUNNERS``, by its option.

    Args:
        target: ``module:function``, called with a :class:`~energon_lite.storage.sharded_job.Runner`, the value of
            the option and units; yields each unit with its outcome, as the runner does that it calls elsewhere.
        help: one line.
        metavar: form of the option's value, which may be left out: it is "" then.
    """

    target: str
    help: str
    metavar: str


class RemoteWorkers:
    """Base class of descriptions of workers elsewhere; ``kind`` is their entry in the table ``WORKERS``."""

    kind: ClassVar[str] = ""


def commands() -> dict[str, Command]:
    """Return the commands of all guests, by name."""
    return _merged("COMMANDS")


def source_formats() -> dict[str, SourceFormat]:
    """Return the formats of all guests, by URL scheme."""
    return _merged("SOURCES")


def columns() -> dict[str, Columns]:
    """Return the columns of all guests."""
    return _merged("COLUMNS")


def cost_models() -> dict[str, str]:
    """Return the cost models of all guests, by the name in documents. Table ``COST_MODELS``.

    A value is ``module:function``, called with the document's :class:`~energon_lite.documents.node.Node`, or with None
    for a model without costs; returns a :class:`~energon_lite.batching.steps.StepCostModel`.
    """
    return _merged("COST_MODELS")


def decoders() -> dict[str, Decoder]:
    """Return the decoders of all guests, by name."""
    return _merged("DECODERS")


def prepare_steps() -> dict[str, PrepareStep]:
    """Return the steps that guests add to ``prepare``, by command."""
    return _merged("PREPARE_STEPS")


def state_readers() -> dict[str, str]:
    """Return the readers of states in checkpoint folders of all guests, by a file that marks such a folder.

    Table ``STATE_READERS``. A value is ``module:function``, called with the folder; returns what was saved in it, in
    which the states of loaders are found at any depth.
    """
    return _merged("STATE_READERS")


def observers() -> dict[str, str]:
    """Return the observers of loaders of all guests, by name. Table ``OBSERVERS``.

    A value is ``module:function``, called with the loader's argument of that name (``trace``, ``quarantine``,
    ``log_every``, or ``metrics``) and an :class:`~energon_lite.loading.batch_observer.ObservedRank`; returns a
    :class:`~energon_lite.loading.batch_observer.BatchObserver`. Others are opened for every loader, with None.
    """
    return _merged("OBSERVERS")


def batch_paths() -> dict[str, str]:
    """Return the paths of batches of all guests, by name. Table ``BATCH_PATHS``.

    A value is ``module:function``, called with a :class:`~energon_lite.loading.batch_path.PathRequest`; returns a
    :class:`~energon_lite.loading.batch_path.BatchPath`. Paths to devices are chosen by name: ``loader.to("cuda",
    "copy")``; ``replica`` is the path between the ranks of a model replica.
    """
    return _merged("BATCH_PATHS")


def metadataset_keys() -> dict[str, str]:
    """Return the objects of guests for the keys of metadatasets, by key.

    Table ``METADATASET_KEYS``. A value is ``module:object``; for keys (fixed ones) and types of the objects see
    :mod:`energon_lite.loading.metadataset_keys`; ``weight`` is a
    :class:`~energon_lite.loading.metadataset_keys.ScheduleGuest`.
    """
    return _merged("METADATASET_KEYS")


def workers() -> dict[str, str]:
    """Return the pools with workers elsewhere of all guests, by the kind of the workers. Table ``WORKERS``.

    A value is ``module:function``, called with a :class:`~energon_lite.loading.executors.executor_handle.PoolRequest`;
    returns an :class:`~energon_lite.loading.executors.executor.Executor`. The kind is that of a
    :class:`RemoteWorkers`, or the beginning of a text: ``tcp://host:port``.
    """
    return _merged("WORKERS")


def unit_runners() -> dict[str, UnitRunner]:
    """Return the runners of units of all guests, by option."""
    return _merged("UNIT_RUNNERS")


#: By key of a metadataset: the work of its guest, and the extra of this library that does it, for messages.
_EXTRAS = {
    "join": ("joined data sets are read", "energon"),
    "aux": ("the stores of a cooker are opened", "media"),
    "filter": ("filters of samples are opened", "energon"),
    "weight": ("weights that change are read", "blends"),
    "weight_unit": ("weights in another unit than samples are converted", "blends"),
}


def metadataset_guest(key: str, origin: str) -> Any:
    """Return the object for a key of metadatasets; ``origin`` is the place of the key, for messages.

    Raises:
        ConfigError: its extra is not installed.
    """
    target = metadataset_keys().get(key)
    if target is None:
        what, fix = _missing(*_EXTRAS[key])
        raise ConfigError(what, file=origin, fix=fix)
    return load(target)


def keyword_guests() -> dict[str, str]:
    """Return the guests that accept further keywords of functions for data sets and loaders. Table ``KEYWORDS``.

    A value is ``module:object``, a :class:`~energon_lite.loading.recipes.KeywordGuest`. The first one gets all of them.
    """
    return _merged("KEYWORDS")


def blend_openers() -> dict[str, str]:
    """Return the functions of guests that open blends in a way of their own, by name. Table ``BLEND_OPENERS``.

    A value is ``module:function``, called with a :class:`~energon_lite.loading.assembly.BlendRequest`; returns an
    :class:`~energon_lite.loading.metadataset_keys.OpenedBlend`, or None if the leaves are to be opened as usual.
    """
    return _merged("BLEND_OPENERS")


def storage_guests() -> dict[str, str]:
    """Return what guests do for the storage, by name. Table ``STORAGE_GUESTS``; a value is ``module:object``.

    * ``index.sqlite``: a :class:`~energon_lite.storage.index.nv_meta.KeyDatabase`
    * ``jsonl``: makes a :class:`~energon_lite.storage.index.index_cache.FileIndex`
    * ``url_files``: a :class:`~energon_lite.storage.files.byte_ranges.UrlFiles`
    * ``url_datasets``: a :class:`~energon_lite.storage.index.index_cache.UrlDatasets`
    * ``range_cache``: makes a :class:`~energon_lite.storage.read.ranges.RangeCache`
    * ``reader_ahead``: makes an :class:`~energon_lite.storage.read.runs.Ahead`
    * ``prepare_url``: a :class:`~energon_lite.storage.prepare.UrlPreparer`
    * ``prepare_dialogue``: a :class:`~energon_lite.cli.prepare.PrepareDialogue`
    """
    return _merged("STORAGE_GUESTS")


def storage_guest(name: str, work: str, extra: str, where: str, otherwise: str = "") -> Any:
    """Return an entry of ``STORAGE_GUESTS`` that the task at hand needs.

    Args:
        name: the entry.
        work: the task, for messages, such as ``files behind URLs are read``.
        extra: the extra of this library that has the entry.
        where: the data set, file or option.
        otherwise: the way without the extra.

    Raises:
        UsageError: the extra is not installed.
    """
    target = storage_guests().get(name)
    if target is None:
        what, fix = _missing(work, extra)
        raise UsageError(what, where=where, fix=f"{fix}; or {otherwise}" if otherwise else fix)
    return load(target)


def _missing(work: str, extra: str) -> tuple[str, str]:
    """Return the problem and the fix for work whose extra is missing."""
    what = f"{work} by the extra {extra!r}, which is not installed"
    return what, f"install energon_lite with energon_lite/extras/{extra}"


def load(target: str) -> Any:
    """Return the object that ``module:name`` names.

    Raises:
        UsageError: the module has no such name.
    """
    module, _, name = target.partition(":")
    loaded = import_module(module)
    try:
        return getattr(loaded, name)
    except AttributeError as error:  # perhaps of a mistake in the module's own __getattr__
        what = f"{module} has no {name!r}: {error}"
        raise UsageError(what, where=f"entry {target!r}", fix="correct the table of its package") from error


@cache
def _guests() -> tuple[ModuleType, ...]:
    return (*map(import_module, _names()), *map(_foreign, metadata.entry_points(group=_GROUP)))


def _names() -> Iterator[str]:
    if find_spec(_FOLDERS) is not None:
        for folder in pkgutil.iter_modules(import_module(_FOLDERS).__path__, f"{_FOLDERS}."):
            if folder.ispkg:
                yield folder.name
    if find_spec(_TRAINER) is not None:
        yield _TRAINER


def _foreign(entry_point: metadata.EntryPoint) -> ModuleType:
    """Import the guest of another distribution."""
    where = f"entry point {entry_point.name!r} of {entry_point.dist.name if entry_point.dist else 'a package'}"
    try:
        guest = import_module(entry_point.value)
    except ImportError as error:
        raise UsageError(str(error), where=where, fix="correct it, or uninstall the package") from error
    if vars(guest).keys().isdisjoint(TABLES):
        what = f"{guest.__name__} has none of the tables of entries"
        raise UsageError(what, where=where, fix=f"name one of them: {', '.join(sorted(TABLES))}")
    return guest


@cache
def _merged(table: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for guest in _guests():
        added: Mapping[str, Any] = vars(guest).get(table, {})
        for name in entries.keys() & added.keys():
            what = f"{table} of {guest.__name__} has {name!r}, which another package has, too"
            raise UsageError(what, fix="choose another name, or uninstall one of them")
        entries |= added
    return entries
