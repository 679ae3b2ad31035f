"""A program of the fork server ends, prints and is placed as one that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkedProgram, run_program, write_commands

SAY = "import sys, os; print(sys.argv, __name__, os.getcwd(), os.environ.get('OWN'), os.getsid(0) == os.getpid())"
PROGRAMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "says": (["-c", SAY, "a", "b c"], {}),
    "elsewhere": (["-c", SAY], {"cwd": "/", "env": {"OWN": "5"}, "start_new_session": True}),
    "reads": (["-u", "-c", "print(input(), open(1, closefd=False).isatty())"], {"input": "given\n"}),
    "a number": (["-c", "raise SystemExit(3)"], {}),
    "a text": (["-c", "raise SystemExit('why')"], {}),
    "atexit": (["-c", "import atexit; atexit.register(print, 'bye'); 1 / 0"], {}),
    "interrupted": (["-c", "raise KeyboardInterrupt"], {}),
    "killed": (["-c", "import os; os.kill(os.getpid(), 9)"], {}),
    "aborted": (["-c", "import os; os.abort()"], {}),
    "threads": (["-c", "import threading, time; threading.Timer(0.01, print, 'late').start()"], {}),
    "pickles": (["-c", "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)"], {}),
    "files": (["-c", "import os; print(sorted(os.listdir('/proc/self/fd'))[:3])"], {}),
    "module": (["-m", "energon_lite.cli.main", "--version"], {}),
    "script": (["script.py", "a"], {}),
}
SCRIPT = """
import multiprocessing, sys
print(sys.argv, sys.path[0], __file__, __spec__)
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(abs, [-1]))
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_one_of_a_fresh_interpreter(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments, options = PROGRAMS[name]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300} | options
    fresh = subprocess.run([sys.executable, *arguments], check=False, **options)
    forked = run_program(arguments, **options)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout), forked.stderr
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_a_process_of_many_files_has_a_server() -> None:
    program = (
        "import os, resource\nfrom tests.fork_server import run_program\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))\n"
        "files = [os.open('/dev/null', 0) for _ in range(1100)]\nrun_program(['-c', 'print(5)'], check=True)"
    )
    assert run_program(["-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout == "5\n"


def test_torch_is_there_and_this_library_is_not() -> None:
    said = "import sys; print('torch' in sys.modules, [name for name in sys.modules if name.startswith('energon')])"
    assert run_program(["-c", said], stdout=subprocess.PIPE, text=True, check=True).stdout == "True []\n"


def test_a_program_is_a_child_that_takes_signals() -> None:
    with ForkedProgram(["-c", "import os; print(os.getppid()); input()"], **PIPES) as program:
        assert program.stdout is not None and int(program.stdout.readline()) == os.getpid()
        assert program.poll() is None
        program.send_signal(signal.SIGTERM)
        assert program.wait(100) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["-c", "import time; time.sleep(60)"], timeout=0.1)


def test_commands_of_a_shell(tmp_path: Path) -> None:
    path = os.pathsep.join([str(write_commands(tmp_path / "commands")), os.environ["PATH"]])
    told = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PATH": path}, "timeout": 300}
    words = """
    echo given | python -c 'import sys; print(sys.argv[1], input(), "torch" in sys.modules)' a
    energon-lite --version
    python -c 'raise SystemExit(3)' || echo $?
    python -c 'import os; os.kill(os.getpid(), 15)' || echo $?
    """
    done = subprocess.run(["bash", "-c", words], check=True, **told)  # type: ignore[call-overload]
    first, version, *codes = done.stdout.splitlines()
    assert (first, codes) == ("a given True", ["3", "143"]) and "energon-lite" in version, done.stderr


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
