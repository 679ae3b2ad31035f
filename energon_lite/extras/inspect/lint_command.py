"""``energon-lite lint``: read and decode all samples, and report broken ones."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import click
import numpy as np
import yaml

from energon_lite.cli import job_options, json_object, make_task_encoder, progress, show_share
from energon_lite.config.dataset import SplitConfig, load_split_config
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import is_url, local_path
from energon_lite.errors import ConfigError, DatasetError, EmptyDatasetError, EnergonLiteError, counted
from energon_lite.extras.inspect.lint_work import Findings, LintWork, Problem, Span, Target
from energon_lite.hooks import code_hash
from energon_lite.loading.leaves import find_leaves, open_source
from energon_lite.storage.dataset_scan import usual_parts
from energon_lite.storage.index.index_cache import cache_folder, first_writable, index_places, local_meta, open_index
from energon_lite.storage.index.nv_meta import META_FOLDER, is_jsonl, meta_path, read_info
from energon_lite.storage.read.source import source_opener
from energon_lite.storage.sharded_job import Progress, Ranks, ShardedJob
from energon_lite.storage.sharded_work import Table

#: The splits that are examined by default.
_PARTS = "train,val,test"


@click.command(name="lint", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--split-parts", help="Splits to examine, with commas.  [default: all of a folder; train,val,test]")
@click.option(
    "--dataset-config", default="dataset.yaml", show_default=True, help="For a folder: the file of its samples."
)
@click.option("--split-config", default="split.yaml", show_default=True, help="For a folder: the file of its splits.")
@click.option("--task-encoder", metavar="MODULE:CLASS", help="Also run its cookers and hooks, up to encode_sample.")
@click.option("--subflavors", metavar="JSON", help="Labels that override those of the documents, for choosing cookers.")
@click.option("--optional", multiple=True, metavar="PART", help="A part that may be missing or empty (repeatable).")
@click.option("--trust-code", is_flag=True, help="Allow dataset.yaml to name Python code that is run.")
@click.option("--parallel", type=click.IntRange(min=1), help="Same as --num-workers.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
@job_options("Processes that decode.")
def command(path: str, as_json: bool, ranks: Ranks, **asked: Any) -> None:
    """Examine all samples of PATH: a prepared folder, a JSONL file, or a metadataset .yaml (with all its data sets).

    Checks the headers and indexes of shards, decodes every part of every sample, makes samples as dataset.yaml says,
    and looks for duplicate keys. With --task-encoder the samples go through its cookers and its hooks as well. Each
    broken sample is reported with its shard, key and part, and the exit code is 1 if there is one. Exclusions of
    split.yaml are left out.

    A run that was killed continues when it is started again. Under torchrun, or with --rank and --world-size, processes
    share the work.

    \b
    Example:
      energon-lite lint data/coco
      energon-lite lint blend.yaml --task-encoder train:Captions --json
    """
    reports, notes = [], list[Problem]()
    text = asked["task_encoder"]
    encoder = None if text is None else make_task_encoder(text)  # first, so that its mistakes are reported early
    options = {
        "make_encoder": None if encoder is None else partial(make_task_encoder, text),
        "code": "" if encoder is None else f"{text} {code_hash(encoder)}",
        "trust_code": asked["trust_code"],
        "optional": frozenset(asked["optional"]),
    }
    whole, joined = _specs(local_path(path), asked), list[LeafSpec]()
    for spec in whole:
        joined += _members(spec, notes)
    alone = [spec for spec in whole if spec.join is None]
    if encoder is not None and joined:
        what = "the task encoder's hooks are not run on joined samples, only on those of other data sets"
        notes.append(Problem(local_path(path), "", "", "", "join", what, note=True))
    bare = options | {"make_encoder": None, "code": ""}
    groups = [(specs, options) for specs in _by_dataset(alone)] + [(specs, bare) for specs in _by_dataset(joined)]
    for specs, how in groups:
        try:
            target = _target(specs, how, notes)
        except DatasetError as error:  # continue with the other data sets
            notes.append(Problem(specs[0].path, "", "", "", "data set", error.what))
            continue
        with progress(asked["show_progress"], f"Examining {os.path.basename(specs[0].path)}", "samples") as show:
            workers = asked["parallel"] or asked["num_workers"]
            reports.append(lint(target, ranks=ranks, workers=workers, progress=show))
    if ranks.rank:
        show_share(ranks, f"{counted(sum(report.samples for report in reports), 'sample')} examined")
        return
    if as_json:
        click.echo(json.dumps(_plain(reports, notes), indent=2, ensure_ascii=False))
    else:
        for line in chain((f"{note.dataset}: {note.where}: {note.what}" for note in notes), *map(_lines, reports)):
            click.echo(line)
    if any(not note.note for note in notes) or any(report.broken for report in reports):
        sys.exit(1)


# -- data sets ------------------------------------------------------------------------------------------------------


def _specs(path: str, asked: dict[str, Any]) -> list[LeafSpec]:
    """References to all data sets, in all splits."""
    labels = json_object(asked["subflavors"] or None, "--subflavors", '{"kind": "chat"}') or {}
    files = asked["dataset_config"], asked["split_config"]
    parts = asked["split_parts"]
    if not is_metadataset(path):
        # An empty name means all shards.
        return [spec for part in (parts or "").split(",") for spec in find_leaves(path, part.strip(), *files, labels)]
    specs, missing = list[LeafSpec](), list[ConfigError]()
    wanted = [part.strip() for part in (parts or _PARTS).split(",")]
    for part in wanted:
        try:
            specs += find_leaves(path, part, *files, labels)
        except ConfigError as error:
            missing.append(error)
    if missing and (not specs or parts or not all("has no split" in str(error) for error in missing)):
        raise missing[0]
    return specs


def _members(spec: LeafSpec, notes: list[Problem]) -> Sequence[LeafSpec]:
    """Data sets of a join, each of which is examined separately; a join that cannot be made is added to ``notes``."""
    if spec.join is None:
        return ()
    try:
        open_source(spec)
    except EnergonLiteError as error:
        is_empty = isinstance(error, EmptyDatasetError)
        notes.append(Problem(" + ".join(spec.folders), "", "", "", "join", error.what, note=is_empty))
    return spec.join.members


def _by_dataset(specs: Sequence[LeafSpec]) -> list[list[LeafSpec]]:
    """Group references that read a data set in the same way; subsets and weights do not matter."""
    groups: dict[tuple[str, ...], list[LeafSpec]] = {}
    for spec in specs:
        labels = json.dumps(spec.subflavors, sort_keys=True, default=str)
        split = spec.split_part if source_opener(spec.path) is not None else ""
        groups.setdefault((spec.path, spec.dataset_config, spec.split_config, labels, split), []).append(spec)
    return list(groups.values())


def _target(specs: Sequence[LeafSpec], options: dict[str, Any], notes: list[Problem]) -> Target:
    """The shards of a data set to examine.

    Raises:
        DatasetError: it is not prepared, or there are no shards to examine.
    """
    spec = replace(specs[0], subset=None, aux=specs[0].aux if options["make_encoder"] else {})  # aux is for cookers
    if source_opener(spec.path) is not None:
        return Target(spec, {"": len(open_source(spec))}, **options)
    if is_jsonl(spec.path):
        return Target(spec, open_index(spec.path)[0].shard_counts, **options)
    meta = local_meta(spec.path)
    counts = read_info(meta)
    split = load_split_config(os.path.join(meta, META_FOLDER, spec.split_config))
    shards = dict[str, None]()
    for reference in specs:
        shards |= dict.fromkeys(_shards(split, reference.split_part, counts))
    unknown = [shard for shard in shards if shard not in counts]
    for shard in unknown:
        what = f"{spec.split_config} names the shard, which the data set does not have"
        notes.append(Problem(spec.path, shard, "", "", "split", what))
    wanted = {shard: counts[shard] for shard in shards if shard in counts}
    if not wanted:
        raise EmptyDatasetError("there are no shards to be examined", where=spec.path, fix="give other --split-parts")
    excluded: dict[str, set[str]] = {}
    for shard, key in split.excluded_samples:
        excluded.setdefault(shard, set()).add(key)
    target = Target(spec, wanted, excluded={shard: frozenset(keys) for shard, keys in excluded.items()}, **options)
    return replace(target, **_known_parts(target, counts)) if target.is_folder else target


def _shards(split: SplitConfig, part: str, counts: dict[str, int]) -> Sequence[str]:
    if not part:
        left_out = set(split.exclude)
        return [shard for shard in counts if shard not in left_out]
    if part not in split.split_parts and part in _PARTS.split(","):
        return ()
    return split.shards(part)


def _known_parts(target: Target, counts: dict[str, int]) -> dict[str, Any]:
    """Names of all parts, and of those that nearly all samples have, from the index."""
    try:
        index, _ = open_index(target.spec.path, counts)
    except EnergonLiteError:  # a shard is broken, which is reported for the shard
        return {}
    usual = usual_parts(index.parts[:][:, 2], index.part_names, len(index))
    return {"part_names": frozenset(index.part_names), "usual": usual}


# -- the report -----------------------------------------------------------------------------------------------------


def _plain(reports: Sequence[LintReport], notes: Sequence[Problem]) -> dict[str, Any]:
    problems = [*notes, *(problem for report in reports for problem in report.problems)]
    names = ("path", "shards", "samples", "skipped", "excluded", "broken_samples", "kinds")
    return {
        "ok": all(problem.note for problem in problems),
        "samples": sum(report.samples for report in reports),
        "broken_samples": sum(report.broken_samples for report in reports),
        "data_sets": [{name: getattr(report, name) for name in names} for report in reports],
        "problems": [asdict(problem) for problem in problems],
    }


def _lines(report: LintReport) -> Iterator[str]:
    excluded = f", {report.excluded:,} excluded" if report.excluded else ""
    skipped = f", {report.skipped:,} skipped by hooks" if report.skipped else ""
    yield f"{report.path}: {counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}{excluded}{skipped}"
    for problem in report.broken:
        yield f"  {problem.where}: {problem.kind}: {problem.what}"
    notes: dict[str, list[str]] = {}  # the shards of each
    for problem in report.problems:
        if problem.note:
            notes.setdefault(problem.what, []).append(problem.shard)
    for text, shards in notes.items():
        yield f"  note: {text} ({shards[0]}" + (f" and {len(shards) - 1:,} more)" if len(shards) > 1 else ")")
    if not report.broken:
        yield "  nothing is broken"
        return
    kinds = ", ".join(f"{count:,} x {kind}" for kind, count in report.kinds.items())
    yield f"  {counted(report.broken_samples, 'broken sample')}; {counted(len(report.broken), 'problem')}: {kinds}"
    if report.broken_samples and not is_jsonl(report.path) and source_opener(report.path) is None:
        first = next(problem for problem in report.broken if problem.key)
        yield "  to leave samples out, name them in .nv-meta/split.yaml, under exclude, such as:"
        example = {"exclude": [f"{first.shard}/{first.key}"]}
        yield "    " + yaml.safe_dump(example, default_flow_style=None, allow_unicode=True, width=math.inf).strip()


# -- the work --------------------------------------------------------------------------------------------------------

#: Samples in a span: the work that each process repeats, at most, after a kill.
SPAN = 512
#: Largest number of result files, apart from one per shard: large data sets have longer spans.
_MOST_FILES = 1 << 16
#: Most keys that are compared at a time; more keys are compared in parts, by ranges of their hashes.
_KEYS_AT_ONCE = 1 << 27
#: Seconds of work up to which no helper processes are started, because these import torch.
_ALONE = 4.0


@dataclass
class LintReport:
    """Results of linting a data set.

    Args:
        path: path of the data set.
        shards: number of shards examined.
        samples: number of samples examined.
        skipped: number of these that a hook of the user's skipped.
        excluded: number of samples that ``split.yaml`` excludes, which were not examined.
        problems: problems in the order of shards and samples; duplicate keys come last.
    """

    path: str
    shards: int = 0
    samples: int = 0
    skipped: int = 0
    excluded: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def broken(self) -> list[Problem]:
        """Problems that are more than notes."""
        return [problem for problem in self.problems if not problem.note]

    @property
    def broken_samples(self) -> int:
        """Number of samples with a problem."""
        return len({(problem.shard, problem.key) for problem in self.broken if problem.key})

    @property
    def kinds(self) -> dict[str, int]:
        """Number of problems by kind, the most frequent first."""
        return dict(Counter(problem.kind for problem in self.broken).most_common())


def lint(
    target: Target, *, ranks: Ranks | None = None, workers: int | None = None, progress: Progress | None = None
) -> LintReport:
    """Examine all samples of a data set. After a kill, another call continues the work.

    Args:
        target: the data set, and the options of the examination.
        ranks: processes that work together; None: this process alone.
        workers: processes of this rank; None: one per core.
        progress: called with the number of samples that are done, the total, and a short text.

    Raises:
        FatalSampleError: a package is missing, or a hook of the user's is broken.
        DatasetError: other ranks made no progress in time; there is no folder that can be written.
    """
    ranks = ranks or Ranks()
    path, spans = target.spec.path, spans_of(target)
    work = LintWork(_results_folder(target), target)
    total, done = sum(span.stop - span.start for span in ranks.seen(spans)), 0

    def tick(span: Span, table: Table | None, number: int, of: int) -> None:
        nonlocal done
        done += span.stop - span.start
        if progress:
            progress(done, total, "")

    job = ShardedJob(
        work, spans, ranks=ranks, workers=workers, alone=_ALONE, what="spans of samples", where=path, tick=tick
    )
    try:
        job.run()
    except BaseException:
        if os.path.isdir(work.folder) and not os.listdir(work.folder):
            os.rmdir(work.folder)
        raise
    if ranks.rank:
        samples = sum(job.done[span]["samples"] for span in job.made)
        return LintReport(path, samples=samples)  # of its share; rank 0 has the whole
    report = LintReport(path, len({span.shard for span in spans}))
    for span in spans:
        if span in job.errors:
            error = job.errors[span]
            report.problems.append(Problem(path, span.shard, "", "", "lint", f"{work.name(span)}: {error.what}"))
            continue
        findings = job.read(span)
        report.samples += findings.samples
        report.skipped += findings.skipped
        report.excluded += findings.excluded
        report.problems += findings.problems
    report.problems += _duplicates(target, work, [span for span in spans if span not in job.errors], job)
    if not job.errors:
        work.remove()
    return report


def spans_of(target: Target) -> list[Span]:
    """Return the spans of a data set; a shard without samples has one, too."""
    size = max(SPAN, -(-sum(target.counts.values()) // _MOST_FILES))
    return [
        Span(shard, start, start + size, start + size >= count)
        for shard, count in target.counts.items()
        for start in range(0, max(count, 1), size)
    ]


def _results_folder(target: Target) -> str:
    """Return the folder of results: next to the data, where other ranks see it, or in the user's cache."""
    path = target.spec.path
    name = "energon_lite.lint"
    cached = os.path.splitext(index_places(path)[1])[0] + ".lint"
    if not target.is_folder:
        return os.path.join(cache_folder(), "lint", os.path.basename(cached)) if is_url(path) else cached

    def made(folder: str) -> str:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission")
        return folder

    return first_writable(path, "what lint finds", [meta_path(path, name), cached], "run lint", made)


