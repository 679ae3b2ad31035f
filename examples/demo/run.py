"""Start ``torchrun``, and follow its output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

RANKS = 4
#: What examples/train.py says itself: its lines begin with the time. Warnings of others go to the log only.
_SAID = re.compile(rb"\d\d:\d\d:\d\d ")


@dataclass(frozen=True)
class Run:
    """A training run of four processes. Starting it a second time resumes it.

    Args:
        config: the YAML file.
        output: its folder for metrics and checkpoints.
        tp: tensor-parallel ranks; data parallelism takes the rest.
        overrides: more settings, ``section.key=value``.
    """

    config: Path
    output: Path
    tp: int
    overrides: Sequence[str] = field(default_factory=tuple)

    @property
    def metrics(self) -> Path:
        return self.output / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def log(self) -> Path:
        """Everything that its processes print."""
        return self.output / "log.txt"

    @property
    def command(self) -> list[str]:
        """The command."""
        script = ["examples/train.py", str(self.config), f"output={self.output}", f"mesh.tp={self.tp}"]
        return ["torchrun", "--standalone", "--nproc-per-node", str(RANKS), *script, *self.overrides]

    def train(self, *, meanwhile: Callable[[int], None] | None = None) -> int:
        """Run the command and show its progress, until it ends.

        Args:
            meanwhile: called about 50 times a second with the process of torchrun.

        Returns:
            Its exit code.
        """
        print(f"  $ OMP_NUM_THREADS=1 {shlex.join(self.command)}", flush=True)
        self.output.mkdir(parents=True, exist_ok=True)
        # The program `torchrun` of this Python.
        command = [sys.executable, "-m", "torch.distributed.run", *self.command[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab") as log, open(self.log, "rb") as said:
            said.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
            echo = Echo()
            try:
                while process.poll() is None:
                    if meanwhile is not None:
                        meanwhile(process.pid)
                    echo.show(said.read())
                    time.sleep(0.02)
            finally:
                _stop(process)
            echo.show(said.read())
            echo.close()
        return process.returncode

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        with open(self.log, encoding="utf-8", errors="replace") as stream:
            return "".join(deque(stream, maxlen=lines))


class Echo:
    """Shows only the trainer's own lines of the output; on a terminal, progress takes one line."""

    def __init__(self) -> None:
        self._rest, self._live = b"", sys.stdout.isatty()
        self._open = False

    def show(self, data: bytes) -> None:
        """Take what was printed since the last call, lines cut anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if _SAID.match(line):
                self._print(line.decode(errors="replace"))

    def close(self) -> None:
        """Leave the line of progress."""
        if self._open:
            print(flush=True)
        self._open = False

    def _print(self, text: str) -> None:
        if self._live and re.search(r"step \d+ of \d+", text):
            # Back to the start of the line, and clear it.
            print(f"\r\x1b[K  {text}", end="", flush=True)
            self._open = True
        else:
            self.close()
            print(f"  {text}", flush=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks, after Ctrl-C."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        process.kill()
        process.wait()
