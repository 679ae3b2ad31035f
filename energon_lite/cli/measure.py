"""``energon-lite measure``: run a task encoder over data sets, and store measurements of each sample as columns."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import click

from energon_lite.cli.arguments import (
    PART_OPTIONS,
    AskedParts,
    asked_parts,
    given_words,
    job_options,
    json_object,
    local_dataset,
    make_task_encoder,
    part_options,
)
from energon_lite.cli.output import measuring, show_report, show_share
from energon_lite.config.dataset import load_split_config
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.errors import UsageError, counted
from energon_lite.hooks import code_hash
from energon_lite.loading.leaves import check_measurable, dataset_config_of, find_leaves, open_whole
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.measured_columns import Maker, MeasureReport
from energon_lite.loading.measuring import measure
from energon_lite.loading.measuring_runner import MeasuringRunner
from energon_lite.loading.part_columns import measure_parts, part_columns, part_settings
from energon_lite.storage.index.column_file import check_column_name
from energon_lite.storage.index.index_cache import shard_counts
from energon_lite.storage.index.nv_meta import is_jsonl, meta_path
from energon_lite.storage.read.webdataset import WebdatasetSource, check_known
from energon_lite.storage.sharded_job import Ranks


@click.command(name="measure", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--task-encoder", metavar="MODULE:CLASS", help="The encoder whose encode_sample is run.")
@click.option(
    "--length-field",
    help="Field of an encoded sample that has its length; without an encoder, a part.  [default: see above]",
)
@part_options
@click.option(
    "--split-parts",
    multiple=True,
    metavar="NAMES",
    callback=lambda _, __, given: tuple(name.strip() for names in given for name in names.split(",")),
    help="Only the shards of these splits, with commas.  [default: all of a folder; train of a metadataset]",
)
@click.option("--name", default="", help="Prefix of the columns: NAME.length and NAME.skip instead of length and skip.")
@click.option("--force-overwrite", "again", is_flag=True, help="Measure samples again that are already measured.")
@click.option("--same-encoder", is_flag=True, help="Keep measurements from before a change of the encoder's code.")
@click.option(
    "--dataset-config", default="dataset.yaml", show_default=True, help="For a folder: definition of samples."
)
@click.option("--split-config", default="split.yaml", show_default=True, help="For a folder: the file of its splits.")
@click.option("--subflavors", metavar="JSON", help="Labels that override those of the documents, for choosing cookers.")
@click.option("--trust-code", is_flag=True, help="Allow dataset.yaml to name Python code that is run.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON, a line for each data set.")
@job_options("Processes that encode.", least_workers=0)
def command(path: str, task_encoder: str | None, ranks: Ranks, **asked: Any) -> None:
    """Measure the samples of PATH, a prepared folder or a metadataset .yaml (with each of its data sets).

    Runs the task encoder up to encode_sample, and stores for each sample its length and whether it was skipped, as
    columns in .nv-meta/energon_lite.columns.

    The length is that of the field --length-field. Without this option it is the result of the encoder's method
    sample_length(encoded), if it has one, else the length of the field tokens, input_ids, token_ids or text_tokens. The
    length of a tensor is its first dimension, that of a list its number of items, that of an integer its value.

    The result of the encoder's method sample_costs(encoded), a dict of integers and lists, is stored as further
    columns. Options such as --column and --checksums add columns of data stored in the shards. For these, and for a
    --length-field that is a part, no encoder is needed.

    A run that was killed continues when it is started again. A further run measures changed or added shards, and failed
    samples. Under torchrun, or with --rank and --world-size, processes share the work.

    \b
    Example:
      energon-lite measure data/coco --task-encoder train:Captions
      energon-lite measure data/coco --column bytes=jpg
    """
    path, trust_code = local_dataset(path, "measure"), asked["trust_code"]
    if asked["name"]:
        check_column_name(asked["name"])
    parts = asked_parts(asked)
    labels = json_object(asked["subflavors"] or None, "--subflavors", '{"kind": "chat"}') or {}
    # An empty name means all shards.
    splits = asked["split_parts"] or (("train",) if is_metadataset(path) else ("",))
    files = asked["dataset_config"], asked["split_config"]
    specs = [spec for part in splits for spec in find_leaves(path, part, *files, labels)]
    for spec in specs:
        check_measurable(spec)
    if task_encoder is None:
        _measure_parts(path, dict.fromkeys(spec.path for spec in specs), parts, ranks, asked)
        return
    encoder = make_task_encoder(task_encoder)
    length = SampleLength(encoder, asked["length_field"])
    for same in _by_way(specs):
        settings = {
            "by": "measure",
            "task_encoder": task_encoder,
            "encoder_class": type(encoder).__name__,
            "length": str(length),
            "sample": _reading(same[0], trust_code),
            **part_settings(*parts),
        }
        leaf = open_whole(same[0], encoder, trust_code)
        assert isinstance(leaf.source, WebdatasetSource)  # other sources cannot store columns
        by_parts = part_columns(leaf.source, *parts)
        maker = Maker(settings, code_hash(encoder), _command_line(path), any_code=asked["same_encoder"])
        runner = MeasuringRunner(leaf, encoder, length, by_parts)
        _run(partial(measure, runner, maker, shards=_shards(same)), same[0].path, ranks, asked)


def _measure_parts(
    path: str, folders: Iterable[str], parts: AskedParts, ranks: Ranks, asked: Mapping[str, Any]
) -> None:
    """Measure the parts stored in the shards, without an encoder."""
    length = asked["length_field"]
    if length is None and not parts:
        raise UsageError(
            "nothing to measure is given",
            where=path,
            fix="give --task-encoder module:Class; or --column NAME=PART or --length-field PART",
        )
    if asked["split_parts"]:
        raise UsageError(
            "--split-parts needs a task encoder", fix="leave it out; stored parts are measured in all shards"
        )
    how = {**parts._asdict(), "by": "measure", "command": _command_line(path)}
    for folder in folders:
        _run(partial(measure_parts, folder, length, **how), folder, ranks, asked)


def _run(measured: Callable[..., MeasureReport], folder: str, ranks: Ranks, asked: Mapping[str, Any]) -> None:
    """Measure a data set with the user's options, and report it."""
    options = {"name": asked["name"], "ranks": ranks, "workers": asked["num_workers"], "again": asked["again"]}
    with measuring(folder, asked["show_progress"]) as show:
        report = measured(**options, progress=show)
    if ranks.rank:
        show_share(ranks, f"{counted(report.samples, 'sample')} measured")
    elif asked["as_json"]:
        click.echo(json.dumps(dataclasses.asdict(report)))
    else:
        show_report(report)


