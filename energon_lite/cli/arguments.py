"""Arguments and options that several commands have."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from energon_lite.documents import parse_yaml
from energon_lite.documents.paths import absolute_path, is_url, local_path, missing_file_fix
from energon_lite.entry_points import columns as columns_of_guests
from energon_lite.entry_points import load, unit_runners
from energon_lite.errors import UsageError
from energon_lite.imports import find_named
from energon_lite.storage.index.columns import CHECKSUMS
from energon_lite.storage.sharded_job import Ranks

if TYPE_CHECKING:
    from energon_lite.config.leaf_spec import LeafSpec
    from energon_lite.hooks import TaskEncoder
    from energon_lite.loading.part_columns import RequestedColumns
    from energon_lite.storage.read.opened_source import AnySource

T = TypeVar("T", bound=Callable[..., object])


def with_options(*given: Callable[[Any], Any]) -> Callable[[T], T]:
    """Return a decorator of commands that adds options, in this order."""
    return lambda command: functools.reduce(lambda wrapped, option: option(wrapped), reversed(given), command)


class ExistingPath(click.Path):
    """Type of a path argument that must exist; the error for a missing path proposes a similar one."""

    def __init__(self, *, dir_okay: bool = True):
        super().__init__(exists=True, dir_okay=dir_okay, path_type=str)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = local_path(value)
        if not os.path.exists(value):
            self.fail(f"{value!r} does not exist: {missing_file_fix(value, 'correct the path')}", param, ctx)
        return super().convert(value, param, ctx)


def local_dataset(path: str, command: str) -> str:
    """Return the absolute path of a data set that a command writes into.

    Raises:
        UsageError: it is a URL.
    """
    text = absolute_path(path)
    if is_url(text):
        raise UsageError(
            f"{command} works on local folders",
            where=text,
            fix=f"{command} a local copy, and upload its .nv-meta with the shards, then load from the URL",
        )
    return text


split_part_option = click.option(
    "--split-parts", "split_part", metavar="NAME", default="train", help="The split of the data set."
)
split_config_option = click.option("--split-config", default="split.yaml", help="For a folder: the file of its splits.")


def strategy_document(text: str, option: str) -> dict[str, Any]:
    """Convert ``name:key=value,key=value`` to a document.

    Raises:
        ConfigError: a value is not valid YAML.
    """
    name, _, rest = text.partition(":")
    document: dict[str, Any] = {"strategy": name}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        document[key.strip()] = parse_yaml(value.strip() or "null", f"{option} {text}").plain()
    return document


def batching_argument(text: str) -> dict[str, Any] | str:
    """Convert the value of ``--batching``: the path of a YAML file is kept, a strategy becomes a document."""
    return text if text.endswith((".yaml", ".yml")) else strategy_document(text, "--batching")


def open_dataset(path: str, split_part: str, split_config: str) -> list[tuple[LeafSpec, AnySource]]:
    """Open each data set of a folder or a blend, and return it with its description.

    Raises:
        ConfigError, DatasetError: a document or a file has a mistake.
    """
    from energon_lite.loading.leaves import find_leaves, open_source

    specs = find_leaves(path, split_part, "dataset.yaml", split_config, None)
    return [(spec, open_source(spec)) for spec in specs]


def make_task_encoder(text: str) -> TaskEncoder:
    """Import ``module:name`` and make a task encoder: from a class or function without arguments, or an instance.

    The current folder is searched first, as by ``python -m``.

    Raises:
        UsageError: the module or the name does not exist, or does not make a task encoder.

    Example:
        >>> make_task_encoder("train:Captions")
        <train.Captions object>
    """
    from energon_lite.hooks import TaskEncoder, check_hooks  # imports torch

    wanted = "a class derived from energon_lite.TaskEncoder"
    example = "--task-encoder train:Captions"
    value = find_named(text, option="--task-encoder", form="module:Class", example=example, wanted=wanted)
    try:
        encoder = value if isinstance(value, TaskEncoder) else value()  # type: ignore[operator]
    except TypeError as error:
        raise UsageError(
            f"{text} cannot be called without arguments: {error}",
            fix="give a function that makes the encoder, such as train:make_encoder",
        ) from error
    check_hooks(encoder)
    return encoder


def json_object(text: str | None, option: str, example: str) -> dict[str, Any] | None:
    """Parse the value of an option that is a JSON object; None if it is not given.

    Raises:
        UsageError: the value is not a JSON object.
    """
    if text is None:
        return None
    cure = f"write it like {option} '{example}', in single quotes"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}", fix=cure) from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} is not a JSON object", fix=cure)
    return value


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: a power of 1000 with ``B`` (``5GB``), else of 1024 (``6G``, ``500 MiB``).

    Raises:
        UsageError: the text is not a number of bytes, or 0.

    Example:
        >>> parse_bytes("5GB"), parse_bytes("1.5k"), parse_bytes("2 GiB")
        (5000000000, 1536, 2147483648)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    base = 1000 if match and match[3] == "b" else 1024
    count = int(float(match[1]) * base ** " kmgt".index(match[2] or " ")) if match else 0
    if count < 1:
        raise UsageError(f"{text!r} is not a number of bytes", fix="write 6G, 500MiB, or 5GB")
    return count


def job_options(workers_do: str, *, least_workers: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--num-workers``, ``--progress``, ``--rank``, ``--world-size``, ``--rank-timeout``, and those of
    :class:`~energon_lite.entry_points.UnitRunner`.

    The command gets ``num_workers``, ``show_progress`` and ``ranks``.

    Args:
        workers_do: description of the processes, such as "Processes that read shards."
        least_workers: smallest number of processes.
    """
    runners = unit_runners()

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @with_options(
            click.option(
                "--num-workers", type=click.IntRange(min=least_workers), help=f"{workers_do}  [default: one per core]"
            ),
            click.option(
                "--progress/--no-progress",
                "show_progress",
                default=True,
                help="Show the progress, as a bar or in lines.",
            ),
            click.option(
                "--rank", type=int, envvar="RANK", default=0, help="Rank of this process.  [default: $RANK, else 0]"
            ),
            click.option(
                "--world-size",
                type=int,
                envvar="WORLD_SIZE",
                default=1,
                help="Number of processes, on any machines, that share the work.  [default: $WORLD_SIZE, else 1]",
            ),
            click.option(
                "--rank-timeout",
                type=float,
                default=600.0,
                show_default=True,
                help="Seconds that rank 0 waits for other ranks without any progress.",
            ),
            *(
                click.option(f"--{name}", metavar=runner.metavar, is_flag=False, flag_value="", help=runner.help)
                for name, runner in runners.items()
            ),
        )
        @functools.wraps(command)
        def with_ranks(*arguments: Any, rank: int, world_size: int, rank_timeout: float, **others: Any) -> None:
            given = [(name, value) for name in runners if (value := others.pop(name)) is not None]
            ranks = Ranks(rank, world_size, rank_timeout, given[0] if given else None)
            command(*arguments, ranks=ranks, **others)

        return with_ranks

    return decorate


