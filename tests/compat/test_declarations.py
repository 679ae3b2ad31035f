"""Declarations that a seed makes, read by the installed Megatron-Energon and by us: in one pass, the same samples, with
the same fields, types and values; and the same shares in a blend."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from energon_lite.config import load_metadataset
from energon_lite.errors import EnergonLiteError

sys.path.insert(0, str(Path(__file__).parent))

from declarations import JOINERS, declaration, make_data

pytest.importorskip("megatron.energon")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
#: What is in the quick suite, and what is behind ``-m nightly``.
QUICK, ALL = 64, 1200


@pytest.fixture(scope="session")
def mended() -> Iterator[None]:
    """Energon with ``nonmatch: none`` as it is documented: 7.4.1 looks for the sample that is not there, and fails."""
    from megatron.energon.flavors.webdataset.itar_reader import ITarReader

    read = ITarReader._get_item_by_sample_pointer

    def read_if_there(self: Any, sample_pointer: Any, *more: Any, **others: Any) -> Any:
        return None if sample_pointer.tar_file_id < 0 else read(self, sample_pointer, *more, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ITarReader, "_get_item_by_sample_pointer", read_if_there)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, tools: Any, mended: None) -> Iterator[tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("declared")
    (root / "joiners_of_tests.py").write_text(JOINERS)
    sys.path.insert(0, str(root))
    yield make_data(root, tools), tools
    sys.path.remove(str(root))


def energon_one_pass(path: Path, split: str, repeats: bool) -> list[Any]:
    """The samples of one pass, or of one epoch of a ``blend_epochized``, as Energon reads them."""
    from megatron.energon import (
        Cooker,
        Sample,
        TaskEncoder,
        WorkerConfig,
        edataclass,
        get_loader,
        get_train_dataset,
        get_val_dataset,
        stateless,
    )
    from megatron.energon import basic_sample_keys as base
    from megatron.energon.epathlib import EPath
    from megatron.energon.metadataset.loader import prepare_metadataset

    @edataclass
    class Cooked(Sample):  # type: ignore[misc]
        crude: dict[str, Any]

    @stateless
    def cook(sample: dict[str, Any]) -> Cooked:
        return Cooked(**base(sample), crude=dict(sample))

    class Encoder(TaskEncoder):  # type: ignore[misc]
        cookers = [Cooker(cook)]

    prepare_metadataset(EPath(path))
    config: dict[str, Any] = {
        "split_part": split,
        "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0),
        "batch_size": None,
        "task_encoder": Encoder(),
    }
    if repeats:
        dataset = get_train_dataset(
            str(path), shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False, **config
        )
    else:
        dataset = get_val_dataset(str(path), **config)
    return [*get_loader(dataset)]


def our_one_pass(path: Path, split: str, repeats: bool) -> list[Any]:
    from energon_lite import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, get_val_dataset

    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return sample

    config: dict[str, Any] = {
        "split_part": split,
        "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0),
        "batch_size": None,
        "task_encoder": Encoder(),
        "trust_code": True,
    }
    dataset = get_train_dataset(path, repeat=False, **config) if repeats else get_val_dataset(path, **config)
    return [*get_loader(dataset)]


def compare(data: tuple[Path, Any], seed: int) -> str:
    """Read a declaration both ways; returns in a word what came of it."""
    (root, tools), document = data, declaration(seed)
    (split,) = document["splits"]
    path = root / f"declared-{seed}.yaml"
    path.write_text(json.dumps(document))
    repeats = "blend_epochized" in document["splits"][split]
    try:
        theirs = [tools.plain(sample) for sample in energon_one_pass(path, split, repeats)]
    except Exception as error:
        try:
            our_one_pass(path, split, repeats)
        except EnergonLiteError:
            return f"both refuse: {type(error).__name__}"
        raise AssertionError(f"Energon refuses {document}") from error
    ours = [tools.plain(sample) for sample in our_one_pass(path, split, repeats)]
    for sample in (*theirs, *ours):
        # Energon's from_joined has the first sample's source twice; its JSONL samples have None for no subflavors.
        sample["__sources__"] = tuple(dict.fromkeys(sample["__sources__"]))
        sample["__subflavors__"] = sample["__subflavors__"] or {}
    theirs, ours = sorted(theirs, key=_place), sorted(ours, key=_place)
    assert [_place(sample) for sample in ours] == [_place(sample) for sample in theirs], document
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert same(tools, one[name], other[name]), (document, one["__key__"], name, one[name], other[name])
    if "blend" in document["splits"][split]:
        assert energon_weights(path, split) == pytest.approx(our_weights(path, split))
    return "equal"


def _place(sample: dict[str, Any]) -> tuple[str, ...]:
    labels = sorted(map(str, sample["__subflavors__"].items()))
    joined = str(sample.get("listed")), str(sample.get("named"))
    return sample["__key__"], str(sample["__sources__"]), str(labels), *joined, *sorted(sample)


def same(tools: Any, one: Any, other: Any) -> bool:
    """Equal to the last bit, in lists and dicts too."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(tools, one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, repeat(tools), one, other))
    found: bool = tools.equal(one, other)
    return found


