"""What hooks raise, or forget to return: what the user is shown, and when it ends the run."""

from __future__ import annotations

import errno
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import BestFit, Capacity, Cooker, CrudeSample, SkipSample, SourceInfo, TaskEncoder, stateless
from energon_lite.errors import FatalSampleError
from energon_lite.loading.makers import hook_errors
from tests.testing import CRUDE_YAML, take, train_loader, val_loader, write_dataset

#: Arguments of the data set: planned batches; chunks in lanes; batches by tokens.
KINDS: dict[str, dict[str, Any]] = {
    "planned": {"batch_size": 2},
    "lanes": {"batch_size": 2, "packing_buffer_size": 4, "chunk_size": 300},
    "tokens": {"batching": BestFit(Capacity(9)), "length_column": None, "chunk_size": 300},
}


class Base(TaskEncoder):
    """What each kind of pipeline needs beside an ``encode_sample``."""

    def sample_length(self, encoded: Any) -> int:
        return 3

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def _loader(path: Any, encoder: TaskEncoder, workers: int = 0, *, val: bool = False, **arguments: Any) -> Any:
    return (val_loader if val else train_loader)(path, workers, task_encoder=encoder, **arguments)


def _end(loader: Any) -> FatalSampleError:
    with loader, pytest.raises(FatalSampleError) as caught:
        next(iter(loader))
    return caught.value


def _line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


class Stops(Base):
    def encode_sample(self, sample: Any) -> Any:
        try:
            return {"text": sample.caption}
        except AttributeError as error:
            raise FatalSampleError.from_sample(sample, "it has no caption") from error


@pytest.mark.parametrize("method", ["main", "fork", "thread"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_stop_the_run(leaf_of: Any, kind: str, method: str) -> None:
    error = _end(_loader(leaf_of(300), Stops(), 1, start_method=method, **KINDS[kind]))
    assert "failed: it has no caption" in str(error)
    assert "sample a-" in str(error) and str(leaf_of(300)) in str(error)
    if method == "fork":  # the traceback came along
        notes = "".join(error.__notes__)
        assert f'{__file__}", line {_line_of(Stops.encode_sample, "raise")}' in notes and "AttributeError" in notes


def test_errors_name_samples() -> None:
    assert "sample 5 failed" in str(FatalSampleError.from_sample_key("5"))
    assert str(FatalSampleError.from_sample({"__key__": "k"})) == "sample k failed"
    many = [{"__key__": str(number)} for number in range(9)]
    assert str(FatalSampleError.from_sample(many, "why")) == "sample 0, 1, 2, 3 and 5 more failed: why"
    assert str(FatalSampleError.from_sample(5, "why")) == "sample int failed: why"


def _cooks_nothing(sample: Any) -> Any:
    pass


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cooker_that_returns_nothing_is_an_error(tmp_path: Path, workers: int) -> None:
    class Cooks(TaskEncoder):
        cookers = [Cooker(_cooks_nothing)]

    path = write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x"})]}, dataset_yaml=CRUDE_YAML)
    text = str(_end(_loader(path, Cooks(), workers)))
    assert "_cooks_nothing returned None, in cook_crude_sample" in text and "did you forget `return" in text
    assert f"{__file__}:{_cooks_nothing.__code__.co_firstlineno}" in text


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: None, "encode_sample yielded None(?s:.*)did you forget `yield"),
        (
            lambda: (part for part in "ab"),
            "encode_sample yielded a generator\n  where: .*\n  fix:   write `yield from`",
        ),
        (lambda: TaskEncoder, "encode_sample yielded a type, for a-"),
        (lambda: SkipSample("no"), "yielded a SkipSample, for a-.*\n.*\n  fix:   did you mean `raise SkipSample"),
    ],
)
def test_a_hook_that_yields_what_none_may_return_is_an_error(leaf_of: Any, make: Any, what: str) -> None:
    class Yields(TaskEncoder):
        def encode_sample(self, sample: Any) -> Iterator[Any]:
            yield make()

    assert re.search(what, str(_end(_loader(leaf_of(300), Yields()))))


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "none"), RuntimeError("memory of elephants")])
def test_other_errors_are_the_samples(leaf_of: Any, error: Exception) -> None:
    class Fails(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.text.endswith("3"):
                raise error
            return sample

    with _loader(leaf_of(20), Fails(), batch_size=2) as loader:
        assert len(take(loader, 20)) == 20
        assert loader.stats()["failed"] > 0


# -- tolerances ----------------------------------------------------------------------------------------------------


def _run(loader: Any, count: int) -> tuple[int, FatalSampleError | None]:
    """Batches up to the end, and what ended the run."""
    made = 0
    try:
        with loader:
            for _ in islice(loader, count):
                made += 1
    except FatalSampleError as error:
        return made, error
    return made, None


def _number(sample: Any) -> int:
    return int(sample.text[2:])


def _tolerant(tolerance: int | None, bad: range, general: int = 100) -> TaskEncoder:
    class Tolerates(Base):
        failure_tolerance = general

        @stateless(failure_tolerance=tolerance)
        def encode_sample(self, sample: Any) -> Any:
            if _number(sample) in bad:
                raise ValueError("bad")
            return {"text": sample.text}

    return Tolerates()


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tolerance, bad, general, ends",
    [
        (4, range(10, 14), 100, True),
        (5, range(10, 14), 100, False),
        (4, range(10, 50, 2), 100, False),  # each success begins the count again
        (None, range(10, 50, 2), 4, False),
        (None, range(10, 14), 4, True),
        (50, range(10, 14), 4, False),  # the hook's own tolerance takes the place of the encoder's
        (0, range(10, 50), 4, False),
    ],
)
def test_failures_of_one_hook_in_a_row(
    leaf_of: Any, kind: str, workers: int, tolerance: int | None, bad: range, general: int, ends: bool
) -> None:
    made, error = _run(_loader(leaf_of(60), _tolerant(tolerance, bad, general), workers, val=True, **KINDS[kind]), 99)
    assert (error is not None) == ends
    if error is not None:
        # Hooks decide on an empty one among them; by tokens, nothing is made before all is encoded.
        assert made == 6 if kind == "planned" else made >= (4 if kind == "lanes" else 0)
        named = "encode_sample failed 4 times in a row" if tolerance else "4 samples in a row were skipped or failed"
        assert named in str(error) and "bad" in str(error) and "test_hook_errors.py" in str(error)


