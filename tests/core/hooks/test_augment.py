"""A task encoder around another one is that one, but for the hooks that it overrides."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from energon_lite import Cooker, DefaultTaskEncoder, TaskEncoder, TextSample, basic_sample_keys, cooker, stateless
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.hooks import (
    AugmentTaskEncoder,
    failure_tolerances,
    hooks_of,
    is_overridden,
    returns_its_argument,
    seeded_hooks,
)
from energon_lite.storage import SampleDecoder
from tests.testing import CRUDE_YAML, take, train_loader, write_dataset


@cooker
def cook(sample: dict[str, Any]) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Base(TaskEncoder):
    cookers = [Cooker(cook)]
    decoder = SampleDecoder(image_decode="pil")
    __default_failure_tolerance__ = 7


class Encodes(Base):
    padding = 0

    @stateless(restore_seeds=False, failure_tolerance=3)
    def encode_sample(self, sample: TextSample) -> TextSample:
        sample.text += "."
        return sample


class Packs(Base):
    @stateless
    def preencode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        yield sample
        yield TextSample.derive_from(sample, text=f"{sample.text} again {random.random()}")

    def select_samples_to_pack(self, samples: Sequence[Any]) -> list[list[Any]]:
        return [list(samples[start : start + 3]) for start in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples: Sequence[Any]) -> TextSample:
        return TextSample.derive_from(samples[0], text=" ".join(sample.text for sample in samples))


class Groups(Base):
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, int]:
        return len(sample.text) % 2, 2

    def batch(self, samples: list[Any]) -> Any:
        return [sample.text for sample in samples]

    def encode_batch(self, batch: Any) -> Any:
        return {"texts": batch, "number": self.current_batch_index}


KINDS: dict[str, tuple[TaskEncoder, dict[str, Any]]] = {
    "plain": (Base(), {}),
    "encodes": (Encodes(), {}),
    "packs": (Packs(), {"packing_buffer_size": 4}),
    "groups": (Groups(), {"batch_size": None}),
    "default": (DefaultTaskEncoder(encoded_sample_type=dict), {}),
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    samples = [(str(number), {"txt": b"x" * number}) for number in range(12)]
    return write_dataset(tmp_path / "texts", {"a.tar": samples}, dataset_yaml=CRUDE_YAML)


def batches(path: Path, encoder: TaskEncoder, **more: Any) -> list[str]:
    with train_loader(path, task_encoder=encoder, **({"batch_size": 2} | more)) as loader:
        return [str(batch) for batch in take(loader, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_overrides_nothing_is_the_other_one(texts: Path, kind: str) -> None:
    inner, more = KINDS[kind]
    around = AugmentTaskEncoder(AugmentTaskEncoder(inner))
    assert batches(texts, around, **more) == batches(texts, inner, **more)
    packing = "packing_buffer_size" in more
    assert hooks_of(around, packing=packing, batched=True) == hooks_of(inner, packing=packing, batched=True)
    for function in (seeded_hooks, failure_tolerances):
        assert function(around) == function(inner)
    for name in ("decoder", "cookers", "failure_tolerance", "padding"):
        assert getattr(around, name) == getattr(inner, name)
    for name in ("encode_sample", "batch", "encode_batch", "_batch", "sample_length"):
        assert is_overridden(around, name) == is_overridden(inner, name)
        assert returns_its_argument(around, name) == returns_its_argument(inner, name)
    for again in (copy.copy(around), pickle.loads(pickle.dumps(around))):
        assert type(again.task_encoder.task_encoder) is type(inner)


def test_what_is_overridden_comes_on_top(texts: Path) -> None:
    class Louder(AugmentTaskEncoder):
        padding = 5

        @stateless(failure_tolerance=9)
        def encode_sample(self, sample: Any) -> Any:
            sample = super().encode_sample(sample)
            sample.text = f"<{sample.text}>"
            return sample

    around = Louder(Encodes())
    assert "<" in batches(texts, around)[0] and ".>" in batches(texts, around)[0]
    assert (around.padding, around.failure_tolerance) == (5, 7)
    assert failure_tolerances(around)["encode_sample"] == 9 and "encode_sample" in seeded_hooks(around)
    assert "encode_sample" not in seeded_hooks(Encodes())


def test_the_others_own_attributes_and_cookers(texts: Path) -> None:
    class Counts(Base):
        longest = 3

        def cook_crude_sample(self, sample: Any, recipe: Cooker) -> Any:
            cooked = recipe.cook(sample)
            cooked.text = f"{len(cooked.text)} of {self.longest}"
            return cooked

    class Around(AugmentTaskEncoder):
        def cook_crude_sample(self, sample: Any, cooker: Cooker, aux: Any = None) -> Any:
            cooked = super().cook_crude_sample(sample, cooker, aux)
            cooked.text += "!"
            return cooked

    assert " of 3" in batches(texts, Counts())[0]
    assert " of 3!" in batches(texts, Around(Counts()))[0] and Around(Counts()).longest == 3
    with pytest.raises(AttributeError, match="shortest"):
        Around(Counts()).shortest  # noqa: B018


def test_what_the_other_one_may_not_have(texts: Path) -> None:
    class Builds(Base):
        def build_batch(self) -> None: ...

    with pytest.raises(UsageError, match="build_batch"):
        batches(texts, AugmentTaskEncoder(Builds()))


class Numbered(Base):
    """Notes which batch a sample is made for."""

    @stateless(restore_task_encoder_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=str(self.current_batch_index))

    def batch(self, samples: list[TextSample]) -> Any:
        return {"numbers": [sample.text for sample in samples], "own": self.current_batch_index, "__restore_key__": ()}


def test_samples_know_the_batch_that_they_are_planned_for(texts: Path) -> None:
    with train_loader(texts, task_encoder=Numbered(), batch_size=3) as loader:
        found = take(loader, 5)
        assert [(one["numbers"], one["own"]) for one in found] == [([str(n)] * 3, n) for n in range(5)]
        assert loader.restore_sample(found[4]["__restore_key__"])["numbers"] == ["4"] * 3
        with pytest.raises(FatalSampleError, match="made again by itself"):
            loader.restore_sample(("sample", 0, 3, 0, 0))


def test_where_nobody_knows_it_the_run_ends_at_once(texts: Path) -> None:
    class Unknown(Packs):
        calls = 0

        def postencode_sample(self, sample: TextSample) -> Any:
            type(self).calls += 1
            return self.current_batch_index

    with pytest.raises(FatalSampleError, match="ask for it in batch or encode_batch"):
        batches(texts, Unknown(), packing_buffer_size=4)
    assert Unknown.calls == 1
