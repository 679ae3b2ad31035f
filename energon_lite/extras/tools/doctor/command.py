"""``energon-lite doctor``: check if training can run on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

__all__ = ["command"]


@click.command(name="doctor", context_settings={"show_default": True})
@click.option("--path", default=".", help="Folder for checkpoints, which is checked.")
@click.option(
    "--megabytes", type=click.IntRange(1, 4000), default=64, help="Size of the all-reduce by which links are timed."
)
@click.option("--timeout", type=click.FloatRange(min=1), default=60.0, help="Seconds to wait for other ranks.")
@click.option("--json", "as_json", is_flag=True, help="Write the findings of each rank as JSON.")
def command(path: str, megabytes: int, timeout: float, as_json: bool) -> None:
    """Examine this machine, and under torchrun all ranks and their links.

    It reports problems and their fixes; the exit code is 1 if there is a problem.

    \b
    energon-lite doctor
    torchrun --standalone --nproc-per-node 8 -m energon_lite.cli.main doctor --path output
    """
    from energon_lite.extras.tools.doctor.examination import examine, report_lines

    report = examine(path, megabytes=megabytes, timeout=timeout)
    if not report.speaks:
        return
    if as_json:
        by_rank = [[dataclasses.asdict(finding) for finding in findings] for findings in report.by_rank]
        click.echo(json.dumps({"wrong": report.wrong, "ranks": by_rank}, indent=2))
        sys.exit(1 if report.wrong else 0)
    for line in report_lines(report.by_rank):
        click.echo(line)
    if report.wrong:
        click.echo(f"{report.wrong} thing{'s are' if report.wrong > 1 else ' is'} wrong")
        sys.exit(1)
    click.echo("nothing is wrong")
