"""A training that prints the keys of its batches, which actors of Ray make on CPU machines.

    ray start --head --port 6379 --num-cpus 0                           # on the GPU machine
    ray start --address HEAD:6379 --resources '{"cpu_node": 64}'        # on each CPU machine
    RAY_ADDRESS=HEAD:6379 python examples/machines/ray_actors.py DATA   # on the GPU machine

Each actor takes one ``cpu_node``, so none runs on the GPU machine.
"""

import sys

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.remote_workers import RayWorkers

if __name__ == "__main__":
    workers = RayWorkers(maximum=64, resources={"CPU": 1, "cpu_node": 1})
    config = WorkerConfig(rank=0, world_size=1, workers=workers)
    dataset = get_train_dataset(sys.argv[1], worker_config=config, batch_size=2, repeat=False)
    with get_savable_loader(dataset) as loader:
        print(sorted(key for batch in loader for key in batch.__key__))