def _duplicates(
    target: Target, work: LintWork, spans: Sequence[Span], job: ShardedJob[Span, Findings]
) -> Iterator[Problem]:
    """Yield a problem for each sample whose key an earlier sample has."""
    total = sum(job.done[span]["samples"] for span in spans)
    if not target.has_keys or not total:
        return
    rounds = max(1, -(-total // _KEYS_AT_ONCE))
    for number in range(rounds):
        columns = []
        for owner, span in enumerate(spans):
            keys = job.read(span).keys
            wanted = np.flatnonzero((keys != 0) & (keys % np.uint64(rounds) == number))
            columns.append((keys[wanted], np.full(len(wanted), owner, dtype=np.int32), wanted + span.start))
        hashes, owners, places = map(np.concatenate, zip(*columns, strict=True))
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        both = (np.stack([owners[rows], places[rows]], axis=1).tolist() for rows in (order[same], order[same + 1]))
        pairs = [(tuple(first), tuple(again)) for first, again in zip(*both, strict=True)]
        # Sorted, so that the shards are opened one after the other.
        names = {(owner, place): work.key(spans[owner].shard, place) for owner, place in sorted({*chain(*pairs)})}
        for first, again in pairs:
            if names[first] == names[again]:  # otherwise only the hashes are equal
                shard, other = spans[first[0]].shard, spans[again[0]].shard
                where = "this shard" if shard == other else shard
                what = f"a sample of {where} has the same key"
                yield Problem(target.spec.path, other, names[again], "", "duplicate key", what)
