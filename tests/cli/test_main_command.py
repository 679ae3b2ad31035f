from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from energon_lite.cli.main import COMMANDS, main


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("arguments", [("-h",), ("--help",), ()])
def test_help_lists_all_commands(arguments: tuple[str, ...]) -> None:
    code, output = run(*arguments)
    assert code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in output


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option: str) -> None:
    code, output = run(option)
    assert code == 0 and output.startswith("energon-lite ")


def test_an_unknown_command() -> None:
    code, output = run("perpare")
    assert code == 2 and "did you mean 'prepare'?" in output


def test_every_command_can_be_imported_and_explains_itself() -> None:
    for name in COMMANDS:
        code, output = run(name, "-h")
        assert code == 0 and "Usage:" in output


def test_help_imports_no_command() -> None:
    program = "import sys; from energon_lite.cli.main import main; "
    program += "main(['-h'], standalone_mode=False); print('energon_lite.cli.prepare' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.endswith("False\n")


def test_output_that_nobody_reads_any_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        command = [sys.executable, "-m", "energon_lite.cli.main", "layout", "--world", "8"]
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
