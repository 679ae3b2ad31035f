"""The training process: its kernels and NCCL's flight recorder, and its signals and time limit."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from energon_lite.trainer.models.named_layers import choose_attention
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import TrainerConfig

logger = logging.getLogger(__name__)

#: Newer kernels of FlashAttention by the generation of a GPU, if their package is installed.
_FLASH = {9: "FA3", 10: "FA4"}


def prepare_process(config: TrainerConfig) -> None:
    """Set determinism and NCCL's flight recorder, before the first collective and the first kernel."""
    deterministic = config.train.deterministic
    if deterministic or (deterministic is None and not torch.cuda.is_available()):
        make_deterministic()
    if config.train.flight_recorder:
        # Variables that the user has set take precedence.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(config.train.flight_recorder))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", os.path.join(config.output, "nccl-trace-rank"))


def make_deterministic() -> None:
    """Restrict torch to kernels that give the same bits each time, and to one thread per process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)


def prepare_attention(config: TrainerConfig, device: torch.device, *, visible: bool) -> None:
    """Activate the newest FlashAttention for the GPU, unless the run is deterministic; log the kernels in use.

    Args:
        config: configuration of the run.
        device: device of this rank.
        visible: False on ranks that do not log.
    """
    fast = device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    newer = _FLASH.get(torch.cuda.get_device_capability(device)[0]) if fast else None
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)  # torch >= 2.11
    if newer is not None and activate is not None:
        try:
            activate(newer)
        except Exception as error:  # any error, as of a missing package or one for another CUDA
            logger.debug("no %s here: %s", newer, error)
    if visible:
        name = choose_attention(config.model, device).function.__name__
        logger.info("attention: %s; deterministic: %s", name, torch.are_deterministic_algorithms_enabled())


#: Reasons to stop: signals, and ``train.time_limit``. Slurm can send the second ahead of the end
#: (``--signal=USR1@300``).
_STOPS = ("SIGTERM", "SIGUSR1", "train.time_limit")
#: Signal that requests a checkpoint.
_SAVE = "SIGUSR2"


class Requests:
    """Signals received and time left. They reach ranks at different times; :meth:`agreed` makes all ranks agree.

    Args:
        time_limit: seconds from now until the run must be over, its last checkpoint included; None for no limit.
        mesh: the ranks.
    """

    def __init__(self, time_limit: float | None, mesh: ParallelMesh):
        self.time_limit = time_limit
        self.mesh = mesh
        self._came: set[str] = set()
        self._began = self._asked = time.monotonic()
        self._slowest = 0.0  # seconds from one step to the next
        self._tried = False  # a checkpoint was requested to measure its time
        # A collective on the GPU would wait for all work launched before it, so the CPU is used.
        apart = mesh.world_size > 1 and mesh.device.type == "cuda"
        self._group = dist.new_group(backend="gloo", timeout=mesh.timeout) if apart else None

    @contextmanager
    def listening(self) -> Iterator[set[str]]:
        """Collect SIGTERM instead of ending the process; also SIGUSR1 and SIGUSR2, if they have no other handler.

        Yields the names of the signals received and not yet handled.
        """
        self._came.clear()
        before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers there only
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
                    before[number] = signal.signal(number, lambda came, _: self._came.add(signal.Signals(came).name))
        self._asked = time.monotonic()
        try:
            yield self._came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(
        self, *bad: bool, sums: Sequence[float] = (), seconds_to_save: float = 0.0
    ) -> tuple[str, bool, list[bool], list[float]]:
        """Return the requests of all ranks after a step was launched. Every rank must call it.

        The time limit counts as reached if the time left is less than two of the slowest steps so far (the running one
        and the next) and two of the slowest checkpoints (one that may be in progress, and the last). While the time of
        a checkpoint is unknown, one is requested when half of the time has passed.

        Args:
            bad: whether each of the reported steps was bad on this rank.
            sums: numbers of this rank, as many on each, to be summed over ranks in the same message.
            seconds_to_save: seconds that a checkpoint takes, as measured on this rank; 0 if unknown.

        Returns:
            The reason to stop, or an empty text; whether to save; whether each of the steps was bad on any rank; the
            sums.
        """
        now = time.monotonic()
        self._slowest, self._asked = max(self._slowest, now - self._asked), now
        if self.time_limit is not None:
            left = self.time_limit - (now - self._began)
            if left < 2 * (self._slowest + seconds_to_save):
                self._came.add(_STOPS[-1])
            elif not (seconds_to_save or self._tried) and left < self.time_limit / 2:
                self._came.add(_SAVE)
        shared = torch.tensor([*(name in self._came for name in (*_STOPS, _SAVE)), *bad, *sums], dtype=torch.float64)
        if self.mesh.world_size > 1:
            dist.all_reduce(shared, group=self._group)
        flags, totals = (part.tolist() for part in shared.split([len(shared) - len(sums), len(sums)]))
        flags = [count > 0 for count in flags]
        self._came.discard(_SAVE)
        self._tried = self._tried or flags[len(_STOPS)]  # equal on all ranks, whose clocks differ
        stop = next((name for name, came in zip(_STOPS, flags, strict=False) if came), "")
        return stop, flags[len(_STOPS)], flags[len(_STOPS) + 1 :], totals
