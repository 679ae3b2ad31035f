"""What users of other loaders report, and the tests that show that it does not happen here; some stand below."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset

TESTS = Path(__file__).parents[3]

#: A trouble, and the tests that would fail if it came up here.
TROUBLES: dict[str, list[str]] = {
    "a position that is counted in a worker and read in the trainer never moves": [
        "extras/energon/compat/test_known_defects.py::test_saving_again_before_every_worker_has_delivered",
    ],
    "a shuffle buffer is lost with its samples, or shuffled anew": [
        "core/laws/test_topology.py::test_any_chain_of_topologies_is_the_uninterrupted_run",
        "core/laws/test_exactly_once.py::test_each_epoch_of_training_once",
    ],
    "what was prefetched is lost when the position is saved": [
        "core/laws/test_topology.py::test_restoring_in_the_middle_of_a_loop",
    ],
    "a resume at the end of an epoch leaves one out, or repeats one": [
        "extras/energon/compat/test_user_troubles.py::test_saved_around_the_end_of_a_pass",
    ],
    "a resume on other ranks leaves data out without a word": [
        "core/laws/test_lanes.py::test_states_that_do_not_go_together_are_named",
        "core/laws/test_no_code.py::test_states_of_many_ranks",
    ],
    "an index error, or a hang, when some workers have ended": [
        "extras/energon/compat/test_known_defects.py::test_fewer_samples_than_workers",
    ],
    "ranks with different numbers of batches hang at the end": [
        "core/laws/test_exactly_once.py::test_validation_once_over_all_ranks_and_in_step",
        "core/laws/test_lane_passes.py::test_a_pass_is_the_same_on_any_number_of_ranks",
    ],
    "ranks disagree on the number of micro-batches of dynamic size": [
        "core/laws/test_token_batches.py::test_a_pass_has_everything_once",
    ],
    "fewer shards or samples than workers": [
        "extras/energon/compat/test_known_defects.py::test_fewer_samples_than_workers",
        "core/laws/test_exactly_once.py::test_more_ranks_than_samples",
    ],
    "the memory of workers grows": [
        "core/storage/test_open_at_scale.py::test_workers_do_not_grow_over_a_hundred_thousand_samples",
        "extras/tools/test_packed_list.py::",
    ],
    "a fork together with threads or locks": [
        "core/chaos/test_workers_die.py::test_every_start_method_gives_the_same_batches",
        "core/storage/test_shard_store.py::test_a_fork_and_its_parent_read_through_the_same_files",
        "extras/energon/compat/test_user_troubles.py::test_an_import_changes_nothing",
    ],
    "files left in shared memory stand in the way of the next start": [
        "core/chaos/test_workers_die.py::test_nothing_stays_when_the_trainer_is_killed",
    ],
    "shared memory is full": ["core/loading/executors/test_segments.py::"],
    "a signal ends the workers first, and the last checkpoint is lost": [
        "core/chaos/test_trainers_die.py::test_sigterm_leaves_time_for_an_emergency_save",
        "core/chaos/test_workers_die.py::test_workers_ignore_the_signals_that_stop_a_trainer",
    ],
    "a checkpoint that was half written is taken for one": [
        "core/chaos/test_storage_fails.py::test_a_state_file_that_was_cut_off_is_never_taken_for_a_state",
    ],
    "a state holds pickles": ["core/laws/test_no_code.py::test_torch_save_keeps_a_state_loadable_without_pickles"],
    "a state is large, or slow to take": [
        "core/laws/test_topology.py::test_state_is_small_plain_and_quick",
        "core/laws/test_lanes.py::test_state_is_small_plain_and_quick",
        "extras/energon/compat/test_known_defects.py::test_the_state_does_not_grow_with_the_data",
    ],
    "preparing hangs, or has to begin again": [
        "core/storage/test_prepare_resume.py::test_killed_many_times",
        "core/storage/test_prepare_kills.py::test_a_first_preparation",
    ],
    "a slow start, from large indexes": [
        "core/storage/test_open_at_scale.py::test_opening_touches_few_shards_of_two_thousand",
    ],
    "a database on a network file system is locked or damaged": [
        "extras/energon/compat/test_user_troubles.py::test_the_database_is_not_needed_for_reading",
    ],
    "errors of storage that pass end the run": [
        "core/chaos/test_storage_fails.py::test_storage_that_fails_for_a_moment_changes_nothing",
    ],
    "bad samples end the run, or vanish unseen": [
        "core/laws/test_exactly_once.py::test_in_training_a_bad_sample_is_replaced_and_moves_nobody",
        "core/laws/test_exactly_once.py::test_skips_are_summed_up_at_close",
    ],
    "equal random numbers in all workers and epochs": [
        "core/laws/test_address.py::test_randomness_does_not_depend_on_who_makes_a_sample",
        "core/laws/test_address.py::test_each_epoch_draws_anew_and_another_seed_too",
    ],
    "another order with another release": [
        "core/laws/test_topology.py::test_golden_run",
        "core/order/test_permutation.py::test_golden",
    ],
    "samples come twice in an epoch, or its length is not known": [
        "core/laws/test_exactly_once.py::test_each_epoch_of_training_once",
        "core/laws/test_repetitions.py::test_each_pass_is_an_epoch_exact_with_fractions_and_in_step",
    ],
    "a changed mixture loses samples or repeats them": [
        "extras/blends/test_schedules.py::test_a_run_goes_on_with_other_stages_ahead",
    ],
    "a loss that is averaged over micro-batches of different sizes": ["trainer/parallel/test_parity.py::"],
    "which samples were in a step cannot be found out": [
        "core/laws/test_address.py::test_batches_and_their_samples_again"
    ],
    "row groups of Parquet files stay in memory": ["trainer/tokenizing/test_records.py::"],
    "files are opened again and again, or too many stay open": [
        "core/loading/test_many_leaves.py::test_a_blend_within_few_open_files",
        "core/storage/test_shard_store.py::test_keeps_a_bounded_number_of_files_open",
    ],
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_there_is_a_test(trouble: str) -> None:
    for place in TROUBLES[trouble]:
        file, _, name = place.partition("::")
        assert f"def {name or 'test_'}" in (TESTS / file).read_text(), place


class Packs(TaskEncoder):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"__key__": "+".join(sample.__key__ for sample in samples), "__restore_key__": ()}


def _epochs(leaf: Path) -> dict[str, Any]:
    split = {"blend_epochized": [{"path": str(leaf), "repetitions": 1.5}]}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": split}}


#: How a pass of four batches comes about.
PASSES: dict[str, Callable[[Path, WorkerConfig], Any]] = {
    "training": lambda leaf, config: get_train_dataset(leaf, batch_size=3, repeat=False, worker_config=config),
    "training without the rest": lambda leaf, config: get_train_dataset(
        leaf, batch_size=2, repeat=False, batch_drop_last=True, worker_config=config
    ),
    "repetitions": lambda leaf, config: get_train_dataset(
        _epochs(leaf), batch_size=4, repeat=False, worker_config=config
    ),
    "virtual epochs": lambda leaf, config: get_train_dataset(
        leaf, batch_size=3, virtual_epoch_length=4, worker_config=config
    ),
    "validation": lambda leaf, config: get_val_dataset(leaf, batch_size=3, worker_config=config),
    "validation up to a limit": lambda leaf, config: get_val_dataset(leaf, batch_size=2, limit=4, worker_config=config),
    "packs": lambda leaf, config: get_train_dataset(
        leaf, batch_size=1, repeat=False, packing_buffer_size=6, task_encoder=Packs(), worker_config=config
    ),
}


def _loader(manner: str, leaf: Path, workers: int) -> Any:
    return get_savable_loader(PASSES[manner](leaf, WorkerConfig(rank=0, world_size=1, num_workers=workers)))


def _loops(loader: Any) -> Iterator[Any]:
    """Batches of one ``for`` loop after the other."""
    while True:
        for batch in loader:
            yield batch["__key__"] if isinstance(batch, dict) else batch.__key__


@pytest.mark.parametrize("manner, workers", [*((manner, 0) for manner in PASSES), ("training", 2), ("packs", 2)])
def test_saved_around_the_end_of_a_pass(manner: str, workers: int, leaf_of: Any) -> None:
    leaf = leaf_of(8 if manner == "training without the rest" else 10)
    with _loader(manner, leaf, 0) as alone:
        passes = [len(list(alone)) for _ in range(3)]
    count = passes[0]
    assert passes == [count] * 3 and 4 <= count <= 5
    with _loader(manner, leaf, 0) as alone:
        expected = list(itertools.islice(_loops(alone), 3 * count))
    for cut in (0, 1, count - 1, count, count + 1, 2 * count):
        for behind_the_loop in (False, True):
            with _loader(manner, leaf, workers) as first:
                found = []
                while len(found) < cut:
                    for batch in first:
                        found.append(batch["__key__"] if isinstance(batch, dict) else batch.__key__)
                        if len(found) == cut and not (behind_the_loop and cut % count == 0):
                            break
                state = first.save_state_rank()
            with _loader(manner, leaf, workers) as second:  # saved again before it has done anything
                second.restore_state_rank(json.loads(json.dumps(state)))
                state = second.save_state_rank()
            with _loader(manner, leaf, workers) as third:
                third.restore_state_rank(state)
                rest = len(list(third))
                assert rest == count - cut % count, "the loop that was cut ends where it would have"
                third.restore_state_rank(state)
                found += itertools.islice(_loops(third), 3 * count - cut)
            assert found == expected, (cut, behind_the_loop)


def test_an_import_changes_nothing() -> None:
    """Neither the environment, nor how processes are started, nor the global generators; and no thread is begun."""
    program = """
import multiprocessing, os, random, signal, threading
import numpy, torch

def seen():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    generators = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
    return (dict(os.environ), multiprocessing.get_start_method(allow_none=True), torch.get_num_threads(),
            torch.multiprocessing.get_sharing_strategy(), handlers, generators, threading.active_count())

before = seen()
import energon_lite
for name in energon_lite.__all__:
    getattr(energon_lite, name)
assert seen() == before
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


READER = """
import sys
from energon_lite import WorkerConfig, get_savable_loader, get_val_dataset
dataset = get_val_dataset(sys.argv[1], batch_size=1, worker_config=WorkerConfig(rank=0, world_size=1))
print(*(batch.__key__[0] for batch in get_savable_loader(dataset)), "sqlite3" in sys.modules)
"""


def test_the_database_is_not_needed_for_reading(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    path = write_dataset(tmp_path / "data", {"s.tar": [(str(number), {"txt": b"x"}) for number in range(5)]})
    connection = sqlite3.connect(path / ".nv-meta" / "index.sqlite")
    connection.execute("CREATE TABLE samples (x)")
    connection.execute("BEGIN EXCLUSIVE")
    command = [sys.executable, "-c", READER, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    connection.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "2", "3", "4", "False"]
