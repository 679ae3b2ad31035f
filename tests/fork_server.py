"""Fork server of a test session: starts programs from a process that has imported torch, and nothing of this library.

A program gets what a fresh interpreter would get: its arguments, environment, folder, pipes and session; it is a child
of the process that asks for it. What an interpreter reads once, at its start, is that of the server: ``PYTHON*``
variables other than ``PYTHONPATH``, the seed of the hashes of texts, and how torch was imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: ``prctl``: orphans below become children of this process, not of the first process of the machine.
_SUBREAPER = 36
_LONGEST = 1 << 20


class ForkedProgram(subprocess.Popen[Any]):
    """A running Python program, forked from the server of this process.

    Args:
        arguments: those of Python: ``-c CODE``, ``-m MODULE`` or a file, then the program's own.
        options: those of ``subprocess.Popen``.
    """

    def __init__(self, arguments: Sequence[object], **options: Any) -> None:
        super().__init__([*map(str, arguments)], **options)

    def _execute_child(self, *arguments: Any) -> None:
        told = dict(zip(inspect.signature(super()._execute_child).parameters, arguments, strict=True))  # type: ignore[misc]
        assert not told["pass_fds"] and told["preexec_fn"] is None
        pipes = [told[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "arguments": told["args"],
            "folder": os.getcwd() if told["cwd"] is None else os.fspath(told["cwd"]),
            "environment": dict(os.environ if told["env"] is None else told["env"]),
            "session": told["start_new_session"],
            "parent": os.getpid(),
        }
        self.pid = _ask(json.dumps(request).encode(), [own if own >= 0 else fd for fd, own in enumerate(pipes)])
        self._child_created = True
        self._close_pipe_fds(*(told[name] for name in _PIPES))  # type: ignore[attr-defined]


def run_program(arguments: Sequence[object], **options: Any) -> subprocess.CompletedProcess[Any]:
    """The result of a Python program, as of ``subprocess.run([sys.executable, *arguments], **options)``."""
    given, timeout, check = (options.pop(name, None) for name in ("input", "timeout", "check"))
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with ForkedProgram(arguments, **options) as program:
        try:
            output, errors = program.communicate(given, timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(program.args, program.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


#: A command of this name, for shells: a program of the server's, which gets its files, folder, environment and signals.
_COMMAND = """\
#!{python} -IS
import json, os, signal, socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.connect({door!r})
arguments = {first!r} + sys.argv[1:]
request = dict(arguments=arguments, folder=os.getcwd(), environment=dict(os.environ), session=False, parent=None)
socket.send_fds(door, [json.dumps(request).encode()], [0, 1, 2])
program = int(door.recv(64))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(program, number))
code = int(door.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def write_commands(folder: Path, scripts: Sequence[str] = ("energon-lite",)) -> Path:
    """Write ``python``, and scripts of this interpreter's, as commands that are forked; the folder, for ``PATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    run_program(["-c", ""])  # the server is there
    installed = Path(sys.executable).parent
    for name, first in [("python", []), *((name, [str(installed / name)]) for name in scripts)]:
        told = {"python": os.path.realpath(sys.executable), "door": _door(os.getpid()), "first": first}
        (folder / name).write_text(_COMMAND.format(**told))
        (folder / name).chmod(0o755)
    return folder


def _door(parent: int) -> str:
    """Address of the server of a process; it has no file."""
    return f"\0energon-lite-tests-{parent}"


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_lock = threading.Lock()
#: By the process that asks: a forked one has a server of its own.
_servers: dict[int, socket.socket] = {}


def _ask(request: bytes, files: list[int]) -> int:
    with _lock:
        if (server := _servers.get(os.getpid())) is None:
            server = _servers[os.getpid()] = _start()
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [request], files)
            process = int(server.recv(64))
        finally:
            libc.prctl(_SUBREAPER, 0, 0, 0, 0)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # an error, if it is no child of this process
    return process


def _start() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # It ends when this process has closed its end of the socket.
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    return ours


# ---- in the server


def _serve(asked: socket.socket, door: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answer requests for ever; returns in each program, with its request and its standard files."""
    waiting = select.poll()  # not select(), which takes no descriptor above 1,023
    waiting.register(asked, select.POLLIN)
    waiting.register(door, select.POLLIN)
    while True:
        ready = [file for file, _ in waiting.poll(5000)]
        if not ready:
            if os.getppid() != int(sys.argv[2]):  # its other children may have its end of the socket
                os._exit(0)
            continue
        source = asked if asked.fileno() in ready else door.accept()[0]
        message, files, _, _ = socket.recv_fds(source, _LONGEST, 3)
        if not message and source is asked:
            os._exit(0)
        told, own = os.pipe()
        if message and not (between := os.fork()):
            between = os.getpid()
            if not (program := os.fork()):
                request = json.loads(message)
                return request | {"parent": request["parent"] or between}, files
            os.write(own, str(program).encode())
            if source is not asked:  # a command waits for its end; else the program becomes a child of who asks
                source.send(str(program).encode())
                source.send(str(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])).encode())
            os._exit(0)
        if message and source is asked:
            os.waitpid(between, 0)
            asked.send(os.read(told, 64))
        for file in (told, own, *files):
            os.close(file)
        if source is not asked:
            source.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Make this process look like a fresh one; its arguments."""
    while os.getppid() != request["parent"]:
        os.sched_yield()
    if request["session"]:
        os.setsid()
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.ORIGINAL_DIR = request["folder"]
    sys.modules["numpy"].random.seed()
    tempfile.tempdir = None
    arguments: list[str] = request["arguments"]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del arguments[0]
    return arguments


def _run(arguments: list[str], paths: list[str]) -> None:
    """Run a program in ``__main__``, as Python does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        sys.path[:] = [os.getcwd(), *added, *paths]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path[:] = ["", *added, *paths]
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = arguments
        sys.path[:] = [str(Path(arguments[0]).resolve().parent), *added, *paths]
        main.__file__ = os.path.abspath(arguments[0])
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main.__dict__)


def _main() -> None:
    import numpy.random
    import torch
    import yaml

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kept = [sys.modules["__main__"], numpy, torch, yaml]  # this file's names, as another module becomes the main one
    paths = sys.path[1:]
    gc.collect()
    gc.freeze()
    asked, door = socket.socket(fileno=int(sys.argv[1])), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(_door(int(sys.argv[2])))
    door.listen()
    arguments = _become(*_serve(asked, door))
    asked.detach(), door.detach()  # closed
    try:
        _run(arguments, paths)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        sys.exit(1)
    finally:
        kept.clear()


if __name__ == "__main__":
    _main()
