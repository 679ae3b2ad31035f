"""Spans of neighbouring samples of a shard, as units of work of linting, and their results: problems."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.documents.paths import is_url
from energon_lite.errors import DatasetError, EnergonLiteError, FatalSampleError, ShardChangedError
from energon_lite.extras.inspect.lint_checks import Fault, SampleExaminer, ShardState, examine_shard
from energon_lite.hooks import DefaultTaskEncoder, HookContext, TaskEncoder
from energon_lite.loading.leaves import open_source, open_whole
from energon_lite.storage.dataset_scan import usual_parts
from energon_lite.storage.files.shard_store import file_state
from energon_lite.storage.index.index_cache import find_index
from energon_lite.storage.index.key_index import hash_key
from energon_lite.storage.index.nv_meta import META_FOLDER, is_jsonl, shard_index_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.sample_choice import SampleChoice
from energon_lite.storage.read.source import source_opener
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.sharded_work import Arrays, Table, Work
from energon_lite.storage.tar_scan import ShardScan


@dataclass(frozen=True)
class Problem:
    """A problem, and its place.

    Args:
        dataset: the folder, file or URL.
        shard: name of the shard; empty: the problem is not about one shard.
        key: key of the sample; empty: the problem is not about one sample.
        part: part of the sample, such as ``jpg``; empty: the sample as a whole.
        kind: ``decode``, ``missing part``, ``empty part``, ``double part``, ``duplicate key``, ``shard``, ``index``,
            ``field_map``, ``sample``, ``data set`` (a mistake in a document), or the name of a hook.
        what: description.
        note: it is a remark, and nothing is broken.
    """

    dataset: str
    shard: str
    key: str
    part: str
    kind: str
    what: str
    note: bool = False

    @property
    def where(self) -> str:
        """Shard, key and part, as text.

        Example:
            >>> Problem("/data/coco", "s000.tar", "000007", "jpg", "decode", "...").where
            's000.tar: 000007.jpg'
        """
        sample = f"{self.key}.{self.part}" if self.part and self.key else self.key or self.part
        return ": ".join(word for word in (self.shard, sample) if word) or self.dataset


#: Version of the rules; incremented when the same samples would be reported differently.
_RULES = 1


@dataclass(frozen=True)
class Span:
    """Neighbouring samples of a shard, ``start`` to ``stop``; the last span of a shard continues to its end, whatever
    the number of its samples turns out to be."""

    shard: str
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True)
class Target:
    """The data set that is examined, and the options of the examination.

    Args:
        spec: the data set as the documents describe it.
        counts: number of samples by shard.
        excluded: keys of the samples that ``split.yaml`` leaves out, by shard.
        part_names: names of all parts of the data set; empty: not known.
        usual: parts that nearly all samples have; None: not known.
        optional: parts that may be missing, or empty.
        make_encoder: makes the user's task encoder; None: no hooks are run.
        code: identification of that encoder.
        trust_code: as in ``get_train_dataset``.
    """

    spec: LeafSpec
    counts: Mapping[str, int]
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    part_names: frozenset[str] = frozenset()
    usual: frozenset[str] | None = None
    optional: frozenset[str] = frozenset()
    make_encoder: Callable[[], TaskEncoder] | None = None
    code: str = ""
    trust_code: bool = False

    @property
    def is_folder(self) -> bool:
        """True if it is a local folder of shards, whose headers can be examined."""
        return self.has_keys and not is_url(self.spec.path)

    @property
    def has_keys(self) -> bool:
        """True if samples have keys, which may be duplicates; lines and records are numbered."""
        return not (is_jsonl(self.spec.path) or source_opener(self.spec.path))


@dataclass
class Findings:
    """Results of a span.

    Args:
        samples: number of samples that were examined.
        skipped: number of these that a hook skipped.
        excluded: number of samples that ``split.yaml`` excludes.
        problems: problems, in order.
        keys: uint64 ``[samples of the span]``: a hash of each key; 0: the sample is excluded.
    """

    samples: int = 0
    skipped: int = 0
    excluded: int = 0
    problems: list[Problem] = field(default_factory=list)
    keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))


class LintWork(Work[Span, Findings]):
    """Examination of spans of a data set. Tables have the numbers of samples."""

    def __init__(self, folder: str, target: Target):
        super().__init__(folder)
        self.target = target
        self._open: tuple[str, ShardState | None, SampleExaminer | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_names": self._names, "target": self.target, "_open": None}

    # -- the unit ---------------------------------------------------------------------------------------------------

    def name(self, unit: Span) -> str:
        return f"{unit.shard or self.target.spec.path}[{unit.start}:{unit.stop}]"

    def inputs(self, unit: Span) -> list[Any]:
        """Return the inputs of a unit: rules, files that it is read from, and settings that problems depend on."""
        target, spec = self.target, self.target.spec
        path = spec.path if is_jsonl(spec.path) else os.path.join(spec.path, unit.shard)
        settings = [spec.dataset_config, json.dumps(spec.subflavors, sort_keys=True, default=str), target.trust_code]
        excluded = sorted(target.excluded.get(unit.shard, ()))
        document = file_state(os.path.join(spec.path, META_FOLDER, spec.dataset_config))
        if target.is_folder:  # the files that the shard is compared with
            index, beside = self._stored_index, file_state(shard_index_path(spec.path, unit.shard))
            files = [target.counts.get(unit.shard), beside, "" if index is None else index.digest]
        else:
            files = self._source_state
        return [_RULES, [file_state(path), *files], settings, document, target.code, sorted(target.optional), excluded]

    def do(self, unit: Span) -> Findings:
        findings = Findings()
        state, examiner = self._opened(unit.shard, findings)
        if state is not None and not unit.start:
            findings.problems += [self._problem(unit, "", fault) for fault in state.findings]
        if examiner is not None:
            self._examine(unit, state, examiner, findings)
        elif state is not None and state.scan is not None:
            self._name_lost(unit, state, state.scan.all_keys(), findings)
        return findings

    def key(self, shard: str, number: int) -> str:
        """Return the key of a sample that was examined."""
        examiner = self._opened(shard, Findings())[1]
        return "" if examiner is None else examiner.leaf.source.key(number)

    @cached_property
    def _source_state(self) -> list[Any]:
        """State of the files of a source or URL, read once by each process; empty if it cannot be opened."""
        spec = self.target.spec
        try:
            source = open_source(spec) if source_opener(spec.path) else WebdatasetSource.open(spec.path)
        except EnergonLiteError:
            return []
        shards = source.choice.shards if isinstance(source, WebdatasetSource) else []
        files = [] if is_url(spec.path) or is_jsonl(spec.path) else sorted(_files_of(spec.path))
        states = [[os.path.basename(path), *file_state(path)] for path in files]
        return [source.fingerprint, source.contents, [[*shard[1]] for shard in shards], states]

    # -- a shard ----------------------------------------------------------------------------------------------------

    def _opened(self, shard: str, findings: Findings) -> tuple[ShardState | None, SampleExaminer | None]:
        """Return the state of a shard, and the examiner of its samples; the last one is kept."""
        if self._open is None or self._open[0] != shard:
            self._open = (shard, *self._examiner(shard, findings))
        return self._open[1:]

    def _examiner(self, shard: str, findings: Findings) -> tuple[ShardState | None, SampleExaminer | None]:
        target = self.target
        state = None
        if target.is_folder:
            state = examine_shard(target.spec.path, shard, target.counts[shard], self._stored_index)
            if state.scan is None or not state.scan.samples:
                return state, None
        try:
            source = self._source(shard, state)
            if target.part_names and isinstance(source, WebdatasetSource):
                source.part_names = target.part_names  # a shard without one of them does not make a field map wrong
            encoder, is_damaged = self._encoder, state is not None and state.is_damaged
            leaf = open_whole(target.spec, encoder or DefaultTaskEncoder(), target.trust_code, source, is_damaged)
        except EnergonLiteError as error:
            if isinstance(error, FatalSampleError) and not isinstance(error, ShardChangedError):
                raise
            of_shard = isinstance(error, DatasetError)
            kind = "shard" if of_shard else "data set"  # the samples are not to blame for a mistake in a document
            findings.problems.append(Problem(target.spec.path, shard, "", "", kind, error.what))
            return state if of_shard or state is None else dataclasses.replace(state, scan=None), None
        usual = target.usual
        if usual is None and state is not None and state.scan is not None:
            usual = usual_parts(state.scan.parts[:, 2], state.scan.part_names, state.scan.samples)
        return state, SampleExaminer(leaf, encoder, usual, target.optional)

    def _source(self, shard: str, state: ShardState | None) -> AnySource:
        """Return the source of one shard."""
        spec = self.target.spec
        if state is not None and state.scan is not None:
            index = PackedIndex.from_scans([state.scan])
            return WebdatasetSource(SampleChoice(index, spec.path, [shard], np.zeros(0, dtype=np.int64)))
        if source_opener(spec.path) is not None:
            return open_source(spec)
        return WebdatasetSource.open(spec.path, shards=[shard])

    @cached_property
    def _stored_index(self) -> PackedIndex | None:
        try:
            index = find_index(self.target.spec.path, self.target.counts)
        except DatasetError:
            return None
        return None if index is None else index[0]

    @cached_property
    def _encoder(self) -> TaskEncoder | None:
        return None if self.target.make_encoder is None else self.target.make_encoder()

    # -- its samples ------------------------------------------------------------------------------------------------

    def _examine(self, unit: Span, state: ShardState | None, examiner: SampleExaminer, findings: Findings) -> None:
        source, reader = examiner.leaf.source, examiner.all_parts
        excluded = self.target.excluded.get(unit.shard, frozenset())
        stop = len(source) if unit.is_last else min(unit.stop, len(source))
        findings.keys = np.zeros(max(0, stop - unit.start), dtype=np.uint64)
        skipped = examiner.skipped
        with HookContext():
            for number in range(unit.start, stop):
                key = source.key(number)
                if key in excluded:
                    findings.excluded += 1
                    continue
                findings.keys[number - unit.start] = hash_key(key) or 1
                findings.samples += 1
                faults = [] if state is None else [*state.parts.get(number, ()), *_doubles(state.scan, number)]
                if not faults:
                    try:
                        faults = examiner.faults(number, reader.sample(number))
                    except DatasetError as error:
                        if isinstance(error, FatalSampleError) and not isinstance(error, ShardChangedError):
                            raise
                        faults = [Fault("read", error.what)]
                findings.problems += [self._problem(unit, key, fault) for fault in faults]
        findings.skipped = examiner.skipped - skipped

    def _name_lost(self, unit: Span, state: ShardState, keys: list[str], findings: Findings) -> None:
        """Report the samples that a shard that cannot be opened should have."""
        excluded = self.target.excluded.get(unit.shard, frozenset())
        for number in range(unit.start, len(keys) if unit.is_last else min(unit.stop, len(keys))):
            if keys[number] not in excluded:
                faults = state.parts.get(number) or [Fault("shard", "its shard cannot be read")]
                findings.problems += [self._problem(unit, keys[number], fault) for fault in faults]

    def _problem(self, unit: Span, key: str, fault: Fault) -> Problem:
        return Problem(self.target.spec.path, unit.shard, key, fault.part, fault.kind, fault.what, fault.note)

    # -- its file ---------------------------------------------------------------------------------------------------

    def pack(self, result: Findings) -> tuple[dict[str, Any], Arrays]:
        problems = json.dumps([asdict(problem) for problem in result.problems]).encode()
        table = {"samples": result.samples, "skipped": result.skipped, "excluded": result.excluded}
        return table, {"problems": np.frombuffer(problems, dtype=np.uint8), "keys": result.keys}

    def unpack(self, table: Table, arrays: Arrays) -> Findings:
        problems = [Problem(**fields) for fields in json.loads(arrays["problems"].tobytes())]
        return Findings(**table, problems=problems, keys=arrays["keys"])


def _doubles(scan: ShardScan | None, number: int) -> list[Fault]:
    """Return the parts that a sample has more than once, of which only the last is read."""
    if scan is None:
        return []
    first, stop = scan.first_part[number : number + 2].tolist()
    numbers = scan.parts[first:stop, 2].tolist()
    doubled = [part for part in dict.fromkeys(numbers) if numbers.count(part) > 1] if len(numbers) > 1 else []
    return [Fault("double part", "the sample has the part more than once", scan.part_names[part]) for part in doubled]


def _files_of(path: str) -> list[str]:
    """Return the local files of a path: itself, those below a folder, or those of a pattern."""
    if os.path.isdir(path):
        return [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    return [path] if os.path.exists(path) else glob.glob(path, recursive=True)
