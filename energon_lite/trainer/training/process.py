"""The process that a run computes in: which kernels it may use, when it collects garbage, what is recorded."""

from __future__ import annotations

import gc
import logging
import os

import torch

from energon_lite.trainer.models.attention_functions import describe_attention
from energon_lite.trainer.training.config import TrainerConfig

logger = logging.getLogger(__name__)

#: Newer kernels of FlashAttention by the generation of a GPU, if their package is installed.
_FLASH = {9: "FA3", 10: "FA4"}


def prepare_process(config: TrainerConfig) -> None:
    """What must be set before the first collective and the first kernel: determinism, and NCCL's flight recorder."""
    deterministic = config.train.deterministic
    if deterministic or (deterministic is None and not torch.cuda.is_available()):
        make_deterministic()
    if config.train.flight_recorder:
        # Who set one of these already wants it so.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(config.train.flight_recorder))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", os.path.join(config.output, "nccl-trace-rank"))


def make_deterministic() -> None:
    """Only kernels that give the same bits each time, and one thread per process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)


def prepare_attention(config: TrainerConfig, device: torch.device, *, visible: bool) -> None:
    """Take the newest FlashAttention that there is for the GPU, unless it must be deterministic; say what is used.

    Args:
        config: of the run.
        device: where it computes.
        visible: False on the ranks that stay silent.
    """
    fast = device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    newer = _FLASH.get(torch.cuda.get_device_capability(device)[0]) if fast else None
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)  # torch >= 2.11
    if newer is not None and activate is not None:
        try:
            activate(newer)
        except Exception as error:  # whatever a package of another CUDA or none raises
            logger.debug("no %s here: %s", newer, error)
    if visible:
        kernels = describe_attention(config.model, device, config.data.max_length)
        logger.info("attention: %s; deterministic: %s", kernels, torch.are_deterministic_algorithms_enabled())


class GarbageCollection:
    """Python's search for garbage in rings, at chosen steps instead of whenever it likes, which is in the midst of one,
    and on each rank in another, while the others wait.

    Args:
        every: steps between two collections; 0: Python's own way.

    Example:
        >>> with GarbageCollection(every=100) as garbage:
        ...     garbage.ended(step)
    """

    def __init__(self, every: int):
        self.every, self._was_enabled = every, False

    def __enter__(self) -> GarbageCollection:
        if self.every:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
        return self

    def ended(self, step: int) -> None:
        """A step was launched; all ranks call it at the same one."""
        if self.every and step % self.every == 0:
            gc.collect(1)

    def __exit__(self, *exc: object) -> None:
        if self._was_enabled:
            gc.enable()
