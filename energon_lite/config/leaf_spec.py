"""Leaves: the data sets of a metadataset, with all settings of the documents on the path to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from energon_lite.config.class_names import joiner
from energon_lite.config.subset import Subset
from energon_lite.config.weight_schedule import Segment, Share, constant
from energon_lite.documents import Node
from energon_lite.samples import Sample

__all__ = ["AuxReference", "FoundLeaves", "JoinSpec", "LeafSpec", "Nonmatch", "Step", "WeightUnit"]

#: Treatment of a sample of the first data set without a counterpart in another one.
Nonmatch = Literal["error", "skip", "none"]


class Step(NamedTuple):
    """Reference to a metadataset on the path to a leaf.

    Attributes:
        path: path of the document.
        split_part: its split.
        origin: the reference to it, as ``file:line``.
        at: the path of the reference inside its document; one line may have two references.
    """

    path: str
    split_part: str
    origin: str
    at: str


class WeightUnit(NamedTuple):
    """Blend on the path to a leaf whose weights are not shares of samples.

    Attributes:
        unit: the unit of which the weights are shares.
        blend: number of the blend, unique over all paths.
        entry: number of its entry that leads to the leaf.
        origin: place of the blend in its document.
    """

    unit: str
    blend: int
    entry: int
    origin: str


@dataclass(frozen=True)
class AuxReference:
    """One entry of ``aux``.

    Args:
        kind: ``dataset``: a prepared one; ``filesystem``: the files of a folder; ``byterange``: byte ranges of these.
        path: absolute, or a URL.
        origin: ``file:line``, for messages.
    """

    kind: str
    path: str
    origin: str = ""


@dataclass(frozen=True)
class JoinSpec:
    """Join with resolved data sets.

    Args:
        members: the data sets, the first one first; of their fields only those that select samples matter.
        nonmatch: for each of them, the treatment of samples of the first one without a counterpart in it.
        names: the joiner gets samples by these names; None: in order.
        joiner: module and name of the joiner, for messages and comparisons.
        node: the node that names it.
    """

    members: tuple[LeafSpec, ...]
    nonmatch: tuple[Nonmatch, ...]
    names: tuple[str, ...] | None
    joiner: str
    node: Node = field(compare=False, repr=False)

    def load_joiner(self, *, trust_code: bool) -> type[Sample] | Callable[..., Any]:
        """Resolve the class or function that combines samples.

        Raises:
            ConfigError: the class or function does not exist.
            TrustError: it would have to be imported, and ``trust_code`` is False.
        """
        return joiner(self.node, trust_code=trust_code)


@dataclass(frozen=True)
class LeafSpec:
    """One data set of a blend, with all settings of the documents on the path to it.

    Args:
        path: absolute path of the prepared folder, or a URL.
        split_part: the split to read.
        weight: its share of the whole blend; the leaves of one blend sum to 1. Unused with repetitions. If shares
            change during the run, the share at its start.
        segments: changes of the share (see :mod:`energon_lite.config.weight_schedule`); empty if it is constant.
        repetitions: number of times that an epoch of the blend has each of its samples (``blend_epochized``); None in a
            blend by weight.
        subset: the part of the split to read; None: all of it.
        subflavors: labels for its samples; they take precedence over those in its own ``dataset.yaml``.
        shuffle_over_epochs_multiplier: as in Energon: product along the path; None takes precedence over -1, and -1
            over other numbers.
        dataset_config: name of the file in ``.nv-meta`` that maps parts to fields.
        split_config: name of the file in ``.nv-meta`` that lists the splits.
        join: the data sets whose samples are joined, of which this is the first; None: no join.
        aux: data sets and folders from which its cooker reads files, by name.
        origin: ``file:line`` of the reference, for messages.
        trail: the nested metadatasets on the path, the outermost first.
        filters: conditions that its samples must all meet.
        units: blends on the path whose weights are not shares of samples, the outermost first. ``weight`` and
            ``segments`` are computed as if they were.
    """

    path: str
    split_part: str
    weight: float = 1.0
    segments: tuple[Segment, ...] = ()
    repetitions: float | None = None
    subset: Subset | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    join: JoinSpec | None = None
    aux: dict[str, AuxReference] = field(default_factory=dict)
    origin: str = ""
    trail: tuple[Step, ...] = field(default=(), compare=False)
    filters: tuple[str, ...] = ()
    units: tuple[WeightUnit, ...] = ()

    @property
    def paths(self) -> list[str]:
        """Path of its data, as a list, by Energon's name."""
        return [self.path]

    @property
    def share(self) -> Share:
        """Share of the whole blend along the run."""
        return self.segments or constant(self.weight)

    @property
    def folders(self) -> tuple[str, ...]:
        """Paths of all data sets that its samples are read from."""
        return (self.path,) if self.join is None else tuple(member.path for member in self.join.members)

    def labelled(self, subflavors: Mapping[str, Any]) -> LeafSpec:
        """Return the leaf with additional labels, which take precedence over its own."""
        if not subflavors:
            return self
        join = self.join
        if join is not None:
            join = replace(join, members=tuple(member.labelled(subflavors) for member in join.members))
        return replace(self, subflavors=self.subflavors | dict(subflavors), join=join)


@dataclass(frozen=True)
class FoundLeaves:
    """Result of :func:`~energon_lite.loading.leaves.find_leaves`, used in place of the path, so that a caller can
    inspect the leaves and make a data set of them without reading all documents twice.

    Args:
        specs: the leaves as the documents describe them.
    """

    specs: Sequence[LeafSpec]
