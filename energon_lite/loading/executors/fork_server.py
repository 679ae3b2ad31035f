"""What a fork server does at its end, if it was started for loaders: it is imported there, and nowhere else.

The socket of a fork server is in a temporary folder, which the process that started it removes when it ends, unless it
is killed. The server ends in any case, right behind it.
"""

from __future__ import annotations

import atexit
import os
import shutil

__all__ = ["FOLDER"]

#: The variable of the server's environment that names the folder.
FOLDER = "ENERGON_LITE_FORK_SERVER_FOLDER"

if FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
