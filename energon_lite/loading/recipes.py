"""Functions from a path to a loader, for most users, with Energon's names and keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.entry_points import keyword_guests, load
from energon_lite.errors import UsageError, at_least_one, did_you_mean
from energon_lite.hooks import DefaultTaskEncoder, TaskEncoder
from energon_lite.loading.assembly import DatasetRequest, find_specs
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.leaves import PathOrDict
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.makers.hook_errors import short_traceback
from energon_lite.loading.options import Batching, ByTokens, Chunks, Reading
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.worker_config import WorkerConfig, whole_numbers

P = ParamSpec("P")
T = TypeVar("T")

#: Neighbours that are read together from slow storage in validation, where samples are in stored order.
_VAL_RUN = 64


class DatasetOptions(NamedTuple):
    """Task encoder and groups of options of a call; see :func:`get_train_dataset`."""

    encoder: TaskEncoder
    batching: ByTokens | None
    chunks: Chunks
    reading: Reading


class KeywordGuest(Protocol):
    """Guest that accepts further keywords of the functions of this module: entry of the table ``KEYWORDS``."""

    def of_dataset(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], options: DatasetOptions
    ) -> DatasetOptions:
        """Return the options of a data set, completed by keywords.

        Args:
            function: the function that was called, for messages.
            kwargs: keywords that are none of its parameters.
            options: the given options.

        Raises:
            UsageError: an unknown keyword, one without effect on the given groups, or an option that is given twice.
        """

    def of_loader(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], dataset: SavableDataset
    ) -> dict[str, Any]:
        """Return keywords as arguments of :class:`~energon_lite.DataLoader`; all keywords of the call are given.

        Raises:
            UsageError: an unknown keyword, or two that contradict each other.
        """


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a function or class, without a data set and further keywords."""
    return [name for name in inspect.signature(function).parameters if name not in ("kwargs", "dataset")]


def _keyword_guest(function: Callable[..., Any], kwargs: Mapping[str, Any], known: list[str]) -> KeywordGuest:
    """Return the guest for further keywords of a function with the ``known`` parameters."""
    for target in keyword_guests().values():
        return load(target)
    name = next(name for name in kwargs if name not in known)
    fix = did_you_mean(name, known, "the arguments are: " + ", ".join(known))
    raise UsageError(f"{function.__name__} has no argument {name!r}", fix=fix)


def _options(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    encoder: TaskEncoder | None,
    batching: ByTokens | Batching | None,
    chunks: Chunks | None,
    reading: Reading | None,
) -> DatasetOptions:
    if not isinstance(batching, ByTokens) and batching is not None:
        batching = ByTokens(batching)
    options = DatasetOptions(
        DefaultTaskEncoder() if encoder is None else encoder, batching, chunks or Chunks(), reading or Reading()
    )
    if not kwargs:
        return options
    return _keyword_guest(function, kwargs, argument_names(function)).of_dataset(function, kwargs, options)


def _loader_arguments(
    function: Callable[..., Any], kwargs: Mapping[str, Any], dataset: SavableDataset
) -> Mapping[str, Any]:
    known = argument_names(DataLoader)
    if kwargs.keys() <= {*known}:
        return kwargs
    return _keyword_guest(function, kwargs, known).of_loader(function, kwargs, dataset)


