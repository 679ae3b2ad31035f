"""From a path to a loader: the functions that most users need, with Energon's names and keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from energon_lite.config.metadataset import LeafSpec, multiply_epochs
from energon_lite.errors import UsageError
from energon_lite.hooks import DefaultTaskEncoder, TaskEncoder, check_hooks
from energon_lite.loading.assembly import Chunking, assembled
from energon_lite.loading.energon_compat import check_keywords, loader_arguments
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.identity import Identity, LeafIdentity
from energon_lite.loading.leaves import PathOrDict, find_leaves, open_leaves
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.makers.pipeline import Leaf
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.stages import StagedIdentity, find_stages
from energon_lite.loading.token_batching import Batching, TokenBatching, token_batching
from energon_lite.order.hashing import hash_ints
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order
from energon_lite.order.shuffle import LeafOrder
from energon_lite.storage.index.columns import SKIP
from energon_lite.storage.read.range_cache import ReadAhead
from energon_lite.storage.read.run_reader import read_in_runs
from energon_lite.worker_config import WorkerConfig

__all__ = ["get_loader", "get_savable_loader", "get_train_dataset", "get_val_dataset", "get_val_datasets"]

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
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    task_encoder: TaskEncoder | None = None,
    repeat: bool = True,
    subflavors: Mapping[str, Any] | None = None,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    trust_code: bool = False,
    chunk_size: int | None = None,
    chunk_remainder: str | None = None,
    lanes: int | None = None,
    batching: Batching | None = None,
    length_column: str | None = "length",
    length_field: str | None = None,
    plan_chunk: int | None = None,
    micro_batches_per_step: int | None = None,
    use_measured_skips: bool | str = False,
    read_ahead: ReadAhead | None = None,
    sample_type: type | None = None,
    **kwargs: Any,
) -> SavableDataset:
    """A shuffled, blended, endless data set for training.

    Args:
        path: a prepared folder (or its URL, such as ``s3://bucket/coco``), a ``.jsonl`` file, a metadataset ``.yaml``,
            or one as a dict.
        split_part: the split to read, where the YAML does not say otherwise.
        worker_config: who this process is.
        batch_size: samples in a micro-batch; None: single samples, not batched.
        batch_drop_last: with ``repeat=False``: leave out what does not fill a batch on every rank.
        packing_buffer_size: pack samples by ``select_samples_to_pack`` and ``pack_selected_samples``, which see so many
            samples at a time. None: no packing.
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
        subflavors: more labels for all samples; they win over those in the files.
        dataset_config, split_config: names of the files in ``.nv-meta``.
        trust_code: allow the files to name Python code that is run.
        chunk_size: where hooks decide how many samples there are (packing, groups, generators): positions of the order
            that are worked on together. None: 8 micro-batches' worth (32, if chunks hand nothing over), in whole
            packing buffers; but one buffer if packs are not batched, or each pass ends.
        chunk_remainder: there: what becomes of samples that do not fill a batch at a chunk's end: ``"carry"`` them over
            to a later chunk (at the end of a pass: as without), ``"keep"`` them in smaller batches, or ``"drop"`` and
            count them. None: "carry"; with groups "keep", or "drop" with ``batch_drop_last``.
        lanes: there: among so many lanes chunks are divided. A run can go on on every number of ranks that divides it.
            None: the smallest number that 24 and twice the ranks divide with which the run begins.
        batching: put samples together by their tokens: a strategy such as ``BestFit(Capacity(12_000))``, its document
            as a dict, or the path of a YAML file. ``batch_size`` is None then. A sample that fails leaves its place
            empty, since nobody counted the tokens of a replacement.
        length_column: there: the column that has the tokens of each sample. None: nobody measured them; chunks of
            samples are encoded, and then planned by their lengths. ``lanes`` counts there, and hooks may yield.
        length_field: there, without a column: the field of an encoded sample that has its length, or is as long. None:
            what the encoder's ``sample_length(sample)`` says, or its tokens.
        plan_chunk: there: samples that are planned together, each epoch by itself. None: 131,072 (of small data sets,
            64 epochs or more), or 1,024 if they must be encoded first.
        micro_batches_per_step: there, with a column: micro-batches of an optimizer step, over all ranks together. Those
            of a step are evened out: about as many tokens, and as much attention, for each rank, on any number of ranks
            that divides it; each chunk has whole steps. None: nothing is evened out.
        use_measured_skips: leave out the samples that the task encoder skipped when ``energon-lite measure`` ran, so
            that an epoch is exactly the others. True: by the column ``skip``; or the name of another one. It makes
            other data sets, with another order, of those in which anything is left out.
        read_ahead: how slow storage is read; None: local folders directly, URLs with the defaults of
            :class:`~energon_lite.ReadAhead`. Never changes a batch.
        sample_type: what the samples of all data sets must be, before they are cooked; None: anything.
        kwargs: Energon's other keywords are accepted where they have nothing to act on here.

    Raises:
        ConfigError, DatasetError: something is wrong with the files; says where and what to do.
        UsageError: arguments that cannot work.

    Example:
        >>> dataset = get_train_dataset("blend.yaml", batch_size=4, shuffle_buffer_size=1000,
        ...                             max_samples_per_sequence=100,
        ...                             worker_config=WorkerConfig.default_worker_config())
        >>> for batch in get_savable_loader(dataset): ...
    """
    encoder = _checked(task_encoder, packing_buffer_size, kwargs, get_train_dataset)
    chunking = Chunking(packing_buffer_size, chunk_size, chunk_remainder, lanes, batch_drop_last)
    tokens = token_batching(
        batching, length_column, plan_chunk, batch_size, packing_buffer_size, length_field, micro_batches_per_step
    )
    specs = find_leaves(path, split_part, dataset_config, split_config, subflavors)
    leaves, identities = open_leaves(specs, encoder, trust_code, _skips(use_measured_skips), sample_type)
    both = max_samples_per_sequence and shuffle_buffer_size  # one of them alone has no effect
    read_in_runs(
        [leaf.source for leaf in leaves],
        read_ahead,
        run=max_samples_per_sequence if both else None,
        window=shuffle_buffer_size,
    )
    copies = [multiply_epochs(shuffle_over_epochs_multiplier, spec.shuffle_over_epochs_multiplier) for spec in specs]
    if virtual_epoch_length < 0 or (virtual_epoch_length and not repeat):
        raise UsageError(
            f"virtual_epoch_length is {virtual_epoch_length} with repeat={repeat}", fix="give 0, or repeat=True"
        )
    orders = [
        LeafOrder(len(leaf.source), hash_ints(worker_config.seed_offset, leaf.key), copy)
        for leaf, copy in zip(leaves, copies, strict=True)
    ]
    key = hash_ints(worker_config.seed_offset, _BLEND)
    run, window = max_samples_per_sequence, shuffle_buffer_size
    stages = find_stages(specs)
    weights = stages[0].weights
    repetitions = tuple(spec.repetitions for spec in specs if spec.repetitions is not None)  # of all leaves or of none
    if repetitions:
        _check_epoch(leaves, repetitions)
        order: Order = EpochBlendOrder(orders, repetitions, key, run=run, window=window, repeat=repeat)
        leaf_settings: list[tuple[Any, ...]] = [
            ("repetitions", *pair) for pair in zip(repetitions, copies, strict=True)
        ]
    else:
        length = _length_of_pass(leaves, repeat)
        order = BlendOrder(orders, weights if len(stages) == 1 else stages, key, run=run, window=window, length=length)
        leaf_settings = [*zip(weights, copies, strict=True)]
    settings = {
        "kind": "train",
        "split_part": split_part,
        "batch_size": batch_size,
        "batch_drop_last": batch_drop_last,
        "seed": worker_config.seed_offset,
        "shuffle_buffer_size": shuffle_buffer_size,
        "max_samples_per_sequence": max_samples_per_sequence,
        "repeat": repeat,
        **({"blend": "repetitions"} if repetitions else {}),
    }
    identity = Identity(settings, _with_settings(identities, leaf_settings))
    if len(stages) > 1:
        identity = StagedIdentity(settings, identity.leaves, stages=stages)
    return assembled(
        order,
        identity,
        chunking,
        tokens,
        batch_size=batch_size,
        refill=True,
        leaves=leaves,
        weights=None if repetitions else weights,
        task_encoder=encoder,
        worker_config=worker_config,
        loop_length=virtual_epoch_length,
        repetitions=repetitions or None,
        stages=stages if len(stages) > 1 else (),
    )


def get_val_dataset(
    path: PathOrDict,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: TaskEncoder | None = None,
    subflavors: Mapping[str, Any] | None = None,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    trust_code: bool = False,
    chunk_size: int | None = None,
    chunk_remainder: str | None = None,
    lanes: int | None = None,
    batching: Batching | None = None,
    length_column: str | None = "length",
    length_field: str | None = None,
    plan_chunk: int | None = None,
    use_measured_skips: bool | str = False,
    read_ahead: ReadAhead | None = None,
    sample_type: type | None = None,
    **kwargs: Any,
) -> SavableDataset:
    """The data sets one after the other, unshuffled, each sample exactly once in each ``for`` loop, over all ranks.

    All ranks make the same number of steps. In the last one, ranks that find no samples left get an empty batch (see
    ``TaskEncoder.empty_batch``), so a loop with collectives in it does not hang, and nothing is counted twice.

    Args:
        limit: at most so many batches per rank in a loop. A loop that goes on on other ranks ends with the same batch.
        batch_drop_last: leave out what does not fill a batch on every rank.

    The other arguments and errors are those of :func:`get_train_dataset`. Weights and repetitions of a blend do not
    count here; subsets do.
    """
    encoder = _checked(task_encoder, packing_buffer_size, kwargs, get_val_dataset)
    chunking = Chunking(packing_buffer_size, chunk_size, chunk_remainder, lanes, batch_drop_last)
    tokens = token_batching(batching, length_column, plan_chunk, batch_size, packing_buffer_size, length_field)
    specs = find_leaves(path, split_part, dataset_config, split_config, subflavors)
    reading: dict[str, Any] = {"skips": use_measured_skips, "read_ahead": read_ahead, "sample_type": sample_type}
    opened = partial(_opened, encoder=encoder, trust_code=trust_code, **reading)
    return _val_dataset(specs, split_part, worker_config, batch_size, chunking, tokens, limit, encoder, opened)


def get_val_datasets(
    path: PathOrDict,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: TaskEncoder | None = None,
    subflavors: Mapping[str, Any] | None = None,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    trust_code: bool = False,
    chunk_size: int | None = None,
    chunk_remainder: str | None = None,
    lanes: int | None = None,
    batching: Batching | None = None,
    length_column: str | None = "length",
    length_field: str | None = None,
    plan_chunk: int | None = None,
    use_measured_skips: bool | str = False,
    read_ahead: ReadAhead | None = None,
    sample_type: type | None = None,
    **kwargs: Any,
) -> list[tuple[SavableDataset, LeafSpec]]:
    """:func:`get_val_dataset` for each leaf by itself, with the leaf's description, to report metrics for each."""
    encoder = _checked(task_encoder, packing_buffer_size, kwargs, get_val_datasets)
    chunking = Chunking(packing_buffer_size, chunk_size, chunk_remainder, lanes, batch_drop_last)
    tokens = token_batching(batching, length_column, plan_chunk, batch_size, packing_buffer_size, length_field)
    specs = find_leaves(path, split_part, dataset_config, split_config, subflavors)
    reading: dict[str, Any] = {"skips": use_measured_skips, "read_ahead": read_ahead, "sample_type": sample_type}
    opened = partial(_opened, encoder=encoder, trust_code=trust_code, **reading)
    common = (split_part, worker_config, batch_size, chunking, tokens, limit, encoder, opened)
    return [(_val_dataset([spec], *common), spec) for spec in specs]


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


def _val_dataset(
    specs: Sequence[LeafSpec],
    split_part: str,
    worker_config: WorkerConfig,
    batch_size: int | None,
    chunking: Chunking,
    tokens: TokenBatching | None,
    limit: int | None,
    encoder: TaskEncoder,
    opened: Callable[[Sequence[LeafSpec]], tuple[tuple[Leaf, ...], list[LeafIdentity]]],
) -> SavableDataset:
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}", fix="give at least 1 batch per rank, or None")
    leaves, identities = opened(specs)
    settings = {
        "kind": "val",
        "split_part": split_part,
        "batch_size": batch_size,
        "batch_drop_last": chunking.drop_last,
        "seed": worker_config.seed_offset,
    }
    return assembled(
        ConcatOrder([len(leaf.source) for leaf in leaves]),
        Identity(settings, _with_settings(identities, [() for _ in identities])),
        chunking,
        tokens,
        batch_size=batch_size,
        refill=False,
        limit=limit,
        leaves=leaves,
        weights=None,
        task_encoder=encoder,
        worker_config=worker_config,
    )


