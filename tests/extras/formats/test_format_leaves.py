"""Data sets of other formats than tar, in recipes: crude and typed, in blends, resumed, damaged, behind URLs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from energon_lite import (
    BestFit,
    ByTokens,
    Capacity,
    DefaultTaskEncoder,
    EnergonLiteError,
    Reading,
    register_source,
    stateless,
)
from energon_lite.errors import ConfigError, NotPreparedError
from energon_lite.storage.read import source as sources
from tests.servers import upload
from tests.tables_by_hand import png, write_megatron, write_table
from tests.testing import CRUDE_YAML, invoke, refusal_of, take, text_dataset, train_loader, val_loader

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402 -- behind the skip

ROWS = 60
TYPED = """\
sample_type: CaptioningSample
columns: {png: "image[bytes]", txt: caption}
field_map: {image: png, caption: txt}
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Parquet files, with images as Hugging Face writes them."""
    folder = tmp_path_factory.mktemp("photos")
    table = pa.table(
        {
            "image": [{"bytes": png(2, 3, (n, 0, 0)), "path": f"{n}.png"} for n in range(ROWS)],
            "caption": [f"caption {n}" for n in range(ROWS)],
            "num_tokens": [1 + n % 7 for n in range(ROWS)],
        }
    )
    for number in range(2):
        write_table(folder / f"train-{number:05}-of-00002.parquet", table.slice(number * 30, 30), 8)
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "typed.yaml").write_text(TYPED)
    return folder


def batches(path: Any, make: Any = val_loader, **options: Any) -> list[Any]:
    with make(path, **{"split_part": "train", "batch_size": 8} | options) as loader:
        return list(loader)


def of_train(**split: Any) -> dict[str, Any]:
    """A metadataset with this split."""
    return {"splits": {"train": split}}


def test_commands_that_need_tars_say_so(photos: Path) -> None:
    file = photos / "train-00000-of-00002.parquet"
    assert "of this format has no place for what is measured" in refusal_of(
        "measure", file, "--length-field", "caption"
    )
    ratio = ("--non-interactive", "--split-ratio", "1,0,0")
    assert "this is a file, and no folder" in refusal_of("prepare", file, *ratio)


def test_crude_samples_have_columns_by_name(photos: Path) -> None:
    for path in (str(photos), f"{photos}/*.parquet", f"{photos}/train-00000-of-00002.parquet"):
        found = batches(path)
        captions = [caption for batch in found for caption in batch["caption"]]
        assert captions == [f"caption {n}" for n in range(ROWS if "00000" not in path else 30)]
        assert found[0]["image"]["path"][:2] == ["0.png", "1.png"]
    assert found[0]["__sources__"][1].shard_name == "train-00000-of-00002.parquet"


def test_typed_samples(photos: Path) -> None:
    found = batches(str(photos), reading=Reading(dataset_config="typed.yaml"))
    assert type(found[0]).__name__.startswith("CaptioningSample") and found[0].image.shape == (8, 3, 3, 2)
    assert torch.allclose(found[3].image[1, 0], torch.full((3, 2), 25 / 255)) and found[3].caption[1] == "caption 25"

    class OneByOne(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return sample

    others = batches(str(photos), reading=Reading(dataset_config="typed.yaml"), task_encoder=OneByOne())
    for one, other in zip(found, others, strict=True):
        assert torch.equal(one.image, other.image) and one.caption == other.caption
        assert list(one.__sources__) == list(other.__sources__) and one.__key__ == other.__key__


def test_a_choice_of_columns(photos: Path) -> None:
    document = photos / ".nv-meta" / "some.yaml"
    document.write_text(f"{CRUDE_YAML}columns: [caption]\n")
    found = batches(str(photos), reading=Reading(dataset_config="some.yaml"))
    assert found[1]["caption"][0] == "caption 8" and "image" not in found[1]
    document.write_text(f"{CRUDE_YAML}columns: {{txt: captoin}}\n")
    with pytest.raises(ConfigError, match="no column 'captoin'") as error:
        batches(str(photos), reading=Reading(dataset_config="some.yaml"))
    assert "did you mean 'caption'?" in str(error.value.fix) and str(error.value.where).startswith(str(document))
    with pytest.raises(EnergonLiteError, match="missing"):
        batches(str(photos), reading=Reading(dataset_config="none.yaml"))


def test_in_a_blend_and_resumed_on_other_ranks(tmp_path: Path, photos: Path) -> None:
    """One of them from 10 % on, as a pattern of files."""
    typed = {"dataset_config": "typed.yaml"}
    entries = [
        {"path": f"{photos}/*.parquet", "subset": {"range": ["10%", "100%"]}} | typed,
        {"path": str(photos), "weight": 2, "subflavors": {"x": 1}} | typed,
    ]
    (tmp_path / "blend.yaml").write_text(json.dumps(of_train(blend=entries)))
    options: dict[str, Any] = {"batch_size": 3, "max_samples_per_sequence": 8, "shuffle_buffer_size": 24}

    def loader(rank: int, world: int) -> Any:
        return train_loader(tmp_path / "blend.yaml", rank=rank, world_size=world, **options)

    with loader(0, 1) as one:
        iterator = iter(one)
        take(iterator, 7)
        state = one.save_state_rank()
        *following, last = take(iterator, 7)
        assert one.restore_sample(last.__restore_key__).caption == last.caption
    for rank in range(2):
        with loader(rank, 2) as other:
            other.restore_state_rank(state)
            assert [batch.caption for batch in take(other, 3)] == [batch.caption for batch in following[rank::2]]


@pytest.mark.parametrize("start", ["fork", "spawn", "thread"])
@pytest.mark.slow
def test_on_workers(photos: Path, start: str) -> None:
    one, two = (
        batches(str(photos), train_loader, repeat=False, **more)
        for more in ({}, {"num_workers": 2, "start_method": start})
    )
    assert [batch["caption"] for batch in one] == [batch["caption"] for batch in two]


def test_lengths_from_a_column_plan_batches(photos: Path) -> None:
    batching = ByTokens(BestFit(Capacity(20)), length_column="num_tokens")
    found = batches(str(photos), train_loader, batch_size=None, batching=batching, repeat=False)
    assert {caption for batch in found for caption in batch["caption"]} == {f"caption {n}" for n in range(ROWS)}
    assert sum(len(batch["caption"]) for batch in found) == ROWS
    assert all(sum(batch["num_tokens"]) <= 20 for batch in found)
    with pytest.raises(EnergonLiteError, match="no column 'length'") as error:
        batches(str(photos), batch_size=None, batching=BestFit(Capacity(20)))
    assert "num_tokens" in str(error.value.fix)


def test_damaged_row_groups_are_counted_skips(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.parquet", {"compression": "none", "use_dictionary": False, "write_statistics": False}
    table = pa.table({"text": [f"text number {n}" for n in range(40)]})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True, **plain)
    data = path.read_bytes()
    at = data.index(b"number 13")
    path.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with val_loader(str(path), batch_size=10) as loader:
        texts = [text for batch in loader for text in batch["text"]]
        stats = loader.stats()
    assert texts == [f"text number {n}" for n in range(40) if n // 10 != 1]
    assert stats["failed"] == 10 and "row group 1 cannot be read" in stats["reasons"][0]["reason"]


def test_behind_a_url(photos: Path) -> None:
    found = batches(f"{upload(photos, 'photos')}/*.parquet", reading=Reading(dataset_config="typed.yaml"))
    assert [caption for batch in found for caption in batch.caption] == [f"caption {n}" for n in range(ROWS)]
    assert torch.equal(found[0].image, batches(str(photos), reading=Reading(dataset_config="typed.yaml"))[0].image)


def test_paths_that_mean_nothing_or_something_else(tmp_path: Path) -> None:
    for path in (tmp_path / "none.parquet", tmp_path / "*.parquet", tmp_path / "text_document"):
        with pytest.raises(EnergonLiteError, match="no such data set"):
            batches(str(path))
    with pytest.raises(ConfigError, match="does not exist"):
        batches(of_train(path=str(tmp_path / "x*.parquet")))
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    np.array([0, 9], "<u8").tofile(tmp_path / "a.jsonl.idx")  # not of Megatron's tokens
    (batch,) = batches(tmp_path / "a.jsonl")
    assert batch["json"] == {"n": [1]}
    text_dataset(tmp_path / "all" / "one", 2)
    (tmp_path / "all" / "one" / "0.tar.idx").touch()  # neither
    with pytest.raises(NotPreparedError, match="a folder of data sets, and none itself") as error:
        batches(tmp_path / "all")
    assert f"{tmp_path}/all/one" in str(error.value.fix)


def test_what_two_files_begin_with(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "text_document", [[[1, 2]], [[3], [4, 5]]])
    (batch,) = batches(path, batch_size=None, batching=BestFit(Capacity(9)))
    assert [tokens.tolist() for tokens in batch["tokens"]] == [[1, 2], [3, 4, 5]]
    assert len(batches(of_train(path=str(path)))[0]["tokens"]) == 2
    Path(f"{path}.bin").unlink()
    with pytest.raises(EnergonLiteError, match="no such data set"):
        batches(path)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sources, "_registered", dict(sources._registered))
    register_source("letters", Letters, extensions=(".letters",), marker="letters.txt")
    yield


class Letters:
    """A format of a user's own: a sample is a letter of a file."""

    def __init__(self, path: str, split_part: str):
        file = Path(path.removeprefix("letters://"))
        self.text = (file / "letters.txt" if file.is_dir() else file).read_text()
        self.identity = f"letters {self.text}"

    def __len__(self) -> int:
        return len(self.text)

    def read(self, index: int) -> dict[str, Any]:
        raise AssertionError("they are read together")

    def read_many(self, indices: Any) -> dict[str, list[Any]]:
        self.reads.append(list(indices))
        return {"txt": [self.text[index].encode() for index in indices], "n": list(indices)}

    def locate(self, index: int) -> tuple[int, int]:
        return 0, index

    shard_names = ("the file",)
    reads: ClassVar[list[list[int]]] = []


@pytest.mark.usefixtures("letters")
def test_a_format_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.letters").write_text("abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letters.txt").write_text("defg")
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text("sample_type: TextSample\nfield_map: {text: txt}\n")
    entries = [{"path": "a.letters"}, {"path": str(tmp_path / "a.letters")}]
    (tmp_path / "blend.yaml").write_text(json.dumps(of_train(blend=entries)))
    assert [batch.text for batch in batches(tmp_path / "blend.yaml")] == [["a", "b", "c", "a", "b", "c"]]
    Letters.reads.clear()
    assert invoke("info", f"letters://{tmp_path}/folder").output.startswith(
        f"letters://{tmp_path}/folder [train]: 1 data"
    )
    (batch,) = batches(tmp_path / "folder")
    assert Letters.reads == [[0, 1, 2, 3]]  # once, though nothing can be made of columns here
    assert (batch["txt"], batch["n"]) == (["d", "e", "f", "g"], [0, 1, 2, 3])
    assert batch["__sources__"][2].shard_name == "the file"
    assert [source.index for source in batch["__sources__"]] == [0, 1, 2, 3]