def _by_way(specs: Sequence[LeafSpec]) -> list[list[LeafSpec]]:
    """Group the references that read a data set in the same way; each of its shards is in one group.

    Raises:
        UsageError: a shard is in two groups.
    """
    ways_of_folders: dict[str, dict[tuple[str, str], list[LeafSpec]]] = {}
    for spec in specs:
        way = spec.dataset_config, json.dumps(spec.subflavors, sort_keys=True, default=str)
        ways_of_folders.setdefault(spec.path, {}).setdefault(way, []).append(spec)
    for folder, ways in ways_of_folders.items():
        shards = [shard for same in ways.values() for shard in _shards(same)] if len(ways) > 1 else []
        if len(set(shards)) < len(shards):
            texts = [f"{config} with subflavors {subflavors}" for config, subflavors in sorted(ways)]
            raise UsageError(
                f"the data set is used in {len(ways)} ways, and has room for one: {'; '.join(texts)}",
                where=f"{folder} ({', '.join(spec.origin for same in ways.values() for spec in same if spec.origin)})",
                fix="if lengths do not depend on it, measure the folder itself; else measure parts of the blend with "
                "a --name for each",
            )
    return [same for ways in ways_of_folders.values() for same in ways.values()]


def _shards(specs: Sequence[LeafSpec]) -> list[str]:
    counts, chosen = shard_counts(specs[0].path), dict[str, None]()
    for spec in specs:
        whole = not spec.split_part or is_jsonl(spec.path)
        split = None if whole else load_split_config(meta_path(spec.path, spec.split_config))
        shards = counts if split is None else split.shards(spec.split_part)
        if shards:
            check_known(spec.path, list(shards), counts, spec.split_part)
        chosen |= dict.fromkeys(shards)
    return list(chosen)


def _reading(spec: LeafSpec, trust_code: bool) -> dict[str, Any]:
    """Settings by which samples are made of parts, as plain data."""
    config = dataset_config_of(spec, trust_code)
    plain = dataclasses.asdict(config)
    del plain["origin"]
    plain["subflavors"] = config.subflavors | spec.subflavors
    return json.loads(json.dumps(plain, sort_keys=True, default=str))


#: Options that determine the measurements; other options are not part of the stored command line.
_DECIDING = {
    *("task_encoder", "length_field", "name", "split_parts"),
    *("dataset_config", "split_config", "subflavors", "trust_code"),
    *PART_OPTIONS,
}


def _command_line(path: str) -> str:
    """Command line that repeats the measurement."""
    return shlex.join(["energon-lite", "measure", path, *given_words(_DECIDING)])