# -- columns of stored parts ----------------------------------------------------------------------------------------

#: Options of guests, by name.
_OF_GUESTS = {name: option for guest in columns_of_guests().values() for name, option in guest.options.items()}
#: Names of the values of all options.
PART_OPTIONS = ("columns", *_OF_GUESTS, "checksums")
#: Options for columns that are computed from stored parts.
part_options = with_options(
    click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="NAME=PART",
        help="A further column (repeatable): bytes of a part (txt) or of all (*), rows of an array (npy), a value "
        "in a part (json.loss_tokens).",
    ),
    click.option(
        "--checksums",
        is_flag=True,
        help="Add a checksum of each part, by which it is verified on each read. Reads all shards once.",
    ),
    *(
        click.option(f"--{name}", metavar=option.metavar or None, is_flag=not option.metavar, help=option.help)
        for name, option in _OF_GUESTS.items()
    ),
)


class AskedParts(NamedTuple):
    """Columns that these options request.

    Attributes:
        columns: name of the column -> part whose values it stores.
        others: columns of guests.
    """

    columns: dict[str, str]
    others: tuple[RequestedColumns, ...]

    def __bool__(self) -> bool:
        return bool(self.columns or self.others)


def asked_parts(asked: Mapping[str, Any]) -> AskedParts:
    """Parse the user's options.

    Raises:
        UsageError: an option has a wrong form.
    """
    columns = {}
    for text in asked["columns"]:
        name, equals, field = text.partition("=")
        if not (name and equals and field):
            raise UsageError(f"--column {text}: expected NAME=PART", fix="write --column bytes=jpg")
        if name in columns:
            raise UsageError(f"--column {name}=... is given twice", fix="give each column once")
        columns[name] = field
    if asked["checksums"]:
        columns[CHECKSUMS] = "crc32"
    others = []
    for guest in columns_of_guests().values():
        given = {name: asked[name] for name in guest.options}
        if any(value not in (None, False) for value in given.values()):
            make: Callable[[Mapping[str, str | bool | None]], RequestedColumns] = load(guest.target)
            others.append(make(given))
    return AskedParts(columns, tuple(others))


def given_words(names: Collection[str]) -> list[str]:
    """Return the options of the running command that are given, of those with these names, as words."""
    context, words = click.get_current_context(), list[str]()
    for option in context.command.params:
        value = context.params[str(option.name)]
        if option.name in names and value and value != option.get_default(context):
            values = value if isinstance(value, tuple) else [] if value is True else [value]
            words += [word for given in values for word in (option.opts[0], given)] or [option.opts[0]]
    return words
