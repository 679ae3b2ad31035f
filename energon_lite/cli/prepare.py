"""``energon-lite prepare``: make a loadable data set of a folder of tar shards.

The options are those of ``energon prepare``. A guest asks for missing ones, unless ``--non-interactive`` is given.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import click

from energon_lite.cli.arguments import (
    PART_OPTIONS,
    asked_parts,
    given_words,
    job_options,
    json_object,
    local_dataset,
    part_options,
    with_options,
)
from energon_lite.cli.output import (
    measuring,
    progress,
    show_next_step,
    show_notes,
    show_preparation,
    show_report,
    show_scan,
    show_share,
)
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import is_url, local_path, missing_file_fix
from energon_lite.entry_points import load, prepare_steps, storage_guests
from energon_lite.errors import ConfigError, DatasetError, EmptyDatasetError, EnergonLiteError, UsageError, counted
from energon_lite.storage.dataset_scan import DatasetScan
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.nv_meta import is_jsonl
from energon_lite.storage.prepare import PrepareOptions, index_again, prepare_folder, prepare_jsonl
from energon_lite.storage.prepare_choices import (
    CRUDE,
    Choice,
    divide,
    find_sample_type,
    parse_pattern,
    parse_ratio,
    sample_document,
)
from energon_lite.storage.sharded_job import Progress

#: The options of the command, by name.
_Asked = Mapping[str, Any]
#: Options that request columns.
_COLUMNS = ("length_field", *PART_OPTIONS)


def _steps_of_guests(asked: _Asked) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The steps of guests that are requested, by the command that does each alone."""
    for name, step in prepare_steps().items():
        begin: Callable[[_Asked], Callable[[str], None] | None] = load(step.begin)
        if (run := begin(asked)) is not None:
            yield name, run


