"""Arguments and options that several commands have, and the progress of jobs: a bar, or lines."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from energon_lite.documents import parse_yaml
from energon_lite.documents.paths import absolute_path, is_url, local_path, missing_file_fix
from energon_lite.entry_points import find_named, unit_runners
from energon_lite.errors import UsageError
from energon_lite.storage.sharded_job.job import Progress, Ranks

if TYPE_CHECKING:
    from energon_lite.config.leaf_spec import LeafSpec
    from energon_lite.hooks import TaskEncoder
    from energon_lite.storage.read.opened_source import AnySource


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


def job_options(workers_do: str, *, least_workers: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--num-workers``, ``--progress``, ``--rank``, ``--world-size``, ``--rank-timeout``, and those of
    :class:`~energon_lite.entry_points.UnitRunner`.

    The command gets ``num_workers``, ``show_progress`` and ``ranks``.

    Args:
        workers_do: description of the processes, such as "Processes that read shards."
        least_workers: smallest number of processes.
    """
    options = [
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
    ]
    runners = unit_runners()
    options += [
        click.option(f"--{name}", metavar=runner.metavar, is_flag=False, flag_value="", help=runner.help)
        for name, runner in runners.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_ranks(*arguments: Any, rank: int, world_size: int, rank_timeout: float, **others: Any) -> None:
            given = [(name, value) for name in runners if (value := others.pop(name)) is not None]
            ranks = Ranks(rank, world_size, rank_timeout, given[0] if given else None)
            command(*arguments, ranks=ranks, **others)

        return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_ranks)

    return decorate


#: Seconds between two lines without a terminal, such as in the log of a job.
_BETWEEN = 10.0


@contextmanager
def progress(wanted: bool, doing: str, unit: str) -> Iterator[Progress | None]:
    """Provide a function that shows progress; None if it is not ``wanted``. A bar ends when all is done.

    Args:
        doing: description of the work, such as ``"Indexing"``.
        unit: the counted unit, in the plural.
    """
    if not wanted:
        yield None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(unit=f" {unit}", desc=doing, dynamic_ncols=True) as bar:

            def move(done: int, total: int, note: str) -> None:
                bar.total = total
                bar.set_postfix_str(note, refresh=False)
                bar.update(done - bar.n)
                if done == total > 0:
                    bar.close()  # questions may follow

            yield move
    else:
        yield _lines(doing, unit)


def _lines(doing: str, unit: str) -> Progress:
    start = last = time.monotonic()

    def line(done: int, total: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _BETWEEN or not done:
            return
        last, elapsed = now, now - start
        left = elapsed / done * (total - done)
        rate = f"{done / elapsed:,.1f}/s" + (f", {note}" if note else "")
        click.echo(f"{doing}: {done:,} of {total:,} {unit}, {rate}, about {left:.0f} s left", err=True)

    return line


def show_share(ranks: Ranks, done: str) -> None:
    """Report the share of work of a rank other than 0."""
    click.echo(f"Rank {ranks.rank} of {ranks.world_size}: {done}; rank 0 goes on")
