"""Being told when gradients come, and when somebody is about to read or has replaced the values of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

#: Called with the parameters that one module owns itself, its children's aside.
OfModule = Callable[[list[nn.Parameter]], None]


def hook_parameters(
    model: nn.Module,
    parameters: Collection[nn.Parameter],
    on_gradient: Callable[[nn.Parameter], None],
    before_forward: OfModule,
    before_state_dict: OfModule,
    after_load: OfModule,
) -> None:
    """Call back for some parameters of a model, as long as it lives.

    Each module is watched that owns a parameter, leaf of the tree or not. A compiled module is watched at its entrance
    for all that is in it: a call in the midst of compiled code would cut that in two.

    Args:
        model: the model.
        parameters: of those of its parameters.
        on_gradient: when ``grad`` of the parameter is complete for a backward pass.
        before_forward: when the module is called, in training or not; for a compiled one with all that it is made of.
        before_state_dict: when the module's state dict is read or loaded.
        after_load: when it was loaded.
    """
    for p in parameters:
        # Not a hook on the node that adds gradients up: that dies with the node, which nobody may hold, in silence.
        p.register_post_accumulate_grad_hook(on_gradient)
    inside: set[nn.Module] = set()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p in parameters]
        compiled = module._compiled_call_impl is not None
        if module not in inside:
            # Modules say of themselves if they use the parameters of their children without calling these.
            whole = compiled or getattr(module, "reads_children", False)
            entered = [p for p in module.parameters() if p in parameters] if whole else own
            _before_forward(module, entered, before_forward, compiled=compiled)
        if compiled:
            inside.update(module.modules())
        if own:
            module.register_state_dict_pre_hook(lambda *_, own=own: before_state_dict(own))
            module.register_load_state_dict_pre_hook(lambda *_, own=own: before_state_dict(own))
            module.register_load_state_dict_post_hook(lambda *_, own=own: after_load(own))


def _before_forward(module: nn.Module, entered: list[nn.Parameter], call: OfModule, *, compiled: bool) -> None:
    def hook(*_: object) -> None:
        call(entered)

    if entered:
        module.register_forward_pre_hook(torch.compiler.disable(hook) if compiled else hook)
