"""Every hook, in every way in which one fails: what its writer is shown, whoever runs it."""

from __future__ import annotations

import bdb
import errno
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import SkipSample, TaskEncoder
from energon_lite.errors import FatalSampleError, UnlikeError
from energon_lite.loading.makers import hook_errors
from tests.testing import examples, take, train_loader

#: Hooks, and what a data set is given so that they are called.
HOOKS: dict[str, dict[str, Any]] = {
    "encode_sample": {},
    "preencode_sample": {"packing_buffer_size": 4},
    "postencode_sample": {"packing_buffer_size": 4},
    "select_samples_to_pack": {"packing_buffer_size": 4},
    "pack_selected_samples": {"packing_buffer_size": 4},
    "batch_group_criterion": {},
    "batch": {},
    "encode_batch": {},
}


def _raises(value: Any) -> Any:
    return value.captoin  # the line that is looked for


def _misspells(value: Any) -> Any:
    return lenght  # type: ignore[name-defined]  # noqa: F821


def _has_no_more(value: Any) -> Any:
    return next(iter(()))


async def _later() -> None:
    pass


#: What a hook does, whether it is told of as a failed sample before the run ends, and what is said.
RAISES: dict[str, tuple[Callable[[Any], Any], bool, str]] = {
    "raises": (_raises, True, "has no attribute 'captoin'"),
    "misspells": (_misspells, False, "name 'lenght' is not defined"),
    "has no more": (_has_no_more, False, "raised StopIteration"),
}
RETURNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda value: None, "returned None"),
    "a class": (lambda value: TaskEncoder, "returned a type"),
    "a function": (lambda value: _raises, "returned a function"),
    "what was to be raised": (lambda value: SkipSample("no"), "did you mean `raise SkipSample(...)`?"),
    "a generator": (lambda value: (one for one in [value]), "is not a generator function"),
    "a coroutine": (lambda value: _later(), "returned a coroutine"),
    "what is lazy": (lambda value: map(str, [value]), "make a list of it"),
}


def _out_of_memory(value: Any) -> Any:
    raise MemoryError("too much")


def _wrapped(value: Any) -> Any:
    try:
        raise MemoryError
    except MemoryError:
        raise ValueError("cannot resize")  # noqa: B904


