"""What the launcher has told this process, by its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from energon_lite.trainer.doctor.finding import Finding

#: What torchrun sets.
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: How many processes a launcher has started that sets other variables than torchrun.
_OTHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}


def launch(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Ranks as the launcher counts them. Where this finds something wrong, ranks cannot meet."""
    given = [name for name in NEEDED if environment.get(name)]
    if not given:
        for name, size in _OTHERS.items():
            if environment.get(size, "1") != "1":
                what = f"{name} has started {environment[size]} processes, and each believes that it is alone"
                yield Finding("ranks", what, "wrong", f"let {name} start one torchrun on each machine")
                return
        yield Finding("ranks", "one process, without a launcher; links and clocks are not looked at")
        return
    missing = [name for name in NEEDED if name not in given]
    if missing:
        fix = "start with torchrun, or set all of " + ", ".join(NEEDED)
        yield Finding("ranks", f"{', '.join(given)} are set, but not {', '.join(missing)}", "wrong", fix)
        return
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not environment[name].isdigit():
            yield Finding("ranks", f"{name}={environment[name]!r} is no number", "wrong", "start with torchrun")
            return
        numbers[name] = int(environment[name])
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world:
        yield Finding("ranks", f"RANK={rank} of WORLD_SIZE={world}", "wrong", "ranks count from 0 to WORLD_SIZE - 1")
        return
    where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    yield Finding("ranks", f"{world}, meeting at {where}")
    local = environment.get("LOCAL_WORLD_SIZE", str(world))
    if environment["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1") and local != str(world):
        # Nothing is wrong if several launchers were started on one machine; otherwise ranks will not meet.
        what = f"MASTER_ADDR={environment['MASTER_ADDR']}, but only {local} of {world} ranks are started here"
        yield Finding(
            "ranks", what, "warning", "give the address of the first machine (--master-addr, --rdzv-endpoint)"
        )
