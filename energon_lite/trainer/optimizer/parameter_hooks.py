"""Being told when gradients come, and when somebody is about to read or has replaced the values of parameters.

A gradient that the optimizer took is not in ``parameter.grad``. There, until the next step, is a tensor that refuses to
be read, and gives on what autograd adds to it: torch's ``clip_grad_norm_`` takes None for a parameter without gradient,
and would return a norm of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from energon_lite.errors import UsageError

#: Called with the parameters that one module owns itself, its children's aside.
OfModule = Callable[[list[nn.Parameter]], None]


def hook_parameters(
    model: nn.Module,
    parameters: Collection[nn.Parameter],
    on_gradient: Callable[[nn.Parameter, torch.Tensor], None],
    before_forward: OfModule,
    before_state_dict: OfModule,
    after_load: OfModule,
) -> Callable[[], None]:
    """Call back for some parameters of a model, as long as it lives or until the function returned here is called.

    Each module is watched that owns a parameter, leaf of the tree or not. A compiled module is watched at its entrance
    for all that is in it: a call in the midst of compiled code would cut that in two.

    Args:
        model: the model.
        parameters: of those of its parameters.
        on_gradient: when ``grad`` of the parameter is complete for a backward pass; called with both, and takes it:
            the parameter's ``grad`` is None afterwards, or what :func:`refuse_reading` puts there.
        before_forward: when the module is called, in training or not; for a compiled one with all that it is made of.
        before_state_dict: when the module's state dict is read or loaded.
        after_load: when it was loaded.
    """

    def hand_over(p: nn.Parameter) -> None:
        taken = isinstance(p.grad, _TakenGradient)
        grad = p.grad.take_added() if isinstance(p.grad, _TakenGradient) else p.grad
        if grad is None:
            what = "a gradient was taken away before this optimizer could: another one has the same parameters"
            raise UsageError(what, fix="close() that one first, or use it")
        if isinstance(p, DTensor) and isinstance(grad, DTensor):
            grad = grad.redistribute(placements=p.placements).to_local()
        if not taken:
            p.grad = None
        on_gradient(p, grad.to_dense() if grad.is_sparse else grad)

    # Not hooks on the nodes that add gradients up: those die with the node, which nobody may hold, in silence.
    handles = [p.register_post_accumulate_grad_hook(hand_over) for p in parameters]
    inside: set[nn.Module] = set()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p in parameters]
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # torch.compile(module)
        if module not in inside:
            # Modules say of themselves if they use the parameters of their children without calling these.
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
    """From here to :func:`allow_reading`, who computes with a ``grad`` that was taken is told where it is.

    (Not with one of a DTensor, which stays None.)
    """
    for p in parameters:
        if p.grad is None and not isinstance(p, DTensor):
            p.grad = _TakenGradient(p)


def allow_reading(parameters: Iterable[nn.Parameter]) -> None:
    """A step begins; there are no gradients."""
    for p in parameters:
        if isinstance(p.grad, _TakenGradient):
            p.grad = None


class _TakenGradient(torch.Tensor):
    """In the place of a gradient that the optimizer has: without memory, and for autograd only."""

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
        """What autograd has added since the last call."""
        came, self.came = self.came, None
        return came

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a gradient that the optimizer has taken>"


def _told(call: OfModule, parameters: list[nn.Parameter]) -> Callable[..., None]:
    """A hook that says which parameters it is about, whatever torch passes to it."""
    return lambda *_: call(parameters)
