"""The user's side of the pipeline: what is done to each sample, and how samples become a batch.

    parts --decode--> sample --(cook)--> sample --encode_sample--> encoded --batch--> raw batch --encode_batch--> batch

A hook may raise :class:`~energon_lite.SkipSample`; any other exception counts as a failed sample. Hooks run in worker
processes, for any sample, in any order, perhaps twice (when a worker died): they should depend on their arguments and
on ``self.rng`` only. A hook that draws from Python's, numpy's or torch's *global* generators is marked
``@stateless(restore_seeds=True)``; it then finds them seeded for this very sample, and leaves them as they were.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar, overload

import numpy as np

from energon_lite.batching.collate import empty_like, generic_batch
from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints
from energon_lite.samples import BASE_FIELDS, CrudeSample, Sample
from energon_lite.sources.decoding import SampleDecoder

__all__ = [
    "Cooker",
    "DefaultTaskEncoder",
    "HookContext",
    "TaskEncoder",
    "basic_sample_keys",
    "cooker",
    "hook_context",
    "stateless",
]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class HookContext:
    """What a running hook can ask about where it is: indices and its own randomness.

    Args:
        origin: integers that tell this sample (or batch) from all others: the seed of the run, the leaf, the epoch,
            the index. Their hash seeds all of the hook's randomness; it is made when first asked for.
        sample_index: number of the sample in its leaf's stream (epoch * length + index), in sample hooks.
        batch_index: number of the micro-batch in its pass, counted over all ranks.
    """

    __slots__ = ("_origin", "_rng", "batch_index", "sample_index")

    def __init__(self, *origin: int, sample_index: int | None = None, batch_index: int | None = None):
        self._origin = origin
        self.sample_index = sample_index
        self.batch_index = batch_index
        self._rng: np.random.Generator | None = None

    @property
    def seed(self) -> int:
        """64 bits."""
        return hash_ints(*self._origin)

    @property
    def rng(self) -> np.random.Generator:
        """Made at the first call; goes on from there within one hook's run."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(key=self.seed))
        return self._rng


_context: ContextVar[HookContext | None] = ContextVar("energon_lite_hook", default=None)


class hook_context:
    """Run hooks as the loader does; tests of task encoders may use it too.

    Example:
        >>> with hook_context(HookContext(1)):
        ...     encoded = encoder.encode_sample(sample)
    """

    __slots__ = ("_context", "_token")

    def __init__(self, context: HookContext):
        self._context = context

    def __enter__(self) -> HookContext:
        self._token = _context.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _context.reset(self._token)


def _current(what: str) -> HookContext:
    context = _context.get()
    if context is None:
        raise UsageError(
            f"{what} was asked for outside of a hook",
            fix="use it in encode_sample, batch or encode_batch while a loader runs them, or inside hook_context(...)",
        )
    return context


# -- stateless ------------------------------------------------------------------------------------------------------


@overload
def stateless(fn: F) -> F: ...


@overload
def stateless(*, restore_seeds: bool = False, failure_tolerance: int | None = None) -> Callable[[F], F]: ...


def stateless(fn: F | None = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None) -> Any:
    """Mark a hook as a pure function of its arguments and of its randomness.

    Args:
        restore_seeds: seed the global generators of ``random``, ``numpy.random`` and ``torch`` (CPU) for this very
            sample or batch before the hook runs, and put the caller's generators back afterwards.
        failure_tolerance: has no effect, with a warning; set ``TaskEncoder.failure_tolerance``.

    Example:
        >>> class Encoder(TaskEncoder):
        ...     @stateless(restore_seeds=True)
        ...     def encode_sample(self, sample):
        ...         return jitter(sample, random.random())
    """
    if failure_tolerance is not None:
        logger.warning("stateless(failure_tolerance=...) has no effect: set failure_tolerance of the task encoder")
    if fn is None:
        return functools.partial(stateless, restore_seeds=restore_seeds)
    if not restore_seeds:
        fn.__stateless__ = True  # type: ignore[attr-defined]
        return fn

    @functools.wraps(fn)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        context = _context.get()
        if context is None:  # called by the user, outside of a loader: nothing to seed from
            return fn(*args, **kwargs)
        with _seeded_globals(context.seed):
            return fn(*args, **kwargs)

    seeded.__stateless__ = True  # type: ignore[attr-defined]
    return seeded


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    import torch

    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        # Not torch.manual_seed: that would also touch the CUDA generators.
        torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])


