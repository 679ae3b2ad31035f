from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from energon_lite.cli.main import all_commands, main
from tests.testing import command, output_of, text_dataset, write_tar


@pytest.mark.parametrize("arguments", [("-h",), ("--help",), ()])
def test_help_lists_all_commands(arguments: tuple[str, ...]) -> None:
    output = output_of(*arguments)
    assert all(f"\n  {name} " in output for name in all_commands())


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option: str) -> None:
    assert output_of(option).startswith("energon-lite ")


def test_an_unknown_command() -> None:
    code, output = command("perpare")
    assert code == 2 and "did you mean 'prepare'?" in output


def test_colours_unless_they_are_unwanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["info", str(text_dataset(tmp_path / "few", 2)), "--samples", "100"]
    for unwanted in ("", "1"):
        monkeypatch.setenv("NO_COLOR", unwanted)
        warning = CliRunner().invoke(main, arguments, color=True).stderr
        assert "Warning: few" in warning and ("\x1b" in warning) == (not unwanted)


def test_every_command_explains_itself_with_one_spelling_for_one_thing() -> None:
    """Splits and what is done again are asked for by Energon's names, ``--split-parts`` and ``--force-overwrite``."""
    for name in all_commands():
        assert "Usage:" in output_of(name, "-h")
        made = main.get_command(click.Context(main), name)
        assert made is not None
        commands = [made, *getattr(made, "commands", {}).values()]
        options = {text for one in commands for option in one.params for text in option.opts}
        assert not options & {"--split", "--split-part", "--overwrite", "--again"}, name


def test_the_page_of_commands_has_each() -> None:
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text().partition("The exit code is")[0]
    heads = re.findall(r"^\* ((?:`[a-z-]+`(?:, )?)+):", page, re.MULTILINE)
    named = [name for head in heads for name in re.findall(r"`([a-z-]+)`", head)]
    assert sorted(named) == sorted(all_commands())


def test_help_imports_no_command() -> None:
    program = "import sys; from energon_lite.cli.main import main; "
    program += "main(['-h'], standalone_mode=False); print('energon_lite.cli.prepare' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.endswith("False\n")


@pytest.mark.parametrize("arguments", [["-h"], ["prepare", "ten", "--non-interactive", "--split-ratio", "1,0,0"]])
def test_output_that_nobody_reads_any_more(tmp_path: Path, arguments: list[str]) -> None:
    write_tar(tmp_path / "ten/a.tar", [("0", {"txt": b""})])
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        command = [sys.executable, "-m", "energon_lite.cli.main", *arguments]
        command = [str(tmp_path / word) if word == "ten" else word for word in command]
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