def called_as(function: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of another one, for type checkers, editors and ``help``."""

    def declare(declared: Callable[..., T]) -> Callable[P, T]:
        declared.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return declared

    return declare


@short_traceback
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
    """Make a shuffled, blended, endless data set for training.

    The arguments up to ``repeat`` are Energon's; additions of this library are in the three groups after it.

    Args:
        path: a prepared folder (or its URL, such as ``s3://bucket/coco``), a ``.jsonl`` file, a metadataset ``.yaml``,
            or one as a dict.
        split_part: the split to read, unless the YAML names another.
        worker_config: rank and workers of this process.
        batch_size: samples in a micro-batch; None: single samples without batches, or as ``batching`` says.
        batch_drop_last: with ``repeat=False``: leave out samples that do not fill a batch on every rank.
        packing_buffer_size: pack samples with ``select_samples_to_pack`` and ``pack_selected_samples``, which get this
            number of samples at a time. None: no packing; but with ``pack_capacity`` of the task encoder, 128.
        shuffle_buffer_size: width, in samples of one leaf's stream, of the windows inside which sequences are mixed. No
            buffer exists: the order is computed. None: mix everything.
        max_samples_per_sequence: length of the sequences of neighbours that are read one after the other, for storage
            with slow random access. None: single samples. Both must be given to have an effect.
        virtual_epoch_length: batches per rank after which a ``for`` loop ends; the next loop continues. 0: never.
        shuffle_over_epochs_multiplier: 1: each epoch is a permutation. n: n epochs are mixed. -1: draw with
            replacement. None: do not shuffle.
        task_encoder: the hooks; None: :class:`~energon_lite.DefaultTaskEncoder`.
        repeat: False: one ``for`` loop is one pass over the data set, or one epoch of a ``blend_epochized``. A blend by
            weight is endless.
        batching: instead of ``batch_size``: micro-batches by tokens, made by a strategy such as
            ``BestFit(Capacity(12_000))``; see :class:`~energon_lite.ByTokens`.
        chunks: the samples that are processed together; see :class:`~energon_lite.Chunks`.
        reading: settings for interpreting and reading files; see :class:`~energon_lite.Reading`.
        kwargs: with the extra ``energon``, the fields of the groups may be given here directly, as ``subflavors`` in
            Energon. Energon's other keywords are accepted if they have no effect here.

    Raises:
        ConfigError, DatasetError: a file has a mistake; the message has its place and the fix.
        UsageError: the arguments are inconsistent.

    Example:
        >>> dataset = get_train_dataset("blend.yaml", batch_size=4, shuffle_buffer_size=1000,
        ...                             max_samples_per_sequence=100, reading=Reading(subflavors={"run": 7}),
        ...                             worker_config=WorkerConfig.default_worker_config())
        >>> for batch in get_savable_loader(dataset): ...
    """
    options = _options(get_train_dataset, kwargs, task_encoder, batching, chunks, reading)
    packing = _packing_buffer(options, packing_buffer_size)
    request = DatasetRequest(split_part, worker_config, batch_size, batch_drop_last, packing, *options)
    loop_length, run, window, copies = whole_numbers(
        virtual_epoch_length=virtual_epoch_length,
        max_samples_per_sequence=max_samples_per_sequence,
        shuffle_buffer_size=shuffle_buffer_size,
        shuffle_over_epochs_multiplier=shuffle_over_epochs_multiplier,
    )
    if loop_length < 0 or (loop_length and not repeat):
        raise UsageError(f"virtual_epoch_length is {loop_length} with repeat={repeat}", fix="give 0, or repeat=True")
    return request.mixed(path, repeat, run, window, copies, loop_length)


@short_traceback
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
    """Make a data set for validation: unshuffled, each sample exactly once in each ``for`` loop, over all ranks.

    The leaves come one after the other. All ranks make the same number of steps. In the last one, ranks without samples
    get an empty batch (see ``TaskEncoder.empty_batch``), so a loop with collectives does not hang, and no sample counts
    twice. Without ``batch_size``, a rank gets None in place of a sample that was lost, or of an empty batch.

    Args:
        path: as for :func:`get_train_dataset`; or a leaf's description, as :func:`get_val_datasets` returns it.
        limit: largest number of batches per rank in a loop. A loop resumed on other ranks ends with the same batch.
        batch_drop_last: leave out samples that do not fill a batch on every rank.

    The other arguments and errors are those of :func:`get_train_dataset`. Weights and repetitions of a blend are
    ignored; subsets apply.
    """
    options = _options(get_val_dataset, kwargs, task_encoder, batching, chunks, reading)
    packing = _packing_buffer(options, packing_buffer_size)
    request = DatasetRequest(split_part, worker_config, batch_size, batch_drop_last, packing, *options)
    (limit,) = whole_numbers(limit=limit)
    at_least_one("give at least 1 batch per rank, or None", limit=limit)
    return request.in_order("val", path, run=_VAL_RUN, limit=limit)


@called_as(get_val_dataset)
@short_traceback
def get_val_datasets(*args: Any, **kwargs: Any) -> list[tuple[SavableDataset, LeafSpec]]:
    """Apply :func:`get_val_dataset` to each leaf separately, and return it with the leaf's description, for metrics."""
    return _each_leaf(get_val_dataset, get_val_datasets, args, kwargs)


@short_traceback
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
    """Make a data set for jobs that process all samples once, such as captioning: unshuffled, leaf by leaf.

    All ranks together get each sample exactly once. They need not be in step: a rank ends when it has no samples left,
    possibly one step before others, and gets no batch without samples. A rank that is restored after its end gets no
    more samples. Skips and failures are counted.

    Args:
        batch_size: samples in a batch; None: single samples.

    The other arguments and errors are those of :func:`get_train_dataset`. Weights and repetitions of a blend are
    ignored; subsets and filters apply. A data set that a blend names twice is processed twice.

    Example:
        >>> dataset = get_processing_dataset("coco", task_encoder=Decode(), worker_config=config)
        >>> with get_savable_loader(dataset) as loader:
        ...     for sample in loader:
        ...         captions.write(sample.__key__, model.describe(sample.image))
    """
    options = _options(get_processing_dataset, kwargs, task_encoder, None, chunks, reading)
    request = DatasetRequest(split_part, worker_config, batch_size, False, None, *options)
    # With several ranks, a sequence of neighbours would be fetched by each of them.
    run = _VAL_RUN if worker_config.world_size == 1 else None
    return request.in_order("processing", path, run=run, once=True)


@called_as(get_processing_dataset)
@short_traceback
def get_processing_datasets(*args: Any, **kwargs: Any) -> list[tuple[SavableDataset, LeafSpec]]:
    """Apply :func:`get_processing_dataset` to each leaf separately, and return it with the leaf's description."""
    return _each_leaf(get_processing_dataset, get_processing_datasets, args, kwargs)


@short_traceback
def get_loader(dataset: SavableDataset, **kwargs: Any) -> DataLoader:
    """Make a loader whose position cannot be saved; arguments as for :func:`get_savable_loader`."""
    return DataLoader(dataset, **_loader_arguments(get_loader, kwargs, dataset))


@short_traceback
def get_savable_loader(dataset: SavableDataset, **kwargs: Any) -> SavableDataLoader:
    """Make a loader whose position can be saved and restored.

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
    return SavableDataLoader(dataset, **_loader_arguments(get_savable_loader, kwargs, dataset))


def _packing_buffer(options: DatasetOptions, size: int | None) -> int | None:
    """Return the number of samples in a buffer of packing; None: hooks do not pack. If batches are made by tokens, they
    do not pack unless the user gives a ``size``, which is an error."""
    encoder = options.encoder
    if size is not None or options.batching is not None or getattr(encoder, "pack_capacity", None) is None:
        return size
    from energon_lite.loading.makers.sample_length import DEFAULT_BUFFER, pack_selection

    return DEFAULT_BUFFER if pack_selection(encoder) is not None else None


def _each_leaf(
    function: Callable[..., SavableDataset], called: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[SavableDataset, LeafSpec]]:
    """Apply a function to each leaf separately.

    Args:
        called: the function that the user called, for messages.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    path, flat = given.pop("path"), given.pop("kwargs")
    options = _options(
        called, flat, given["task_encoder"], *(given.get(name) for name in ("batching", "chunks", "reading"))
    )
    given |= {name: getattr(options, name) for name in ("batching", "chunks", "reading") if name in given}
    given["task_encoder"] = options.encoder
    return [(function(spec, **given), spec) for spec in find_specs(path, given["split_part"], given["reading"])]
