"""What can be said about a data set beside Energon's own arguments, in groups of what belongs together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_model import CostModel
from energon_lite.loading.token_batching import Batching
from energon_lite.storage.read.range_cache import ReadAhead

__all__ = ["ByTokens", "Chunks", "Reading"]


@dataclass(frozen=True)
class ByTokens:
    """Micro-batches that a strategy makes by the tokens of the samples. A sample that fails leaves its place empty:
    nobody counted the tokens of a replacement. Where nothing else is to be said, the strategy, or its document, may
    stand in place of this group: ``batching=BestFit(Capacity(12_000))``.

    Args:
        strategy: such as ``BestFit(Capacity(12_000))``; or its document, as a dict or the path of a YAML file.
        length_column: the measured column that has the tokens of each sample. None: nobody measured them; chunks of
            samples are encoded, and then planned by their lengths, so that hooks may yield any number of samples.
        length_field: without a column: the field of an encoded sample that has its length, or is as long. None: what
            the encoder's ``sample_length(sample)`` says, or its tokens.
        micro_batches_per_step: with a column: micro-batches of an optimizer step, over all ranks together. Those of a
            step are evened out: about as many tokens, and as much attention, for each rank, on any number of ranks that
            divides it; each chunk has whole steps. None: nothing is evened out.
        costs: with steps: a cost model, or the path of its file. All kinds of work that it knows are evened out then,
            the image encoder's and the output layer's among them; it needs their measured columns. None: tokens and
            attention are.
        max_images: of packed micro-batches: images that one may hold, by the measured column ``images``; a sample with
            more of them is alone. None: only tokens are limited.

    Example:
        >>> get_train_dataset("chats", worker_config=config,
        ...                   batching=ByTokens(BestFit(Capacity(12_000)), micro_batches_per_step=64))
    """

    strategy: Batching
    length_column: str | None = "length"
    length_field: str | None = None
    micro_batches_per_step: int | None = None
    costs: CostModel | str | os.PathLike[str] | None = None
    max_images: int | None = None


@dataclass(frozen=True)
class Chunks:
    """Samples that are worked on together: where hooks decide how many samples there are (packing, groups,
    generators), and where batches are made by tokens. Batches of ``batch_size`` that need none of this have no chunks,
    and refuse to be given any.

    Args:
        size: positions of the order in a chunk, at least. None, where hooks decide: 8 micro-batches' worth (32, if
            chunks hand nothing over), in whole packing buffers; but one buffer if packs are not batched, or each pass
            ends. None, by tokens: 131,072 (of small data sets, 64 epochs or more), or 1,024 if they must be encoded
            first. Each epoch is planned by itself.
        remainder: where hooks decide: what becomes of samples that do not fill a batch at a chunk's end: ``"carry"``
            them over to a later chunk (at the end of a pass ``batch_drop_last`` decides), as the samples that a
            selection for packing pushes back, ``"keep"`` them in smaller batches, or ``"drop"`` and count them. None:
            "carry"; with groups "keep", or "drop" with ``batch_drop_last``.
        lanes: where hooks decide, and by tokens without a column: among so many lanes chunks are divided. A run can go
            on on every number of ranks that divides it. None: the smallest number that 24 and twice the ranks divide
            with which the run begins.

    Example:
        >>> get_train_dataset("coco", batch_size=4, packing_buffer_size=64, task_encoder=Packer(), worker_config=config,
        ...                   chunks=Chunks(size=256, remainder="keep", lanes=48))
    """

    size: int | None = None
    remainder: Literal["carry", "keep", "drop"] | None = None
    lanes: int | None = None


@dataclass(frozen=True)
class Reading:
    """How the files of the data sets are understood and read.

    Args:
        dataset_config, split_config: names of the files in ``.nv-meta``.
        subflavors: more labels for all samples; they win over those in the files.
        tags: Energon 8's name of the subflavors; not beside them.
        filter: a comparison of columns, such as ``"tokens <= 4096"``, or the name of a filter index: only the samples
            that meet it, of all data sets.
        sample_type: what the samples of all data sets must be, before they are cooked; None: anything.
        trust_code: allow the files to name Python code that is run. None: as :mod:`energon_lite.trust` says, which is
            no.
        use_measured_skips: leave out the samples that the task encoder skipped when ``energon-lite measure`` ran, so
            that an epoch is exactly the others. True: by the column ``skip``; or the name of another one. It makes
            other data sets, with another order, of those in which anything is left out.
        read_ahead: how slow storage is read; None: local folders directly, URLs with the defaults of
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
        """The tags, or subflavors, for all samples.

        Raises:
            UsageError: there are both.
        """
        if self.tags is not None and self.subflavors is not None:
            raise UsageError("tags beside subflavors, which are the same", fix="give one of them")
        return self.tags or self.subflavors or {}
