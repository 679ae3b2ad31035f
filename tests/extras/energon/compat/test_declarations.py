"""Declarations that a seed makes, read by the installed Megatron-Energon and by us: in one pass, the same samples, with
the same fields, types and values; and the same shares in a blend."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import megatron.energon
import pytest
import torch
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from megatron.energon.metadataset.loader import load_dataset, prepare_metadataset

import energon_lite
from energon_lite.config.metadataset import load_metadataset
from energon_lite.errors import EnergonLiteError
from energon_lite.extras.remote.remote_files import read_file
from tests.extras.energon.compat.declarations import JOINERS, cookers, declaration, make_data, written
from tests.testing import nightly_but

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
#: What is in the quick suite, and what is behind ``-m nightly``.
QUICK, ALL = 64, 1200


@pytest.fixture(scope="session")
def mended() -> Iterator[None]:
    """Energon with ``nonmatch: none`` as it is documented: 7.4.1 looks for the sample that is not there, and fails."""
    read = ITarReader._get_item_by_sample_pointer

    def read_if_there(self: Any, sample_pointer: Any, *more: Any, **others: Any) -> Any:
        return None if sample_pointer.tar_file_id < 0 else read(self, sample_pointer, *more, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ITarReader, "_get_item_by_sample_pointer", read_if_there)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """Energon's loaders collect garbage when they begin, which takes most of the time of so small data sets."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("collect", "freeze", "unfreeze"):
            patch.setattr(gc, name, lambda *_: 0)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tools: Any, mended: None) -> Iterator[tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("declared")
    (root / "joiners_of_tests.py").write_text(JOINERS)
    sys.path.insert(0, str(root))
    make_data(root, tools)
    store = fsspec.filesystem("memory")
    for path in root.rglob("*"):
        if path.is_file():
            store.pipe_file(f"/declared/{path.relative_to(root)}", path.read_bytes())
    yield root, tools
    sys.path.remove(str(root))
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def one_pass(lib: Any, path: Path | str, split: str, repeats: bool, **more: Any) -> list[Any]:
    """The samples of one pass, or of one epoch of a ``blend_epochized``, as a library reads them."""

    class Encoder(lib.DefaultTaskEncoder):
        cookers = cookers(lib)

        def encode_sample(self, sample: Any) -> Any:
            return sample

    more |= {"worker_config": lib.WorkerConfig(rank=0, world_size=1, num_workers=0), "split_part": split}
    more |= {"batch_size": None, "task_encoder": Encoder()}
    if repeats:
        more |= {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}
    dataset = (lib.get_train_dataset if repeats else lib.get_val_dataset)(str(path), **more)
    return [*lib.get_loader(dataset)]


def compare(data: tuple[Path, Any], seed: int) -> str:
    """Read a declaration both ways; returns in a word what came of it."""
    root, document = data[0], declaration(seed)
    (split,) = document["splits"]
    path = root / f"declared-{seed}.yaml"
    path.write_text(written(document, root))
    ours_at: Path | str = path
    if seed % 7 == 5:
        ours_at = f"file://{path}"
    elif seed % 7 == 6 and "ROOT" not in json.dumps(document):  # paths from the document only
        ours_at = f"memory://declared/{path.name}"
        fsspec.filesystem("memory").pipe_file(f"/declared/{path.name}", path.read_bytes())
    repeats = "blend_epochized" in document["splits"][split]
    try:
        prepare_metadataset(EPath(path))
        theirs = [_plain(data, sample) for sample in one_pass(megatron.energon, path, split, repeats)]
    except Exception as error:
        try:
            one_pass(energon_lite, ours_at, split, repeats, trust_code=True)
        except EnergonLiteError:
            return f"both refuse: {type(error).__name__}"
        raise AssertionError(f"Energon refuses {document}") from error
    ours = [_plain(data, sample) for sample in one_pass(energon_lite, ours_at, split, repeats, trust_code=True)]
    theirs, ours = sorted(theirs, key=_content), sorted(ours, key=_content)
    for one, other in zip(ours, theirs, strict=True):
        if _content(one) != _content(other):
            names = {name for name in {*one, *other} if _content(one.get(name)) != _content(other.get(name))}
            pairs = {name: (one.get(name, "absent"), other.get(name, "absent")) for name in names}
            raise AssertionError((document, one["__key__"], pairs))
    if "join" not in document["splits"][split]:
        compare_leaves(path, ours_at, split, "blend" in document["splits"][split])
    return "equal"


def _plain(data: tuple[Path, Any], sample: Any) -> dict[str, Any]:
    root, tools = data
    found: dict[str, Any] = tools.plain(sample)
    # Energon's from_joined has the first sample's source twice; its JSONL samples have None for no subflavors. A folder
    # of files is named by its whole path.
    sources = [(shard.replace("memory://declared", str(root)), names) for shard, names in found["__sources__"]]
    return found | {"__sources__": tuple(dict.fromkeys(sources)), "__subflavors__": found["__subflavors__"] or {}}


def _content(value: Any) -> str:
    """A text that two values have in common only if they are equal to the last bit, with their types."""
    if isinstance(value, dict):
        items = sorted((str(name), _content(one)) for name, one in value.items())
        return "{" + ",".join(f"{name}:{text}" for name, text in items) + "}"
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "(" + ",".join(map(_content, value)) + ")"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {list(value.shape)} {value.contiguous().numpy().tobytes().hex()}"
    return f"{type(value).__name__} {value!r}"


def compare_leaves(path: Path, ours_at: Path | str, split: str, blended: bool) -> None:
    """Shares of the data sets, and over how many epochs each is shuffled."""
    config = megatron.energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    loaded = load_dataset(str(path)).get_datasets(training=True, split_part=split, worker_config=config)
    leaves = load_metadataset(ours_at, split_part=split, read_url=read_file)
    if blended:
        assert [one.weight for one in loaded.datasets] == pytest.approx([leaf.weight for leaf in leaves])
    for one, leaf in zip(loaded.datasets, leaves, strict=True):
        if leaf.join is None:  # Energon has no effect of the number beside a join
            assert one.dataset.shuffle_over_epochs == leaf.shuffle_over_epochs_multiplier


@pytest.mark.parametrize("start", nightly_but(range(QUICK // 8), range(0, ALL, 8)))
def test_declarations(data: tuple[Path, Any], start: int) -> None:
    outcomes = [compare(data, seed) for seed in range(start, start + 8)]
    assert outcomes.count("equal") >= 4, outcomes


def test_declarations_are_worth_comparing() -> None:
    """There are all kinds of them."""
    texts = [str(declaration(seed)) for seed in range(QUICK)]
    words = ["'join': {", "'join': [", "blend_epochized", "'subset'", "nonmatch': 'none", "OCRSample", "bound.yaml"]
    words += ["'aux': {'notes': 'filesystem", "'aux': {'pictures'", "'cook': 'own'", "chats.jsonl", "'path': 'bound'"]
    for word in (*words, "msc://"):
        assert sum(word in text for text in texts) >= 2, word
