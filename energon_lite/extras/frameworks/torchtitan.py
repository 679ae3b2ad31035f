"""torchtitan: a savable loader as the data loader of its ``Trainer`` and of its ``Validator`` (torchtitan 0.3).

:func:`data_loader` makes the configuration for torchtitan. :class:`TitanLoader` is the loader with torchtitan's
interface, and works without torchtitan. Its state is one entry of a checkpoint, equal on all ranks, and loads on any
number of them; order and distribution to ranks are the loader's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import torch

from energon_lite import SavableDataLoader, WorkerConfig
from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.common_state import common_state
from energon_lite.extras.frameworks.torchtitan_inputs import model_inputs

__all__ = ["LoaderRequest", "MakeLoader", "TitanLoader", "data_loader", "model_inputs"]


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """Properties that torchtitan requests of a data loader.

    Args:
        worker_config: this rank among the data-parallel ranks, with the workers and the seed of the configuration.
        dataset_path: path from the configuration; torchtitan's command line may have changed it.
        infinite: True to restart data that ends. A validator with ``steps=-1`` needs an end.
        seq_len: tokens of a row, ``training.seq_len``.
        local_batch_size: rows of a micro-batch, ``training.local_batch_size``.
        tokenizer: the trainer's.
        others: further requested properties, by name.
    """

    worker_config: WorkerConfig
    dataset_path: str | None = None
    infinite: bool = True
    seq_len: int | None = None
    local_batch_size: int = 1
    tokenizer: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)


MakeLoader: TypeAlias = Callable[[LoaderRequest], SavableDataLoader]


class TitanLoader:
    """A savable loader with torchtitan's protocol: ``iter``, ``state_dict``, ``load_state_dict``.

    Args:
        make: maker of the loader; its batches are arguments of :func:`model_inputs`.
        request: requested properties.

    Raises:
        UsageError: ``make`` did not return a savable loader.
    """

    def __init__(self, make: MakeLoader, request: LoaderRequest):
        self.request = request
        self.loader = make(request)
        if not isinstance(self.loader, SavableDataLoader):
            what = f"{getattr(make, '__qualname__', make)} returned a {type(self.loader).__name__}"
            raise UsageError(what, fix="return get_savable_loader(dataset)")

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        # torchtitan does not close data loaders: the workers stop when the loop ends, or is dropped.
        try:
            empty_passes = 0
            while empty_passes < 2:  # a pass restored at its end is empty
                empty_passes += 1
                for batch in self.loader:
                    empty_passes = 0
                    yield model_inputs(batch, self.request.seq_len)
                if not self.request.infinite:
                    return
            raise UsageError("the data has no batch to begin again with", fix="let it end: infinite=False")
        finally:
            self.loader.close()

    def state_dict(self) -> dict[str, str]:
        """Return the state as text, because checkpoints load into the entries they were saved from, and states vary.

        For content-decided batches, it is a collective of all ranks: each knows only its own lanes.
        """
        return {"state": json.dumps(common_state(self.loader))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks. An empty state changes nothing.

        Raises:
            StateError, StateMismatchError: see :meth:`SavableDataLoader.restore_state_rank`.
        """
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["state"]))


def data_loader(
    make: MakeLoader, *, dataset_path: str | None = None, num_workers: int = 2, seed: int = 0, infinite: bool = True
) -> Any:
    """Return the configuration of a data loader, for ``Trainer.Config.dataloader`` and that of the validator.

    Its fields are options of torchtitan's command line: ``--dataloader.num_workers 8``.

    Args:
        make: maker of the loader; called on each rank, and for the validator at each validation.
        dataset_path: path that ``make`` finds in its request.
        num_workers: worker processes of each rank.
        seed: seed of the run: the ``seed_offset`` of the worker config.
        infinite: True to restart when the data ends. The validator overrides it.

    Raises:
        UsageError: torchtitan, or a package that it requires, is not installed.

    Example:
        >>> config.dataloader = data_loader(make_train_loader, dataset_path="blend.yaml", num_workers=4)
    """
    try:
        config = _component().Config
    except ModuleNotFoundError as error:
        raise UsageError(f"there is no {error.name}", fix="pip install 'energon-lite[torchtitan]'") from error
    return config(make=make, dataset_path=dataset_path, num_workers=num_workers, seed=seed, infinite=infinite)


@functools.cache
def _component() -> Any:
    """Return :class:`TitanLoader` as a component of torchtitan, with a configuration that builds it."""
    import tyro
    from torchtitan.components.dataloader import BaseDataLoader

    make = Annotated[Callable[..., Any], tyro.conf.Suppress]  # a function cannot be a command line option
    fields: Any = [("make", make), ("num_workers", int), ("seed", int), ("infinite", bool)]
    base: Any = BaseDataLoader.Config
    config = dataclasses.make_dataclass("Config", fields, bases=(base,), kw_only=True, slots=True)

    def build(self: Any, config: Any, *, dp_rank: int = 0, dp_world_size: int = 1, **asked: Any) -> None:
        workers = {"num_workers": config.num_workers, "seed_offset": config.seed}
        place = WorkerConfig(rank=dp_rank, world_size=dp_world_size, **workers)
        known = {name: asked.pop(name) for name in ("seq_len", "local_batch_size", "tokenizer") if name in asked}
        chosen = {"dataset_path": config.dataset_path, "infinite": config.infinite, "others": asked}
        TitanLoader.__init__(self, config.make, LoaderRequest(worker_config=place, **known, **chosen))

    return type("EnergonLiteDataLoader", (TitanLoader, BaseDataLoader), {"Config": config, "__init__": build})
