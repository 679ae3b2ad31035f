"""A process of a run as two launchers start it: torchrun says the rank in variables that make a process group, srun in
its own, which the script reads itself. Run under energon_lite.extras.energon, and by Energon.

Prints a line of JSON. Arguments: the launcher, and the data set's folder.
"""

import json
import os
import sys

import torch.distributed as dist
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset


class Keys(DefaultTaskEncoder):
    """Batches of the samples' names."""

    def batch(self, samples: list) -> list:
        return [sample.__key__ for sample in samples]


def config_of(launcher: str) -> WorkerConfig:
    if launcher == "torchrun":
        dist.init_process_group("gloo")
        return WorkerConfig.default_worker_config(num_workers=1)
    return WorkerConfig(rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]), num_workers=1)


def main(launcher: str, path: str) -> None:
    config = config_of(launcher)
    shared: dict = {"batch_size": 5, "worker_config": config, "task_encoder": Keys()}
    val = get_val_dataset(path, split_part="val", **shared)
    train = get_train_dataset(
        path, split_part="train", shuffle_buffer_size=None, max_samples_per_sequence=None, **shared
    )
    batches = iter(get_savable_loader(train))
    first = [next(batches) for _ in range(4)]
    found = {
        "library": get_train_dataset.__module__.split(".")[0],
        "place": [config.rank, config.world_size],
        "val": list(get_savable_loader(val)),
        "train": sorted(key for batch in first for key in batch),
    }
    print(json.dumps(found))
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
