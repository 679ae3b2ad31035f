"""A savable, elastic, deterministic data loader for multimodal training, with Megatron-Energon's names and formats.

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

dataset = get_train_dataset("blend.yaml", batch_size=4, worker_config=WorkerConfig.default_worker_config())
loader = get_savable_loader(dataset)
for batch in loader:
    ...
torch.save(loader.save_state_rank(), "loader.pt")  # later: loader.restore_state_rank(torch.load("loader.pt"))
"""

from energon_lite.imports import lazy_exports

__version__ = "0.1.0"
__getattr__, __dir__ = lazy_exports(__name__, __file__)
