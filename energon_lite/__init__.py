"""A savable, elastic, deterministic data loader for multimodal training, with Megatron-Energon's names and formats.

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

dataset = get_train_dataset("blend.yaml", batch_size=4, worker_config=WorkerConfig.default_worker_config())
loader = get_savable_loader(dataset)
for batch in loader:
    ...
torch.save(loader.save_state_rank(), "loader.pt")  # later: loader.restore_state_rank(torch.load("loader.pt"))
"""

from energon_lite.batching.collate import batch_list, batch_pad_stack, batch_stack, generic_batch
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
    UsageError,
    WorkerError,
)
from energon_lite.loading.dataset import PlannedDataset
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.savable_loader import SavableDataLoader
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
from energon_lite.sources.decoding import SampleDecoder
from energon_lite.task_encoder import (
    Cooker,
    DefaultTaskEncoder,
    TaskEncoder,
    basic_sample_keys,
    cooker,
    stateless,
)
from energon_lite.worker_config import WorkerConfig

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CaptioningSample",
    "ConfigError",
    "Cooker",
    "CrudeSample",
    "DataLoader",
    "DatasetError",
    "DefaultTaskEncoder",
    "EmptyDatasetError",
    "EnergonLiteError",
    "FatalSampleError",
    "ImageClassificationSample",
    "ImageSample",
    "InterleavedSample",
    "MultiChoiceVQASample",
    "OCRSample",
    "PlannedDataset",
    "Sample",
    "SampleDecoder",
    "SampleError",
    "SavableDataLoader",
    "SimilarityInterleavedSample",
    "SkipSample",
    "SourceInfo",
    "StateError",
    "StateMismatchError",
    "TaskEncoder",
    "TextSample",
    "TopologyError",
    "TrustError",
    "UsageError",
    "VQAOCRSample",
    "VQASample",
    "VidQASample",
    "WorkerConfig",
    "WorkerError",
    "__version__",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "cooker",
    "edataclass",
    "generic_batch",
    "get_loader",
    "get_savable_loader",
    "get_train_dataset",
    "get_val_dataset",
    "get_val_datasets",
    "stateless",
]
