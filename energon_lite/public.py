"""The public names of the library, all of which ``energon_lite`` has; import them from there."""

from energon_lite.batching.best_fit import BestFit
from energon_lite.batching.best_fit_decreasing import BestFitDecreasing
from energon_lite.batching.capacity import AttentionCost, Capacity
from energon_lite.batching.collate import batch_list, batch_pad_stack, batch_stack, generic_batch
from energon_lite.batching.concat_split import ConcatSplit
from energon_lite.batching.context_parallel import context_parallel_positions, context_parallel_slice
from energon_lite.batching.fixed_size import Fixed, LengthDifference, MaxLength
from energon_lite.batching.greedy import Greedy
from energon_lite.batching.learning_rate import learning_rate_scale
from energon_lite.batching.loss_tokens import count_loss_tokens
from energon_lite.batching.segment_mask import flex_segment_mask, segment_mask
from energon_lite.batching.sequence_batches import PackedBatch, PaddedBatch, pack_sequences, pad_sequences
from energon_lite.batching.sequences import TokenSequence, cut_sequence, next_token_pairs
from energon_lite.batching.sorted_window import SortedWindow
from energon_lite.batching.strategy import from_dict as strategy_from_dict
from energon_lite.error_handlers import log_exception, reraise_exception
from energon_lite.errors import (
    ConfigError,
    DatasetError,
    EmptyDatasetError,
    EnergonLiteError,
    FatalSampleError,
    SampleError,
    SkipSample,
    StateError,
    StateMismatchError,
    TopologyError,
    TrustError,
    UnknownLengthError,
    UsageError,
    WorkerError,
)
from energon_lite.extras.packed_list import PackedList
from energon_lite.hooks import (
    Cooker,
    DefaultTaskEncoder,
    TaskEncoder,
    basic_sample_keys,
    cooker,
    stateless,
)
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.sample_address import SampleAddress
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.states.rebase import RebaseReport, rebase_state
from energon_lite.recipes import (
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.samples import (
    Batch,
    CaptioningSample,
    CrudeSample,
    ImageClassificationSample,
    ImageSample,
    InterleavedSample,
    MultiChoiceVQASample,
    OCRSample,
    Sample,
    SimilarityInterleavedSample,
    SourceInfo,
    TextSample,
    VidQASample,
    VQAOCRSample,
    VQASample,
    edataclass,
)
from energon_lite.storage.read.range_cache import ReadAhead
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.tokenizing.task_encoder import TokenizedTaskEncoder
from energon_lite.worker_config import WorkerConfig

__all__ = [
    "AttentionCost",
    "Batch",
    "BestFit",
    "BestFitDecreasing",
    "Capacity",
    "CaptioningSample",
    "ConcatSplit",
    "ConfigError",
    "Cooker",
    "CrudeSample",
    "DataLoader",
    "DatasetError",
    "DefaultTaskEncoder",
    "EmptyDatasetError",
    "EnergonLiteError",
    "FatalSampleError",
    "Fixed",
    "Greedy",
    "ImageClassificationSample",
    "ImageSample",
    "InterleavedSample",
    "LaneDataset",
    "LengthDifference",
    "MaxLength",
    "MultiChoiceVQASample",
    "OCRSample",
    "PackedBatch",
    "PackedList",
    "PaddedBatch",
    "PlannedDataset",
    "ReadAhead",
    "RebaseReport",
    "Sample",
    "SampleAddress",
    "SampleDecoder",
    "SampleError",
    "SavableDataLoader",
    "SimilarityInterleavedSample",
    "SkipSample",
    "SortedWindow",
    "SourceInfo",
    "StateError",
    "StateMismatchError",
    "TaskEncoder",
    "TextSample",
    "TokenSequence",
    "TokenizedTaskEncoder",
    "TopologyError",
    "TrustError",
    "UnknownLengthError",
    "UsageError",
    "VQAOCRSample",
    "VQASample",
    "VidQASample",
    "WorkerConfig",
    "WorkerError",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "context_parallel_positions",
    "context_parallel_slice",
    "cooker",
    "count_loss_tokens",
    "cut_sequence",
    "edataclass",
    "flex_segment_mask",
    "generic_batch",
    "get_loader",
    "get_savable_loader",
    "get_train_dataset",
    "get_val_dataset",
    "get_val_datasets",
    "learning_rate_scale",
    "log_exception",
    "next_token_pairs",
    "pack_sequences",
    "pad_sequences",
    "rebase_state",
    "reraise_exception",
    "segment_mask",
    "stateless",
    "strategy_from_dict",
]
