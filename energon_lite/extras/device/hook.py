"""Call of the hook ``encode_on_device``, with the randomness of its batch, whoever has loaded it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from energon_lite.hooks import HookContext, LendingScope, is_overridden
from energon_lite.hooks.hooks import hook_of
from energon_lite.hooks.marks import restores_seeds
from energon_lite.loading.makers.hook_errors import check_result, note_where
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.order.hashing import HashDomain

#: Name of the hook.
NAME = "encode_on_device"
_DEVICE = HashDomain.DEVICE_HOOK.value


class DeviceHook:
    """Caller of the hook.

    Args:
        runner: runner of the jobs, with the encoder and the seed of the run.
        generator: global generator of the device; None: it has none of its own.
    """

    def __init__(self, runner: JobRunner, generator: torch.Generator | None):
        self._runner = runner
        self._generator = generator
        self._seeds = restores_seeds(hook_of(runner.encoder, NAME))

    def guarded(self, batch: Any, digest: int) -> Any:
        """Return the result of the hook for a batch.

        Args:
            batch: the batch, on the device.
            digest: digest of its samples, from which its randomness follows.

        Raises:
            FatalSampleError: the hook returned what no hook may return.
        """
        hook = getattr(self._runner.encoder, NAME)
        whose = "a batch on the device"
        services = self._runner.services
        context = HookContext(
            *(self._runner.seed, _DEVICE, digest), cache=services.cache_pool, worker_config=services.worker_config
        )
        with LendingScope(), context, self._seeded(context):
            try:
                made = hook(batch)
            except Exception as error:
                note_where(error, NAME, whose)
                raise
        check_result(made, NAME, hook, whose)
        return made

    @contextmanager
    def _seeded(self, context: HookContext) -> Iterator[None]:
        """Seed the global generators, those of the processor and of the device; restore the latter at the end."""
        if self._seeds:
            context.seed_globals()
        if self._generator is None or not self._seeds:
            yield
            return
        before = self._generator.get_state()
        self._generator.manual_seed(context.seed >> 1)
        try:
            yield
        finally:
            self._generator.set_state(before)


def device_hook(runner: JobRunner, generator: torch.Generator | None) -> DeviceHook | None:
    """Return the caller of the hook; None: the task encoder has none."""
    return DeviceHook(runner, generator) if is_overridden(runner.encoder, NAME) else None