# -- cooking --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cooker:
    """How crude samples become samples.

    Args:
        cook: ``(crude sample) -> sample``.
        has_subflavors: only for data sets whose subflavors contain all of these entries; None: for all.
    """

    cook: Callable[..., Any]
    has_subflavors: dict[str, Any] | None = None

    def is_match(self, subflavors: dict[str, Any] | None) -> bool:
        """Whether this cooker is meant for a data set with these subflavors."""
        given = subflavors or {}
        return all(key in given and given[key] == value for key, value in (self.has_subflavors or {}).items())


def cooker(fn: F) -> F:
    """Mark a function as a cooker: a pure function that makes a sample out of a crude one."""
    return stateless(fn)


def basic_sample_keys(sample: CrudeSample | Sample) -> dict[str, Any]:
    """The base fields (key, restore key, subflavors, sources) of a sample, to be passed on to the one made of it.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    if isinstance(sample, dict):
        return {name: sample.get(name) for name in BASE_FIELDS}
    return {name: getattr(sample, name) for name in BASE_FIELDS}


# -- the encoder ----------------------------------------------------------------------------------------------------

#: Hooks of Energon in which a hook decides how many samples there are.
_CONTENT_HOOKS = (
    "preencode_sample",
    "select_samples_to_pack",
    "postencode_sample",
    "pack_selected_samples",
    "batch_group_criterion",
)


#: Methods of Energon that build its pipeline.
_BUILDERS = (
    "build_batch",
    "build_cook_crude_sample",
    "build_encode_sample",
    "build_train_datasets",
    "build_val_datasets",
)


class TaskEncoder:
    """Override what your task needs; what is not overridden costs nothing.

    Attributes:
        decoder: how parts become values; None gives hooks the raw bytes.
        cookers: for crude data sets; the first one that matches the data set's subflavors is used.
        failure_tolerance: so many samples failing in a row end the iteration; 0: no limit.

    Example:
        >>> class Captions(TaskEncoder):
        ...     def encode_sample(self, sample: CaptioningSample) -> dict:
        ...         return {"image": sample.image, "tokens": tokenize(sample.caption)}
    """

    decoder: SampleDecoder | None = SampleDecoder()
    cookers: ClassVar[Sequence[Cooker]] = ()
    failure_tolerance: int = 100

    @stateless
    def cook_crude_sample(self, sample: Any, cooker: Cooker) -> Any:
        """Make a sample out of a crude one; the default calls the cooker's function."""
        return cooker.cook(sample)

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        """Turn one sample into what shall go into a batch. May raise SkipSample."""
        return sample

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        """Turn encoded samples (at least one) into a batch."""
        return self._batch(samples, None)

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        """Last touch on a batch, in the worker."""
        return batch

    def empty_batch(self, like: Any, rows: int) -> Any:
        """A batch without samples, for ranks that have none left at the end of a finite pass.

        Args:
            like: what ``encode_batch`` returned for ``rows`` samples of the same data.
            rows: see above.
        """
        return empty_like(like, rows)

    @property
    def rng(self) -> np.random.Generator:
        """The running hook's own generator: equal for the same sample (or batch) whenever and wherever it is made."""
        return _current("rng").rng

    @property
    def current_sample_index(self) -> int:
        """Number of the sample in its leaf's stream: epoch * length + index."""
        index = _current("current_sample_index").sample_index
        if index is None:
            raise UsageError("current_sample_index was asked for in a batch hook", fix="use current_batch_index there")
        return index

    @property
    def current_batch_index(self) -> int:
        """Number of the micro-batch that is being made, counted over all ranks of the pass."""
        index = _current("current_batch_index").batch_index
        if index is None:
            raise UsageError(
                "current_batch_index was asked for in a sample hook",
                fix="a sample does not depend on its batch; use rng",
            )
        return index

    def _batch(self, samples: list[Any], result_type: type | None) -> Any:
        """Collate field by field into ``result_type``, or into the samples' own type."""
        if result_type is None:
            return generic_batch(samples)
        if dataclasses.is_dataclass(result_type) and hasattr(result_type, "from_samples"):
            return result_type.from_samples(samples)
        return _fill(result_type, generic_batch(samples))


