"""Settings of the training process: kernels, garbage collection and NCCL's flight recorder."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from energon_lite.trainer.models.attention_functions import describe_attention
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
        kernels = describe_attention(config.model, device, config.data.max_length)
        logger.info("attention: %s; deterministic: %s", kernels, torch.are_deterministic_algorithms_enabled())


@contextmanager
def garbage_collection(every: int) -> Iterator[Callable[[int], None]]:
    """Run Python's cyclic garbage collection at chosen steps, and its own schedule again afterwards.

    By default, Python collects in the middle of a step, on each rank in another one, while the other ranks wait.

    Args:
        every: steps between two collections; 0 for Python's own schedule.

    Yields:
        A function of the number of a step, to be called after its launch; all ranks collect at the same steps.

    Example:
        >>> with garbage_collection(every=100) as ended:
        ...     ended(step)
    """
    enabled = gc.isenabled()
    if every:
        gc.disable()
        gc.collect()

    def ended(step: int) -> None:
        if every and step % every == 0:
            gc.collect(1)

    try:
        yield ended
    finally:
        if enabled:
            gc.enable()
