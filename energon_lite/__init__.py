"""A savable, elastic, deterministic data loader for multimodal training, with Megatron-Energon's names and formats.

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

dataset = get_train_dataset("blend.yaml", batch_size=4, worker_config=WorkerConfig.default_worker_config())
loader = get_savable_loader(dataset)
for batch in loader:
    ...
torch.save(loader.save_state_rank(), "loader.pt")  # later: loader.restore_state_rank(torch.load("loader.pt"))
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from energon_lite.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import the public names when the first of them is wanted: commands need none of them, and no torch."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        public = import_module("energon_lite.public")
        names = {key: value for key, value in vars(public).items() if not key.startswith("_")}
        globals().update(names, __all__=[*names, "__version__"])
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