class PrepareDialogue(Protocol):
    """Guest that asks for missing options: entry ``prepare_dialogue`` of the table ``STORAGE_GUESTS``."""

    def show_samples(self, scan: DatasetScan) -> None:
        """Write the first samples."""

    def ask_again(self, root: str) -> bool:
        """Ask if a prepared data set is to be prepared again."""

    def ask_split_ratio(self) -> str:
        """Ask for the shares of train, val and test, as text."""

    def ask_dataset_document(
        self, scan: DatasetScan, sample_type: str | None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Ask for the definition of samples: the document, None if no file is wanted; and the further files that it
        needs, by name."""

    def begin_loader(self, scan: DatasetScan, sample_type: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the document of samples whose fields a file of code defines, and templates of the files, by name."""

    def guess_field_map(self, scan: DatasetScan, sample_type: str) -> dict[str, str]:
        """Guess the parts of the required fields of a sample; empty if one of them cannot be guessed."""


def find_dialogue() -> PrepareDialogue | None:
    """Return the guest that asks; None: there is none, and nothing is asked."""
    target = storage_guests().get("prepare_dialogue")
    return None if target is None else load(target)


@click.command(name="prepare", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--non-interactive", is_flag=True, help="Ask nothing.")
@click.option("--split-ratio", help="Shares of train, val and test in shards, such as 8,1,1.")
@click.option(
    "--split-parts",
    multiple=True,
    metavar="NAME:REGEX",
    help="A split and a regular expression for the names of its shards (repeatable), instead of a ratio.",
)
@click.option("--exclude", metavar="REGEX", help="Leave out shards whose relative path matches this.")
@click.option("--shuffle-tars", is_flag=True, help="Shuffle the shards before the ratio is applied.")
@click.option("--force-overwrite", is_flag=True, help="Prepare again a data set that is already prepared.")
@click.option("--skip-dataset-yaml", is_flag=True, help="Do not write a dataset.yaml.")
@click.option(
    "--dataset-config", "--dataset-yaml-name", "dataset_yaml_name", default=nv_meta.DATASET_YAML, help="Its name."
)
@click.option("--sample-type", help=f"Name of a sample class such as CaptioningSample, or {CRUDE} for dicts of parts.")
@click.option(
    "--field-map", metavar="JSON", help='Part for each field: \'{"image": "jpg,png", "caption": "json[text]"}\'.'
)
@click.option(
    "--length-field",
    metavar="PART",
    help="Store lengths as a column: bytes of a part (txt), rows of an array (npy), a value in it (json.tokens).",
)
@part_options
@click.option("--tar-index-only", is_flag=True, help="Only make the indexes of a prepared data set again.")
@click.option("--sqlite/--no-sqlite", default=True, help="Write index.sqlite, which only Energon's tools use.")
@click.option("--skip-broken-shards", is_flag=True, help="Leave out shards that cannot be indexed, and list them.")
@click.option(
    "--tmp-path", metavar="DIR", help="For a URL: a local folder for small files until all are made.  [default: cache]"
)
@click.option("--rescan", is_flag=True, help="Read all shards, including those that have not changed.")
@with_options(*(load(step.add_options) for step in prepare_steps().values()))
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON; with --non-interactive nothing else.")
@job_options("Processes that read shards.")
def command(path: str, **asked: Any) -> None:
    """Prepare the data set in the folder PATH or at the URL PATH; or index PATH, if it is a .jsonl file.

    Finds all .tar files in PATH and below, indexes their samples, divides the shards into splits, and writes the
    definition of samples. All results are in PATH/.nv-meta (and a .tar.idx next to each shard); the shards themselves
    are not changed. Megatron-Energon can load the result as well.

    A run that was killed reads only the missing shards when it is started again. With --force-overwrite, a further run
    reads only added shards. Under torchrun, or with --rank and --world-size, processes share the work.

    \b
    Example without questions:
      energon-lite prepare data/coco --non-interactive --split-ratio 8,1,1 \\
        --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    """
    path, asked["steps"] = local_path(path), dict(_steps_of_guests(asked))
    root = path if is_url(path) else local_dataset(path, "prepare")
    if not (is_url(root) or os.path.exists(root)):
        what = "JSONL file" if is_jsonl(root) else "folder"
        fix = missing_file_fix(root, "give the folder that holds the tar files")
        raise UsageError(f"there is no such {what}", where=root, fix=fix)
    if is_metadataset(root):
        _prepare_metadataset(root, asked)
        return
    if is_url(root):
        _check_url(root, asked)
    elif asked["steps"] and (is_jsonl(root) or asked["tar_index_only"]):
        (name, *_), what = asked["steps"], "no JSONL file" if is_jsonl(root) else "no --tar-index-only"
        options = prepare_steps()[name].options
        raise UsageError(f"{options}: needs {what}", where=root, fix=f"leave it out, or use {name}")
    if is_jsonl(root):
        _prepare_jsonl(root, asked)
    elif asked["tar_index_only"]:
        _index_again(root, asked)
    else:
        _prepare_folder(root, asked)


def _check_url(url: str, asked: _Asked) -> None:
    """Refuse what is done on local files only."""
    if is_jsonl(url):
        raise UsageError(
            "prepare indexes JSONL files of this machine",
            where=url,
            fix="load it as it is: it is read once, and its index kept; or prepare a local copy, and upload its .idx",
        )
    for name in asked["steps"]:
        what = f"{prepare_steps()[name].options} works on local folders"
        raise UsageError(what, where=url, fix="leave it out; or use a local copy")
    if wanted := given_words(_COLUMNS):
        raise UsageError(
            f"{wanted[0]} works on local folders",
            where=url,
            fix="leave it out; lengths are measured where the data set is read: `energon-lite measure`",
        )


def _prepare_jsonl(root: str, asked: _Asked) -> None:
    choices = ("split_ratio", "split_parts", "exclude", "shuffle_tars", "sample_type", "field_map")
    refused = ["--" + name.replace("_", "-") for name in choices if asked[name]]
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: a JSONL file is one shard of crude samples, without splits",
            where=root,
            fix="leave that out; a `subset` in a metadataset takes a part of the file",
        )
    if asked["ranks"].rank:
        return
    index, name = prepare_jsonl(root), os.path.basename(root)
    show_notes(index.notes.get(name, ()))
    click.echo(f"Found {counted(len(index), 'sample')} in {root}; wrote {name}.idx and energon_lite's own index")
    click.echo("Done.")
    _store_lengths(root, asked)


def _index_again(root: str, asked: _Asked) -> None:
    if asked["ranks"].world_size > 1:
        raise UsageError("--tar-index-only works alone", fix="add --world-size 1 --rank 0, on one process")
    with progress(asked["show_progress"], "Indexing", "shards") as show:
        report = index_again(root, _options(asked, progress=show))
    show_preparation(report)
    _store_lengths(root, asked)


def _options(asked: _Asked, *, progress: Progress | None, force_overwrite: bool = False) -> PrepareOptions:
    kept = {name: asked[name] for name in ("exclude", "sqlite", "rescan", "ranks", "tmp_path")}
    workers, skip_broken = asked["num_workers"], asked["skip_broken_shards"]
    return PrepareOptions(
        **kept, workers=workers, skip_broken=skip_broken, force_overwrite=force_overwrite, progress=progress
    )


def _prepare_folder(root: str, asked: _Asked) -> None:
    # All options are checked before shards are read, which may take long.
    patterns, fields = _check_options(asked), _parse_field_map(asked["field_map"])
    begun: dict[str, str] | None = None  # likely fields, if a file of code is written that has to be completed
    guest = find_dialogue()
    dialogue = None if asked["non_interactive"] else guest

    def choose(scan: DatasetScan) -> Choice:
        nonlocal begun
        quiet = asked["as_json"] and asked["non_interactive"]
        if not quiet:
            show_scan(scan)
        ratio = asked["split_ratio"]
        if not (patterns or ratio) and dialogue is not None:
            ratio = dialogue.ask_split_ratio()
        splits, may_be_empty = divide(scan.shard_names, ratio, patterns, shuffle=asked["shuffle_tars"])
        document, files = None, dict[str, str]()
        if not asked["skip_dataset_yaml"]:
            if not quiet and guest is not None:
                guest.show_samples(scan)
            kind = asked["sample_type"]
            if fields is None and kind != CRUDE and dialogue is not None:
                document, files = dialogue.ask_dataset_document(scan, kind)
            elif fields is None and kind not in (None, CRUDE) and guest is not None:
                document, files = guest.begin_loader(scan, kind)
                begun = guest.guess_field_map(scan, kind)
            else:
                document = sample_document(scan, sample_type=kind, field_map=fields)
        return Choice(splits, may_be_empty, document, asked["dataset_yaml_name"], files)

    again = asked["force_overwrite"]
    if not again and dialogue is not None and nv_meta.is_prepared(root) and not nv_meta.is_unfinished(root):
        with _explained(root, False):
            again = dialogue.ask_again(root)
        if not again:
            click.echo("Nothing was changed.")
            return

    with progress(asked["show_progress"], "Indexing", "shards") as show, _explained(root, asked["non_interactive"]):
        report = prepare_folder(root, choose, _options(asked, force_overwrite=again, progress=show))
    if asked["ranks"].rank:
        show_notes(report.warnings)
        show_share(asked["ranks"], f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}")
        return
    show_preparation(report, asked["as_json"])
    for step in asked["steps"].values():
        step(root)
    _store_lengths(root, asked)
    if not asked["as_json"]:
        show_next_step(report, asked["dataset_yaml_name"], begun)
        click.echo("\nDone")


def _prepare_metadataset(path: str, asked: _Asked) -> None:
    """Check a metadataset, and make missing indexes of its data sets: of joins, and of folders prepared by Energon."""
    from energon_lite.loading.leaves import find_leaves, open_source  # imports torch

    if asked["ranks"].rank:
        return
    specs, wrong = dict[tuple[Any, ...], LeafSpec](), list[EnergonLiteError]()
    for part in ("train", "val", "test"):
        try:
            specs |= {_identity(spec): spec for spec in find_leaves(path, part, "", "", None)}
        except ConfigError as error:
            wrong.append(error)
    if not specs:
        raise wrong[0]
    broken = 0
    for spec in specs.values():
        try:
            described = counted(len(open_source(spec)), "sample")
        except EmptyDatasetError:
            described = "empty"
        except EnergonLiteError as error:
            described = f"cannot be read: {error.what}" + (f"; {error.fix}" if error.fix else "")
            broken += 1
        click.echo(f"  {' + '.join(spec.folders)} [{spec.split_part}]: {described}")
    if broken:
        raise UsageError(
            f"{broken} of {counted(len(specs), 'data set')} cannot be read",
            where=path,
            fix="prepare them, or correct the document",
        )
    click.echo(f"{path}: {counted(len(specs), 'data set')} ready")


def _identity(spec: LeafSpec) -> tuple[Any, ...]:
    """Properties of a reference that determine its samples, without subsets and filters."""
    nonmatch, members = ((), (spec,)) if spec.join is None else (spec.join.nonmatch, spec.join.members)
    return nonmatch, *((member.path, member.split_part, member.split_config) for member in members)


def _check_options(asked: _Asked) -> list[tuple[str, str]]:
    """Check the options without reading data, and return the patterns of the splits."""
    patterns = [parse_pattern(text) for text in asked["split_parts"]]
    asks = not asked["non_interactive"] and find_dialogue() is not None
    if patterns and (asked["split_ratio"] is not None or asked["shuffle_tars"]):
        raise UsageError("--split-parts cannot be combined with --split-ratio or --shuffle-tars")
    if asked["split_ratio"] is not None:
        parse_ratio(asked["split_ratio"])
    elif not patterns and not asks:
        raise UsageError(
            "--non-interactive needs --split-ratio or --split-parts",
            fix="add --split-ratio 8,1,1 (train, val, test in shards)",
        )
    if asked["sample_type"] not in (None, CRUDE):
        find_sample_type(asked["sample_type"])
    if asked["ranks"].world_size > 1 and asks:
        raise UsageError(
            f"{asked['ranks'].world_size} processes cannot ask questions",
            fix="add --non-interactive and the answers as options, or --world-size 1 --rank 0 to work alone",
        )
    return patterns


def _parse_field_map(text: str | None) -> dict[str, str] | None:
    example = '{"image": "jpg,png", "caption": "txt"}'
    value = json_object(text, "--field-map", example)
    if value is not None and not all(isinstance(access, str) for access in value.values()):
        raise UsageError("--field-map is not a JSON object of strings", fix=f"write it like --field-map '{example}'")
    return value


@contextmanager
def _explained(root: str, non_interactive: bool) -> Iterator[None]:
    """Convert the end of the input during a question, and errors of writes, to errors with the fix."""
    try:
        yield
    except click.Abort:
        if non_interactive or sys.stdin.isatty():
            raise
        raise UsageError(
            "the input ended before all questions were answered; the data set is not prepared",
            fix="answer by options: --non-interactive --split-ratio 8,1,1 --sample-type ... --field-map ...",
        ) from None
    except OSError as error:
        if error.filename is not None or error.strerror is None or isinstance(error, BrokenPipeError):
            raise
        raise DatasetError(error.strerror, where=root, fix="check permissions and free space") from None


def _store_lengths(root: str, asked: _Asked) -> None:
    """Store columns of the prepared data set, if requested, and report them."""
    parts = asked_parts(asked)
    if asked["length_field"] is None and not parts:
        return
    from energon_lite.loading.part_columns import measure_parts  # imports torch

    only = [] if is_jsonl(root) else ["--tar-index-only"]
    again = shlex.join(["energon-lite", "prepare", root, *only, *given_words(_COLUMNS)])
    with measuring(root, asked["show_progress"]) as show:
        report = measure_parts(
            root,
            asked["length_field"],
            **parts._asdict(),
            command=again,
            workers=asked["num_workers"],
            progress=show,
        )
    show_report(report)
