"""Selection of files: those that a path matches, and those of a split."""

from __future__ import annotations

import os
import re
from glob import escape, glob, has_magic

from energon_lite.documents.paths import missing_file_fix, static_folder
from energon_lite.errors import EmptyDatasetError, NotPreparedError, listed
from energon_lite.storage.files.remote_files import is_remote, list_files

__all__ = ["find_files"]

#: Words for splits in names of files and folders, as used by Hugging Face.
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


_PIECES = re.compile(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", re.DOTALL)


def find_files(path: str, extensions: tuple[str, ...], split_part: str) -> list[str]:
    """Return the files of a split, sorted, among those that a path matches: a file, a pattern (``data/*.parquet``, with
    ``**`` for any folders), or a folder with everything in it.

    A file belongs to a split if the name of the file, or of one of its folders (below the fixed part of the path),
    contains the split's name: ``train-00000-of-00010.parquet``, ``val/0.parquet``; ``validation`` and ``dev`` are
    ``val``. Files without such a name belong to all splits. A single file, or a pattern whose files are all of one
    split, is read for any split.

    Raises:
        NotPreparedError: no file matches.
        EmptyDatasetError: no file belongs to the split.
    """
    base, files = _matching(path, extensions)
    if not files:
        fix = f"files named {listed([f'*{extension}' for extension in extensions])} are read"
        if not is_remote(path) and not has_magic(path):
            fix = missing_file_fix(path, fix)
        raise NotPreparedError("there are no files of this data set", where=path, fix=fix)
    splits = {file: _split_of(file[len(base) :]) for file in files}
    known = {split for split in splits.values() if split}
    if len(files) == 1 or not known or (len(known) == 1 and has_magic(path)):
        return files
    wanted = _SPLITS.get(split_part, split_part)
    matching = [file for file, split in splits.items() if split in (wanted, None)]
    if not matching:
        raise EmptyDatasetError(
            f"no file belongs to split {split_part!r}",
            where=path,
            fix=f"there are files of {listed(sorted(known))}: set split_part, or write a pattern for those you mean",
        )
    return matching


def _matching(path: str, extensions: tuple[str, ...]) -> tuple[str, list[str]]:
    """A folder, and all files below it that a path matches."""
    base = static_folder(path)
    if is_remote(path):
        if not has_magic(path):
            if path.endswith(extensions):
                return base, [path]
            base = path.rstrip("/")
        names = list_files(base)
        pattern = path[len(base) + 1 :] if has_magic(path) else "**"
        return base, sorted(f"{base}/{name}" for name in names if name.endswith(extensions) and _fits(name, pattern))
    if has_magic(path) and not os.path.exists(path):
        paths = glob(path, recursive=True)
    elif os.path.isdir(path):
        paths = glob(os.path.join(escape(path), "**", "*"), recursive=True)
    else:
        paths = [path]
    return base, sorted(file for file in paths if file.endswith(extensions) and os.path.isfile(file))


def _fits(name: str, pattern: str) -> bool:
    """Return True if a name matches a pattern as in a shell: a star matches no slash, two stars match any."""
    of = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = "".join(
        of.get(piece) or (piece if piece[0] == "[" else re.escape(piece)) for piece in _PIECES.findall(pattern)
    )
    return re.fullmatch(made, name) is not None


def _split_of(name: str) -> str | None:
    """The split that a relative name contains; the last such word counts."""
    for part in reversed(name.split("/")):
        for word in re.split(r"[-_.\s]", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None
