"""Exceptions of the library.

A message has three parts: *what* is wrong, *where* (a path, a line of YAML, a sample), and *what to do*.
:class:`EnergonLiteError` builds the message from these parts, so that none is forgotten, and keeps them as attributes
for programs.

Two classes are not errors of the library but signals from a user's hook: :class:`SkipSample` (leave this sample out)
and :class:`FatalSampleError` (end the run, do not skip).
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
    *("ConfigError", "DataIndexError", "DatasetError", "DecodeError", "EmptyDatasetError", "EnergonLiteError"),
    *("FatalSampleError", "FatalStorageError", "FieldAccessError", "MissingEntryError", "MissingShardError"),
    *("NonFiniteError", "NotPreparedError", "SampleError", "SampleException", "ShardChangedError"),
    *("ShardFormatError", "SkipSample", "StateError", "StateMismatchError", "TopologyError", "TrustError"),
    *("UnknownLengthError", "UnlikeError", "UsageError", "WorkerError", "WrongHookError"),
    *("at_least_one", "check_choice"),
    *("counted", "did_you_mean", "field_of", "listed", "nearest", "require"),
]


def nearest(word: object, choices: Iterable[object]) -> str | None:
    """Return the choice most similar to ``word``, or None if none is similar enough.

    Example:
        >>> nearest("weigth", ["path", "weight"])
        'weight'
    """
    matches = get_close_matches(str(word), [str(choice) for choice in choices], n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: object, choices: Iterable[object], otherwise: str, *, always: bool = False) -> str:
    """Return a question for the choice most similar to ``word``; or ``otherwise``, if none is similar enough.

    Args:
        word: the user's word.
        choices: the valid words.
        otherwise: the hint without a similar choice.
        always: append ``otherwise`` to the question as well.

    Example:
        >>> did_you_mean("weigth", ["path", "weight"], "there are: path, weight")
        "did you mean 'weight'?"
    """
    close = nearest(word, choices)
    if close is None:
        return otherwise
    return f"did you mean {close!r}?" + (f" {otherwise}" if always else "")


def counted(count: int, noun: str) -> str:
    """Format a number with its noun, such as "1 shard" and "1,200 batches"."""
    end = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{end}"


def listed(names: Sequence[object], most: int = 8, count: int = 0) -> str:
    """Format the first names of a list, and the number of the others.

    Args:
        names: all names, or the first of them.
        most: number of names to show.
        count: total number, if ``names`` is not complete.

    Example:
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    more = max(count, len(names)) - most
    return ", ".join(map(str, names[:most])) + (f" and {more:,} more" if more > 0 else "")


class EnergonLiteError(Exception):
    """Base class of all errors raised by energon_lite.

    Args:
        what: the mistake in one sentence.
        where: the place: a path, ``file:line:column``, a sample's key.
        fix: instruction to the user.
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
        # Workers send exceptions to other processes by pickle, which does not support keyword-only arguments by itself.
        return (copyreg.__newobj__, (type(self),), self.__dict__ | {"args": self.args})  # type: ignore[attr-defined]


class UsageError(EnergonLiteError, ValueError):
    """A function was called with arguments that cannot work (or cannot work together)."""


class UnknownLengthError(UsageError, TypeError):
    """The number of batches is unknown. Also a TypeError, because ``list()`` and progress bars expect that."""


class ConfigError(EnergonLiteError, ValueError):
    """A mistake in a configuration document (YAML), with its exact place.

    Args:
        what: the mistake in one sentence.
        file: the document.
        line: line number, counted from 1.
        column: column number, counted from 1.
        at: path inside the document, e.g. ``splits.train.blend[1].weight``.
        expected: description of a correct value.
        found: description of the actual value.
        choices: valid keys or values; the nearest one is suggested.
        suggest_for: the word to find a suggestion for; None: no suggestion.
        fix: instruction if there is no suggestion; made from ``choices`` or ``expected`` if not given.
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
        self.line = line
        self.column = column
        self.at = at
        self.expected = expected
        self.found = found
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
    """Refuse an invalid setting.

    Raises:
        ConfigError: ``good`` is False; with ``what``, at the setting ``at``.
    """
    if not good:
        raise ConfigError(what, at=at, fix=fix)


