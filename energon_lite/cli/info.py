"""``energon-lite info``: show the data sets of a blend as a tree, with a warning for those that repeat too often."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import click

from energon_lite.cli.arguments import open_dataset, split_config_option, split_part_option
from energon_lite.cli.output import aligned, byte_size
from energon_lite.config.dataset import load_dataset_config, load_split_config
from energon_lite.config.leaf_spec import LeafSpec, WeightUnit
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import absolute_path, is_url
from energon_lite.errors import EnergonLiteError, TrustError, counted
from energon_lite.loading.metadataset_keys import LeafFacts, by_samples, leaf_facts, weight_guest
from energon_lite.storage.index.index_cache import find_index, local_meta
from energon_lite.storage.index.nv_meta import INFO_JSON, is_jsonl, meta_path, read_info
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.source import source_opener

#: The splits for validation.
_READ_ONCE = ("val", "test")
_VALIDATION = """
Validation shows each sample once; weights do not count. For a training run on this split, give --samples."""
#: Largest number of warnings that are shown in full.
_SHOWN_WARNINGS = 10
#: Largest number of stages that are shown in full.
_SHOWN_STAGES = 8


#: Column of a table: its title, and a function of the leaves of a line and a flag (True for one leaf) for its cell.
_Column = tuple[str, Callable[[Sequence[LeafFacts], bool], str]]


@click.command(name="info", context_settings={"show_default": True})
@click.argument("path", type=click.Path())
@split_part_option
@click.option(
    "--samples", type=click.IntRange(min=1), help="Length of the run in samples, to compute epochs and warn of many."
)
@click.option(
    "--max-epochs",
    type=click.FloatRange(min=0, min_open=True),
    default=4.0,
    help="Warn of data sets that such a run repeats more often than this.",
)
@split_config_option
@click.option("--dataset-config", default="dataset.yaml", help="For a folder: the file that defines its samples.")
@click.option("--json", "as_json", is_flag=True, help="Write the facts as JSON.")
def command(
    path: str,
    split_part: str,
    samples: int | None,
    max_epochs: float,
    split_config: str,
    dataset_config: str,
    as_json: bool,
) -> None:
    """Show the data sets of PATH, a prepared folder, a JSONL file or a metadataset .yaml.

    For a folder, without --samples: the tool that prepared it, its sample type, and its splits.

    Otherwise a line for each data set: its samples, and in a blend its effective weight (the product of the weights
    along the path) or its repetitions. With --samples also its epochs: how often a run of this length has each sample
    of the data set. If weights change during the run, a second table has them for each stage. The splits val and test
    are shown as in validation, once and without weights, unless --samples is given.

    \b
    Example:
      energon-lite info blend.yaml --samples 20000000
    """
    whole = None
    if not (is_metadataset(path) or is_jsonl(path) or source_opener(path)):
        whole = _folder_facts(absolute_path(path), dataset_config, split_config)
    is_empty = whole is not None and samples is None and not _has(whole, split_part)
    leaves = [] if is_empty else open_dataset(path, split_part, split_config)
    once = samples is None and split_part in _READ_ONCE
    specs, sources = [spec for spec, _ in leaves], [source for _, source in leaves]
    specs = specs if once else by_samples(specs, sources)
    if as_json:
        data_sets = _plain(specs, sources, samples or 0)
        click.echo(json.dumps({"folder": whole, "data_sets": data_sets}, indent=2))
        return
    if whole is not None and samples is None:
        for line in _fact_lines(whole):
            click.echo(line)
        return
    facts = leaf_facts(specs, [len(source) for source in sources], samples or 0)
    blend = next((blend for spec in specs for blend in spec.units), None)
    if blend is not None and not once:
        facts = _measured(facts, sources, blend)
    base = absolute_path(path)
    folder, blended = os.path.dirname(base), len(facts) > 1 or specs[0].repetitions is not None
    click.echo(_title(base, split_part, facts, once))
    click.echo()
    # Columns without information are left out.
    shares = blended and not once and (samples is not None or not facts[0].stages)
    _show_table("data set", _columns(facts[0], shares, samples is not None), facts, folder, total=blended)
    if once and blended:
        click.echo(_VALIDATION)
    if once:
        return
    if blended or samples is not None:
        click.echo()
    if facts[0].stages:
        _show_stages(facts, folder, samples)
    if specs[0].repetitions is not None:
        epoch = sum(leaf.samples * (leaf.spec.repetitions or 0.0) for leaf in facts)
        click.echo(f"An epoch of the blend has {epoch:,.10g} samples.")
    if samples is not None:
        run = f"{counted(samples, 'sample')} of the {'blend' if len(facts) > 1 else 'run'}"
        click.echo(f"Epochs: how often {run} show each sample of the data set.")
        _warn(facts, folder, run, max_epochs)
    elif blended:
        click.echo("With --samples, the length of the run: how often it shows each sample of a data set.")


def _has(whole: dict[str, Any], split_part: str) -> bool:
    """True if the split has shards; a missing split counts, except the default one, so that an error is reported."""
    split = whole["splits"].get(split_part)
    return bool(split["shards"]) if split else split_part != "train"


def _plain(specs: Sequence[LeafSpec], sources: Sequence[AnySource], samples: int) -> list[dict[str, Any]]:
    """Facts of each data set as plain data."""
    facts = leaf_facts(specs, [len(source) for source in sources], samples) if specs else []
    return [
        {
            "path": leaf.spec.path,
            "joined": None if leaf.spec.join is None else list(leaf.spec.folders),
            "split_part": leaf.spec.split_part,
            "samples": leaf.samples,
            "share": leaf.share,
            "repetitions": leaf.spec.repetitions,
            "epochs": leaf.epochs if samples else None,
            "subflavors": leaf.spec.subflavors,
            "subset": None if leaf.spec.subset is None else str(leaf.spec.subset),
        }
        for leaf in facts
    ]


def _measured(facts: Sequence[LeafFacts], sources: Sequence[AnySource], blend: WeightUnit) -> list[LeafFacts]:
    """Replace the shares by shares in the unit of a blend, computed with the mean of each data set."""
    mean, unit = weight_guest(blend.origin).mean, blend.unit
    sizes = [leaf.share * float(mean(leaf.spec, source, unit)) for leaf, source in zip(facts, sources, strict=True)]
    return [replace(leaf, measured=size / sum(sizes), unit=unit) for leaf, size in zip(facts, sizes, strict=True)]


def _title(path: str, split_part: str, facts: Sequence[LeafFacts], once: bool) -> str:
    how = "blended by weight" if facts[0].spec.repetitions is None else "blended by repetitions"
    kind = f"{counted(len(facts), 'data set')}, {'one after the other' if once else how}"
    return f"{path} [{split_part}]: {kind if len(facts) > 1 else '1 data set'}"


def _columns(first: LeafFacts, shares: bool, epochs: bool) -> list[_Column]:
    columns: list[_Column] = [("samples", lambda facts, leaf: f"{sum(fact.samples for fact in facts):,}")]
    if shares:
        title = "mean weight" if first.stages else "weight"
        if first.spec.repetitions is not None:
            title = "share"
            columns.append(("repetitions", lambda facts, leaf: f"{facts[0].spec.repetitions:g}" if leaf else ""))
        columns.append((title, lambda facts, leaf: _percent(sum(fact.share for fact in facts))))
    if shares and first.measured is not None:
        title = f"share of {first.unit}"
        columns.append((title, lambda facts, leaf: _percent(sum(fact.measured or 0.0 for fact in facts))))
    if epochs:
        columns.append(("epochs", lambda facts, leaf: _number(facts[0].epochs) if leaf else ""))
    return columns


def _show_stages(facts: Sequence[LeafFacts], folder: str, samples: int | None) -> None:
    """Write the second table: a column, or a pair of columns, for each stage."""
    stages = facts[0].stages
    columns: list[_Column] = []
    for number, stage in enumerate(stages[:_SHOWN_STAGES]):
        columns.append((f"{stage.start:,}", partial(_stage_share, number)))
        if samples is not None:
            columns.append(("epochs", partial(_stage_epochs, number, samples)))
    epochs = f", and the epochs of {counted(samples, 'sample')} with these weights" if samples else ""
    click.echo(f"Weights in each stage{epochs}:\n")
    _show_table("from position", columns, facts, folder)
    if len(stages) > _SHOWN_STAGES:
        more = len(stages) - _SHOWN_STAGES
        click.echo(f"... and {more} more stages, up to position {stages[-1].start:,}")
    click.echo()
    if samples and stages[-1].start >= samples:
        click.echo(f"Weights change up to position {stages[-1].start:,}: give --samples for a longer run.")


def _stage_share(number: int, facts: Sequence[LeafFacts], leaf: bool) -> str:
    first, last = (_percent(sum(fact.stages[number][side] for fact in facts)) for side in (1, 2))
    sloping = any(fact.stages[number].first != fact.stages[number].last for fact in facts)
    return f"{first} to {last}" if sloping else first


def _stage_epochs(number: int, samples: int, facts: Sequence[LeafFacts], leaf: bool) -> str:
    _, first, last = facts[0].stages[number]
    return _number((first + last) / 2 * samples / facts[0].samples) if leaf else ""


def _show_table(
    title: str, columns: Sequence[_Column], facts: Sequence[LeafFacts], folder: str, total: bool = False
) -> None:
    """Write the tree of data sets, with columns."""
    lines = [*_branches(facts, folder, 0), *([("total", facts, False)] if total else [])]
    rows = [[name, *(cell(part, leaf) for _, cell in columns)] for name, part, leaf in lines]
    click.echo("\n".join(aligned([[title, *(name for name, _ in columns)], *rows])))


def _branches(facts: Sequence[LeafFacts], folder: str, depth: int) -> Iterator[tuple[str, Sequence[LeafFacts], bool]]:
    """Yield name, leaves and a flag (True for a leaf) of each line, for leaves with the same first trail steps."""
    for steps, group in groupby(facts, key=lambda leaf: leaf.spec.trail[depth : depth + 1]):
        part = [*group]
        if not steps:
            yield from (("  " * depth + _leaf_name(leaf.spec, folder), [leaf], True) for leaf in part)
            continue
        yield f"{'  ' * depth}{_short(steps[0].path, folder)} [{steps[0].split_part}]", part, False
        yield from _branches(part, folder, depth + 1)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _number(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.01 else f"{value:.2g}"


def _leaf_name(spec: LeafSpec, folder: str) -> str:
    part = "" if spec.subset is None else f", {spec.subset}"
    part += "".join(f", {condition}" for condition in spec.filters)
    return f"{' + '.join(_short(path, folder) for path in spec.folders)} [{spec.split_part}{part}]"


def _short(path: str, folder: str) -> str:
    """Path relative to the folder, if it is inside; a URL as it is."""
    return path if is_url(path) else path.removeprefix(folder.rstrip("/") + "/")


def _warn(facts: Sequence[LeafFacts], folder: str, run: str, max_epochs: float) -> None:
    often = sorted((leaf for leaf in facts if leaf.epochs > max_epochs), key=lambda leaf: -leaf.epochs)
    word = "weight" if facts[0].spec.repetitions is None else "repetitions"
    cure = f"lower its {word}, or give it more data" if len(facts) > 1 else "give it more data, or train for less"
    for leaf in often[:_SHOWN_WARNINGS]:
        name = _leaf_name(leaf.spec, folder) + (f" ({leaf.spec.origin})" if leaf.spec.origin else "")
        shown = f"{name}: {run} show it {_number(leaf.epochs)} times, more than {max_epochs:g}; {cure}"
        click.secho(f"Warning: {shown}", fg="yellow", err=True)
    if len(often) > _SHOWN_WARNINGS:
        click.secho(f"Warning: ... and {counted(len(often) - _SHOWN_WARNINGS, 'more data set')}", fg="yellow", err=True)


# -- a prepared folder ----------------------------------------------------------------------------------------------


def _folder_facts(path: str, dataset_config: str, split_config: str) -> dict[str, Any]:
    """Summarize a prepared folder as plain data.

    Args:
        path: the folder, or its URL.
        dataset_config, split_config: names of the files in ``.nv-meta``.

    Raises:
        DatasetError, ConfigError: it is not prepared, or its ``split.yaml`` has a mistake.
    """
    meta = local_meta(path)
    counts = read_info(meta)
    split = load_split_config(meta_path(meta, split_config))
    splits = {}
    for name in split.split_parts:
        shards = split.shards(name)
        splits[name] = {"shards": len(shards), "samples": sum(counts.get(shard, 0) for shard in shards)}
    index = None if is_url(path) else find_index(path, counts)
    return {
        "path": path,
        "prepared_by": _version(meta),
        "sample_type": _sample_type(meta_path(meta, dataset_config)),
        "samples": sum(counts.values()),
        "shards": len(counts),
        "bytes": None if index is None else int(index[0].shards[:-1, 0].sum()),
        "splits": splits,
        "excluded": len(split.exclude),
    }


def _version(meta: str) -> str:
    try:
        with open(meta_path(meta, INFO_JSON), encoding="utf-8") as file:
            version = str(json.load(file).get("energon_version", "unknown"))
    except (OSError, ValueError):
        return "unknown"
    return version if version.startswith("energon") else f"energon {version}"


def _sample_type(path: str) -> str:
    if not os.path.isfile(path):
        return f"unknown: there is no {os.path.basename(path)}"
    try:
        config = load_dataset_config(path)
    except TrustError:
        return "decided by code, which is run only with trust_code=True"
    except EnergonLiteError as error:
        return f"not known: {error}"
    if config.kind == "crude":
        return "crude"
    return config.sample_type if isinstance(config.sample_type, str) else getattr(config.sample_type, "__name__", "?")


def _fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Format the facts as lines of text."""
    size = "" if facts["bytes"] is None else f", {byte_size(facts['bytes'])}"
    yield f"{facts['path']}: {counted(facts['samples'], 'sample')} in {counted(facts['shards'], 'shard')}{size}"
    yield f"  prepared by  {facts['prepared_by']}"
    yield f"  sample type  {facts['sample_type']}"
    for name, split in facts["splits"].items():
        share = f"{100 * split['samples'] / max(1, facts['samples']):.4g}%"
        held = f"{counted(split['samples'], 'sample')} in {counted(split['shards'], 'shard')}"
        yield f"  split        {name}: {held}, {share}"
    if facts["excluded"]:
        yield f"  excluded     {facts['excluded']:,} of shards and samples, by split.yaml"
