"""``energon-lite prepare``: from a folder of tar shards to a data set that can be loaded.

The options are those of ``energon prepare``. What is not given is asked, unless ``--non-interactive``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import click

from energon_lite.cli.job_options import job_options, json_object
from energon_lite.cli.local_paths import local_dataset
from energon_lite.cli.media_options import extract_media, media_options
from energon_lite.cli.progress import progress, show_share
from energon_lite.config.metadataset import is_metadataset, load_metadataset
from energon_lite.documents.paths import missing_file_fix
from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.splits import divide, parse_pattern, parse_ratio
from energon_lite.storage.prepare.dataset_scan import Choice, DatasetScan
from energon_lite.storage.prepare.prepare import PrepareReport, index_again, prepare_folder, prepare_jsonl
from energon_lite.storage.prepare.sample_document import CRUDE, find_sample_type, sample_document
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
@click.option("--tar-index-only", is_flag=True, help="Only make the indexes of a prepared data set again.")
@click.option("--sqlite/--no-sqlite", default=True, help="Write index.sqlite, which only Energon's tools use.")
@click.option("--rescan", is_flag=True, help="Read all shards, also those unchanged since the last preparation.")
@media_options
@job_options("Processes that read shards.")
def command(path: str, **asked: Any) -> None:
    """Prepare the data set in the folder PATH, or index the file PATH, if that is a .jsonl.

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
    root = local_dataset(path, "prepare")
    if not os.path.exists(root):
        what = "JSONL file" if is_jsonl(root) else "folder"
        fix = missing_file_fix(root, "give the folder that holds the tar files")
        raise UsageError(f"there is no such {what}", where=root, fix=fix)
    if is_metadataset(root):
        raise _metadataset(root)
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
    click.echo(f"{root}: {len(index):,} samples; wrote {name}.idx and energon_lite's own index")
    _store_lengths(root, asked)


def _index_again(root: str, asked: _Asked) -> None:
    if asked["ranks"].world_size > 1:
        raise UsageError("--tar-index-only works alone", fix="add --world-size 1 --rank 0, on one process")
    with progress(asked["show_progress"], "Indexing", "shards") as show:
        report = index_again(root, workers=asked["num_workers"], sqlite=asked["sqlite"], progress=show)
    _show_report(report)
    _store_lengths(root, asked)


def _prepare_folder(root: str, asked: _Asked) -> None:
    # All that can be wrong is found before shards are read, which may take long.
    patterns, fields = _check_options(asked), _parse_field_map(asked["field_map"])

    def choose(scan: DatasetScan) -> Choice:
        from energon_lite.cli import prepare_dialogue as dialogue

        dialogue.show_scan(scan)
        ratio = None if patterns else asked["split_ratio"] or dialogue.ask_split_ratio()
        splits, may_be_empty = divide(scan.shard_names, ratio, patterns, shuffle=asked["shuffle_tars"])
        document = None
        if not asked["skip_dataset_yaml"]:
            dialogue.show_samples(scan)
            if fields is None and asked["sample_type"] != CRUDE and not asked["non_interactive"]:
                document = dialogue.ask_dataset_document(scan, asked["sample_type"])
            else:
                document = sample_document(scan, sample_type=asked["sample_type"], field_map=fields)
        return Choice(splits, may_be_empty, document, asked["dataset_yaml_name"])

    with progress(asked["show_progress"], "Indexing", "shards") as show, _answers_expected(asked["non_interactive"]):
        report = prepare_folder(
            root,
            choose,
            **{name: asked[name] for name in ("exclude", "force_overwrite", "sqlite", "rescan", "ranks")},
            workers=asked["num_workers"],
            progress=show,
        )
    if asked["ranks"].rank:
        _show_notes(report.warnings)
        show_share(asked["ranks"], f"{report.samples} samples in {report.shards} shards")
        return
    _show_report(report)
    _store_media(root, asked)
    _store_lengths(root, asked)
    _show_next_step(report, asked["dataset_yaml_name"])


def _metadataset(path: str) -> UsageError:
    """What is to be said of a YAML file, with the data sets that it names."""
    folders: dict[str, None] = {}
    for split in ("train", "val"):
        with suppress(EnergonLiteError):
            folders.update(dict.fromkeys(spec.path for spec in load_metadataset(path, split_part=split)))
    named = f" ({', '.join(folders)})" if folders else ""
    return UsageError(
        "a metadataset is not prepared, its data sets are",
        where=path,
        fix=f"run `energon-lite prepare` for each of them that is not prepared yet{named}, and look at the whole with "
        "`energon-lite info`",
    )


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
        extract_media(root, asked["media"], Ranks(), asked["num_workers"], asked["show_progress"])


def _store_lengths(root: str, asked: _Asked) -> None:
    """Store the column ``length`` of what has just been prepared, if it is wanted, and say what it holds."""
    if asked["length_field"] is None:
        return
    from energon_lite.cli.measure import measuring, show_report  # imports torch
    from energon_lite.loading.measuring.part_lengths import measure_parts

    only = [] if is_jsonl(root) else ["--tar-index-only"]
    again = shlex.join(["energon-lite", "prepare", root, *only, "--length-field", asked["length_field"]])
    with measuring(root, asked["show_progress"]) as show:
        report = measure_parts(root, asked["length_field"], command=again, workers=asked["num_workers"], progress=show)
    show_report(report)


def _show_report(report: PrepareReport) -> None:
    _show_notes(report.warnings)
    if report.splits:
        counted = [f"{name} {samples} samples in {shards} shards" for name, (shards, samples) in report.splits.items()]
        click.echo(f"Splits: {'; '.join(counted)}")
    click.echo(f"Wrote {report.shards} .tar.idx files and, in {os.path.join(report.path, nv_meta.META_FOLDER)}:")
    click.echo("  " + ", ".join(os.path.basename(name) for name in report.written))


def _show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        click.secho(f"Note: {note}", fg="yellow", err=True)


def _show_next_step(report: PrepareReport, dataset_yaml_name: str) -> None:
    if not report.has_dataset_yaml:
        click.echo(
            f"There is no {dataset_yaml_name} yet, which says what a sample is. Write it by hand, or run\n"
            f"  energon-lite prepare {shlex.quote(report.path)} --force-overwrite"
        )
        return
    split = next((name for name, (shards, _) in report.splits.items() if shards), "train")
    extra = "" if split == "train" else f", split_part={split!r}"
    extra += "" if dataset_yaml_name == nv_meta.DATASET_YAML else f", dataset_config={dataset_yaml_name!r}"
    click.echo("Next, in Python:\n")
    click.echo("  from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset")
    click.echo(f"  dataset = get_train_dataset({report.path!r}, batch_size=2, shuffle_buffer_size=None{extra},")
    click.echo("      max_samples_per_sequence=None, worker_config=WorkerConfig.default_worker_config(num_workers=2))")
    click.echo("  print(next(iter(get_savable_loader(dataset))))")
