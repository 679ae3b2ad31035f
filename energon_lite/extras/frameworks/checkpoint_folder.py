"""The loader state in a ``checkpoint-N`` folder of Hugging Face's Trainer."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

from energon_lite.errors import StateError
from energon_lite.loading.iterators.state import State
from energon_lite.storage.files.atomic_file import write_bytes

logger = logging.getLogger(__name__)

__all__ = ["STATE_FILE", "TRAINER_FILE", "newest_checkpoint", "read_json", "write_state"]

#: File with the state of the training loader, for any number of processes.
STATE_FILE = "energon_lite_loader.json"
#: File that Trainer writes last.
TRAINER_FILE = "trainer_state.json"
#: Trainer's mark of a checkpoint that it writes in a hurry before the machine is shut down.
_MARK = "checkpoint-is-incomplete.txt"


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the complete ``checkpoint-N`` with the largest N, or None if there is none.

    Each skipped checkpoint is reported as a warning.
    """
    paths = [path for path in Path(folder).glob("checkpoint-*") if path.name[11:].isdecimal()]
    checkpoints = {int(path.name[11:]): path for path in paths}
    for _, path in sorted(checkpoints.items(), reverse=True):
        why = ""
        try:
            read_json(path / TRAINER_FILE)
        except StateError as error:
            why = error.what
        cut = [file.name for file in path.glob("*.pt*") if not zipfile.is_zipfile(file)]
        why = why or (f"{cut[0]} is cut short" if cut else f"{_MARK} is in it" if (path / _MARK).exists() else "")
        if not why:
            return str(path)
        logger.warning("%s is passed over: %s", path, why)
    return None


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(
            f"the checkpoint cannot be resumed: {error}",
            where=str(path),
            fix="give another one; or ignore_data_skip=True among the arguments, to begin the data anew",
        ) from error


def write_state(folder: Path, state: State) -> None:
    """Write the loader state into a checkpoint atomically, before Trainer marks the checkpoint as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(str(folder / STATE_FILE), json.dumps(state).encode())
