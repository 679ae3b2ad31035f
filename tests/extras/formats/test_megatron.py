"""Megatron's ``.bin`` and ``.idx``. The layout was compared with megatron-core 0.16: see ``tables_by_hand``."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import EnergonLiteError, get_train_dataset
from energon_lite.errors import DataIndexError, MissingShardError, NotPreparedError, ShardChangedError, ShardFormatError
from energon_lite.extras.formats.megatron import MegatronSource, open_sequences, open_source
from tests.servers import upload
from tests.tables_by_hand import write_megatron
from tests.testing import ALONE, examples

DOCUMENTS: list[list[list[int]]] = [[[1, 2, 3]], [[4], [5, 6], []], [], [[7, 8, 9, 10]], []]


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<f4", "<f8", "<u2"])
def test_documents_and_sequences(tmp_path: Path, dtype: str) -> None:
    path = str(write_megatron(tmp_path / "text_document", DOCUMENTS, dtype))
    source = open_source(f"{path}.bin", "train")
    assert len(source) == 5 and source.column("length").tolist() == [3, 3, 0, 4, 0]
    found = source.read_many([3, 1, 2, 4])
    assert [tokens.tolist() for tokens in found["tokens"]] == [[7, 8, 9, 10], [4, 5, 6], [], []]
    assert [lengths.tolist() for lengths in found["lengths"]] == [[4], [1, 2, 0], [], []]
    assert source.read_many([]) == {"tokens": [], "lengths": []}
    assert source.mean_bytes == 10 * np.dtype(dtype).itemsize / 5
    assert found["tokens"][0].dtype == np.dtype(dtype)
    found["tokens"][0][0] = 99  # its own memory
    sequences = pickle.loads(pickle.dumps(open_sequences(f"megatron_sequences://{path}", "")))
    all_tokens = [sequences.read(index)["tokens"].tolist() for index in range(len(sequences))]
    assert all_tokens == [sequence for document in DOCUMENTS for sequence in document]
    assert sequences.column("length").tolist() == [3, 1, 2, 0, 4]
    assert len({source.identity, sequences.identity, open_source(f"{path}.idx", "val").identity}) == 2
    with pytest.raises(DataIndexError, match="no column 'tokens'"):
        source.column("tokens")


def test_modes(tmp_path: Path) -> None:
    source = MegatronSource(str(write_megatron(tmp_path / "m", DOCUMENTS, modes=[0, 1, 2, 3, 4])))
    assert source.read(1)["modes"].tolist() == [1, 2, 3] and source.part_names == {"tokens", "lengths", "modes"}
    source = MegatronSource(str(write_megatron(tmp_path / "none", [])))
    assert len(source) == len(source.column("length")) == source.mean_bytes == 0


def test_behind_a_url(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "m", DOCUMENTS)
    source = MegatronSource(f"{upload(tmp_path, 'tokens')}/m.bin")
    assert [tokens.tolist() for tokens in source.read_many([1, 0])["tokens"]] == [[4, 5, 6], [1, 2, 3]]
    assert source.identity == MegatronSource(str(path)).identity


def test_equal_lengths_and_other_tokens_are_another_data_set(tmp_path: Path) -> None:
    one, other = (write_megatron(tmp_path / name, [[[1, 2, last]]]) for name, last in (("a", 3), ("b", 4)))
    assert MegatronSource(str(one)).identity != MegatronSource(str(other)).identity


def test_files_that_are_gone_or_replaced(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "m", DOCUMENTS)
    source = MegatronSource(str(path))
    write_megatron(path, [*DOCUMENTS, [[1]]])
    with pytest.raises(ShardChangedError):
        pickle.loads(pickle.dumps(source)).read(0)
    Path(f"{path}.bin").unlink()
    with pytest.raises(MissingShardError) as error:
        MegatronSource(str(path))
    assert str(error.value.where).endswith("m.bin")
    with pytest.raises(NotPreparedError, match="a folder, not prepared"):  # the folder of the other one
        get_train_dataset(tmp_path, worker_config=ALONE)


def test_what_is_no_index_or_too_short(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "m", DOCUMENTS)
    index, tokens = Path(f"{path}.idx"), Path(f"{path}.bin")
    whole = index.read_bytes()
    for broken in (b"", b"X" + whole[1:], whole[:33], whole[:41], whole[:-1], whole + b"12"):
        index.write_bytes(broken)
        with pytest.raises(ShardFormatError, match=r"not an \.idx file of Megatron") as error:
            MegatronSource(str(path))
        assert error.value.where == str(index)
    index.write_bytes(whole[:9] + struct.pack("<Q", 2) + whole[17:])
    with pytest.raises(ShardFormatError, match="version 2"):
        MegatronSource(str(path))
    numbers = [(34, "i", -1, "negative"), (62, "q", -4, "negative")]
    numbers += [(62, "q", 16, "do not follow"), (34, "i", 99, "needs")]
    numbers += [(at, "q", number, "not in order") for at, number in ((94, -1), (102, 5), (134, 6))]  # documents
    for at, kind, number, words in numbers:
        changed = struct.pack(f"<{kind}", number)
        index.write_bytes(whole[:at] + changed + whole[at + len(changed) :])
        with pytest.raises(ShardFormatError, match=words):
            MegatronSource(str(path))
    index.write_bytes(whole)
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(ShardFormatError, match="needs 40") as error:
        MegatronSource(str(path))
    assert error.value.where == str(tokens)


@settings(max_examples=examples(100))
@given(st.integers(0, 200), st.integers(1, 255))
def test_any_flipped_byte_is_an_error_of_ours_or_reads_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    path = write_megatron(tmp_path_factory.mktemp("flip") / "m", DOCUMENTS)
    index = Path(f"{path}.idx")
    data = bytearray(index.read_bytes())
    data[place % len(data)] ^= flip
    index.write_bytes(data)
    try:
        source = MegatronSource(str(path))
        found: Any = source.read_many(range(len(source)))
        assert sum(map(len, found["tokens"])) <= 40
    except EnergonLiteError as error:
        assert str(error.where).startswith(str(path)) and error.fix
