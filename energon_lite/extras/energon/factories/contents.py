"""Contents of tars and JSONL files that need not be prepared, sample by sample."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Container, Iterator

from energon_lite.errors import DatasetError, NotPreparedError, ShardFormatError
from energon_lite.storage.files.epath import EPath
from energon_lite.storage.index.jsonl import BOM, PART
from energon_lite.storage.tar.tar_scan import split_member_name

__all__ = ["iter_jsonl_contents", "iter_tar_contents"]


def iter_tar_contents(
    path: str | os.PathLike[str], extract_keys: Container[str] = ()
) -> Iterator[dict[str, bytes | None]]:
    """Yield the samples of a tar: parts by name, with bytes for those in ``extract_keys``, else None.

    Args:
        path: path or URL of the tar, which may be compressed.
        extract_keys: names of parts whose bytes to read.

    Raises:
        DatasetError: the file does not exist, or cannot be read.
        ShardFormatError: the file is no tar, or ends within a part.

    Example:
        >>> next(iter_tar_contents("s000.tar", ("json",)))
        {'jpg': None, 'json': b'{"label": 3}'}
    """
    where = os.fspath(EPath(path))
    sample, last = dict[str, "bytes | None"](), None
    try:
        with EPath(path).open("rb") as file, tarfile.open(fileobj=file, mode="r:*") as tar:
            for member in tar:
                split = split_member_name(member.name) if member.isreg() else None
                if split is None:
                    continue
                key, part = split
                if key != last and sample:
                    yield sample
                    sample = {}
                last = key
                data = tar.extractfile(member) if part in extract_keys else None
                sample[part] = None if data is None else data.read()
    except (tarfile.TarError, EOFError) as error:
        what = f"it is no tar, or not a whole one: {error}"
        raise ShardFormatError(what, where=where, fix="write it anew") from error
    except FileNotFoundError as error:
        raise DatasetError("there is no such file", where=where, fix="check the path") from error
    if sample:
        yield sample


def iter_jsonl_contents(path: str | os.PathLike[str]) -> Iterator[dict[str, bytes]]:
    """Yield the lines of a JSONL file that are not blank, as bytes under ``json``.

    Raises:
        NotPreparedError: the file does not exist.

    Example:
        >>> next(iter_jsonl_contents("chats.jsonl"))
        {'json': b'{"text": "a red bicycle"}'}
    """
    try:
        with EPath(path).open("rb") as file:
            for number, line in enumerate(file):
                text = (line.removeprefix(BOM) if not number else line).strip()
                if text:
                    yield {PART: text}
    except FileNotFoundError as error:
        where = os.fspath(EPath(path))
        raise NotPreparedError("there is no such JSONL file", where=where, fix="check the path") from error