def _opened(
    specs: Sequence[LeafSpec],
    *,
    encoder: TaskEncoder,
    trust_code: bool,
    skips: bool | str,
    read_ahead: ReadAhead | None,
    sample_type: type | None,
) -> tuple[tuple[Leaf, ...], list[LeafIdentity]]:
    """The leaves for validation."""
    leaves, identities = open_leaves(specs, encoder, trust_code, _skips(skips), sample_type)
    read_in_runs([leaf.source for leaf in leaves], read_ahead, run=_VAL_RUN, window=_VAL_RUN)
    return leaves, identities


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
    samples = sum(len(leaf.source) * repetition for leaf, repetition in zip(leaves, repetitions, strict=True))
    if not 1 <= samples < _LONGEST_EPOCH:
        raise UsageError(
            f"an epoch of the blend would have {samples:.6g} samples",
            where=", ".join(leaf.name for leaf in leaves[:3]),
            fix="write larger repetitions" if samples < 1 else "write smaller repetitions",
        )


def _with_settings(identities: Sequence[LeafIdentity], settings: Sequence[tuple[Any, ...]]) -> tuple[LeafIdentity, ...]:
    return tuple(replace(one, settings=setting) for one, setting in zip(identities, settings, strict=True))


def _checked(
    encoder: TaskEncoder | None, packing_buffer_size: int | None, kwargs: Mapping[str, Any], function: Any
) -> TaskEncoder:
    encoder = DefaultTaskEncoder() if encoder is None else encoder
    check_hooks(encoder, packing_buffer_size=packing_buffer_size)
    check_keywords(kwargs, function)
    return encoder


def _skips(use_measured_skips: bool | str) -> str | None:
    """The column by which samples are left out."""
    if isinstance(use_measured_skips, str):
        return use_measured_skips
    return SKIP if use_measured_skips else None