def require_choice(value: object, choices: Iterable[object], what: str, at: str) -> None:
    """Refuse a setting that is not one of its possible values.

    Raises:
        ConfigError: the value is not among them; with ``what``, at the setting ``at``, and the nearest one.
    """
    if value not in choices:
        raise ConfigError(what, at=at, choices=[*choices], suggest_for=value)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse an argument that is not one of its possible values.

    Raises:
        UsageError: the value is not among them; the message lists them, or the nearest one.
    """
    if value not in choices:
        known = f"give one of {', '.join(map(repr, choices))}"
        raise UsageError(f"{name} is {value!r}", fix=did_you_mean(value, choices, known))


def at_least_one(fix: str = "give an integer, at least 1", **settings: int | None) -> None:
    """Refuse settings below 1, and what is no integer; None passes."""
    for name, value in settings.items():
        if value is not None and (not hasattr(value, "__index__") or value < 1):
            raise UsageError(f"{name} is {value!r}", fix=fix)


class TrustError(ConfigError):
    """A document requires code to be imported or run, without ``trust_code=True``."""


class DatasetError(EnergonLiteError):
    """A data set on disk cannot be used in its present state."""


class NotPreparedError(DatasetError, FileNotFoundError):
    """The folder has no ``.nv-meta`` (or an unfinished one)."""

    __str__ = Exception.__str__


class MissingShardError(DatasetError, FileNotFoundError):
    """A shard that the data set names does not exist."""

    __str__ = Exception.__str__


class ShardFormatError(DatasetError):
    """A shard is not a readable tar file (truncated, damaged, compressed)."""


class EmptyDatasetError(DatasetError):
    """There are no samples to read, or too few: an empty split, fewer samples than ranks."""


class SampleException(EnergonLiteError, ValueError):
    """Base class of errors about a sample. Raised by a hook, it counts as a failure of the sample.

    Args:
        what, where, fix: as for :class:`EnergonLiteError`.
    """

    @classmethod
    def from_sample(cls, sample: Any, message: str = "") -> Self:
        """Make an error that names a sample, or the samples of a list, by key and place.

        Example:
            >>> def encode_sample(self, sample):
            ...     try:
            ...         return tokenize(sample.text)
            ...     except LicenseError as error:
            ...         raise FatalSampleError.from_sample(sample, "no license for the tokenizer") from error
        """
        samples = sample if isinstance(sample, list) else [sample]
        keys = listed([field_of(failed, "__key__") or type(failed).__name__ for failed in samples], _NAMED)
        places = [
            f"{source.dataset_path}[{source.index}] {source.shard_name}"
            for failed in samples[:_NAMED]
            for source in field_of(failed, "__sources__") or ()
        ]
        return cls(f"sample {keys} failed" + (f": {message}" if message else ""), where="; ".join(places) or None)

    @classmethod
    def from_sample_key(cls, sample_key: str) -> Self:
        """Make an error that names a sample by its key."""
        return cls(f"sample {sample_key} failed")


class SampleError(SampleException):
    """A sample cannot be made. In a loader it is counted, and replaced or left out."""


class DecodeError(SampleError):
    """A part of a sample cannot be decoded."""


class FieldAccessError(SampleError):
    """A ``field_map`` names a part or a key that the sample does not have."""


class MissingEntryError(SampleError, KeyError, FileNotFoundError):
    """A store has no file with the name that a sample requires."""

    __str__ = Exception.__str__


class SkipSample(Exception):
    """Signal from a hook to leave the sample out. The skip is counted, with its reason.

    Example:
        >>> def encode_sample(self, sample):
        ...     if len(sample.caption) > 1000:
        ...         raise SkipSample("caption too long")
        ...     return sample
    """


class FatalSampleError(SampleException):
    """Error of a sample that must not be skipped: it ends the iteration. Hooks may raise it, too.

    Args:
        what, where, fix: as for :class:`EnergonLiteError`.
        details: traceback of the underlying failure, appended to the message.
    """

    def __init__(
        self, what: str, *, where: str | os.PathLike[str] | None = None, fix: str | None = None, details: str = ""
    ):
        super().__init__(what, where=where, fix=fix)
        self.details = details
        if details:
            self.args = (f"{self}\n{details.rstrip()}",)


#: Largest number of samples that a message names.
_NAMED = 4


def field_of(sample: Any, name: str) -> Any:
    """Return a field of a sample or an entry of a dict; None if it is missing."""
    return sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)


class FatalStorageError(DatasetError, FatalSampleError):
    """A resource that all samples need is not available; it ends the iteration.

    Examples are file descriptors, memory, and a store that returns the requested bytes.
    """


class ShardChangedError(FatalStorageError):
    """A shard differs from the indexed one, by its size, its first bytes, or its version in a store; it ends the run.

    The places of its samples are unknown, and replacing each of them by another sample would hide that.
    """


class DataIndexError(DatasetError, FatalSampleError):
    """An index or a column is damaged, or has a version that this library cannot read.

    If that is detected while samples are read, it ends the iteration: such a file is unreliable for every sample.
    """


class WrongHookError(UsageError, FatalSampleError):
    """A hook requests a value that no sample can provide; it ends the iteration."""


class UnlikeError(FatalSampleError):
    """The samples of a batch, or values of one field, differ too much to be collated; it ends the iteration.

    Attributes:
        is_named: True if the message has the samples' keys; False: their indices in the batch, as "sample 0".
    """

    is_named = True

    def named(self, keys: Sequence[str] | None) -> UnlikeError:
        """Return the same error with the samples' keys in place of "sample 0" etc., if it has no keys."""
        if self.is_named or keys is None:
            return self

        def key(match: re.Match[str]) -> str:
            place = int(match[1])
            return keys[place] if place < len(keys) else match[0]

        return UnlikeError(re.sub(r"\bsample (\d+)\b", key, self.what), where=self.where, fix=self.fix)


class StateError(EnergonLiteError, ValueError):
    """A saved state cannot be read: it is no state, is damaged, or has a newer format."""


class StateMismatchError(StateError):
    """A saved state belongs to another data set, another configuration or another order."""


class NonFiniteError(EnergonLiteError, FloatingPointError):
    """Losses, gradients or weights of a training run are NaN or infinite, and continuing would not help."""


class TopologyError(EnergonLiteError, ValueError):
    """Ranks, groups or mesh dimensions are inconsistent."""


class WorkerError(EnergonLiteError, RuntimeError):
    """A worker process died or failed, and running its job again failed as well."""


def require_at_least(settings: object, section: str, **least: float) -> None:
    """Refuse settings below their lower bounds; settings that are None pass.

    Raises:
        ConfigError: a setting is too small; the first one is reported.
    """
    for name, number in least.items():
        value = getattr(settings, name)
        what = f"{name} is negative" if number == 0 else f"{name} is below {number}"
        require(value is None or value >= number, what, f"{section}.{name}", f"give a number >= {number}")
