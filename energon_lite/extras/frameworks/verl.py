"""verl's data set by address: its driver holds keys, and its agent loop and reward workers make the samples.

verl's own data set reads images in the driver and sends them with each prompt. This one replaces it by configuration
alone, ``data.custom_cls``; the columns have verl's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from energon_lite.errors import UsageError, field_of
from energon_lite.extras.frameworks.ray import SampleKey, SampleKeys
from energon_lite.loading.iterators.state import State

__all__ = ["AddressDataset"]


@dataclass(frozen=True, slots=True, eq=False)
class FieldByAddress:
    """A field of a sample that is read on access, in the process that accesses it.

    It has no length, so numpy and tensordict do not convert it.

    Args:
        key: key of the sample.
        name: name of the field.
    """

    key: SampleKey
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldByAddress, (self.key, self.name)

    def fetch(self) -> Any:
        """Return the field. Its dicts and lists are copies; the values in them are shared.

        Raises:
            UsageError: the sample has no such field.
        """
        value = field_of(self.key.fetch(), self.name)
        if value is None:
            fix = "have encode_sample return it, or leave it out of data.energon_lite.columns"
            raise UsageError(f"samples have no {self.name!r}", where=self.key.data.function, fix=fix)
        return _own(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetch())

    def __getitem__(self, item: Any) -> Any:
        return self.fetch()[item]

    def get(self, item: Any, default: Any = None) -> Any:
        """Return an entry of a field that is a dict."""
        return self.fetch().get(item, default)


def _own(value: Any) -> Any:
    """Copy dicts and lists, with the same values in them."""
    if isinstance(value, dict):
        return {name: _own(entry) for name, entry in value.items()}
    return [_own(entry) for entry in value] if isinstance(value, list) else value


class AddressDataset(Dataset[dict[str, Any]]):
    """Data set for ``data.custom_cls``, for training and for validation.

    A row has verl's columns: ``raw_prompt`` and ``reward_model`` (or those in ``data.energon_lite.columns``) by
    address, from the fields of the same names in the result of ``encode_sample``; ``data_source``, from the subflavors
    of the data set, or else the name of its folder; and ``index``, the number of the sample in the stream.

    An endless data set (of ``get_train_dataset``) returns its stream, whatever index is requested: order, shuffling and
    epochs are its own, and its state is saved and restored with verl's. A finite one has its samples by number.

    Args:
        data_files: argument of the function ``module:name`` in ``data.energon_lite.open``.
        config: verl's ``data`` section.
        max_samples: the most rows in an epoch; -1: all.
        tokenizer, processor: unused; verl passes them.

    Raises:
        UsageError: the section has no ``energon_lite.open``, or that is invalid.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ):
        options: Mapping[str, Any] = (config or {}).get("energon_lite") or {}
        if not options.get("open"):
            fix = "add +data.energon_lite.open=my_data:open_prompts, a function of data.train_files"
            raise UsageError("data.energon_lite.open is missing", where="data.energon_lite.open", fix=fix)
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.keys = SampleKeys(options["open"], *files)
        self.columns = [*options.get("columns", ("raw_prompt", "reward_model"))]
        self._length = len(self.keys) if max_samples < 0 else min(max_samples, len(self.keys))
        self._sources: dict[int, str] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, Any]:
        (row,) = self.__getitems__([number])
        return row

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a batch."""
        if not self.keys.is_endless:
            return [self._row(number, self.keys.key(number)) for number in numbers]
        if get_worker_info() is not None:
            fix = "set it to 0: nothing is read here, so there is nothing for workers to do"
            raise UsageError("each worker would deliver all samples", where="data.dataloader_num_workers", fix=fix)
        first = self.keys.state_dict()["position"]
        return [self._row(first + place, key) for place, key in enumerate(self.keys.take(len(numbers)))]

    def state_dict(self) -> State:
        """Return the position in the stream; verl's loader saves and restores it, for any batch size."""
        return self.keys.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        self.keys.load_state_dict(state)

    def _row(self, number: int, key: SampleKey) -> dict[str, Any]:
        leaf = key.address[0]
        if leaf not in self._sources:
            opened = self.keys.dataset.resolved.leaves[leaf]
            labels = getattr(opened.loader, "subflavors", None) or {}
            self._sources[leaf] = str(labels.get("data_source") or Path(opened.source.path).name)
        by_address = {name: FieldByAddress(key, name) for name in self.columns}
        # verl requires a tensor in each row, and adds entries to extra_info.
        plain = {"data_source": self._sources[leaf], "index": number, "extra_info": {"index": number}}
        empty = {"tools_kwargs": {}, "interaction_kwargs": {}, "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}
        return by_address | plain | empty

    @classmethod
    async def process_multi_modal_info(cls, messages: Any, image_patch_size: int = 14, config: Any = None) -> Any:
        """Return images, videos and audio of messages, made by ``encode_sample``, for verl's agent loop.

        Returns:
            Three lists; None for an empty one.
        """
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        parts = [part for content in contents for part in content]
        media = ([part[kind] for part in parts if part.get("type") == kind] for kind in ("image", "video", "audio"))
        return tuple(items or None for items in media)
