"""A driver of Ray's actors: ``ray_driver.py ADDRESS BLEND FOLDER WORKERS SIZE STEPS [DIE_AT]``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import ray

from energon_lite.extras.frameworks.ray import SampleKey, SampleKeys, fetch, fetch_batch
from tests.extras.frameworks.keyed_prompts import digest


@ray.remote(num_cpus=0)
class Worker:
    def keys(self, keys: list[SampleKey]) -> list[str]:
        return [sample["__key__"] for sample in fetch(keys)]

    def digests(self, keys: list[SampleKey]) -> tuple[int, str, str]:
        return os.getpid(), digest(fetch(keys)), digest(fetch_batch(keys))


def main(address: str, blend: str, folder: Path, workers: int, size: int, steps: int, die_at: int = -1) -> None:
    ray.init(address=address, log_to_driver=False)
    actors = [Worker.remote() for _ in range(workers)]
    keys = SampleKeys("tests.extras.frameworks.keyed_prompts:open_prompts", blend)
    if (folder / "state.json").exists():
        keys.load_state_dict(json.loads((folder / "state.json").read_text()))
    for step, batch in zip(range(steps), keys.batches(size), strict=False):
        answers = ray.get([actor.keys.remote(batch[number::workers]) for number, actor in enumerate(actors)])
        everywhere = ray.get([actor.digests.remote(batch) for actor in actors])
        assert len({process for process, *_ in everywhere}) == workers
        assert {one[1:] for one in everywhere} == {(digest(fetch(batch)), digest(fetch_batch(batch)))}
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(folder / "seen.txt", "a") as file:
            file.writelines(f"{answers[number % workers][number // workers]}\n" for number in range(len(batch)))
        (folder / "new.json").write_text(json.dumps(keys.state_dict()))
        (folder / "new.json").replace(folder / "state.json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
