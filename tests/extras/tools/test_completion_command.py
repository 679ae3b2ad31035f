from __future__ import annotations

import os

import pytest

from tests.fork_server import run_program
from tests.testing import invoke


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0 and f"{shell}_complete" in result.output and "energon-lite" in result.output


def test_another_shell() -> None:
    assert invoke("completion", "tcsh").exit_code == 2


@pytest.mark.slow
def test_what_the_script_asks_for() -> None:
    asked = {"_ENERGON_LITE_COMPLETE": "bash_complete", "COMP_WORDS": "energon-lite l", "COMP_CWORD": "1"}
    program = "from energon_lite.cli.main import main; main(prog_name='energon-lite')"
    done = run_program(["-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == ["plain,lint"]
