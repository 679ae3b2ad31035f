"""Random pipelines of each kind of batches: what the laws that hold for all of them are tried on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from energon_lite import SkipSample, TaskEncoder, WorkerConfig, get_train_dataset, get_val_dataset, stateless
from tests.core.laws import token_data
from tests.core.laws.content_encoders import Content
from tests.testing import blend_of, metadataset

#: Sizes of leaves: few, so that their files are written once.
SIZES = st.sampled_from([1, 2, 3, 7, 20, 50, 120])
#: Leaves, each with its weight.
blends = st.lists(st.tuples(SIZES, st.floats(0.01, 10).map(lambda weight: round(weight, 3))), min_size=1, max_size=6)
#: Leaves, each with its repetitions.
repeated = st.lists(
    st.tuples(SIZES, st.sampled_from([1, 2, 3, 0.5, 1.5, 0.1, 2.75, 0.333])), min_size=1, max_size=4
).filter(lambda blend: sum(int(count * Fraction(str(times))) for count, times in blend) >= 8)
#: Leaves of 50 samples, each with weights that change along the run.
scheduled = st.sampled_from(
    [
        ({"linear": {0: 0.9, 30_000: 0.1}}, {"linear": {0: 0.1, 30_000: 0.9}}),
        (1, {0: 0, 100: 2, 333: 0.5}),
        ({0: 1, 64: 0}, {"linear": {0: 1, 500: 3}}, {0: 0, 50: 1}),
    ]
).map(lambda weights: [(50, weight) for weight in weights])
#: Hooks that decide how many samples and batches there are.
contents = st.builds(
    Content,
    salt=st.integers(0, 5),
    yields=st.booleans(),
    skips=st.sampled_from([0, 0, 4, 9]),
    packing=st.sampled_from([None, None, 4, 7]),
    pack_yields=st.booleans(),
    groups=st.sampled_from([0, 0, 2, 3]),
    batch_size=st.sampled_from([None, 1, 2, 3]),
    batch_yields=st.booleans(),
    encoded_yields=st.booleans(),
    late=st.booleans(),
).filter(lambda content: content.decides)


class Noise(TaskEncoder):
    """Samples with randomness of their own, in batches with more of it."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        noise = [float(self.rng.random())]
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "noise": noise}

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        noise = [float(self.rng.random()), *(number for sample in samples for number in sample["noise"])]
        return {"__key__": [sample["__key__"] for sample in samples], "__restore_key__": (), "noise": noise}

    def empty_batch(self, like: Any, rows: int) -> dict[str, Any]:
        return {"__key__": [], "__restore_key__": (), "noise": []}


