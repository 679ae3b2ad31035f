"""Show the groups of ranks of a training run, and the layers of each pipeline stage:

python examples/layout.py --world 16 --tp 2 --pp 4
python examples/layout.py --world 4 --pp 4 --layers 16 --virtual 2
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

import click

from energon_lite.errors import counted
from energon_lite.trainer.parallel.rank_grid import RankGrid, fit_sizes, layers_of_stages

_COUNT = click.IntRange(min=1)
_TITLES = {
    ("tp",): "Tensor parallel",
    ("cp",): "Context parallel",
    ("dp",): "Data parallel",
    ("dp", "cp"): "Data x context (gradients are summed here)",
    ("pp",): "Pipeline parallel",
}


def group_table(grid: RankGrid) -> Iterator[str]:
    """Yield each axis with its groups, one group a line."""
    for axes, title in _TITLES.items():
        size = math.prod(grid.size(axis) for axis in axes)
        if len(axes) > 1 and (grid.dp == 1 or grid.cp == 1):
            continue  # equal to one of the two axes
        yield f"{title}, {'-'.join(axes)} = {size}" + (": each rank by itself" if size == 1 else "")
        if size > 1:
            for group in grid.groups(*axes):
                yield f"    [{_ranks(group)}]"


def draw_grid(grid: RankGrid) -> Iterator[str]:
    """Draw the ranks as a table: a column for each stage, a row for each replica, tensor-parallel peers in one cell."""
    width = len(f"g{grid.world_size - 1}")
    cell = grid.tp * (width + 1) - 1
    label = len(f"dp {grid.dp - 1}  cp {grid.cp - 1}")
    line = " " * label + "  +" + "+".join(["-" * (cell + 2)] * grid.pp) + "+"
    yield " " * label + "   " + " ".join(f"pp {stage}".center(cell + 2) for stage in range(grid.pp))
    yield line
    ranks = grid.ranks
    for dp, cp in itertools.product(range(grid.dp), range(grid.cp)):
        cells = [" ".join(f"g{rank}".ljust(width) for rank in ranks[pp, dp, cp]) for pp in range(grid.pp)]
        yield f"dp {dp}  cp {cp}".ljust(label) + "  | " + " | ".join(cells) + " |"
        if cp == grid.cp - 1:
            yield line
    if grid.tp > 1:
        yield " " * label + f"   in a cell: tp 0 to {grid.tp - 1}"


def layer_map(grid: RankGrid, layers: int, virtual: int) -> Iterator[str]:
    """Yield the layers of each pipeline stage, counted from 1, as a list for each chunk."""
    for stage, chunks in enumerate(layers_of_stages(layers, grid.pp, virtual)):
        shown = " ".join(str([number + 1 for number in chunk]) for chunk in chunks)
        yield f"    stage {stage} ({_ranks(sorted(grid.ranks[stage].flat))}): {shown}"


def _ranks(group: list[int]) -> str:
    return ", ".join(f"g{rank}" for rank in group)


@click.command(context_settings={"show_default": True})
@click.option("--world", type=_COUNT, required=True, help="Number of ranks.")
@click.option("--tp", type=_COUNT, default=1, help="Tensor parallel size.")
@click.option("--cp", type=_COUNT, default=1, help="Context parallel size.")
@click.option("--dp", type=_COUNT, help="Data parallel size.  [default: the remaining factor]")
@click.option("--pp", type=_COUNT, default=1, help="Pipeline stages.")
@click.option("--order", default="tp-cp-dp-pp", help="Order of the axes, the fastest varying first.")
@click.option("--layers", type=_COUNT, help="Number of layers, to show the layers of each stage.")
@click.option("--virtual", type=_COUNT, default=1, help="Chunks of layers for each stage.")
@click.option("--json", "as_json", is_flag=True, help="Write sizes, groups and layers as JSON.")
def main(
    world: int, tp: int, cp: int, dp: int | None, pp: int, order: str, layers: int | None, virtual: int, as_json: bool
) -> None:
    """Show the groups of ranks of a run."""
    grid = RankGrid(pp, fit_sizes(world, pp=pp, dp=dp, cp=cp, tp=tp), cp, tp, order)
    if as_json:
        groups = {"-".join(axes): grid.groups(*axes) for axes in _TITLES}
        stages = None if layers is None else layers_of_stages(layers, pp, virtual)
        sizes_by_axis = {axis: grid.size(axis) for axis in ("tp", "cp", "dp", "pp")}
        click.echo(json.dumps({"sizes": sizes_by_axis, "groups": groups, "layers_of_stages": stages}, indent=2))
        return
    sizes = ", ".join(f"{axis} {grid.size(axis)}" for axis in ("tp", "cp", "dp", "pp"))
    click.echo(f"{counted(world, 'rank')}, g0 to g{world - 1}: {sizes}")
    click.echo(f"counted in the order {'-'.join(reversed(grid.slow_to_fast))}, the fastest varying axis first\n")
    for line in itertools.chain(draw_grid(grid), [""], group_table(grid)):
        click.echo(line)
    if layers is not None:
        click.echo(f"\nLayers 1 to {layers}, in {counted(virtual, 'chunk')} for each stage")
        for line in layer_map(grid, layers, virtual):
            click.echo(line)


if __name__ == "__main__":
    main()
