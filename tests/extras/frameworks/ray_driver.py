"""A driver of Ray's actors: ``ray_driver.py ADDRESS BLEND FOLDER WORKERS SIZE STEPS [DIE_AT]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray

from energon_lite.extras.frameworks.ray import SampleKey, fetch, fetch_batch
from tests.extras.frameworks.keyed_prompts import digest, drive


@ray.remote(num_cpus=0)
class Worker:
    def keys(self, keys: list[SampleKey]) -> list[str]:
        return [sample["__key__"] for sample in fetch(keys)]

    def digests(self, keys: list[SampleKey]) -> tuple[int, str, str]:
        return os.getpid(), digest(fetch(keys)), digest(fetch_batch(keys))


def main(address: str, blend: str, folder: Path, workers: int, *numbers: int) -> None:
    ray.init(address=address, log_to_driver=False)
    actors = [Worker.remote() for _ in range(workers)]

    def ask(batch: list[SampleKey]) -> list[list[str]]:
        answers = ray.get([actor.keys.remote(batch[number::workers]) for number, actor in enumerate(actors)])
        everywhere = ray.get([actor.digests.remote(batch) for actor in actors])
        assert len({process for process, *_ in everywhere}) == workers
        assert {one[1:] for one in everywhere} == {(digest(fetch(batch)), digest(fetch_batch(batch)))}
        return answers

    drive(ask, blend, folder, *numbers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
