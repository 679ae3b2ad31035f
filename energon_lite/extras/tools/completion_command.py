"""``energon-lite completion``: the script by which a shell completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from energon_lite.cli.main import main

_SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "energon-lite"
_VARIABLE = "_ENERGON_LITE_COMPLETE"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Write the completion script for SHELL: commands, options and their values.

    \b
    bash   eval "$(energon-lite completion bash)"    in ~/.bashrc
    zsh    eval "$(energon-lite completion zsh)"     in ~/.zshrc
    fish   energon-lite completion fish > ~/.config/fish/completions/energon-lite.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click supports all three
    if shell == "bash":
        # click would check the version of the bash that it finds, not of the one that reads this script
        kind = type("_Bash", (kind,), {"_check_version": staticmethod(lambda: None)})
    click.echo(kind(main, {}, _PROGRAM, _VARIABLE).source())
