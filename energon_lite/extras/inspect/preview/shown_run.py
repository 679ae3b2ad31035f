"""The run that is looked at: its data sets with their shares, and what its steps are made of."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from energon_lite.config.metadataset import LeafSpec
from energon_lite.documents.paths import local_path
from energon_lite.errors import UnlikeError, UsageError, counted, did_you_mean
from energon_lite.extras.inspect.preview.run_options import RunOptions
from energon_lite.hooks import DefaultTaskEncoder, TaskEncoder, stateless
from energon_lite.loading.blend_facts import LeafFacts, leaf_facts
from energon_lite.loading.found_leaves import FoundLeaves
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_cursor import LaneCursor
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import Cursor as PlannedCursor
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.leaves import find_leaves
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.weight_units import by_samples
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.read.sample_choice import SampleChoice
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["Decode", "Listed", "ShownRun", "check_state"]

#: From tokens to their text.
Decode = Callable[[Sequence[int]], str]
#: A data set without an index of keys is searched sample by sample, up to so many.
_SEARCHED = 1 << 20


@dataclass(frozen=True)
class Listed:
    """Samples in a list, because no batch can be made of them without a task encoder of the user's.

    Args:
        samples: as they are loaded.
        why: what a run without a task encoder would end with.
    """

    samples: Sequence[Any]
    why: UnlikeError


class _ListingEncoder(DefaultTaskEncoder):
    """The default hooks; samples that are not alike stay in a list, since a page can show them all the same."""

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        try:
            return super().batch(samples)
        except UnlikeError as error:
            return Listed(samples, error)


@dataclass(frozen=True)
class ShownRun:
    """What pages are made of. Make one with :meth:`open`.

    Args:
        path: what was asked for.
        options: how the run is.
        dataset: its data set.
        facts: of each leaf, in the order of ``dataset.leaves``: its samples and its share.
        encoder_name: of the user's task encoder; None: there is none, samples are shown as they are loaded.
        decode: from tokens to text; None: nobody knows how.
        lock: hooks run one at a time.
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
        cls,
        path: str,
        options: RunOptions,
        encoder: TaskEncoder | None = None,
        *,
        decode: Decode | None = None,
    ) -> ShownRun:
        """Open a folder, a JSONL file or a metadataset.

        Raises:
            ConfigError, DatasetError, UsageError: as ``get_train_dataset``.
            StateMismatchError: the state of the options is that of other data.
        """
        used = _ListingEncoder() if encoder is None else encoder
        specs: Sequence[LeafSpec] = find_leaves(
            path, options.split_part, options.dataset_config, options.split_config, None
        )
        dataset = options.open(FoundLeaves(specs), used)
        if options.state is not None:
            dataset = dataset.at(options.state)
            check_state(dataset, options.state)
        sources = [leaf.source for leaf in dataset.leaves]
        lengths = [len(source) for source in sources]
        if options.reads_once:  # then all samples come once, whatever the weights are
            counts = zip(specs, lengths, strict=True)
            specs = [replace(spec, weight=float(count), segments=(), repetitions=None) for spec, count in counts]
        else:
            specs = by_samples(specs, sources)
        name = None if encoder is None else f"{type(encoder).__module__}:{type(encoder).__qualname__}"
        if decode is None:
            decode = getattr(getattr(used, "tokenizer", None), "decode", None)
        return cls(path, options, dataset, leaf_facts(specs, lengths), name, decode, Lock())

    @property
    def title(self) -> str:
        """A short name."""
        return os.path.basename(self.path.rstrip("/")) or self.path

    @property
    def folder(self) -> str:
        """What names of data sets are relative to."""
        return os.path.dirname(os.path.abspath(local_path(self.path)))

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The data sets."""
        return self.dataset.leaves

    def leaf_name(self, number: int) -> str:
        """A data set's path, relative to the folder of the blend where it is below it."""
        folders = self.facts[number].spec.folders
        return " + ".join(path.removeprefix(self.folder.rstrip("/") + "/") for path in folders)

    def find_leaf(self, text: str) -> int:
        """The number of the data set that is meant by a number, a name or a path.

        Raises:
            UsageError: there is none, or there are several.
        """
        if text.isdecimal() and int(text) < len(self.leaves):
            return int(text)
        whole = os.path.abspath(text)
        names = [
            {self.leaf_name(n), one.spec.path, os.path.basename(one.spec.path)} for n, one in enumerate(self.facts)
        ]
        found = [number for number, those in enumerate(names) if text in those or whole in those]
        if len(found) == 1:
            return found[0]
        if found:
            fix = f"give its number, one of {', '.join(map(str, found[:8]))}"
            raise UsageError(f"{counted(len(found), 'data set')} are called {text!r}", fix=fix)
        choices = [self.leaf_name(number) for number in range(min(len(self.leaves), 5000))]
        known = f"give a number from 0 to {len(self.leaves) - 1}, or a path"
        raise UsageError(f"there is no data set {text!r}", where=self.path, fix=did_you_mean(text, choices, known))

    def find_key(self, key: str, leaf: int | None = None) -> list[tuple[int, int]]:
        """``(leaf, index)`` of the samples with a key, in one data set or in all. Each data set gets an index of its
        keys when it is asked for the first time."""
        found: list[tuple[int, int]] = []
        for number in range(len(self.leaves)) if leaf is None else [leaf]:
            source = self.leaves[number].source
            if isinstance(source, WebdatasetSource):
                those = (_number_of(source.choice, one) for one in KeyIndex(source.index).find(key))
                found += [(number, index) for index in those if index is not None]
            elif len(source) <= _SEARCHED:
                found += [(number, index) for index in range(len(source)) if source.key(index) == key]
        return found


def check_state(dataset: SavableDataset, state: Mapping[str, Any]) -> PlannedCursor | LaneCursor:
    """Where a state is, after checking that it is of this very data set.

    Raises:
        StateError, StateMismatchError: it is damaged, or of other data or another configuration.
    """
    if isinstance(dataset, LaneDataset):
        return dataset.cursor(dict(state), whole=True)
    assert isinstance(dataset, PlannedDataset)
    return dataset.cursor(dict(state))


def _number_of(choice: SampleChoice, sample: int) -> int | None:
    """The number among the chosen samples of one that is counted over the whole folder; None: it is not chosen."""
    firsts = choice.index.shards[:, 3]
    shard = choice.index.shard_names[int(firsts[:-1].searchsorted(sample, "right")) - 1]
    for place in (place for place, name in enumerate(choice.shard_names) if name == shard):
        at = bisect_left(range(len(choice)), (place, sample), key=choice.locate)
        if at < len(choice) and choice.locate(at) == (place, sample):
            return at
    return None