class DefaultTaskEncoder(TaskEncoder):
    """Copies fields by name into the given types; batches by padding and stacking tensors, listing everything else.

    Args:
        encoded_sample_type: dataclass, named tuple or ``dict`` that ``encode_sample`` makes; None: the sample itself.
        raw_batch_type: what ``batch`` makes.
        batch_type: what ``encode_batch`` makes.
    """

    def __init__(
        self,
        *,
        encoded_sample_type: type | None = None,
        raw_batch_type: type | None = None,
        batch_type: type | None = None,
    ):
        self.encoded_sample_type = encoded_sample_type
        self.raw_batch_type = raw_batch_type
        self.batch_type = batch_type

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample if self.encoded_sample_type is None else _fill(self.encoded_sample_type, sample)

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        return self._batch(samples, self.raw_batch_type)

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        return batch if self.batch_type is None else _fill(self.batch_type, batch)


def _fields_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    raise UsageError(
        f"fields cannot be copied from a {type(value).__name__}", fix="use a dataclass, a named tuple or a dict"
    )


def _fill(cls: type, value: Any) -> Any:
    """An instance of ``cls`` from the fields of ``value`` that have the same names."""
    given = _fields_of(value)
    if cls is dict:
        return given
    names: list[str] = (
        [f.name for f in dataclasses.fields(cls)]
        if dataclasses.is_dataclass(cls)
        else list(getattr(cls, "_fields", ()))
    )
    if not names:
        raise UsageError(f"{cls.__name__} has no fields", fix="give a dataclass, a named tuple or dict")
    return cls(**{name: given[name] for name in names if name in given})


def check_hooks(encoder: TaskEncoder) -> None:
    """Refuse, when the data set is built, an encoder with hooks that this loader would not call as meant.

    Raises:
        UsageError: names the hook.
    """
    if not isinstance(encoder, TaskEncoder):
        raise UsageError(
            f"task_encoder is a {type(encoder).__name__}",
            fix="derive it from energon_lite.TaskEncoder, and give an instance",
        )
    cls = type(encoder)
    for name in _CONTENT_HOOKS:
        if hasattr(cls, name):
            raise UsageError(f"{cls.__name__}.{name} is not supported yet", fix="use encode_sample and batch")
    for name in _BUILDERS:
        if hasattr(cls, name):
            raise UsageError(
                f"{cls.__name__}.{name} would not be called: there is no pipeline of wrappers to build here",
                fix="do it in encode_sample, batch or encode_batch",
            )
    if hasattr(cls, "__default_failure_tolerance__"):
        raise UsageError(
            f"{cls.__name__}.__default_failure_tolerance__ has no effect", fix="set failure_tolerance instead"
        )
    if len(inspect.signature(cls.cook_crude_sample).parameters) != 3:
        raise UsageError(
            f"{cls.__name__}.cook_crude_sample is called with (sample, cooker)",
            fix="take these two; auxiliary data is not supported yet",
        )
    for name in ("cook_crude_sample", "encode_sample", "batch", "encode_batch"):
        if inspect.isgeneratorfunction(inspect.unwrap(getattr(cls, name))):
            raise UsageError(
                f"{cls.__name__}.{name} is a generator; hooks that yield several samples are not supported yet",
                fix="return one value",
            )
