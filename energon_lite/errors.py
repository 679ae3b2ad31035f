"""Every exception of the library, in one place.

A message says three things: *what* is wrong, *where* (a path, a line of YAML, a sample), and *what to do*.
:class:`EnergonLiteError` builds the message from these parts, so that none of them is forgotten, and keeps
them as attributes, so that a program can read them too.

Two classes are not failures of the library but words a user's hook says to it: :class:`SkipSample`
("leave this one out, I know why") and :class:`FatalSampleError` ("stop, do not skip this").
"""

from __future__ import annotations

import copyreg
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from typing_extensions import Self

__all__ = [
    "ConfigError",
    "DataIndexError",
    "DatasetError",
    "DecodeError",
    "EmptyDatasetError",
    "EnergonLiteError",
    "FatalSampleError",
    "FatalStorageError",
    "FieldAccessError",
    "MissingEntryError",
    "MissingShardError",
    "NonFiniteError",
    "NotPreparedError",
    "SampleError",
    "SampleException",
    "ShardChangedError",
    "ShardFormatError",
    "SkipSample",
    "StateError",
    "StateMismatchError",
    "TopologyError",
    "TrustError",
    "UnknownLengthError",
    "UnlikeError",
    "UsageError",
    "WorkerError",
    "WrongHookError",
    "check_choice",
    "counted",
    "did_you_mean",
    "field_of",
    "listed",
    "nearest",
    "require",
]


def nearest(word: object, choices: Iterable[object]) -> str | None:
    """The choice that looks most like ``word``, or None if none comes close.

    Example:
        >>> nearest("weigth", ["path", "weight"])
        'weight'
    """
    matches = get_close_matches(str(word), [str(choice) for choice in choices], n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: object, choices: Iterable[object], otherwise: str, *, always: bool = False) -> str:
    """Whether the choice that looks most like ``word`` was meant; or ``otherwise``, if none comes close.

    Args:
        word: what was written.
        choices: what could have been.
        otherwise: what to do, if there is nothing to ask.
        always: ``otherwise`` stands behind the question as well.

    Example:
        >>> did_you_mean("weigth", ["path", "weight"], "there are: path, weight")
        "did you mean 'weight'?"
    """
    close = nearest(word, choices)
    if close is None:
        return otherwise
    return f"did you mean {close!r}?" + (f" {otherwise}" if always else "")


def counted(count: int, noun: str) -> str:
    """A number of things, such as "1 shard" and "1,200 batches"."""
    end = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{end}"


def listed(names: Sequence[object], most: int = 8, count: int = 0) -> str:
    """The first names of some, and how many more there are.

    Args:
        names: some, or all.
        most: so many are given.
        count: of all, if these are not.

    Example:
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    more = max(count, len(names)) - most
    return ", ".join(map(str, names[:most])) + (f" and {more:,} more" if more > 0 else "")


class EnergonLiteError(Exception):
    """Base of all errors raised by energon_lite.

    Args:
        what: one sentence that says what is wrong.
        where: the place: a path, ``file:line:column``, a sample's key.
        fix: what the reader should do about it.
    """

    def __init__(self, what: str, *, where: str | os.PathLike[str] | None = None, fix: str | None = None):
        self.what = what
        self.where = None if where is None else os.fspath(where)
        self.fix = fix
        lines = [what]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if fix is not None:
            lines.append(f"  fix:   {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross the process boundary from workers; keyword-only arguments need help with that.
        return (copyreg.__newobj__, (type(self),), self.__dict__ | {"args": self.args})  # type: ignore[attr-defined]


class UsageError(EnergonLiteError, ValueError):
    """A function was called with arguments that cannot work (or cannot work together)."""


class UnknownLengthError(UsageError, TypeError):
    """The number of batches is not known. Also a TypeError, because ``list()`` and progress bars expect that."""


class ConfigError(EnergonLiteError, ValueError):
    """A mistake in a configuration document (YAML), with its exact place.

    Args:
        what: the mistake in one sentence.
        file: the document.
        line: line number, counted from 1.
        column: column number, counted from 1.
        at: path inside the document, e.g. ``splits.train.blend[1].weight``.
        expected: what would have been right.
        found: what is there instead.
        choices: valid keys or values; the nearest one is suggested.
        suggest_for: what the suggestion is to be near to; None: there is none.
        fix: what to do, if there is no suggestion; made from ``choices``, or from ``expected``, if not given.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str] | None = None,
        line: int | None = None,
        column: int | None = None,
        at: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        choices: Sequence[object] = (),
        suggest_for: object = None,
        fix: str | None = None,
    ):
        self.file = None if file is None else os.fspath(file)
        self.line, self.column, self.at = line, column, at
        self.expected, self.found = expected, found
        self.suggestion = nearest(suggest_for, choices) if suggest_for is not None else None
        said = {"expected": expected, "found": found}
        parts = [what, *(f"{name} {words}" for name, words in said.items() if words is not None)]
        if self.suggestion is not None:
            fix = f"did you mean {self.suggestion!r}?"
        elif fix is None and choices:
            fix = "use one of: " + ", ".join(str(choice) for choice in choices)
        elif fix is None and expected is not None:
            fix = f"write {expected}"
        where = ":".join(str(part) for part in (self.file, line, column) if part is not None) or None
        if at:
            where = f"{where} at {at}" if where else at
        super().__init__("; ".join(parts), where=where, fix=fix)


