"""Hooks that could not be called as they will be, and names that are nearly those of hooks."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import Cooker, TaskEncoder, stateless
from energon_lite.errors import UsageError
from energon_lite.hooks import AugmentTaskEncoder, attributes, code_digests
from energon_lite.hooks.checks import check_hooks
from energon_lite.hooks.hooks import HOOK_ORDER
from tests.testing import examples, told_of, train_loader

Hook = Callable[..., Any]


def _with(**members: Any) -> TaskEncoder:
    made: TaskEncoder = type("Own", (TaskEncoder,), members)()
    return made


def _refused(encoder: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check_hooks(encoder)
    return str(caught.value)


async def _coroutine(self: Any, sample: Any) -> Any:
    return sample


async def _async_generator(self: Any, sample: Any) -> AsyncIterator[Any]:
    yield sample


@pytest.mark.parametrize("function", [_coroutine, _async_generator])
@pytest.mark.parametrize("hook", HOOK_ORDER)
def test_async_hooks_are_refused(hook: str, function: Hook) -> None:
    said = _refused(_with(**{hook: function}))
    assert f"Own.{hook} is `async def`" in said and __file__ in said


def test_cookers_are_functions_that_return() -> None:
    def yields(sample: Any) -> Any:
        yield sample

    assert "the cooker yields is a generator" in _refused(_with(cookers=[Cooker(yields)]))
    assert "the cooker _coroutine is `async def`" in _refused(_with(cookers=[Cooker(_coroutine)]))


@pytest.mark.parametrize("hook", [name for name in HOOK_ORDER if name != "cook_crude_sample"])
@pytest.mark.parametrize("function", [lambda: 0, lambda self: 0, lambda self, a, b, c: 0, lambda self, *, sample: 0])
def test_a_hook_takes_what_it_is_called_with(hook: str, function: Hook) -> None:
    said = _refused(_with(**{hook: function}))
    assert f"Own.{hook} is called with (" in said and f"write `def {hook}(self, " in said and __file__ in said


def test_other_ways_to_take_it_are_fine() -> None:
    check_hooks(_with(encode_sample=lambda self, anything, more=1: 0, batch=lambda *given: 0))
    check_hooks(_with(encode_sample=staticmethod(lambda sample: 0), empty_batch=lambda self, a, b: 0))
    check_hooks(_with(encode_sample=stateless(restore_seeds=False)(lambda self, sample, **more: 0)))


def test_a_hook_may_be_set_on_an_instance(leaf_of: Callable[..., Path]) -> None:
    encoder: Any = TaskEncoder()
    encoder.encode_sample = lambda sample: {"__key__": sample.__key__}
    encoder.batch_group_criterion = None
    with train_loader(leaf_of(5), batch_size=2, task_encoder=encoder) as loader:
        assert next(iter(loader)).keys() == {"__key__"}
    encoder.encode_sample = lambda: 0
    assert "TaskEncoder.encode_sample is called with (sample)" in _refused(encoder)


@pytest.mark.parametrize("hook", ["sample_length", "sample_costs"])
def test_hooks_that_only_an_augmented_encoder_has(hook: str) -> None:
    check_hooks(AugmentTaskEncoder(_with(**{hook: lambda self, encoded: 1})))
    assert f"Own.{hook} is called with (encoded)" in _refused(AugmentTaskEncoder(_with(**{hook: lambda self: 1})))


def test_hooks_of_an_encoder_that_is_augmented_are_looked_at() -> None:
    class Outer(AugmentTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return super().encode_sample(sample)

    check_hooks(Outer(_with(batch=lambda self, samples: 0)))
    assert "Own.batch is called with" in _refused(Outer(_with(batch=lambda self: 0)))
    assert "Own.encode_smaple is never called" in _refused(Outer(_with(encode_smaple=lambda self, sample: 0)))


@settings(max_examples=examples(60))
@given(data=st.data(), hook=st.sampled_from(HOOK_ORDER))
def test_two_letters_in_the_wrong_order_are_noticed(data: st.DataObject, hook: str) -> None:
    places = [place for place in range(len(hook) - 1) if "_" not in hook[place : place + 2]]
    place = data.draw(st.sampled_from([one for one in places if hook[one] != hook[one + 1]]))
    wrong = hook[:place] + hook[place + 1] + hook[place] + hook[place + 2 :]
    assert f"Own.{wrong} is never called: did you mean {hook!r}?" in _refused(_with(**{wrong: lambda self, x: x}))


@pytest.mark.parametrize("wrong", ["encodeSample", "encode__sample", "EncodeSample", "batchEncode"])
def test_other_spellings_are_noticed(wrong: str) -> None:
    assert f"Own.{wrong} is never called" in _refused(_with(**{wrong: lambda self, x: x}))
    assert f"More.{wrong} is never called" in _refused(type("More", (Helped,), {wrong: lambda self, x: x})())


@pytest.mark.parametrize("wrong, meant", [("encode_sampl", "encode_sample"), ("encode_samples", "encode_sample")])
def test_what_may_be_a_helper_is_warned_of_once(wrong: str, meant: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    encoder = _with(**{wrong: lambda self, x: x})
    check_hooks(encoder)
    check_hooks(encoder)
    assert caplog.text.count(f"Own.{wrong} is never called: did you mean {meant!r}?") == 1


def test_settings_that_nobody_reads_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_hooks(_with(failure_tolerence=5, encoder=None))
    assert "Own.failure_tolerence is never read: did you mean 'failure_tolerance'?" in caplog.text
    assert "Own.encoder" not in caplog.text


class Helped(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return self.encode_samples([sample])[0]

    def encode_samples(self, samples: list[Any]) -> list[Any]:
        return samples

    def batches(self) -> int:
        return 0

    def _encode_smaple(self) -> int:
        return 0


def test_helpers_are_no_misspelt_hooks(caplog: pytest.LogCaptureFixture) -> None:
    check_hooks(Helped())
    assert not told_of(caplog, "Helped")


def test_a_class_in_place_of_an_instance_is_named() -> None:
    assert "task_encoder is the class Helped" in _refused(Helped) and "Helped(...)" in _refused(Helped)
    assert "task_encoder is a int" in _refused(5)


def test_attributes_are_told_apart_by_all_of_their_values() -> None:
    def texts(*values: Any) -> list[dict[str, str]]:
        return [dict(attributes(value, "self")) for value in values]

    values = torch.arange(3), np.arange(3), np.array([None, "a"]), {"b", "a"}
    others = torch.arange(3) + 1, np.arange(3.0), np.array([None, "b"]), {"b", "c"}
    found = texts(*values)
    assert found == texts(*map(copy.deepcopy, values)) and found[3] == {"self[0]": "'a'", "self[1]": "'b'"}
    for one, other in zip(found, texts(*others), strict=True):
        assert one.keys() == other.keys() and one != other
    assert texts([[[[[1]]]]], [[[[[[1]]]]]]) == [{"self[0][0][0][0][0]": "1"}, {}], "not read further inside"


def test_the_code_of_a_class_is_in_all_files_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "its_class": "import its_module\nfrom its_function import f\nfrom its_base import B\nclass C(B): ...",
        **{"its_module": "import its_package", "its_function": "def f(): ...", "its_base": "class B: ..."},
    }
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    packages = tmp_path / "elsewhere" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "its_package.py").touch()
    for folder in (tmp_path, packages):
        monkeypatch.syspath_prepend(folder)
    assert code_digests(importlib.import_module("its_class").C).keys() == {f"{name}.py" for name in files}