class Skipping(Noise):
    """Leaves out one sample of four, or fails."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if not self.rng.integers(4):
            raise SkipSample if self.rng.integers(2) else ValueError("broken")
        return super().encode_sample(sample)


class Fewer(token_data.Tokens):
    """Leaves out one sample of four."""

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if not self.rng.integers(4):
            raise SkipSample
        return super().encode_sample(sample)


class Several(token_data.Tokens):
    """None, one or two sequences of each sample."""

    @stateless
    def encode_sample(self, sample: Any) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(int(self.rng.integers(3))):
            yield super().encode_sample(sample)


@dataclass(frozen=True)
class Pipeline:
    """A blend of text leaves, and a way to make batches of it.

    Args:
        leaves: samples of each, and its weight, weights, or repetitions.
        arguments: of ``get_train_dataset``; a task encoder is given as the function that makes it.
        lanes: ranks that it can run on are those that divide this number; None: on any.
        key: of the second of each leaf.
    """

    leaves: list[tuple[int, Any]]
    arguments: Mapping[str, Any]
    lanes: int | None = None
    key: str = "weight"
    seed: int = 0

    def document(self, leaf_of: Callable[..., Any]) -> dict[str, Any]:
        """The metadataset."""
        leaves = [(leaf_of(count, "abcdef"[number]), value) for number, (count, value) in enumerate(self.leaves)]
        if self.key == "weight":
            return blend_of(leaves)
        return metadataset({"blend_epochized": [{"path": str(path), self.key: value} for path, value in leaves]})

    @property
    def worlds(self) -> list[int]:
        return [world for world in range(1, 13) if (world < 9 if self.lanes is None else self.lanes % world == 0)]

    def builder(self, leaf_of: Callable[..., Any]) -> Callable[[WorkerConfig], Any]:
        """The function from a worker configuration to the data set."""
        document = self.document(leaf_of)

        def build(config: WorkerConfig) -> Any:
            config = replace(config, seed_offset=self.seed)
            own = {name: value() if name == "task_encoder" else value for name, value in self.arguments.items()}
            return get_train_dataset(document, worker_config=config, lanes=self.lanes, **own)

        return build


def _fixed(leaves: st.SearchStrategy[Any], key: str = "weight") -> st.SearchStrategy[Pipeline]:
    """Batches of a number of samples, or single samples."""
    arguments = st.tuples(
        st.sampled_from([None, 1, 2, 3, 4, 5, 7]),
        st.sampled_from([(None, None), (1000, 100), (10, 3), (5, 1)]),
        st.sampled_from([Noise, Skipping, TaskEncoder]),
    ).map(
        lambda drawn: {
            "batch_size": drawn[0],
            "shuffle_buffer_size": drawn[1][0],
            "max_samples_per_sequence": drawn[1][1],
            "task_encoder": drawn[2],
        }
    )
    made = st.builds(Pipeline, leaves, arguments, key=st.just(key), seed=st.integers(0, 3))
    # What is left out is replaced from the same leaf.
    return made.filter(
        lambda one: one.arguments["task_encoder"] is not Skipping or all(count >= 7 for count, _ in one.leaves)
    )


def _tokens(chunks: list[int], encoders: list[Any], *, encoded: bool) -> st.SearchStrategy[Pipeline]:
    """Batches by the tokens that are measured, or those of encoded samples."""
    arguments = st.fixed_dictionaries(
        {
            "batch_size": st.none(),
            "batching": token_data.STRATEGIES,
            "chunk_size": st.sampled_from(chunks),
            "task_encoder": st.sampled_from(encoders),
            **({"length_column": st.none()} if encoded else {}),
        }
    )
    sizes = st.sampled_from([7, 50] if encoded else [7, 50, 120])
    few = st.lists(st.tuples(sizes, st.sampled_from([0.3, 1.0])), min_size=1, max_size=3)
    lanes = st.sampled_from([1, 2, 6]) if encoded else st.none()
    return st.builds(Pipeline, few, arguments, lanes)


@st.composite
def _content(draw: st.DrawFn, *, packs: bool) -> Pipeline:
    """Batches that hooks decide on, of chunks of some buffers of packing if there are any."""
    content, chunk = draw(contents.filter(lambda one: bool(one.packing) == packs)), draw(st.integers(1, 12))
    arguments = content.arguments() | {
        "task_encoder": content.encoder,
        "chunk_size": chunk * (content.packing or 4),
        "chunk_remainder": draw(st.sampled_from([None, None, None, "keep", "drop"])),
    }
    leaves = [(draw(st.sampled_from([5, 13, 50])), 1.0)]
    return Pipeline(leaves, arguments, draw(st.sampled_from([1, 2, 3, 4, 6, 12])))


KINDS: dict[str, st.SearchStrategy[Pipeline]] = {
    "fixed": _fixed(blends),
    "weights that change": _fixed(scheduled),
    "repetitions": _fixed(repeated, "repetitions"),
    "tokens": _tokens([11, 40, 1000], [token_data.Tokens, Fewer], encoded=False),
    "encoded tokens": _tokens([7, 20, 200], [token_data.Tokens, Several], encoded=True),
    "content": _content(packs=False),
    "packs": _content(packs=True),
}


def training(path: Any, **arguments: Any) -> Callable[[WorkerConfig], Any]:
    """The function from a worker configuration to ``get_train_dataset(path, **arguments)``."""
    return lambda config: get_train_dataset(path, worker_config=config, **arguments)


def validation(path: Any, **arguments: Any) -> Callable[[WorkerConfig], Any]:
    """The same of ``get_val_dataset``."""
    return lambda config: get_val_dataset(path, worker_config=config, **arguments)


def in_step(loaders: Iterable[Any]) -> list[Any]:
    """The micro-batches of a pass, step by step; all ranks have as many."""
    per_rank = [list(loader) for loader in loaders]
    assert len({len(batches) for batches in per_rank}) == 1
    return [batch for step in zip(*per_rank, strict=True) for batch in step]


def dealt(loaders: Iterable[Any], count: int) -> list[Any]:
    """The first micro-batches of a run, in the order of the whole run."""
    with ExitStack() as stack:
        ranks = [iter(stack.enter_context(loader)) for loader in loaders]
        return [next(rank) for _, rank in zip(range(count), itertools.cycle(ranks), strict=False)]
