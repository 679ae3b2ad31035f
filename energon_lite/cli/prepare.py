"""``energon-lite prepare``: from a folder of tar shards to a data set that can be loaded.

The options are those of ``energon prepare``. What is not given is asked, unless ``--non-interactive``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from energon_lite.cli.jobs import job_options, json_object, progress, show_share
from energon_lite.cli.local_paths import local_dataset
from energon_lite.cli.next_step import show_next_step
from energon_lite.cli.part_options import asked_parts, part_options, part_words
from energon_lite.config.metadataset import LeafSpec, is_metadataset
from energon_lite.documents.paths import is_url, local_path, missing_file_fix
from energon_lite.errors import ConfigError, EmptyDatasetError, EnergonLiteError, UsageError, counted
from energon_lite.extras.media.media_options import extract_media, media_options
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.splits import divide, parse_pattern, parse_ratio
from energon_lite.storage.prepare.dataset_scan import Choice, DatasetScan, find_shards
from energon_lite.storage.prepare.loader_template import loader_template
from energon_lite.storage.prepare.prepare import PrepareReport, index_again, prepare_folder, prepare_jsonl
from energon_lite.storage.prepare.sample_document import CRUDE, SAMPLE_LOADER, find_sample_type, sample_document
from energon_lite.storage.prepare.shard_scans import is_unfinished
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["command"]


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
@click.option("--exclude", metavar="REGEX", help="Leave out shards in whose relative path this is found.")
@click.option("--shuffle-tars", is_flag=True, help="Mix the shards before the ratio is applied.")
@click.option("--force-overwrite", is_flag=True, help="Prepare a data set again that is prepared already.")
@click.option("--skip-dataset-yaml", is_flag=True, help="Do not write a dataset.yaml.")
@click.option("--dataset-yaml-name", default=nv_meta.DATASET_YAML, show_default=True, help="Name of that file.")
@click.option("--sample-type", help=f"Name of a sample class such as CaptioningSample, or {CRUDE} for dicts of parts.")
@click.option(
    "--field-map", metavar="JSON", help='Part of each field: \'{"image": "jpg,png", "caption": "json[text]"}\'.'
)
@click.option(
    "--length-field",
    metavar="PART",
    help="Store lengths as a column: bytes of a part (txt), rows of an array (npy), a value in it (json.tokens).",
)
@part_options
@click.option("--tar-index-only", is_flag=True, help="Only make the indexes of a prepared data set again.")
@click.option("--sqlite/--no-sqlite", default=True, help="Write index.sqlite, which only Energon's tools use.")
@click.option("--fix-duplicates", is_flag=True, help="Give members of shards names with the shard's, if keys collide.")
@click.option("--skip-broken-shards", is_flag=True, help="Leave out shards that cannot be indexed, and name them.")
@click.option(
    "--tmp-path", metavar="DIR", help="For a URL: a local folder for small files until all are made (else the cache)."
)
@click.option("--rescan", is_flag=True, help="Read all shards, also those unchanged since the last preparation.")
@media_options
@click.option(
    "--json", "as_json", is_flag=True, help="Write what was done as JSON; with --non-interactive nothing else."
)
@job_options("Processes that read shards.")
def command(path: str, **asked: Any) -> None:
    """Prepare the data set in the folder, or behind the URL, PATH; or index the file PATH, if that is a .jsonl.

    Finds all .tar files in PATH and below, indexes their samples, divides the shards into splits, and writes how a
    sample is made of its parts. Everything goes into PATH/.nv-meta (and a .tar.idx beside each shard); the shards
    themselves are only read. Megatron-Energon can load the result as well.

    Killed and run again, it reads only the shards that are missing; run again with --force-overwrite after shards were
    added, it reads only the new ones. Under torchrun, or with --rank and --world-size, processes share the work.

    \b
    Example without questions:
      energon-lite prepare data/coco --non-interactive --split-ratio 8,1,1 \\
        --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    """
    path = local_path(path)
    if is_url(path):
        _prepare_url(path, asked)
        return
    root = local_dataset(path, "prepare")
    if not os.path.exists(root):
        what = "JSONL file" if is_jsonl(root) else "folder"
        fix = missing_file_fix(root, "give the folder that holds the tar files")
        raise UsageError(f"there is no such {what}", where=root, fix=fix)
    if is_metadataset(root):
        _prepare_metadataset(root, asked)
        return
    if asked["media"] is not None and (is_jsonl(root) or asked["tar_index_only"]):
        what = "a JSONL file has no media" if is_jsonl(root) else "goes together with no --tar-index-only"
        raise UsageError(f"--media-metadata-by-...: {what}", where=root, fix="leave it out, or use prepare-media")
    if is_jsonl(root):
        _prepare_jsonl(root, asked)
    elif asked["tar_index_only"]:
        _index_again(root, asked)
    else:
        _prepare_folder(root, asked)


#: The options of the command, by name.
_Asked = Mapping[str, Any]


def _prepare_url(url: str, asked: _Asked) -> None:
    if is_metadataset(url):
        _prepare_metadataset(url, asked)
        return
    if is_jsonl(url):
        raise UsageError(
            "prepare indexes JSONL files of this machine",
            where=url,
            fix="load it as it is: it is read once, and its index kept; or prepare a local copy, and upload its .idx",
        )
    if asked["media"] is not None:
        raise UsageError(
            "--media-metadata-by-... works on local folders", where=url, fix="leave it out; or use a local copy"
        )
    options = {"--length-field": "length_field", "--column": "columns", "--images": "images", "--patches": "patches"}
    options["--checksums"] = "checksums"
    if wanted := [option for option, name in options.items() if asked[name]]:
        raise UsageError(
            f"{wanted[0]} works on local folders",
            where=url,
            fix="leave it out; lengths are measured where the data set is read: `energon-lite measure`",
        )
    if asked["tar_index_only"]:
        _index_again(url, asked)
    else:
        _prepare_folder(url, asked)


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
    _show_notes(index.notes.get(name, ()))
    click.echo(f"Found {counted(len(index), 'sample')} in {root}; wrote {name}.idx and energon_lite's own index")
    click.echo("Done.")
    _store_lengths(root, asked)


def _index_again(root: str, asked: _Asked) -> None:
    if asked["ranks"].world_size > 1:
        raise UsageError("--tar-index-only works alone", fix="add --world-size 1 --rank 0, on one process")
    with progress(asked["show_progress"], "Indexing", "shards") as show:
        options = {name: asked[name] for name in ("sqlite", "tmp_path")}
        report = index_again(root, workers=asked["num_workers"], progress=show, **options)
    _show_report(report)
    _store_lengths(root, asked)


def _prepare_folder(root: str, asked: _Asked) -> None:
    # All that can be wrong is found before shards are read, which may take long.
    patterns, fields = _check_options(asked), _parse_field_map(asked["field_map"])
    begun: dict[str, str] | None = None  # code that is to be completed: the fields that it is likely to have

    def choose(scan: DatasetScan) -> Choice:
        from energon_lite.cli import prepare_dialogue as dialogue

        nonlocal begun
        quiet = asked["as_json"] and asked["non_interactive"]
        if not quiet:
            dialogue.show_scan(scan)
        ratio = None if patterns else asked["split_ratio"] or dialogue.ask_split_ratio()
        splits, may_be_empty = divide(scan.shard_names, ratio, patterns, shuffle=asked["shuffle_tars"])
        document, files = None, dict[str, str]()
        if not asked["skip_dataset_yaml"]:
            if not quiet:
                dialogue.show_samples(scan)
            kind = asked["sample_type"]
            if fields is None and kind != CRUDE and not asked["non_interactive"]:
                document, files = dialogue.ask_dataset_document(scan, kind)
            else:
                document = sample_document(scan, sample_type=kind, field_map=fields, use_loader=True)
                if document is not None and "sample_loader" in document:
                    files = {SAMPLE_LOADER: loader_template(kind, scan.parts)}
                    begun = dialogue.guess_field_map(scan, kind)
        return Choice(splits, may_be_empty, document, asked["dataset_yaml_name"], files)

    if asked["force_overwrite"] or asked["non_interactive"] or not nv_meta.is_prepared(root) or is_unfinished(root):
        again = asked["force_overwrite"]
    elif not (again := _asked_again(root)):
        click.echo("Nothing was changed.")
        return

    if asked["fix_duplicates"]:
        _fix_duplicates(root, asked)
    with progress(asked["show_progress"], "Indexing", "shards") as show, _answers_expected(asked["non_interactive"]):
        report = prepare_folder(
            root,
            choose,
            **{name: asked[name] for name in ("exclude", "sqlite", "rescan", "ranks", "tmp_path")},
            force_overwrite=again,
            skip_broken=asked["skip_broken_shards"],
            workers=asked["num_workers"],
            progress=show,
        )
    if asked["ranks"].rank:
        _show_notes(report.warnings)
        show_share(asked["ranks"], f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}")
        return
    _show_report(report, asked["as_json"])
    _store_media(root, asked)
    _store_lengths(root, asked)
    if not asked["as_json"]:
        show_next_step(report, asked["dataset_yaml_name"], begun)
        click.echo("\nDone")


def _prepare_metadataset(path: str, asked: _Asked) -> None:
    """Check a metadataset, and have the indexes of all of its data sets: those of joins, and of folders that Energon
    has prepared."""
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
            found = counted(len(open_source(spec)), "sample")
        except EmptyDatasetError:
            found = "empty"
        except EnergonLiteError as error:
            found, broken = f"cannot be read: {error.what}" + (f"; {error.fix}" if error.fix else ""), broken + 1
        click.echo(f"  {' + '.join(spec.folders)} [{spec.split_part}]: {found}")
    if broken:
        raise UsageError(
            f"{broken} of {counted(len(specs), 'data set')} cannot be read",
            where=path,
            fix="prepare them, or correct the document",
        )
    click.echo(f"{path}: {counted(len(specs), 'data set')} ready")


def _identity(spec: LeafSpec) -> tuple[Any, ...]:
    """What two references have in common that mean the same samples, but for subsets and filters."""
    nonmatch, members = ((), (spec,)) if spec.join is None else (spec.join.nonmatch, spec.join.members)
    return nonmatch, *((one.path, one.split_part, one.split_config) for one in members)


def _check_options(asked: _Asked) -> list[tuple[str, str]]:
    """Check what can be checked without the data; returns the patterns of the splits."""
    patterns = [parse_pattern(text) for text in asked["split_parts"]]
    if patterns and (asked["split_ratio"] is not None or asked["shuffle_tars"]):
        raise UsageError("--split-parts goes together neither with --split-ratio nor with --shuffle-tars")
    if asked["split_ratio"] is not None:
        parse_ratio(asked["split_ratio"])
    elif not patterns and asked["non_interactive"]:
        raise UsageError(
            "--non-interactive needs --split-ratio or --split-parts",
            fix="add --split-ratio 8,1,1 (train, val, test in shards)",
        )
    if asked["sample_type"] not in (None, CRUDE):
        find_sample_type(asked["sample_type"])
    if asked["ranks"].world_size > 1 and not asked["non_interactive"]:
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


def _asked_again(root: str) -> bool:
    from energon_lite.cli.prepare_dialogue import ask_again

    with _answers_expected(False):
        return ask_again(root)


def _fix_duplicates(root: str, asked: _Asked) -> None:
    from energon_lite.storage.prepare.unique_keys import make_keys_unique

    if asked["ranks"].rank:
        return
    renamed = make_keys_unique(root, find_shards(root, asked["exclude"]))
    click.echo(
        f"Keys collided: the members of {counted(len(renamed), 'shard')} now begin with the name of their shard"
        if renamed
        else "All keys are unique; no shard was changed"
    )


@contextmanager
def _answers_expected(non_interactive: bool) -> Iterator[None]:
    """Say what to do when a question finds nobody to answer it."""
    try:
        yield
    except click.Abort:
        if non_interactive or sys.stdin.isatty():
            raise
        raise UsageError(
            "a question was not answered, because the input has ended; the data set is not prepared",
            fix="answer by options: --non-interactive --split-ratio 8,1,1 --sample-type ... --field-map ...",
        ) from None


def _store_media(root: str, asked: _Asked) -> None:
    """Store the metadata of media of what has just been prepared, if it is wanted; rank 0 does it."""
    if asked["media"] is not None and not asked["ranks"].rank:
        extract_media(
            root, asked["media"], Ranks(), asked["num_workers"], asked["show_progress"], to_log=asked["as_json"]
        )


def _store_lengths(root: str, asked: _Asked) -> None:
    """Store columns of what has just been prepared, if they are wanted, and say what they hold."""
    parts = asked_parts(asked)
    if asked["length_field"] is None and not parts:
        return
    from energon_lite.cli.measure import measuring, show_report  # imports torch
    from energon_lite.loading.measuring.part_lengths import measure_parts

    only = [] if is_jsonl(root) else ["--tar-index-only"]
    length = asked["length_field"]
    given = [] if length is None else ["--length-field", length]
    again = shlex.join(["energon-lite", "prepare", root, *only, *given, *part_words(asked)])
    with measuring(root, asked["show_progress"]) as show:
        report = measure_parts(
            root,
            length,
            columns=parts.columns,
            images=parts.images,
            patches=parts.patches,
            command=again,
            workers=asked["num_workers"],
            progress=show,
        )
    show_report(report)


def _show_report(report: PrepareReport, as_json: bool = False) -> None:
    _show_notes(report.warnings)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    if report.splits:
        splits = [
            f"{name} {counted(samples, 'sample')} in {counted(shards, 'shard')}"
            for name, (shards, samples) in report.splits.items()
        ]
        click.echo(f"Splits: {'; '.join(splits)}")
    click.echo(
        f"Wrote {counted(report.shards, '.tar.idx file')} and, in {os.path.join(report.path, nv_meta.META_FOLDER)}:"
    )
    click.echo("  " + ", ".join(os.path.basename(name) for name in report.written))


def _show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        click.secho(f"Note: {note}", fg="yellow", err=True)
