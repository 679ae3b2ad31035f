"""Samples by address, for trainers that have a driver: Ray's actors, verl.

The driver has keys, some twenty bytes each, in the order of a data set, and saves how far it is. Whoever needs a sample
makes it from its key: it is the same in every process that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.shared_data import Address, DataReference, open_data
from energon_lite.loading.iterators.state import State
from energon_lite.loading.savable_loader import SavableDataLoader

__all__ = ["SampleKey", "SampleKeys", "fetch", "fetch_batch"]


@dataclass(frozen=True, slots=True)
class SampleKey:
    """A sample that can be made anywhere.

    Args:
        data: its data set; one object for all keys, so that a pickled list has it once.
        address: number of the leaf, of the sample in it, and of the epoch.
    """

    data: DataReference
    address: Address

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleKey, (self.data, self.address)

    def fetch(self) -> Any:
        """The sample, as ``encode_sample`` made it; in training, its replacement if it is skipped or fails. This
        process keeps the last few: do not change what is in it.

        Raises:
            SampleError: in validation, where there are no replacements, it is skipped or fails.
            StateMismatchError: this process finds other data than the driver has.
        """
        return self.data.opened().sample(self.address)


class SampleKeys:
    """The driver's side: keys in the order of a data set, and how far it is.

    Args:
        function: ``module:name`` of a function that returns a data set of single samples (``batch_size=None``) for one
            rank. That rank is the driver: who gets which key is the driver's business.
        arguments: what it is called with, here and in the workers.

    Raises:
        UsageError: there is no such function, or what it returns cannot be addressed sample by sample.

    Example:
        >>> keys = SampleKeys("my_data:open_prompts", "blend.yaml")
        >>> for batch in keys.batches(256):
        ...     ray.get([worker.step.remote(batch[n::8]) for n, worker in enumerate(workers)])
        ...     torch.save(keys.state_dict(), "keys.pt")
    """

    def __init__(self, function: str, *arguments: Any):
        self.dataset = open_data(function, arguments)
        self.data = DataReference(function, arguments, self.dataset.identity.fingerprint)
        self.is_endless = self.dataset.is_endless
        self._loader = SavableDataLoader(self.dataset)
        self._state = self._loader.state_dict()

    def __len__(self) -> int:
        """Samples in a pass; of an endless stream, as many as its data sets hold."""
        return len(self.dataset)

    def key(self, number: int) -> SampleKey:
        """The key of a sample of the running pass, by its number in it."""
        (found,) = self._loader.samples_at(number, pass_number=self._state["pass_number"])
        return SampleKey(self.data, found.restore_key[1:4])

    def take(self, count: int) -> list[SampleKey]:
        """The next keys; fewer at the end of a pass. Behind it, the next pass begins.

        Raises:
            UsageError: ``count`` is not positive.
        """
        if count < 1:
            raise UsageError(f"{count} keys are asked for", fix="ask for at least 1")
        state, first = self._state, self._state["position"]
        if self._is_at_end:
            state, first = state | {"pass_number": state["pass_number"] + 1, "position": 0}, 0
        stop = first + count if self.is_endless else min(first + count, len(self))
        self._state = state
        keys = [self.key(number) for number in range(first, stop)]
        self._state = state | {"position": stop}
        return keys

    def batches(self, size: int) -> Iterator[list[SampleKey]]:
        """Lists of keys, of an endless stream for ever, of a finite one to the end of the pass. A list counts as
        delivered when it is handed out."""
        while keys := self.take(size):
            yield keys
            if self._is_at_end:
                return

    def state_dict(self) -> State:
        """How far it is: the state of a loader of this data set, which can go on with it as well."""
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Go on where a state was saved: of keys that were taken so many at a time, or of a loader.

        Raises:
            StateError, StateMismatchError: as of any loader.
        """
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    @property
    def _is_at_end(self) -> bool:
        return not self.is_endless and self._state["position"] >= len(self)


def fetch(keys: Sequence[SampleKey]) -> list[Any]:
    """The samples of keys, made in this process; each is what :meth:`SampleKey.fetch` returns."""
    return [key.fetch() for key in keys]


def fetch_batch(keys: Sequence[SampleKey]) -> Any:
    """The batch of keys: read together, encoded, and collated by ``batch`` and ``encode_batch`` of the task encoder. It
    depends on nothing but the keys.

    Raises:
        SampleError: in validation, a sample or the batch is skipped or fails: nothing is left out silently.
        UsageError: there are no keys, or keys of several data sets.
    """
    if len(found := {key.data for key in keys}) != 1:
        raise UsageError(f"a batch of {len(keys)} keys of {len(found)} data sets", fix="give keys of one")
    return keys[0].data.opened().batch([key.address for key in keys])
