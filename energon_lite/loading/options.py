"""Options of a data set in addition to Energon's own arguments, in groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from energon_lite.errors import UsageError, check_choice
from energon_lite.loading.iterators.state import MAX_LANES
from energon_lite.storage.read.ranges import ReadAhead

if TYPE_CHECKING:
    from energon_lite.batching.steps import StepCostModel
    from energon_lite.batching.strategy import Strategy

#: A strategy, its document, or the path of a YAML file with its document.
Batching: TypeAlias = "Strategy | Mapping[str, Any] | str | os.PathLike[str]"


@dataclass(frozen=True)
class ByTokens:
    """Micro-batches that a strategy makes by the tokens of the samples. A sample that fails leaves its place empty,
    because the tokens of a replacement are not in the plan. If no other option is needed, the strategy, or its
    document, may be given in place of this group: ``batching=BestFit(Capacity(12_000))``.

    Args:
        strategy: strategy such as ``BestFit(Capacity(12_000))``; or its document, as a dict or the path of a YAML file.
        length_column: measured column with the tokens of each sample. None: there are no measurements; chunks of
            samples are encoded, and then planned by their lengths, so that hooks may yield any number of samples.
        length_field: without a column: the field of an encoded sample that is, or has, its length. None: the encoder's
            ``sample_length(sample)``, or its tokens.
        micro_batches_per_step: with a column: micro-batches of an optimizer step, over all ranks together. The
            micro-batches of a step are balanced: about equal tokens, and equal attention, for each rank, on any number
            of ranks that divides it; each chunk has whole steps. None: no balancing.
        costs: with steps: a cost model, or the path of its file. All kinds of work in the model are balanced, including
            the image encoder and the output layer; it needs their measured columns. None: tokens and attention are
            balanced.
        max_images: for packed micro-batches: the most images that one may hold, by the measured column ``images``; a
            sample with more images is alone. None: only tokens are limited.

    Example:
        >>> get_train_dataset("chats", worker_config=config,
        ...                   batching=ByTokens(BestFit(Capacity(12_000)), micro_batches_per_step=64))
    """

    strategy: Batching
    length_column: str | None = "length"
    length_field: str | None = None
    micro_batches_per_step: int | None = None
    costs: StepCostModel | str | os.PathLike[str] | None = None
    max_images: int | None = None


@dataclass(frozen=True)
class Chunks:
    """Samples that are worked on together, if hooks decide how many samples there are (packing, groups, generators), or
    if batches are made by tokens. Other batches of ``batch_size`` samples have no chunks, and these options are
    refused.

    Args:
        size: positions of the order in a chunk, at least. None, if hooks decide: 8 micro-batches (32, if chunks hand
            nothing over), in whole packing buffers; but one buffer if packs are not batched, or each pass ends. None,
            by tokens: 131,072 (of small data sets, 64 epochs or more), or 1,024 if samples must be encoded first. Each
            epoch is planned by itself.
        remainder: if hooks decide: the use of samples that do not fill a batch at a chunk's end: ``"carry"`` them over
            to a later chunk (at the end of a pass ``batch_drop_last`` decides), like the samples that a selection for
            packing pushes back, ``"keep"`` them in smaller batches, or ``"drop"`` and count them. None: "carry"; with
            groups "keep", or "drop" with ``batch_drop_last``.
        lanes: if hooks decide, or by tokens without a column: number of lanes that chunks are dealt to. A run can be
            resumed on every number of ranks that divides it. None: the smallest number that is divisible by 24 and by
            twice the number of ranks at the beginning of the run.

    Raises:
        UsageError: a value that is not allowed.

    Example:
        >>> get_train_dataset("coco", batch_size=4, packing_buffer_size=64, task_encoder=Packer(), worker_config=config,
        ...                   chunks=Chunks(size=256, remainder="keep", lanes=48))
    """

    size: int | None = None
    remainder: Literal["carry", "keep", "drop"] | None = None
    lanes: int | None = None

    def __post_init__(self) -> None:
        if self.remainder is not None:
            check_choice("chunk_remainder", self.remainder, ("carry", "keep", "drop"))
        if self.lanes is not None and not 1 <= self.lanes <= MAX_LANES:
            raise UsageError(
                f"lanes is {self.lanes}",
                fix=f"give a multiple of the number of data-parallel ranks, at most {MAX_LANES}",
            )


@dataclass(frozen=True)
class Reading:
    """Options for interpreting and reading the files of the data sets.

    Args:
        dataset_config, split_config: names of the files in ``.nv-meta``.
        subflavors: additional labels of all samples; they take precedence over those in the files.
        tags: Energon 8's name of the subflavors; give one of the two.
        filter: a comparison of columns, such as ``"tokens <= 4096"``, or the name of a filter index: only samples that
            meet it are used, of all data sets.
        sample_type: required type of the samples of all data sets, before they are cooked; None: any.
        trust_code: allow the files to name Python code that is run. None: the default of :mod:`energon_lite.trust`,
            which is no.
        use_measured_skips: leave out the samples that the task encoder skipped when ``energon-lite measure`` ran, so
            that an epoch has exactly the other samples. True: by the column ``skip``; or the name of another column. A
            data set from which samples are left out counts as another one, with another order.
        read_ahead: settings for slow storage; None: local folders are read directly, URLs with the defaults of
            :class:`~energon_lite.ReadAhead`. Never changes a batch.

    Example:
        >>> get_train_dataset("s3://bucket/coco", batch_size=4, worker_config=config,
        ...                   reading=Reading(subflavors={"kind": "photo"}, read_ahead=ReadAhead(folder="/cache")))
    """

    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    subflavors: Mapping[str, Any] | None = None
    sample_type: type | None = None
    trust_code: bool | None = None
    use_measured_skips: bool | str = False
    read_ahead: ReadAhead | None = None
    tags: Mapping[str, Any] | None = None
    filter: str | None = None

    @property
    def labels(self) -> Mapping[str, Any]:
        """Labels of all samples: the tags, or the subflavors.

        Raises:
            UsageError: both are given.
        """
        if self.tags is not None and self.subflavors is not None:
            raise UsageError("both tags and subflavors, which mean the same", fix="give one of them")
        return self.tags or self.subflavors or {}
