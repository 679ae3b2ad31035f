"""Cost model of a training step: the time of a sample's tokens, images and loss, in nanoseconds; and steps whose
micro-batches are balanced in all of these costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.epochs import keep_apart
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.batching.steps import IMAGES, TOKENS
from energon_lite.batching.transformer_shape import TransformerShape
from energon_lite.errors import UsageError
from energon_lite.extras.balance.even_costs import arrange_costs, even_costs, fit_limits

#: Most micro-batches among which images are swapped, so that none exceeds the limit of images.
_WINDOW = 128


@dataclass(frozen=True)
class StepCosts:
    """Costs of each sample of a chunk.

    Args:
        rows: costs by kind of work, each in its own unit, ``[rows, samples]``.
        lengths: lengths of the samples in tokens, ``[samples]``; a piece of a sample costs its share by length.
        images: images of each sample, ``[samples]``; None: their number is not limited.
        max_images: limit of images in a micro-batch.
    """

    rows: Ints
    lengths: Ints
    images: Ints | None = None
    max_images: int | None = None

    def of(self, batches: MicroBatches, multiple: int = 1) -> Ints:
        """Costs of the entries of micro-batches, ``[1 + rows, entries]``; the first row is attention.

        Each entry is padded to a multiple, and with context parallelism cut into parts of equal cost: a balance of the
        whole entries is a balance of the parts.
        """
        whole = np.maximum(self.lengths[batches.sample], 1)
        length = batches.length
        rows = self.rows[:, batches.sample]
        part = np.where(length == whole, rows, rows // whole * length + rows % whole * length // whole)
        padded = -(-length // multiple) * multiple
        return np.concatenate([(padded * padded)[None], part])

    def of_batches(self, batches: MicroBatches) -> Ints:
        """Costs of micro-batches, ``[2 + rows, micro-batches]``; the first two are tokens and attention, padded."""
        costs = self.of(batches)[1:]
        ends = np.concatenate([np.zeros((len(costs), 1), dtype=np.int64), np.cumsum(costs, axis=1)], axis=1)
        return np.concatenate([batches.space()[None], batches.attention()[None], np.diff(ends[:, batches.offsets])])

    def sizes(self, batches: MicroBatches, capacity: Capacity) -> tuple[Ints, list[int]]:
        """Sizes of entries, ``[limits, entries]``, and the limit of a micro-batch for each row."""
        sizes, limits = [capacity.sizes(batches.length)], [capacity.limit]
        if self.images is not None and self.max_images is not None:
            sizes.append(self.images[batches.sample])
            limits.append(self.max_images)
        return np.stack(sizes), limits

    def even(self, batches: MicroBatches, capacity: Capacity | None, sample: Ints | None) -> MicroBatches:
        """See :class:`~energon_lite.batching.steps.StepBalancer`. The samples of packed micro-batches are
        redistributed (:func:`~energon_lite.extras.balance.even_costs.even_costs`); padded ones are only reordered."""
        if batches.packed and capacity is not None and len(batches.sample):
            even = _evened(batches, capacity, self, sample)
            if even is not None:
                return even
        return batches.select(np.argsort(arrange_costs(self.of_batches(batches)), kind="stable"))

    def within_limits(self, batches: MicroBatches, capacity: Capacity, edges: Sequence[int] = (0,)) -> MicroBatches:
        """See :class:`~energon_lite.batching.steps.StepBalancer`. Images are swapped for text with neighbours
        of the same epoch, which stay within the capacity. If all of them have many images, the number of micro-batches
        grows."""
        sizes, limits = self.sizes(batches, capacity)
        if len(limits) < 2 or not batches.packed or not len(batches):
            return batches
        home = np.repeat(np.arange(len(batches)), batches.rows())
        images = np.bincount(home, weights=sizes[1], minlength=len(batches)).astype(np.int64)
        crowded = (images > limits[1]) & (batches.rows() > 1)
        stretch = np.searchsorted(edges, batches.sample[batches.offsets[:-1]], side="right")
        begins = [*np.flatnonzero(np.diff(stretch, prepend=-1)).tolist(), len(batches)]
        windows = [first for begin, stop in pairwise(begins) for first in range(begin, stop, _WINDOW)]
        parts = []
        for first, stop in pairwise([*windows, len(batches)]):
            part = batches.select(np.arange(first, stop))
            if crowded[first:stop].any():
                sizes, limits = self.sizes(part, capacity)
                home = np.repeat(np.arange(len(part)), part.rows())
                place = fit_limits(sizes, limits, home, len(part))
                part = _put(part, place, int(place.max()) + 1)
            parts.append(part)
        return replace(concatenate(parts, [0] * len(parts)), counts=batches.counts)


def _evened(batches: MicroBatches, capacity: Capacity, costs: StepCosts, sample: Ints | None) -> MicroBatches | None:
    """Balanced micro-batches, in the order of their places; None if copies of a sample cannot be kept apart."""
    sizes, limits = costs.sizes(batches, capacity)
    home = np.repeat(np.arange(len(batches)), batches.rows())
    owner = None if sample is None else np.unique(sample[batches.sample], return_inverse=True)[1]
    if owner is not None and int(owner.max()) + 1 == len(owner):
        owner = None  # no sample repeats in this step
    place = even_costs(costs.of(batches, capacity.multiple), sizes, limits, home, len(batches), owner)
    even = _put(batches, place, len(batches))
    if sample is None or owner is None:
        return even
    sizes, _ = costs.sizes(even, capacity)
    images = sizes[-1] if len(limits) > 1 else np.zeros_like(sizes[0])
    most = limits[-1] if len(limits) > 1 else 0

    def fits(sizes: list[int], images: list[int]) -> bool:
        return sum(sizes) <= limits[0] and sum(images) <= most

    apart = keep_apart(even, sample, sizes[0], images, fits)
    return apart if len(apart) == len(batches) else None


def _put(batches: MicroBatches, place: Ints, count: int) -> MicroBatches:
    """Micro-batches with the entries moved to the given places, ``[entries]``."""
    return batches.regrouped(
        np.argsort(place, kind="stable"), np.bincount(place, minlength=count), later=len(batches.sample)
    )


#: Further names of the sizes of a sample from which its cost is computed. Others may have any other name.
PATCHES = "patches"
SQUARED_PATCHES = "squared_patches"
LOSS_TOKENS = "loss_tokens"
_KNOWN = (TOKENS, IMAGES, PATCHES, SQUARED_PATCHES, LOSS_TOKENS)
#: The sizes of a micro-batch that coefficients multiply: sums over its segments and images.
MICRO_BATCH_NUMBERS = ("squared_tokens", TOKENS, "segments", SQUARED_PATCHES, PATCHES, IMAGES, LOSS_TOKENS)
#: Attoseconds (the unit of coefficients) in a nanosecond (the unit of costs).
_UNIT = 1_000_000_000
#: Largest cost in nanoseconds, about 18 minutes, so that sums over millions of samples fit into 64 bits.
_MOST = 1 << 40
#: Assumed operations per second, if they were not measured: an H100 at 40 % of its peak.
_FLOPS = 4e14


@dataclass(frozen=True)
class Quadratic:
    """The time ``a n^2 + b n + c`` for a sequence of ``n`` positions.

    Args:
        a, b, c: coefficients in attoseconds (10**-18 s), integers of at least 0.

    Example:
        >>> Quadratic(a=2_000_000_000, b=5_000_000_000)  # 2 ns for each pair, 5 ns for each position
        Quadratic(a=2000000000, b=5000000000, c=0)
    """

    a: int = 0
    b: int = 0
    c: int = 0

    def __post_init__(self) -> None:
        _check_coefficients(a=self.a, b=self.b, c=self.c)


@dataclass(frozen=True)
class CostModel:
    """Time that each sample keeps a rank busy, forward and backward, by kind of work.

    A sample is one segment of a packed row, with its tokens (the tokens of its images included) and any number of
    images. The kinds of work are ``language``, ``encoder`` and ``head``, and one for each name in ``columns``.

    All numbers are integers, so that ranks on different machines compute the same costs, and so the same plan.
    Coefficients are in attoseconds (10**-18 s), costs in nanoseconds. Only their proportions affect a plan.

    Args:
        language: time for a segment of ``n`` tokens.
        encoder: time for an image of ``n`` patches.
        head: time for each token that the loss counts.
        micro_batch: fixed time of each micro-batch. It is equal for all, and is part of no sample's cost.
        columns: time for each unit of other sizes of a sample, by name, such as seconds of audio.

    Raises:
        UsageError: a coefficient is not an integer, or is below 0.

    Example:
        >>> model = CostModel(Quadratic(a=10**9, b=4 * 10**9), encoder=Quadratic(b=10**9, c=7 * 10**9), head=10**9)
        >>> sizes = {"tokens": [3, 10], "loss_tokens": [3, 5], "images": [0, 1], "patches": [0, 4]}
        >>> model.kinds, model.costs(sizes).tolist()
        (('language', 'encoder', 'head'), [[21, 140], [0, 11], [3, 5]])
    """

    language: Quadratic
    encoder: Quadratic = field(default_factory=Quadratic)
    head: int = 0
    micro_batch: int = 0
    columns: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_coefficients(head=self.head, micro_batch=self.micro_batch, **self.columns)
        for name in self.columns:
            if name in _KNOWN:
                raise UsageError(f"{name!r} is an argument of its own in a cost model", fix="leave it out of columns")

    def __hash__(self) -> int:
        return hash((self.language, self.encoder, self.head, self.micro_batch, *sorted(self.columns.items())))

    @classmethod
    def of_shape(
        cls,
        language: TransformerShape,
        encoder: TransformerShape | None = None,
        *,
        logits_of_loss_only: bool = False,
        encoder_trained: bool = True,
        flops: float = _FLOPS,
    ) -> CostModel:
        """Cost model derived from the operations of a model. A fitted one is more accurate: kernels differ in speed.

        Args:
            language: the shape of the language model.
            encoder: the shape of the image encoder; None: images cost only the tokens that they become.
            logits_of_loss_only: True: the output layer computes logits only of tokens that the loss counts.
            encoder_trained: False: it is frozen, and its backward pass is left out.
            flops: operations per second, for times in nanoseconds; proportions do not depend on it.

        Example:
            >>> shape = TransformerShape(hidden_size=4096, num_layers=32, num_heads=32, kv_heads=8, ffn_size=14336)
            >>> model = CostModel.of_shape(shape)
            >>> model.costs({"tokens": [1024, 8192]})[0].tolist()  # attention grows faster
            [109265919, 989581209]
        """
        head = language.head_flops
        position = language.position_flops + (0 if logits_of_loss_only else head)
        share = 1.0 if encoder_trained else 1 / 3
        return cls(
            _quadratic(language, position, flops),
            Quadratic() if encoder is None else _quadratic(encoder, encoder.position_flops, flops / share),
            head=round(head / flops * 1e18) if logits_of_loss_only else 0,
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of work: the rows of :meth:`costs`."""
        return ("language", "encoder", "head", *sorted(self.columns))

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the sizes of a sample that :meth:`costs` requires: those with a coefficient above 0."""
        return tuple(dict.fromkeys(name for _, name, _, coefficient in self._terms() if name and coefficient))

    def costs(self, sizes: Mapping[str, Any]) -> Ints:
        """Time of each sample, by kind of work.

        Args:
            sizes: by name, integers ``[samples]``: ``tokens`` of the segment, ``images``, ``patches`` and
                ``squared_patches`` (sums over its images), ``loss_tokens``, and others that are in ``columns``. Sizes
                whose coefficient is 0 may be missing; names that the model does not know are ignored.

        Returns:
            int64 ``[kinds, samples]``, in nanoseconds, rounded down.

        Raises:
            UsageError: a required size is missing, negative, or so large that the cost exceeds the limit.
        """
        given = {name: checked_lengths(values, name) for name, values in sizes.items() if name in self.needs}
        if missing := [name for name in self.needs if name not in given]:
            raise UsageError(
                f"the cost model needs {missing[0]!r} of each sample, which is not there",
                fix="measure it: `energon-lite measure`; or use a model whose coefficient for it is 0",
            )
        samples = len(next(iter(sizes.values()), ()))
        costs = np.zeros((len(self.kinds), samples), dtype=np.int64)
        for row, name, power, coefficient in self._terms():
            if coefficient:
                values = given[name] if name else np.ones(samples, dtype=np.int64)
                costs[row] += _scaled(coefficient, values, power, name)
        return costs

    def balancer(self, sizes: Mapping[str, Ints], max_images: int | None) -> StepCosts:
        """See :class:`~energon_lite.batching.steps.StepCostModel`."""
        images = None if max_images is None else sizes[IMAGES]
        return StepCosts(self.costs(sizes), sizes[TOKENS], images, max_images)

    def image_costs(self, patches: Any) -> Ints:
        """Encoder time for each image, in nanoseconds: int64 ``[images]``.

        Args:
            patches: patches of each image, ``[images]``.

        Example:
            >>> CostModel(Quadratic(), encoder=Quadratic(a=10**9, c=7 * 10**9)).image_costs([4, 16]).tolist()
            [23, 263]
        """
        patches = checked_lengths(patches, PATCHES)
        terms = ((self.encoder.a, 2), (self.encoder.b, 1), (self.encoder.c, 0))
        return sum((_scaled(k, patches, power, PATCHES) for k, power in terms), np.zeros_like(patches))

    def micro_batch_costs(self, sizes: Mapping[str, Any]) -> Ints:
        """Time of each micro-batch, predicted from its sizes; used to judge a fit.

        Args:
            sizes: sums over the samples of each micro-batch, named as in :meth:`costs`, and ``squared_tokens`` and
                ``segments``: integers ``[micro-batches]``.

        Returns:
            int64 ``[micro-batches]``, in nanoseconds.
        """
        count = len(next(iter(sizes.values()), ()))
        total = np.full(count, self.micro_batch // _UNIT, dtype=np.int64)
        for name, coefficient in self.by_feature().items():
            if name != "micro_batches" and coefficient:
                total += _scaled(coefficient, checked_lengths(sizes[name], name), 1, name)
        return total

    def by_feature(self) -> dict[str, int]:
        """The coefficients in attoseconds, by the size of a micro-batch that each one multiplies."""
        return {
            "micro_batches": self.micro_batch,
            "squared_tokens": self.language.a,
            TOKENS: self.language.b,
            "segments": self.language.c,
            SQUARED_PATCHES: self.encoder.a,
            PATCHES: self.encoder.b,
            IMAGES: self.encoder.c,
            LOSS_TOKENS: self.head,
            **{name: self.columns[name] for name in sorted(self.columns)},
        }

    @classmethod
    def from_features(cls, coefficients: Mapping[str, int]) -> CostModel:
        """Build the model from coefficients as :meth:`by_feature` returns them; missing ones are 0.

        Example:
            >>> CostModel.from_features({"tokens": 5, "images": 3, "seconds": 2}).columns
            {'seconds': 2}
        """
        left = dict(coefficients)
        return cls(
            Quadratic(left.pop("squared_tokens", 0), left.pop(TOKENS, 0), left.pop("segments", 0)),
            Quadratic(left.pop(SQUARED_PATCHES, 0), left.pop(PATCHES, 0), left.pop(IMAGES, 0)),
            head=left.pop(LOSS_TOKENS, 0),
            micro_batch=left.pop("micro_batches", 0),
            columns=left,
        )

    def _terms(self) -> Iterator[tuple[int, str, int, int]]:
        """Row, name, power and coefficient of each term; an empty name means a constant for each sample."""
        yield 0, TOKENS, 2, self.language.a
        yield 0, TOKENS, 1, self.language.b
        yield 0, "", 0, self.language.c
        yield 1, SQUARED_PATCHES, 1, self.encoder.a
        yield 1, PATCHES, 1, self.encoder.b
        yield 1, IMAGES, 1, self.encoder.c
        yield 2, LOSS_TOKENS, 1, self.head
        for row, name in enumerate(sorted(self.columns), 3):
            yield row, name, 1, self.columns[name]


def _quadratic(shape: TransformerShape, position: int, flops: float) -> Quadratic:
    # A causal row of n positions has n (n + 1) / 2 pairs.
    pairs = shape.pair_flops / (2 if shape.causal else 1)
    linear = position + (pairs if shape.causal else 0)
    return Quadratic(*(round(time / flops * 1e18) for time in (pairs, linear, shape.sequence_flops)))


def _check_coefficients(**coefficients: int) -> None:
    for name, value in coefficients.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"the coefficient {name} is {value!r}", fix="give an integer of attoseconds, at least 0")


def _scaled(coefficient: int, values: Ints, power: int, name: str) -> Ints:
    """``coefficient * values ** power`` in nanoseconds, rounded down, without overflow of 64 bits."""
    most = int(values.max(initial=0)) ** power
    if coefficient * most // _UNIT > _MOST or most > 1 << 62:
        raise UsageError(
            f"a sample with {int(values.max())} {name or 'segments'} would take {coefficient * most / 1e18:.3g} s",
            fix="check the column, and the unit of the coefficients: attoseconds",
        )
    whole, part = divmod(coefficient, _UNIT)
    high, low = np.divmod(values**power, _UNIT)
    return whole * (high * _UNIT + low) + part * high + part * low // _UNIT
