"""Hooks for the arrival of gradients, and for reads and loads of parameter values.

A gradient that the optimizer took is not in ``parameter.grad``. Until the next step, that holds a tensor that raises an
error when it is read, and passes on what autograd adds to it. None would not do: torch's ``clip_grad_norm_`` treats
None as no gradient, and would return a norm of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from energon_lite.errors import UsageError

#: Callback with the parameters that one module owns directly, without its children's.
OfModule = Callable[[list[nn.Parameter]], None]


def hook_parameters(
    model: nn.Module,
    parameters: Collection[nn.Parameter],
    on_gradient: Callable[[nn.Parameter, torch.Tensor], None],
    before_forward: OfModule,
    before_state_dict: OfModule,
    after_load: OfModule,
) -> Callable[[], None]:
    """Install callbacks for some parameters of a model.

    Every module that owns a parameter is hooked, leaf or not. A compiled module is hooked at its entry for all
    parameters in it: a callback within compiled code would cause a graph break.

    Args:
        model: the model.
        parameters: the parameters to watch.
        on_gradient: called with a parameter and its gradient when that is complete for a backward pass; it takes the
            gradient: the parameter's ``grad`` is None afterwards, or the tensor of :func:`refuse_reading`.
        before_forward: called when a module is called, in training or not; for a compiled one with all parameters in
            it.
        before_state_dict: called before a module's state dict is read or loaded.
        after_load: called after it was loaded.

        Returns:
            A function that removes the hooks.
    """

    def hand_over(p: nn.Parameter) -> None:
        taken = isinstance(p.grad, _TakenGradient)
        grad = p.grad.take_added() if isinstance(p.grad, _TakenGradient) else p.grad
        if grad is None:
            what = "another optimizer has the same parameters, and took a gradient of this one"
            raise UsageError(what, fix="close() the other optimizer first, or use it")
        if isinstance(p, DTensor) and isinstance(grad, DTensor):
            grad = grad.redistribute(placements=p.placements).to_local()
        if not taken:
            p.grad = None
        on_gradient(p, grad.to_dense() if grad.is_sparse else grad)

    # Hooks on autograd's accumulation nodes would vanish silently with the nodes, which cannot be kept alive.
    handles = [p.register_post_accumulate_grad_hook(hand_over) for p in parameters]
    inside: set[nn.Module] = set()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p in parameters]
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # torch.compile(module)
        if module not in inside:
            # A module sets reads_children if it uses the parameters of its children without calling them.
            whole = compiled or getattr(module, "reads_children", False)
            entered = [p for p in module.parameters() if p in parameters] if whole else own
            if entered:
                hook = _told(before_forward, entered)
                handles.append(module.register_forward_pre_hook(torch.compiler.disable(hook) if compiled else hook))
        if compiled:
            inside.update(module.modules())
        if own:
            handles += [
                module.register_state_dict_pre_hook(_told(before_state_dict, own)),
                module.register_load_state_dict_pre_hook(_told(before_state_dict, own)),
                module.register_load_state_dict_post_hook(_told(after_load, own)),
            ]

    def unhook() -> None:
        for handle in handles:
            handle.remove()
        allow_reading(parameters)

    return unhook


def refuse_reading(parameters: Iterable[nn.Parameter]) -> None:
    """Make reads of taken gradients raise an error that names the optimizer, until :func:`allow_reading`.

    The ``grad`` of a DTensor stays None instead.
    """
    for p in parameters:
        if p.grad is None and not isinstance(p, DTensor):
            p.grad = _TakenGradient(p)


def allow_reading(parameters: Iterable[nn.Parameter]) -> None:
    """Remove the placeholders of taken gradients at the start of a step."""
    for p in parameters:
        if isinstance(p.grad, _TakenGradient):
            p.grad = None


class _TakenGradient(torch.Tensor):
    """Placeholder of a gradient that the optimizer has taken: without memory, usable by autograd only."""

    came: torch.Tensor | None

    @staticmethod
    def __new__(cls, p: nn.Parameter) -> _TakenGradient:
        made: _TakenGradient = torch.Tensor._make_wrapper_subclass(cls, p.shape, dtype=p.dtype, device=p.device)
        made.came = None
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):  # autograd, in a further micro-batch
            args[0].came = args[1]
        elif function is not torch.ops.aten.detach.default:
            what = f"{function} of a gradient that is not in .grad: this model's optimizer has it"
            fix = "clip with OptimizerConfig(clip=...), or 0 for not at all; step() returns the norm before clipping"
            raise UsageError(what, fix=fix)
        return args[0]

    def take_added(self) -> torch.Tensor | None:
        """Return the gradient that autograd has added since the last call, or None."""
        came, self.came = self.came, None
        return came

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a gradient that the optimizer has taken>"


def _told(call: OfModule, parameters: list[nn.Parameter]) -> Callable[..., None]:
    """Return a hook that calls ``call(parameters)`` and ignores torch's arguments."""
    return lambda *_: call(parameters)