def _no_files(value: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def _no_system_files(value: Any) -> Any:
    raise RuntimeError("cannot open") from OSError(errno.ENFILE, "Too many open files in system")


def _no_memory_to_map(value: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def _torch_has_no_memory(value: Any) -> Any:
    return torch.empty(1 << 60, dtype=torch.uint8)


#: What is left of nothing, and how a hook learns of it.
SHORTAGES = {
    "memory": (_out_of_memory, _wrapped, _no_memory_to_map, _torch_has_no_memory, lambda value: bytearray(1 << 46)),
    "file descriptor": (_no_files, _no_system_files),
}


def _encoder(hook: str, does: Callable[[Any], Any]) -> TaskEncoder:
    def own(self: Any, value: Any) -> Any:
        return does(value)

    packs = {
        "select_samples_to_pack": lambda self, samples: [[sample] for sample in samples],
        "pack_selected_samples": lambda self, samples: samples[0],
    }
    return type("Fails", (TaskEncoder,), packs | {hook: own})()


def _loader(path: Path, encoder: TaskEncoder, method: Any = "main", **arguments: Any) -> Any:
    return train_loader(path, 2, task_encoder=encoder, start_method=method, **{"batch_size": 2, **arguments})


def _end(loader: Any) -> Exception:
    with loader, pytest.raises(Exception) as caught:
        next(iter(loader))
    return caught.value


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _own_frames(text: str) -> list[str]:
    """The files of the library in a traceback."""
    return [line for line in text.splitlines() if 'File "' in line and "/energon_lite/" in line]


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What was told of failures."""
    texts, logger = list[str](), logging.getLogger("energon_lite.loading.makers.outcomes")
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


@settings(max_examples=examples(40))
@given(hook=st.sampled_from(list(HOOKS)), way=st.sampled_from(list(RAISES)))
def test_the_first_failure_is_shown_at_once_and_once(leaf_of: Any, told: list[str], hook: str, way: str) -> None:
    does, is_counted, said = RAISES[way]
    told.clear()
    seen: list[int] = []  # failures told of before each call

    def own(value: Any) -> Any:
        seen.append(len(told))
        return does(value)

    error = _end(_loader(leaf_of(300), _encoder(hook, own), **HOOKS[hook]))
    text = _shown(error)
    line = f'{__file__}", line {inspect.getsourcelines(does)[1] + 1}, in {does.__name__}'
    assert said in text and hook in text and line in text
    assert len(_own_frames(text)) == 1 and "loader.py" in _own_frames(text)[0]  # from where the user called it
    assert text.index("loader.py") < text.index(line)  # the user's own lines are the end
    if is_counted:
        assert len(told) == 1 and line in told[0] and hook in told[0] and not _own_frames(told[0])
        assert seen[1:] and set(seen[1:]) == {1}
        assert text.count(line) == 1
    else:
        assert not told and set(seen) == {0}


@settings(max_examples=examples(40))
@given(hook=st.sampled_from(list(HOOKS)), way=st.sampled_from(list(RETURNS)))
def test_what_no_hook_may_return_is_named(leaf_of: Any, hook: str, way: str) -> None:
    does, said = RETURNS[way]
    if (hook, way) == ("select_samples_to_pack", "a generator"):
        return  # packs may come from one
    error = _end(_loader(leaf_of(300), _encoder(hook, does), **HOOKS[hook]))
    if hook == "select_samples_to_pack" and way != "nothing":
        assert isinstance(error, FatalSampleError) and hook in str(error)
        return
    assert type(error) is FatalSampleError and said in str(error)
    assert __file__ in str(error) and "fix:" in str(error) and len(_own_frames(_shown(error))) == 1


@pytest.mark.parametrize(
    "method", ["main", "fork", "thread", "spawn", pytest.param("forkserver", marks=pytest.mark.nightly)]
)
def test_whoever_runs_a_hook_its_failure_is_shown_alike(leaf_of: Any, told: list[str], method: str) -> None:
    with _loader(leaf_of(300), Misspells(), method) as loader:
        take(loader, 60)
        assert loader.stats()["failed"] > 1
    misspelt, missing = sorted(told, key=lambda text: "KeyError" in text)  # of each kind, one is shown
    for text in told:
        assert "encode_sample failed for a-" in text and "of a-300[train]" in text and not _own_frames(text)
    assert f'{__file__}", line {inspect.getsourcelines(_raises)[1] + 1}, in _raises' in misspelt
    assert f'{__file__}", line {inspect.getsourcelines(Misspells)[1] + 3}, in encode_sample' in missing


class Misspells(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.text.endswith("7"):
            raise KeyError(sample.text)
        return _raises(sample) if sample.text.endswith("3") else sample


class Late(TaskEncoder):
    """Misspells a name after some samples, whose bytes are not decoded."""

    decoder = None
    seen = 0

    def encode_sample(self, sample: Any) -> Any:
        self.seen += 1
        return sample if self.seen < 20 else _misspells(sample)


def test_an_error_in_samples_that_are_made_fast_comes_in_the_users_frames(leaf_of: Any) -> None:
    text = _shown(_end(_loader(leaf_of(300), Late(), batch_size=30)))
    line = f'{__file__}", line {inspect.getsourcelines(_misspells)[1] + 1}, in _misspells'
    assert "name 'lenght' is not defined" in text and line in text
    assert len(_own_frames(text)) == 1 and "loader.py" in _own_frames(text)[0]


@pytest.mark.parametrize("way", ["misspells", "has no more"])
def test_an_error_that_ends_the_run_comes_out_of_a_worker_in_the_users_frames(leaf_of: Any, way: str) -> None:
    does, _, said = RAISES[way]
    text = _shown(_end(_loader(leaf_of(300), _encoder("encode_sample", does), "fork")))
    assert said in text and len(_own_frames(text)) == 1
    in_order = [text.index("loader.py"), text.index(f"in {does.__name__}")]
    if sys.version_info < (3, 11) and way == "misspells":  # without notes, the error in the worker is a cause, so first
        in_order.reverse()
    assert in_order == sorted(in_order)
    assert "a-300[train]" in text


def test_a_failure_behind_a_yield_is_told_and_counted(leaf_of: Any, told: list[str]) -> None:
    class Halves(TaskEncoder):
        def encode_sample(self, sample: Any) -> Iterator[Any]:
            yield sample
            _raises(sample)

    with _loader(leaf_of(300), Halves()) as loader:
        take(loader, 5)
        assert loader.stats()["failed"] >= 10 and loader.stats()["samples"] == 10
    assert len(told) == 1


def test_a_value_beside_a_yield_is_lost_and_named(leaf_of: Any) -> None:
    class Mixed(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.text:
                return {"text": sample.text}
            yield sample

    assert "encode_sample returned a dict, but is a generator function" in str(_end(_loader(leaf_of(300), Mixed())))


def test_yielding_nothing_is_said(leaf_of: Any) -> None:
    class Silent(TaskEncoder):
        failure_tolerance = 3

        def encode_sample(self, sample: Any) -> Any:
            if not sample.text:
                yield sample

    assert "encode_sample: it yielded nothing (48 x)" in str(_end(_loader(leaf_of(300), Silent())))


def test_samples_without_keys_are_named_by_those_of_the_data(leaf_of: Any) -> None:
    class Sizes(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return {"x": torch.ones(len(sample.text))}

    packs = _encoder("encode_sample", Sizes().encode_sample)
    for encoder, arguments in ((Sizes(), {}), (packs, {"packing_buffer_size": 4})):
        error = _end(_loader(leaf_of(300), encoder, batch_size=40, **arguments))
        assert isinstance(error, UnlikeError) and "the 'x' of the samples of one batch have unequal sizes" in str(error)
        assert "sample 0" not in str(error) and ": a-" in str(error) and 'padding = {"x": 0}' in str(error)


def test_a_selection_of_samples_or_numbers_is_named(leaf_of: Any) -> None:
    ways: dict[str, Callable[[Any], Any]] = {"a list of samples": list, "numbers": lambda samples: [[0, 1]]}
    for named, made in (ways | {"a int": len, "a str": str}).items():
        error = _end(_loader(leaf_of(300), _encoder("select_samples_to_pack", made), packing_buffer_size=4))
        assert f"select_samples_to_pack returned {named}" in str(error) and __file__ in str(error)


@pytest.mark.parametrize("make", [len, list, tuple])
def test_samples_that_are_numbers_or_lists_may_be_packed(leaf_of: Any, make: Callable[[str], Any]) -> None:
    class Plain(TaskEncoder):
        def preencode_sample(self, sample: Any) -> Any:
            return make(sample.text)

        def select_samples_to_pack(self, samples: list[Any]) -> Any:
            return [samples]

        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return sum(type(one) is type(make("")) for one in samples)

    with _loader(leaf_of(300), Plain(), packing_buffer_size=4) as loader:
        assert next(iter(loader)) == [4, 4]


def test_hooks_that_leave_or_ask_for_a_gpu_end_the_run(leaf_of: Any) -> None:
    """No sample is to blame."""

    def leaves(sample: Any) -> Any:
        raise SystemExit(3)

    def asks(sample: Any) -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with ...")

    def quits(sample: Any) -> Any:
        raise bdb.BdbQuit

    for does, method, words in (
        (leaves, "fork", ["sys.exit(3)", f'{__file__}", line']),
        (asks, "main", ["asked for a GPU", '.to("cuda")']),
        (quits, "main", ["the debugger was left in encode_sample"]),
    ):
        error = _end(_loader(leaf_of(300), _encoder("encode_sample", does), method))
        assert all(one in str(error) for one in words)


@pytest.mark.parametrize("method", ["main", "fork"])
@pytest.mark.parametrize(("what", "shortage"), [(what, one) for what, some in SHORTAGES.items() for one in some])
def test_a_machine_that_is_short_of_something_ends_the_run(
    leaf_of: Any, what: str, shortage: Callable[[Any], Any], method: str
) -> None:
    """The hook is shown and its sample named, and nothing of the library."""
    error = _end(_loader(leaf_of(300), _encoder("encode_sample", shortage), method))
    assert f"no {what} was left in encode_sample: " in str(error) and "a-300[train], a-" in str(error)
    assert ("SkipSample" in str(error)) == (what == "memory")
    text = _shown(error)
    assert f"in {shortage.__name__}" in text and len(_own_frames(text)) == 1 and "loader.py" in _own_frames(text)[0]


def test_all_frames_are_shown_to_who_asks(leaf_of: Any, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_FULL_TRACEBACK", "1")
    assert len(_own_frames(_shown(_end(_loader(leaf_of(300), _encoder("encode_sample", _misspells)))))) > 5
    _end(_loader(leaf_of(300), _encoder("encode_sample", _raises)))
    assert len(_own_frames(told[0])) == 1  # that which calls the hook


def test_of_a_defect_of_the_library_all_frames_stay(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with _loader(leaf_of(300), TaskEncoder()) as loader:
        monkeypatch.setattr(loader._dataset_iterator, "take", lambda: os.path.getsize(b"\0"))
        with pytest.raises(ValueError, match="null") as caught:
            next(iter(loader))
    assert len(_own_frames(_shown(caught.value))) > 1


def test_of_a_defect_in_a_default_hook_all_frames_stay() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def guarded(hook): return hook('x')", f"{hook_errors._LIBRARY}hooks/made_up.py", "exec"), scope)
    for hook, is_users in ((int, False), (lambda text: int(text), True)):
        with pytest.raises(ValueError, match="invalid literal") as caught:
            scope["guarded"](hook)
        hook_errors.hide_own_frames(caught.value)
        assert bool(_own_frames(_shown(caught.value))) != is_users


def test_an_error_with_causes_keeps_the_users_frames_of_each() -> None:
    def raises() -> None:
        try:
            _raises(1)
        except AttributeError as error:
            raise FatalSampleError("why") from error

    with pytest.raises(FatalSampleError) as caught:
        raises()
    hook_errors.hide_own_frames(caught.value)
    assert "in _raises" in _shown(caught.value) and "in raises" in _shown(caught.value)


def test_of_an_error_made_of_one_inside_the_library_no_frame_is_shown() -> None:
    """Such as storage that fails: neither error has a frame of the user's."""

    def fails() -> None:
        scope: dict[str, Any] = {"FatalSampleError": FatalSampleError}
        source = """
def fetch():
    raise FatalSampleError("it is gone")
def take():
    try:
        fetch()
    except FatalSampleError as error:
        raise FatalSampleError("cannot be read") from error
"""
        exec(compile(source, f"{hook_errors._LIBRARY}storage/made_up.py", "exec"), scope)
        scope["take"]()

    with pytest.raises(FatalSampleError) as caught:
        fails()
    hook_errors.hide_own_frames(caught.value)
    text = _shown(caught.value)
    assert "it is gone" in text and "cannot be read" in text and "in fails" in text and not _own_frames(text)
