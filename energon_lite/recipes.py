"""From a path to a loader: the functions that most users need, with Energon's names and keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from energon_lite.config.metadataset import LeafSpec, multiply_epochs
from energon_lite.errors import UsageError
from energon_lite.hooks import DefaultTaskEncoder, TaskEncoder, check_hooks
from energon_lite.loading.assembly import Chunking, assembled
from energon_lite.loading.energon_compat import called_as, grouped_keywords, loader_arguments, with_decoder
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.identity import Identity, LeafIdentity
from energon_lite.loading.leaves import PathOrDict, find_leaves, open_leaves
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.makers.pack_selection import packing_buffer
from energon_lite.loading.makers.pipeline import Leaf
from energon_lite.loading.opened_blend import OpenedBlend, blend_of_leaves, blend_of_many
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.stages import StagedIdentity
from energon_lite.loading.token_batching import Batching, TokenBatching, token_batching
from energon_lite.order.hashing import hash_ints
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order
from energon_lite.order.shuffle import LeafOrders
from energon_lite.storage.index.columns import SKIP
from energon_lite.storage.read.run_reader import read_in_runs
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig

__all__ = [
    "get_loader",
    "get_processing_dataset",
    "get_processing_datasets",
    "get_savable_loader",
    "get_train_dataset",
    "get_val_dataset",
    "get_val_datasets",
]

#: Keeps the hashes for different purposes apart.
_BLEND = 22

#: Neighbours that are read together from slow storage in validation, where samples come in their order.
_VAL_RUN = 64

#: So many samples are refused: positions have to stay below 2**62 for a few thousand epochs at least.
_LONGEST_EPOCH = 2.0**50


def get_train_dataset(
    path: PathOrDict,
    *,
    split_part: str = "train",
    worker_config: WorkerConfig,
    batch_size: int | None = None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    task_encoder: TaskEncoder | None = None,
    repeat: bool = True,
    batching: ByTokens | Batching | None = None,
    chunks: Chunks | None = None,
    reading: Reading | None = None,
    **kwargs: Any,
) -> SavableDataset:
    """A shuffled, blended, endless data set for training.

    Up to ``repeat`` the arguments are Energon's; what this library adds is in the three groups after it.

    Args:
        path: a prepared folder (or its URL, such as ``s3://bucket/coco``), a ``.jsonl`` file, a metadataset ``.yaml``,
            or one as a dict.
        split_part: the split to read, where the YAML does not say otherwise.
        worker_config: who this process is.
        batch_size: samples in a micro-batch; None: single samples, not batched, or what ``batching`` says.
        batch_drop_last: with ``repeat=False``: leave out what does not fill a batch on every rank.
        packing_buffer_size: pack samples by ``select_samples_to_pack`` and ``pack_selected_samples``, which see so many
            samples at a time. None: no packing; but with ``pack_capacity`` of the task encoder, 128.
        shuffle_buffer_size: width, in samples of one leaf's stream, of the windows inside which runs are mixed. No
            buffer exists: it is the order that is computed. None: mix everything.
        max_samples_per_sequence: length of the runs of neighbours that are read one after the other, for storage
            that dislikes random access. None: single samples. Both have to be given to have an effect.
        virtual_epoch_length: batches per rank after which a ``for`` loop ends; the next one goes on. 0: never.
        shuffle_over_epochs_multiplier: 1: each epoch is a permutation. n: n epochs are mixed. -1: draw with
            replacement. None: do not shuffle.
        task_encoder: the hooks; None: :class:`~energon_lite.DefaultTaskEncoder`.
        repeat: False: one ``for`` loop is one pass over the data set, or one epoch of a ``blend_epochized``. A blend by
            weight has no end.
        batching: instead of ``batch_size``: micro-batches by tokens, made by a strategy such as
            ``BestFit(Capacity(12_000))``; see :class:`~energon_lite.ByTokens`.
        chunks: the samples that are worked on together; see :class:`~energon_lite.Chunks`.
        reading: how files are understood and read; see :class:`~energon_lite.Reading`.
        kwargs: the fields of the groups may stand here by themselves, as ``subflavors`` does in Energon. Its other
            keywords are accepted where they have nothing to act on here.

    Raises:
        ConfigError, DatasetError: something is wrong with the files; says where and what to do.
        UsageError: arguments that cannot work.

    Example:
        >>> dataset = get_train_dataset("blend.yaml", batch_size=4, shuffle_buffer_size=1000,
        ...                             max_samples_per_sequence=100, reading=Reading(subflavors={"run": 7}),
        ...                             worker_config=WorkerConfig.default_worker_config())
        >>> for batch in get_savable_loader(dataset): ...
    """
    groups = grouped_keywords(get_train_dataset, kwargs, batching, chunks, reading)
    encoder = with_decoder(DefaultTaskEncoder() if task_encoder is None else task_encoder, kwargs, get_train_dataset)
    packing = packing_buffer(encoder, packing_buffer_size, by_tokens=groups[0] is not None)
    recipe = _Recipe(split_part, worker_config, batch_size, batch_drop_last, packing, encoder, *groups)
    if virtual_epoch_length < 0 or (virtual_epoch_length and not repeat):
        raise UsageError(
            f"virtual_epoch_length is {virtual_epoch_length} with repeat={repeat}", fix="give 0, or repeat=True"
        )
    return recipe.train(
        path,
        repeat,
        max_samples_per_sequence,
        shuffle_buffer_size,
        shuffle_over_epochs_multiplier,
        virtual_epoch_length,
    )


def get_val_dataset(
    path: PathOrDict | LeafSpec,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None = None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: TaskEncoder | None = None,
    batching: ByTokens | Batching | None = None,
    chunks: Chunks | None = None,
    reading: Reading | None = None,
    **kwargs: Any,
) -> SavableDataset:
    """The data sets one after the other, unshuffled, each sample exactly once in each ``for`` loop, over all ranks.

    All ranks make the same number of steps. In the last one, ranks that find no samples left get an empty batch (see
    ``TaskEncoder.empty_batch``), so a loop with collectives in it does not hang, and nothing is counted twice.

    Args:
        path: as for :func:`get_train_dataset`; or a leaf's description, as :func:`get_val_datasets` returns it.
        limit: at most so many batches per rank in a loop. A loop that goes on on other ranks ends with the same batch.
        batch_drop_last: leave out what does not fill a batch on every rank.

    The other arguments and errors are those of :func:`get_train_dataset`. Weights and repetitions of a blend do not
    count here; subsets do.
    """
    groups = grouped_keywords(get_val_dataset, kwargs, batching, chunks, reading)
    encoder = with_decoder(DefaultTaskEncoder() if task_encoder is None else task_encoder, kwargs, get_val_dataset)
    packing = packing_buffer(encoder, packing_buffer_size, by_tokens=groups[0] is not None)
    recipe = _Recipe(split_part, worker_config, batch_size, batch_drop_last, packing, encoder, *groups)
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}", fix="give at least 1 batch per rank, or None")
    specs = _find(path, split_part, recipe.reading)
    leaves, identities = recipe.open(specs, run=_VAL_RUN, window=_VAL_RUN)
    order = ConcatOrder([len(leaf.source) for leaf in leaves])
    identity = Identity(recipe.settings("val"), identities)
    return recipe.dataset(order, identity, leaves, refill=False, limit=limit, weights=None)


@called_as(get_val_dataset)
def get_val_datasets(*args: Any, **kwargs: Any) -> list[tuple[SavableDataset, LeafSpec]]:
    """:func:`get_val_dataset` for each leaf by itself, with the leaf's description, to report metrics for each."""
    return _each_leaf(get_val_dataset, get_val_datasets, args, kwargs)


def get_processing_dataset(
    path: PathOrDict | LeafSpec,
    *,
    split_part: str = "train",
    worker_config: WorkerConfig,
    batch_size: int | None = None,
    task_encoder: TaskEncoder | None = None,
    chunks: Chunks | None = None,
    reading: Reading | None = None,
    **kwargs: Any,
) -> SavableDataset:
    """The data sets one after the other, unshuffled, once: for jobs that work on all samples, as captioning does.

    All ranks together get each sample exactly once. They need not be in step: a rank ends when it has none left, one
    step before others perhaps, and gets no batch without samples. One that has ended, and is restored there, gets
    nothing more. What a hook skips, and what fails, is counted.

    Args:
        batch_size: samples in a batch; None: single ones.

    The other arguments and errors are those of :func:`get_train_dataset`. Weights and repetitions of a blend do not
    count here; subsets and filters do. A data set that a blend names twice is gone through twice.

    Example:
        >>> dataset = get_processing_dataset("coco", task_encoder=Decode(), worker_config=config)
        >>> with get_savable_loader(dataset) as loader:
        ...     for sample in loader:
        ...         captions.write(sample.__key__, model.describe(sample.image))
    """
    groups = grouped_keywords(get_processing_dataset, kwargs, None, chunks, reading)
    encoder = with_decoder(
        DefaultTaskEncoder() if task_encoder is None else task_encoder, kwargs, get_processing_dataset
    )
    recipe = _Recipe(split_part, worker_config, batch_size, False, None, encoder, *groups)
    # With other ranks between, runs of neighbours would be fetched by each of them.
    run = _VAL_RUN if worker_config.world_size == 1 else None
    leaves, identities = recipe.open(_find(path, split_part, recipe.reading), run=run, window=run)
    order = ConcatOrder([len(leaf.source) for leaf in leaves])
    identity = Identity(recipe.settings("processing"), identities)
    return recipe.dataset(order, identity, leaves, refill=False, weights=None, once=True)


@called_as(get_processing_dataset)
def get_processing_datasets(*args: Any, **kwargs: Any) -> list[tuple[SavableDataset, LeafSpec]]:
    """:func:`get_processing_dataset` for each leaf by itself, with the leaf's description: an output for each."""
    return _each_leaf(get_processing_dataset, get_processing_datasets, args, kwargs)


def get_loader(dataset: SavableDataset, **kwargs: Any) -> DataLoader:
    """A loader whose position cannot be saved; arguments as for :func:`get_savable_loader`."""
    return DataLoader(dataset, **loader_arguments(dataset, kwargs, get_loader))


def get_savable_loader(dataset: SavableDataset, **kwargs: Any) -> SavableDataLoader:
    """A loader whose position can be saved and restored.

    Args:
        dataset: from :func:`get_train_dataset` or :func:`get_val_dataset`.
        kwargs: ``prefetch_factor`` (2), ``start_method`` ("fork"), ``watchdog_timeout_seconds`` (60), ``on_timeout``
            ("warn"), ``skip_steps``, ``quarantine``, ``trace``, ``log_every`` and the others of
            :class:`~energon_lite.DataLoader`. Energon's keywords for its snapshots and its garbage collection are
            accepted and have no effect: there are no snapshots.

    Example:
        >>> loader = get_savable_loader(dataset)
        >>> state = loader.save_state_rank()
    """
    return SavableDataLoader(dataset, **loader_arguments(dataset, kwargs, get_savable_loader))


# -- steps ----------------------------------------------------------------------------------------------------------


@dataclass
class _Recipe:
    """What data sets for training and for validation have in common: their arguments, checked before a file is read."""

    split_part: str
    worker_config: WorkerConfig
    batch_size: int | None
    drop_last: bool
    packing: int | None
    encoder: TaskEncoder
    batching: ByTokens | None
    chunks: Chunks
    reading: Reading
    tokens: TokenBatching | None = field(default=None, init=False)
    chunking: Chunking = field(init=False)

    def __post_init__(self) -> None:
        check_hooks(self.encoder, packing_buffer_size=self.packing)
        size = self.chunks.size
        if self.batching is not None:
            self.tokens, size = token_batching(self.batching, size, self.batch_size, self.packing), None
        self.chunking = Chunking(self.packing, size, self.chunks.remainder, self.chunks.lanes, self.drop_last)

    def train(
        self, path: PathOrDict, repeat: bool, run: int | None, window: int | None, copies: int | None, loop_length: int
    ) -> SavableDataset:
        """The data set for training; arguments as those of :func:`get_train_dataset` that mean the same."""
        blend = self.blend(path, run=run if window else None, window=window)  # one alone has no effect
        leaves, stages, repetitions, weights = blend.leaves, blend.stages, blend.repetitions, blend.stages[0].weights
        multipliers = [multiply_epochs(copies, one) for one in blend.multipliers]
        seed = self.worker_config.seed_offset
        orders = LeafOrders.seeded(blend.lengths, blend.keys, multipliers, seed)
        mixed: dict[str, Any] = {"key": hash_ints(seed, _BLEND), "run": run, "window": window}
        settings = self.settings("train")
        settings |= {"shuffle_buffer_size": window, "max_samples_per_sequence": run, "repeat": repeat}
        if repetitions:
            _check_epoch(leaves, repetitions)
            order: Order = EpochBlendOrder(orders, repetitions, **mixed, repeat=repeat)
            settings["blend"] = "repetitions"
        else:
            length = _length_of_pass(leaves, repeat)
            order = BlendOrder(orders, weights if len(stages) == 1 else stages, **mixed, length=length)
        share, values = (("repetitions",), repetitions) if repetitions else ((), weights)
        identities = blend.identities(lambda number: (*share, values[number], multipliers[number]))
        identity = Identity(settings, identities)
        if len(stages) > 1:
            identity = StagedIdentity(settings, identities, stages=stages)
        return self.dataset(
            order,
            identity,
            leaves,
            refill=True,
            weights=None if repetitions else weights,
            loop_length=loop_length,
            repetitions=repetitions or None,
            stages=stages if len(stages) > 1 else (),
        )

    def blend(self, path: PathOrDict, run: int | None, window: int | None) -> OpenedBlend:
        """The leaves of a blend; those of a very large one are opened when they are read."""
        find = partial(_find, path, self.split_part, self.reading)
        if self.tokens is not None and self.tokens.length_column is not None:
            found: OpenedBlend | Sequence[LeafSpec] = find()  # plans are made by what is in the files of all leaves
        else:
            found = blend_of_many(path, self.encoder, self.reading, self.split_part, find, run=run, window=window)
        if not isinstance(found, OpenedBlend):
            found = blend_of_leaves(found, *self.open(found, run=run, window=window))
        return found

    def open(
        self, specs: Sequence[LeafSpec], run: int | None, window: int | None
    ) -> tuple[tuple[Leaf, ...], tuple[LeafIdentity, ...]]:
        skips = self.reading.use_measured_skips
        column = SKIP if skips is True else skips or None
        leaves, identities = open_leaves(
            specs, self.encoder, trusts(self.reading.trust_code), column, self.reading.sample_type
        )
        every = [one for leaf in leaves for one in getattr(leaf.source, "members", (leaf.source,))]
        folders = [source for source in every if isinstance(source, WebdatasetSource)]
        read_in_runs(folders, self.reading.read_ahead, run=run, window=window)
        return leaves, tuple(identities)

    def settings(self, kind: str) -> dict[str, Any]:
        """For the identity: what decides the order, beside the leaves."""
        return {
            "kind": kind,
            "split_part": self.split_part,
            "batch_size": self.batch_size,
            "batch_drop_last": self.drop_last,
            "seed": self.worker_config.seed_offset,
        }

    def dataset(
        self, order: Order, identity: Identity, leaves: Sequence[Leaf], *, refill: bool, **common: Any
    ) -> SavableDataset:
        """The data set: of batches by tokens, or of a number of samples."""
        common |= {"leaves": leaves, "task_encoder": self.encoder, "worker_config": self.worker_config}
        batch_size = self.batch_size
        return assembled(order, identity, self.chunking, self.tokens, batch_size=batch_size, refill=refill, **common)


def _find(path: PathOrDict | LeafSpec, split_part: str, reading: Reading) -> Sequence[LeafSpec]:
    if isinstance(path, LeafSpec):
        return [path]
    specs = find_leaves(path, split_part, reading.dataset_config, reading.split_config, reading.labels)
    return specs if reading.filter is None else [replace(one, filters=(*one.filters, reading.filter)) for one in specs]


def _each_leaf(
    function: Callable[..., SavableDataset], called: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[SavableDataset, LeafSpec]]:
    """What a function makes of each leaf by itself.

    Args:
        called: the one that the user called, for messages.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    path, flat = given.pop("path"), given.pop("kwargs")
    encoder = DefaultTaskEncoder() if given["task_encoder"] is None else given["task_encoder"]
    given["task_encoder"] = with_decoder(encoder, flat, called)
    names = ("batching", "chunks", "reading")
    groups = zip(names, grouped_keywords(called, flat, *(given.get(name) for name in names)), strict=True)
    given |= {name: group for name, group in groups if name in given}
    return [(function(spec, **given), spec) for spec in _find(path, given["split_part"], given["reading"])]


def _length_of_pass(leaves: Sequence[Leaf], repeat: bool) -> int | None:
    if repeat:
        return None
    if len(leaves) > 1:
        raise UsageError(
            "repeat=False with a blend by weight: its leaves end at different times",
            fix="give a single data set or a blend_epochized, or keep repeat=True and set virtual_epoch_length",
        )
    return len(leaves[0].source)


def _check_epoch(leaves: Sequence[Leaf], repetitions: Sequence[float]) -> None:
    samples = sum(leaf.length * repetition for leaf, repetition in zip(leaves, repetitions, strict=True))
    if not 1 <= samples < _LONGEST_EPOCH:
        raise UsageError(
            f"an epoch of the blend would have {samples:.6g} samples",
            where=", ".join(leaf.name for leaf in leaves[:3]),
            fix="write larger repetitions" if samples < 1 else "write smaller repetitions",
        )
