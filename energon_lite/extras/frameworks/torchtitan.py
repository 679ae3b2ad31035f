"""torchtitan: a savable loader as the data loader of its ``Trainer`` and of its ``Validator`` (torchtitan 0.3).

:func:`data_loader` makes the configuration for theirs. :class:`TitanLoader` is the loader in their words, and
works without torchtitan. Its state is one entry of their checkpoint, the same on all ranks, and loads on any number of
them; the order, and who gets what, are the loader's.
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
    """What torchtitan asks of a data loader.

    Args:
        worker_config: this rank's place among the data-parallel ranks, with the workers and the seed of the config.
        dataset_path: the config's; torchtitan's command line may have changed it.
        infinite: whether data that ends begins again. A validator with ``steps=-1`` wants it to end.
        seq_len: tokens of a row, ``training.seq_len``.
        local_batch_size: rows of a micro-batch, ``training.local_batch_size``.
        tokenizer: the trainer's.
        others: whatever else it said, by its names.
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
    """A savable loader by torchtitan's protocol: ``iter``, ``state_dict``, ``load_state_dict``.

    Args:
        make: makes the loader; its batches are those that :func:`model_inputs` takes.
        request: what it is to be like.

    Raises:
        UsageError: what was made is no savable loader.
    """

    def __init__(self, make: MakeLoader, request: LoaderRequest):
        self.request, self.loader = request, make(request)
        if not isinstance(self.loader, SavableDataLoader):
            what = f"{getattr(make, '__qualname__', make)} returned a {type(self.loader).__name__}"
            raise UsageError(what, fix="return get_savable_loader(dataset)")

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        # Nobody closes a data loader there: its workers stop when the loop over it ends, or is dropped.
        try:
            empty_passes = 0
            while empty_passes < 2:  # one that was restored at its end is empty
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
        """The state, as text: a checkpoint loads into the same entries that it was saved from, and states vary in them.

        Where hooks decide what is in a batch, it is a collective of all ranks: each knows its own lanes only.
        """
        return {"state": json.dumps(common_state(self.loader))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved, on whatever number of ranks. An empty one changes nothing.

        Raises:
            StateError, StateMismatchError: as :meth:`SavableDataLoader.restore_state_rank`.
        """
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["state"]))


def data_loader(
    make: MakeLoader, *, dataset_path: str | None = None, num_workers: int = 2, seed: int = 0, infinite: bool = True
) -> Any:
    """The configuration of a data loader: for ``Trainer.Config.dataloader``, and for that of the validator.

    Its fields are options of torchtitan's command line: ``--dataloader.num_workers 8``.

    Args:
        make: makes the loader; called on each rank, for the validator at each validation.
        dataset_path: what ``make`` finds in its request.
        num_workers: worker processes of each rank.
        seed: of the run: the ``seed_offset`` of the worker config.
        infinite: begin again where the data ends. The validator decides for itself.

    Raises:
        UsageError: torchtitan, or what it needs, is not installed.

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
    """:class:`TitanLoader` as a component of torchtitan: with a configuration that builds it."""
    import tyro
    from torchtitan.components.dataloader import BaseDataLoader

    make = Annotated[Callable[..., Any], tyro.conf.Suppress]  # an option of the command line is no function
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
