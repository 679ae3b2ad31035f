"""The previewed run: its options, its data sets with their shares, and the data set of its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import Any

from energon_lite.cli.checkpoint import found_states, whole_state
from energon_lite.config.leaf_spec import FoundLeaves, LeafSpec
from energon_lite.documents.paths import local_path
from energon_lite.errors import StateError, UnlikeError, UsageError, counted, did_you_mean
from energon_lite.extras.inspect.appearances import indices_of
from energon_lite.hooks import DefaultTaskEncoder, TaskEncoder, stateless
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_cursor import LaneCursor
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlanCursor, PlannedDataset
from energon_lite.loading.leaves import find_leaves
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.metadataset_keys import LeafFacts, by_samples, leaf_facts
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.loading.recipes import get_train_dataset, get_val_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.worker_config import WorkerConfig

#: Splits that are read once, in order.
_READ_ONCE = ("val", "test")


@dataclass(frozen=True)
class RunOptions:
    """Arguments of ``get_train_dataset`` that determine the samples of a step.

    Args:
        split_part: the split; ``val`` and ``test`` are read in order, as in validation.
        ranks: data-parallel ranks; a step has a micro-batch for each.
        state: state of a run, which then determines all options except the ranks; see :meth:`of_state`.
    """

    split_part: str = "train"
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    trust_code: bool = False
    batch_size: int | None = 8
    packing_buffer_size: int | None = None
    batching: Mapping[str, Any] | str | None = None
    length_column: str | None = "length"
    length_field: str | None = None
    micro_batches_per_step: int | None = None
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    batch_drop_last: bool = False
    repeat: bool = True
    chunks: Chunks = field(default_factory=Chunks)
    seed: int = 0
    ranks: int = 1
    kind: str | None = None
    state: Mapping[str, Any] | None = None

    def of_state(self, path: str) -> RunOptions:
        """Return the options of the run in which a state was saved.

        Args:
            path: a file of a state, a checkpoint with one in it, or a folder of the states of all ranks.

        Raises:
            StateError: there is no state in the file, or one without settings.
        """
        state = whole_state(found_states((path,)))
        settings = state.get("identity", {}).get("settings") if isinstance(state.get("identity"), Mapping) else None
        if not isinstance(settings, Mapping):
            raise StateError("the state has no settings of its run", where=path, fix="give the options themselves")
        others = {"dataset_config", "split_config", "trust_code", "chunks", "ranks", "state"}
        names = {field.name for field in fields(self)} - others
        given = {name: settings[name] for name in names & settings.keys()}
        if "batching" in given:
            given |= {"length_column": settings.get("length_column"), "batch_size": None}
        lanes = state.get("lanes") if state.get("kind") == "lanes" else None
        size = settings.get("chunk_size", settings.get("plan_chunk"))
        chunks = Chunks(size, settings.get("chunk_remainder"), lanes if isinstance(lanes, int) else None)
        return replace(self, **given, chunks=chunks, state=state)

    def open(self, leaves: FoundLeaves, encoder: TaskEncoder) -> SavableDataset:
        """Open the data set of a run with these options.

        Raises:
            ConfigError, DatasetError, UsageError: as ``get_train_dataset``.
        """
        config = WorkerConfig(rank=0, world_size=self.ranks, num_workers=0, seed_offset=self.seed)
        names = ["split_part", "batch_drop_last", "packing_buffer_size", "chunks"]
        if not self.reads_once:
            names += ["shuffle_buffer_size", "max_samples_per_sequence", "repeat"]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.batching is None:
            given["batch_size"] = self.batch_size
        else:
            lengths = self.length_column, self.length_field, self.micro_batches_per_step
            given["batching"] = ByTokens(self.batching, *lengths)
        given["reading"] = Reading(
            dataset_config=self.dataset_config, split_config=self.split_config, trust_code=self.trust_code or None
        )
        make = get_val_dataset if self.reads_once else get_train_dataset
        return make(leaves, worker_config=config, task_encoder=encoder, **given)

    @property
    def reads_once(self) -> bool:
        """True if samples are read in order, once per pass, whatever the weights of the blend."""
        return self.kind == "val" if self.kind is not None else self.split_part in _READ_ONCE


#: Function from tokens to text.
Decode = Callable[[Sequence[int]], str]
#: The largest data set without a key index that is searched sample by sample.
_SEARCHED = 1 << 20


@dataclass(frozen=True)
class Listed:
    """Samples in a list instead of a batch, because there is no task encoder to collate them.

    Args:
        samples: the loaded samples.
        why: the error that would end a run without a task encoder.
    """

    samples: Sequence[Any]
    why: UnlikeError


class _ListingEncoder(DefaultTaskEncoder):
    """Default hooks that return unlike samples as a list, since a page can still show them."""

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        try:
            return super().batch(samples)
        except UnlikeError as error:
            return Listed(samples, error)


@dataclass(frozen=True)
class ShownRun:
    """The run that pages show. Make one with :meth:`open`.

    Args:
        path: path of the data.
        options: options of the run.
        dataset: its data set.
        facts: samples and share of each leaf, in the order of ``dataset.leaves``.
        encoder_name: name of the user's task encoder; None if there is none, and samples are shown as loaded.
        decode: function from tokens to text; None if unknown.
        lock: lock by which hooks run one at a time.
    """

    path: str
    options: RunOptions
    dataset: SavableDataset
    facts: Sequence[LeafFacts]
    encoder_name: str | None
    decode: Decode | None
    lock: Lock

    @classmethod
    def open(
        cls, path: str, options: RunOptions, encoder: TaskEncoder | None = None, *, decode: Decode | None = None
    ) -> ShownRun:
        """Open a folder, a JSONL file or a metadataset.

        Raises:
            ConfigError, DatasetError, UsageError: as ``get_train_dataset``.
            StateMismatchError: the state in the options is of other data.
        """
        used = _ListingEncoder() if encoder is None else encoder
        files = options.dataset_config, options.split_config
        specs: Sequence[LeafSpec] = find_leaves(path, options.split_part, *files, None)
        if encoder is None:
            specs = [replace(spec, aux={}) for spec in specs]  # aux is for cookers
        dataset = options.open(FoundLeaves(specs), used)
        if options.state is not None:
            dataset = dataset.at(options.state)
            check_state(dataset, options.state)
        sources = [leaf.source for leaf in dataset.leaves]
        lengths = [len(source) for source in sources]
        if options.reads_once:  # all samples are read once, whatever the weights
            counts = zip(specs, lengths, strict=True)
            specs = [replace(spec, weight=float(count), schedule=None, repetitions=None) for spec, count in counts]
        else:
            specs = by_samples(specs, sources)
        name = None if encoder is None else f"{type(encoder).__module__}:{type(encoder).__qualname__}"
        if decode is None:
            decode = getattr(getattr(used, "tokenizer", None), "decode", None)
        return cls(path, options, dataset, leaf_facts(specs, lengths), name, decode, Lock())

    @property
    def title(self) -> str:
        """Short name of the data."""
        return os.path.basename(self.path.rstrip("/")) or self.path

    @property
    def folder(self) -> str:
        """Folder that names of data sets are relative to."""
        return os.path.dirname(os.path.abspath(local_path(self.path)))

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Leaves of the blend."""
        return self.dataset.leaves

    def leaf_name(self, number: int) -> str:
        """Return a data set's path, relative to the folder of the blend if it is below it."""
        folders = self.facts[number].spec.folders
        return " + ".join(path.removeprefix(self.folder.rstrip("/") + "/") for path in folders)

    def find_leaf(self, text: str) -> int:
        """Return the number of the data set with a given number, name or path.

        Raises:
            UsageError: there is none, or there are several.
        """
        if text.isdecimal() and int(text) < len(self.leaves):
            return int(text)
        whole = os.path.abspath(text)
        names = [
            {self.leaf_name(n), leaf.spec.path, os.path.basename(leaf.spec.path)} for n, leaf in enumerate(self.facts)
        ]
        matches = [number for number, aliases in enumerate(names) if text in aliases or whole in aliases]
        if len(matches) == 1:
            return matches[0]
        if matches:
            fix = f"give its number, one of {', '.join(map(str, matches[:8]))}"
            raise UsageError(f"{counted(len(matches), 'data set')} are called {text!r}", fix=fix)
        choices = [self.leaf_name(number) for number in range(min(len(self.leaves), 5000))]
        known = f"give a number from 0 to {len(self.leaves) - 1}, or a path"
        raise UsageError(f"there is no data set {text!r}", where=self.path, fix=did_you_mean(text, choices, known))

    def find_key(self, key: str, leaf: int | None = None) -> list[tuple[int, int]]:
        """Return ``(leaf, index)`` of the samples with a key, in one data set or in all.

        An index of keys is built for a data set on its first search.

        Raises:
            UsageError: there is none.
        """
        matches: list[tuple[int, int]] = []
        for number in range(len(self.leaves)) if leaf is None else [leaf]:
            source = self.leaves[number].source
            if isinstance(source, WebdatasetSource) or len(source) <= _SEARCHED:
                matches += [(number, index) for index in indices_of(source, key)]
        if not matches:
            fix = "a key is the part of a name in a shard before the first dot; --split-parts chooses the split"
            raise UsageError(f"no sample has the key {key!r}", where=self.path, fix=fix)
        return matches


def check_state(dataset: SavableDataset, state: Mapping[str, Any]) -> PlanCursor | LaneCursor:
    """Return the position of a state, after checking that it is of this data set.

    Raises:
        StateError, StateMismatchError: the state is damaged, or of other data or another configuration.
    """
    assert isinstance(dataset, (PlannedDataset, LaneDataset))
    return dataset.cursor(dict(state), **({"whole": True} if isinstance(dataset, LaneDataset) else {}))
