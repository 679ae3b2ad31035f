"""``energon-lite checkpoint rebase``: continue a run with a changed blend or batch size."""

from __future__ import annotations

import os
from typing import Any

import click

from energon_lite.cli.checkpoint import STATES, dataset_of_state, dataset_options, found_states, suffix_of, whole_state
from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.extras.blends.rebase import rebase_state
from energon_lite.loading.saved_states import write_state_file


@click.command(name="rebase", context_settings={"show_default": True})
@STATES
@click.option("--from", "old", required=True, metavar="PATH", help="The blend (or folder) it was saved with.")
@click.option("--to", "new", metavar="PATH", help="The blend (or folder) to resume with.  [default: that of --from]")
@click.option("--batch-size", type=click.IntRange(min=1), help="New number of samples in a micro-batch.")
@click.option(
    "--output", "-o", type=click.Path(), help="The file to write.  [default: STATE with .rebased in its name]"
)
@click.option("--give-up", is_flag=True, help="Allow the loss of samples of unfinished work.")
@dataset_options
def command(
    states: tuple[str, ...],
    old: str,
    new: str | None,
    batch_size: int | None,
    output: str | None,
    give_up: bool,
    **options: Any,
) -> None:
    """Continue a run with a changed blend or batch size. Data sets in both blends continue where they were, new ones
    start at zero.

    The other arguments of get_train_dataset are taken from the state.
    """
    output = output or os.path.splitext(states[0].rstrip("/"))[0] + ".rebased" + suffix_of(states[0])
    whole = whole_state(found_states(states))
    if new is None and batch_size is None:
        raise UsageError("neither --to nor --batch-size: nothing would change", fix="give one of them, or both")
    before = dataset_of_state(whole, old, **options)
    after = dataset_of_state(whole, new or old, batch_size, **options)
    try:
        state, report = rebase_state(whole, before, after, give_up=give_up)
    except StateMismatchError as error:
        if "another run" not in error.what:
            raise
        fix = "give the blend as it was when the state was saved, and the options that it was built with"
        raise StateMismatchError(error.what, where=f"--from {old}", fix=fix) from None
    write_state_file(output, state)
    click.echo(f"{output}: {report}")