def require(good: bool, what: str, at: str, fix: str) -> None:
    """Refuse a setting that is not good.

    Raises:
        ConfigError: ``what`` is wrong, with the setting at ``at``.
    """
    if not good:
        raise ConfigError(what, at=at, fix=fix)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse an argument that is none of its possible values.

    Raises:
        UsageError: names them, or the one that was meant.
    """
    if value not in choices:
        known = f"give one of {', '.join(map(repr, choices))}"
        raise UsageError(f"{name} is {value!r}", fix=did_you_mean(value, choices, known))


class TrustError(ConfigError):
    """A document asks for code to be imported or run, and the caller did not say ``trust_code=True``."""


class DatasetError(EnergonLiteError):
    """A data set on disk cannot be used as it is."""


class NotPreparedError(DatasetError, FileNotFoundError):
    """The folder has no ``.nv-meta`` (or an unfinished one)."""

    __str__ = Exception.__str__


class MissingShardError(DatasetError, FileNotFoundError):
    """A shard that the data set names is not there."""

    __str__ = Exception.__str__


class ShardFormatError(DatasetError):
    """A shard is not a readable tar file (truncated, damaged, compressed)."""


class EmptyDatasetError(DatasetError):
    """Nothing (or too little) to read: an empty split, fewer samples than ranks."""


class SampleException(EnergonLiteError, ValueError):
    """Something is wrong with a sample. Raised by a hook, it counts as the failure of this one.

    Args:
        what, where, fix: as for :class:`EnergonLiteError`.
    """

    @classmethod
    def from_sample(cls, sample: Any, message: str = "") -> Self:
        """One that names a sample, or the samples of a list, by key and place.

        Example:
            >>> def encode_sample(self, sample):
            ...     try:
            ...         return tokenize(sample.text)
            ...     except LicenseError as error:
            ...         raise FatalSampleError.from_sample(sample, "no license for the tokenizer") from error
        """
        samples = sample if isinstance(sample, list) else [sample]
        keys = listed([field_of(one, "__key__") or type(one).__name__ for one in samples], _NAMED)
        places = [
            f"{source.dataset_path}[{source.index}] {source.shard_name}"
            for one in samples[:_NAMED]
            for source in field_of(one, "__sources__") or ()
        ]
        return cls(f"sample {keys} failed" + (f": {message}" if message else ""), where="; ".join(places) or None)

    @classmethod
    def from_sample_key(cls, sample_key: str) -> Self:
        """One that names a sample."""
        return cls(f"sample {sample_key} failed")


class SampleError(SampleException):
    """One sample cannot be made. In a loader it is counted and its place is refilled (or left empty)."""


class DecodeError(SampleError):
    """A part of a sample cannot be decoded."""


class FieldAccessError(SampleError):
    """A ``field_map`` names a part or a key that the sample does not have."""


class MissingEntryError(SampleError, KeyError, FileNotFoundError):
    """A store has no file of the name that a sample asks for."""

    __str__ = Exception.__str__


class SkipSample(Exception):
    """Raise this in a hook to leave the sample out. It is counted, with the reason, never silent.

    Example:
        >>> def encode_sample(self, sample):
        ...     if len(sample.caption) > 1000:
        ...         raise SkipSample("caption too long")
        ...     return sample
    """


class FatalSampleError(SampleException):
    """Raise this in a hook (or see it raised) when skipping would be wrong: it ends the iteration.

    Args:
        what, where, fix: as for :class:`EnergonLiteError`.
        details: the traceback of the failure that it is about; shown behind them.
    """

    def __init__(
        self, what: str, *, where: str | os.PathLike[str] | None = None, fix: str | None = None, details: str = ""
    ):
        super().__init__(what, where=where, fix=fix)
        self.details = details
        if details:
            self.args = (f"{self}\n{details.rstrip()}",)


#: Samples that a message names, at most.
_NAMED = 4


def field_of(sample: Any, name: str) -> Any:
    """A field of a sample that may be a dict, or None."""
    return sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)


class FatalStorageError(DatasetError, FatalSampleError):
    """What all samples need cannot be had, so that no sample is to blame: file descriptors, memory, a store that gives
    the bytes it is asked for. It ends the iteration."""


class ShardChangedError(FatalStorageError):
    """A shard is not the one that was indexed: it has another size, or begins in another way. Where its samples are is
    not known any more, so it ends the iteration, too: another sample in the place of each would hide it."""


class DataIndexError(DatasetError, FatalSampleError):
    """An index or a column is damaged, or of a version this library cannot read. Found out while samples are read, it
    ends the iteration: what such a file says about any sample is not to be trusted."""


class WrongHookError(UsageError, FatalSampleError):
    """A hook asks for what it cannot have, for any sample; it ends the iteration."""


class UnlikeError(FatalSampleError):
    """The samples of a batch cannot be put together: they, or a field of theirs, are not alike; ends the iteration.

    Attributes:
        is_named: samples are called by their keys; else by their place in the batch, as "sample 0".
    """

    is_named = True

    def named(self, keys: Sequence[str] | None) -> UnlikeError:
        """The same, with the keys of the samples in place of "sample 0" and so on, if they had none themselves."""
        if self.is_named or keys is None:
            return self

        def key(found: re.Match[str]) -> str:
            place = int(found[1])
            return keys[place] if place < len(keys) else found[0]

        return UnlikeError(re.sub(r"\bsample (\d+)\b", key, self.what), where=self.where, fix=self.fix)


class StateError(EnergonLiteError, ValueError):
    """A saved state cannot be read: not a state, a damaged one, or one of a future format."""


class StateMismatchError(StateError):
    """A saved state belongs to another data set, another configuration or another order."""


class NonFiniteError(EnergonLiteError, FloatingPointError):
    """Losses, gradients or weights of a training run are NaN or infinite, and going on would not cure it."""


class TopologyError(EnergonLiteError, ValueError):
    """Ranks, groups or mesh dimensions do not fit together."""


class WorkerError(EnergonLiteError, RuntimeError):
    """A worker process died or failed in a way that running its job again did not cure."""


def require_at_least(settings: object, section: str, **least: float) -> None:
    """Refuse settings, those that are not None, that are below a number each.

    Raises:
        ConfigError: the first that is.
    """
    for name, number in least.items():
        value = getattr(settings, name)
        what = f"{name} is negative" if number == 0 else f"{name} is below {number}"
        require(value is None or value >= number, what, f"{section}.{name}", f"give a number >= {number}")
