"""Megatron-Bridge's own data path, as installed, over ``energon_lite.extras.energon``: ``python bridge_run.py DATA
FOLDER``.

Its Energon provider, its ``setup_data_iterators``, and its saving of the loader's state run unchanged. What it imports
beside that, and what is not installed here (Transformer Engine and the like, for GPUs), is stood in for by empty names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STANDS_IN = {"datasets", "einops", "modelopt", "omegaconf", "transformer_engine", "triton"}


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_Empty):
    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given else self


class _Module(types.ModuleType):
    __version__ = "2.10.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Behind all others: what is installed is found before."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        known = fullname.partition(".")[0] in STANDS_IN
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def main(data: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    import energon_lite.extras.energon

    energon_lite.extras.energon.install()

    sys.meta_path.append(_Finder())
    from megatron.bridge.data.energon.energon_provider import EnergonProvider
    from megatron.bridge.data.loaders import setup_data_iterators
    from megatron.bridge.data.utils import DatasetBuildContext, DatasetProvider, get_dataset_provider
    from megatron.bridge.training.checkpointing import maybe_save_dataloader_state
    from megatron.bridge.training.state import TrainState

    from energon_lite import get_train_dataset, get_val_dataset
    from energon_lite.extras.frameworks.megatron import data_iterators, worker_config
    from tests.extras.frameworks.toy_megatron import Layout, on_cpu

    @dataclass(kw_only=True)
    class LiteProvider(DatasetProvider):  # type: ignore[misc]
        path: str
        micro_batch_size: int
        dataloader_type: str = "external"
        dataloader_save: str | None = None
        progress: Any = None

        def build_datasets(self, context: DatasetBuildContext) -> Any:
            config = worker_config(num_workers=self.num_workers, all_tensor_ranks=True)
            common = {"batch_size": self.micro_batch_size, "worker_config": config}
            train, valid = get_train_dataset(self.path, **common), get_val_dataset(self.path, **common)
            given = {"progress": self.progress, "states": self.dataloader_save}
            return data_iterators(train, valid, micro_batch_size=self.micro_batch_size, **given)

    def iterators(provider: Any, state: Any) -> Any:
        train = SimpleNamespace(train_samples=None, train_iters=9, global_batch_size=4, eval_interval=3, eval_iters=1)
        vars(train).update(skip_train=False, exit_signal=15, exit_signal_handler_for_dataloader=False)
        train.micro_batch_size = 2
        model = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
        config = SimpleNamespace(train=train, dataset=provider, model=model)
        group = groups.get_data_parallel_group()
        return setup_data_iterators(config, state, 1, get_dataset_provider(provider), group)

    with on_cpu(Layout()) as groups:
        found: dict[str, Any] = {}
        sizes = {"micro_batch_size": 2, "num_workers": 0}
        theirs = EnergonProvider(path=data, seq_length=8, global_batch_size=4, image_processor=None, **sizes)
        theirs.tokenizer = None
        state = TrainState()
        train, valid, test = iterators(theirs, state)
        found["theirs"] = [next(train).__key__ for _ in range(6)]
        found["their validation"] = [len(next(valid).__key__), len(next(test).__key__)]
        found["flags"] = [state.do_train, state.do_valid, state.do_test]
        ranks = SimpleNamespace(rank=lambda: 0)
        collection: Any = SimpleNamespace(pp=ranks, tp=ranks, dp=groups.get_data_parallel_group())
        try:
            maybe_save_dataloader_state(None, train, 3, folder, pg_collection=collection)
        except RuntimeError as error:
            found["their saving"] = str(error)
        batches = theirs.build_datasets(DatasetBuildContext(1, 1, 1))[0]
        found["again"] = [next(batches).__key__ for _ in range(6)]

        ours = LiteProvider(path=data, dataloader_save=folder, **sizes)
        train, _, _ = iterators(ours, state)
        whole = [next(train).__key__ for _ in range(6)]
        maybe_save_dataloader_state(None, train, 3, folder, pg_collection=collection)
        whole += [next(train).__key__ for _ in range(6)]
        ours.progress = TrainState(step=3, consumed_train_samples=12)
        resumed, valid, _ = iterators(ours, state)
        found["ours"] = [whole[6:], [next(resumed).__key__ for _ in range(6)]]
        found["our validation"] = [next(valid).__key__ for _ in range(2)]
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