def test_skips_do_not_count_for_the_hook(leaf_of: Any) -> None:
    class Skips(Base):
        @stateless(failure_tolerance=3)
        def encode_sample(self, sample: Any) -> Any:
            if _number(sample) < 20:
                raise SkipSample("by number")
            return sample

    assert _run(_loader(leaf_of(40), Skips(), val=True, batch_size=4), 99) == (10, None)


def test_calls_of_a_batch_hook_count_not_its_samples(leaf_of: Any) -> None:
    def encoder(tolerance: int | None, bad: range = range(10, 25)) -> TaskEncoder:
        class Batches(Base):
            failure_tolerance = 6

            @stateless(failure_tolerance=tolerance)
            def batch(self, samples: list[Any]) -> Any:
                if _number(samples[0]) in bad:
                    raise ValueError("bad")
                return {"texts": [sample.text for sample in samples]}

        return Batches()

    for arguments in ({"batch_size": 5}, {"batch_size": 5, "packing_buffer_size": 10, "chunk_size": 40}):
        for fine in (encoder(4), encoder(None, range(5, 40, 10))):
            assert _run(_loader(leaf_of(40), fine, val=True, **arguments), 99)[1] is None
        _, error = _run(_loader(leaf_of(40), encoder(3), val=True, **arguments), 99)
        assert "batch failed 3 times in a row" in str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_training_replacements_count(leaf_of: Any, workers: int) -> None:
    made, error = _run(_loader(leaf_of(60), _tolerant(7, range(60)), workers, batch_size=2), 9)
    assert made == 0 and "encode_sample failed 7 times in a row" in str(error)


def test_energons_default_tolerance_is_taken(leaf_of: Any) -> None:
    class Energons(TaskEncoder):
        __default_failure_tolerance__ = 5

        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("bad")

    class Unlimited(TaskEncoder):
        __default_failure_tolerance__ = None

    assert Unlimited().failure_tolerance == 0
    _, error = _run(_loader(leaf_of(20), Energons(), batch_size=2), 9)
    assert "5 samples in a row" in str(error)


@pytest.mark.parametrize(
    ("tolerance", "fix"), [(8, "to allow more"), (10, "hook or the data"), (0, "hook or the data")]
)
def test_the_tolerance_is_named_where_a_higher_one_would_help(leaf_of: Any, tolerance: int, fix: str) -> None:
    class Fails(TaskEncoder):
        failure_tolerance = tolerance

        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("bad")

    error = str(_end(_loader(leaf_of(9), Fails(), val=True, batch_size=3)))
    assert f"{min(tolerance or 9, 9)} samples in a row" in error and fix in error.splitlines()[2]
    assert ("there are no others" in error) is ("to allow more" not in error)


@pytest.mark.parametrize("own", [True, False])
def test_failures_without_a_limit_are_told_meanwhile(leaf_of: Any, own: bool, caplog: pytest.LogCaptureFixture) -> None:
    told = list[bool]()

    class Unlimited(TaskEncoder):
        failure_tolerance = 5 if own else 0
        calls = 0

        @stateless(failure_tolerance=0 if own else None)
        def encode_sample(self, sample: Any) -> Any:
            self.calls += 1
            told.append("in a row" in caplog.text)
            return sample.captoin if self.calls <= 150 else sample

    caplog.set_level(logging.WARNING)
    made, error = _run(_loader(leaf_of(20), Unlimited(), batch_size=2), 1)
    assert made == 1 and error is None
    assert ("encode_sample failed 100 times" if own else "100 samples in a row") in caplog.text
    assert told[:101] == [False] * 100 + [True]
    assert "without end" in caplog.text and "return sample.captoin" in caplog.text


def test_a_tolerance_below_none_is_refused() -> None:
    with pytest.raises(ValueError, match="failure_tolerance is -1"):
        stateless(failure_tolerance=-1)


def test_sources_for_error_handlers() -> None:
    """Of a stored sample, of one that a cooker is given, and of lists that selections and batches are made of."""
    source = SourceInfo("data", 5, "0.tar", ("a.txt",))
    crude, sample = CrudeSample(__sources__=(source,)), type("Has", (), {"__sources__": (source,)})()
    assert [hook_errors.sources_of(one) for one in (source, crude, sample)] == [(source,)] * 3
    assert hook_errors.sources_of([crude, 5, sample]) == (source, source)
    assert hook_errors.sources_of([]) is hook_errors.sources_of([5]) is hook_errors.sources_of(5) is None
