"""Cleanup at the end of a fork server that was started for loaders. Only that server imports this module.

The socket of a fork server is in a temporary folder. The process that started the server removes the folder when it
ends, unless it is killed. The server ends shortly after that process in any case, so it removes the folder, too.
"""

from __future__ import annotations

import atexit
import os
import shutil

__all__ = ["FOLDER"]

#: Environment variable of the server that holds the path of the folder.
FOLDER = "ENERGON_LITE_FORK_SERVER_FOLDER"

if FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