def energon_weights(path: Path, split: str) -> list[float]:
    from megatron.energon import WorkerConfig
    from megatron.energon.metadataset.loader import load_dataset

    loaded = load_dataset(str(path)).get_datasets(
        training=True, split_part=split, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    return [one.weight for one in loaded.datasets]


def our_weights(path: Path, split: str) -> list[float]:
    return [leaf.weight for leaf in load_metadataset(path, split_part=split)]


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_declaration(data: tuple[Path, Any], seed: int) -> None:
    compare(data, seed)


def test_declarations_behind_a_url(data: tuple[Path, Any]) -> None:
    """The same documents and data in a store give the same samples, in the same order."""
    import fsspec

    (root, tools), store = data, fsspec.filesystem("memory")
    seeds = range(0, QUICK, 5)
    documents = {seed: declaration(seed) for seed in seeds}
    local = {}
    for seed, document in documents.items():
        (root / f"declared-{seed}.yaml").write_text(json.dumps(document))
        local[seed] = _ours_or_error(root / f"declared-{seed}.yaml", document)
    for path in root.rglob("*"):
        if path.is_file():
            store.pipe_file(f"/declared/{path.relative_to(root)}", path.read_bytes())
    try:
        for seed, document in documents.items():
            found = _ours_or_error(f"memory://declared/declared-{seed}.yaml", document)
            if isinstance(found, str) or isinstance(local[seed], str):
                assert found == local[seed]
                continue
            assert len(found) == len(local[seed])
            for one, other in zip(found, local[seed], strict=True):
                assert same(tools, tools.plain(one), tools.plain(other)), document
    finally:
        store.store.clear()
        store.pseudo_dirs[:] = [""]


def _ours_or_error(path: Any, document: dict[str, Any]) -> Any:
    (split,) = document["splits"]
    try:
        return our_one_pass(path, split, "blend_epochized" in document["splits"][split])
    except EnergonLiteError as error:
        return type(error).__name__


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(QUICK, ALL, 32))
def test_many_declarations(data: tuple[Path, Any], start: int) -> None:
    for seed in range(start, start + 32):
        compare(data, seed)


def test_declarations_are_worth_comparing(data: tuple[Path, Any]) -> None:
    """Most of them are read, and all kinds of them."""
    documents = [declaration(seed) for seed in range(QUICK)]
    texts = [str(document) for document in documents]
    for word in (
        "'join': {",
        "'join': [",
        "blend_epochized",
        "'subset'",
        "nonmatch': 'none",
        "OCRSample",
        "bound.yaml",
    ):
        assert sum(word in text for text in texts) >= 3, word
    assert sum(compare(data, seed) == "equal" for seed in range(8)) >= 4
