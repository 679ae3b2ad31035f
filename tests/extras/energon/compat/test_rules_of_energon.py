"""What is Energon's rule under Energon's names, and ours elsewhere."""

from pathlib import Path

from tests.fork_server import run_program

PROGRAM = """
import sys, time
import energon_lite.extras.energon
energon_lite.extras.energon.install()
from megatron.energon import CrudeSample, DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset, stateless
from megatron.energon.wrappers.watchdog_dataset import WatchdogDataset

class Packs(DefaultTaskEncoder):
    decoder = None

    @stateless
    def encode_sample(self, sample):
        return sample

    def select_samples_to_pack(self, samples):
        return [samples[:1], samples[1:]] if len(samples) == 5 else []

    @stateless
    def pack_selected_samples(self, samples):
        return [int(sample["__key__"]) for sample in samples]

    def batch(self, packs):
        return packs

class Slow(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        while sample["__key__"] == "2" and not hangs:  # until somebody has heard of it
            time.sleep(0.01)
        return sample

    def batch(self, samples):
        return len(samples)

hangs = []
WatchdogDataset._watchdog_trigger = lambda: hangs.append(1)
config = WorkerConfig(rank=0, world_size=1, num_workers=0)
path = sys.argv[1]
packed = get_val_dataset(
    path, split_part="train", batch_size=2, packing_buffer_size=5, task_encoder=Packs(), worker_config=config
)
loader = get_loader(packed)
assert len(loader) == 6, len(loader)
print(list(loader))
slow = get_val_dataset(path, split_part="train", batch_size=4, task_encoder=Slow(), worker_config=config)
print(list(get_loader(slow, watchdog_timeout_seconds=0.5)), hangs)
"""


def test_packs_come_in_their_order_and_hangs_are_heard_of(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(12)))
    run = run_program(["-c", PROGRAM, tmp_path / "a.jsonl"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    packs = [[[0], [1, 2, 3, 4]], [[5], [6, 7, 8, 9]]]
    assert run.stdout.splitlines() == [str(packs), "[4, 4, 4] [1]"]
