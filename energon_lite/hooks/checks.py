"""Checks of a task encoder when a data set is built: its hooks can be called, and none has a misspelled name."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any

from energon_lite.batching.collate import check_padding
from energon_lite.errors import UsageError
from energon_lite.hooks.base import AugmentTaskEncoder, TaskEncoder
from energon_lite.hooks.cooking import Cooker, places, required, takes
from energon_lite.hooks.hooks import HOOK_ORDER, hook_of, is_generator, is_overridden, layers_of, owner_of

logger = logging.getLogger(__name__)

#: The hooks that jobs call, and the one that a path to a device calls.
_HOOKS = (*HOOK_ORDER, "encode_on_device")
#: Arguments of the hooks. (cook_crude_sample may take fewer; it is checked elsewhere.)
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(HOOK_ORDER, ("sample",)),
    **dict.fromkeys(("select_samples_to_pack", "pack_selected_samples", "batch"), ("samples",)),
    **dict.fromkeys(("sample_length", "sample_costs"), ("encoded",)),
    **dict.fromkeys(("encode_batch", "encode_on_device"), ("batch",)),
    "empty_batch": ("like", "rows"),
}
#: Other attributes of an encoder that the loader reads.
_ATTRIBUTES = ("cookers", "decoder", "device_decoder", "failure_tolerance", "padding")
#: Least similarity at which a name may be a misspelled hook.
_ALIKE = 0.88
#: Warnings that were given: a class, and a name in it.
_warned: set[tuple[type, str]] = set()

_PIPELINE = (
    "leave it out: blends, repetitions, shuffling and lengths are arguments of get_train_dataset and get_val_dataset, "
    "and wrappers go around what these return. For batches of like lengths (a sort of a pool before the batch) write "
    "a batch_group_criterion that returns (class of the length, None); or give, in place of batch_size, "
    'batching=ByTokens(SortedWindow(Capacity(12_000, "padded_tokens")), length_column=None)'
)
#: Methods of Energon that build its pipeline, and their replacements.
_BUILDERS = {
    "build_batch": "leave it out, and write batch, encode_batch, batch_group_criterion, or the hooks of packing",
    "build_cook_crude_sample": "leave it out, and write cookers, or cook_crude_sample",
    "build_encode_sample": "leave it out, and write encode_sample, or preencode_sample and postencode_sample",
    "build_train_datasets": _PIPELINE,
    "build_val_datasets": _PIPELINE,
}

_PACKING = ("select_samples_to_pack", "pack_selected_samples")


def check_hooks(encoder: TaskEncoder, *, packing_buffer_size: int | None = None) -> None:
    """Refuse, when the data set is built, an encoder with hooks that this loader would not call as intended.

    Args:
        packing_buffer_size: argument of the data set.

    Raises:
        UsageError: a hook is refused; the message names it.
    """
    if not isinstance(encoder, TaskEncoder):
        is_class = isinstance(encoder, type)
        raise UsageError(
            f"task_encoder is {f'the class {encoder.__name__}' if is_class else f'a {type(encoder).__name__}'}",
            fix=f"give an instance: {encoder.__name__}(...)"
            if is_class
            else "derive it from energon_lite.TaskEncoder, and give an instance",
        )
    check_padding(encoder.padding)
    _check_functions(encoder)
    _check_names(encoder)
    _check_packing(encoder, packing_buffer_size)
    _check_generators(encoder, packing=packing_buffer_size is not None)


def _check_names(encoder: TaskEncoder) -> None:
    cls = type(encoder)
    for name, fix in _BUILDERS.items():
        if hasattr(encoder, name) and not _only_calls_super(getattr(encoder, name)):
            raise UsageError(
                f"{cls.__name__}.{name} would not be called: there is no pipeline of wrappers to build here",
                fix=fix,
            )
    if places(encoder.cook_crude_sample) not in (1, 2, 3, None):
        raise UsageError(
            f"{cls.__name__}.cook_crude_sample is called with (sample, cooker, aux)",
            fix="take these three, or the first two where no data set has aux",
        )
    if is_overridden(encoder, "preencode_sample") and is_overridden(encoder, "encode_sample"):
        raise UsageError(
            f"{cls.__name__} has both encode_sample and preencode_sample: both are the first hook of a sample",
            fix="rename encode_sample to postencode_sample, or leave one of them out",
        )


def check_stores(cooker: Cooker, aux: Iterable[str], encoder: TaskEncoder, where: str) -> None:
    """Check that a cooker accepts the stores of its data set.

    Args:
        aux: names of the stores.
        where: the data set, for messages.

    Raises:
        UsageError: the cooker does not accept one of them, or requires others; or ``cook_crude_sample`` does not pass
            them on.
    """
    needs = {"cache": cooker.need_cache, "primary": cooker.need_primary}
    names = sorted({*aux, *(name for name, needed in needs.items() if needed)})
    cls, name = type(encoder).__name__, getattr(cooker.cook, "__name__", str(cooker.cook))
    cook = encoder.cook_crude_sample
    if names and (places(cook) or 3) < 3 and not takes(cook, "aux"):
        raise UsageError(
            f"{cls}.cook_crude_sample takes (sample, cooker), but {name} is to be given {', '.join(names)}",
            where=where,
            fix="take (sample, cooker, aux), and pass all three on",
        )
    if is_overridden(encoder, "cook_crude_sample"):
        return  # an override may call the cooker with any arguments
    wanted = [argument for argument in required(cooker.cook)[1:] if argument not in names]
    if wanted:
        raise UsageError(
            f"the cooker {name} wants {', '.join(map(repr, wanted))}, which it is not given",
            where=where,
            fix="name them under aux in the metadataset; cache and primary are given to a function that is marked "
            "@cooker(need_cache=True, need_primary=True)",
        )
    missing = [store for store in names if not takes(cooker.cook, store)]
    if missing:
        raise UsageError(
            f"the cooker {name} does not take {', '.join(map(repr, missing))}",
            where=where,
            fix=f"write `def {name}(sample, {', '.join(names)})`; or remove from aux what it does not need",
        )


def _only_calls_super(method: Any) -> bool:
    """True if the whole body of a method returns the result of ``super()`` for the same arguments."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    body = function.body if isinstance(function, ast.FunctionDef) else []
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # its docstring
    match body:
        case [ast.Return(ast.Call(ast.Attribute(ast.Call(ast.Name("super"), []), called), given, keywords))]:
            values = [*given, *(keyword.value for keyword in keywords)]
            plain = all(
                isinstance(value.value if isinstance(value, ast.Starred) else value, ast.Name) for value in values
            )
            return called == method.__name__ and plain
    return False


def _check_packing(encoder: TaskEncoder, size: int | None) -> None:
    if size is None:
        return
    if size < 1:
        raise UsageError(f"packing_buffer_size is {size}", fix="give at least 1, or None for no packing")
    needed = _PACKING if encoder.pack_capacity is None else _PACKING[1:]
    missing = [name for name in needed if not is_overridden(encoder, name)]
    if missing:
        raise UsageError(
            f"packing_buffer_size={size}, but {type(encoder).__name__} has no {' and no '.join(missing)}",
            fix="write both select_samples_to_pack and pack_selected_samples (or give pack_capacity in place of the "
            "first one), or leave out packing_buffer_size",
        )


def _check_generators(encoder: TaskEncoder, *, packing: bool) -> None:
    groups = is_overridden(encoder, "batch_group_criterion")
    refused = {
        "cook_crude_sample": "a cooker makes one sample",
        "select_samples_to_pack": "it returns a list of lists",
        "batch_group_criterion": "it returns the key of the group and the size of its batches",
    }
    if packing:
        refused["postencode_sample"] = "the samples of a pack are chosen already; yield in preencode_sample"
    if groups:
        refused["batch"] = "a group makes one batch; yield in encode_batch"
    for name, why in refused.items():
        if is_generator(encoder, name):
            raise UsageError(f"{type(encoder).__name__}.{name} is a generator: {why}", fix="return one value")


# -- arguments and names --------------------------------------------------------------------------------------------


def _check_functions(encoder: TaskEncoder) -> None:
    """Refuse hooks that cannot be called, and names that are permutations of a hook's letters; warn of similar names.

    Raises:
        UsageError: a hook or a name is refused; the message has its name and place.
    """
    for name in _HOOKS:
        if is_overridden(encoder, name) and hook_of(encoder, name) is not None:
            own = owner_of(encoder, name)
            _check_kind(f"{type(own).__name__}.{name}", hook_of(encoder, name))
            if name != "cook_crude_sample":
                _check_call(own, name)
    for cooker in encoder.cookers:
        name = f"the cooker {getattr(cooker.cook, '__name__', cooker.cook)}"
        _check_kind(name, cooker.cook)
        if inspect.isgeneratorfunction(inspect.unwrap(cooker.cook)):
            raise UsageError(
                f"{name} is a generator", where=place_of(cooker.cook), fix="return one sample; yield in encode_sample"
            )
    _check_spelling(encoder)


def _check_kind(name: str, function: Any) -> None:
    plain = inspect.unwrap(function) if callable(function) else function
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise UsageError(
            f"{name} is `async def`, which is never awaited",
            where=place_of(function),
            fix="write it with `def`; have it run what is asynchronous: asyncio.run(...)",
        )
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise UsageError(f"{name} is a {type(function).__name__}, and no function", fix="write it with `def`")


def _check_call(encoder: TaskEncoder, name: str) -> None:
    arguments, hook = _ARGUMENTS[name], getattr(encoder, name)
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # a C function without a signature; or a method without `self`
        if not hasattr(hook, "__code__"):
            return
        signature = inspect.Signature()
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{type(encoder).__name__}.{name} is called with ({', '.join(arguments)}), which it does not take: {error}",
            where=place_of(hook),
            fix=f"write `def {name}(self, {', '.join(arguments)})`",
        ) from None


def _check_spelling(encoder: TaskEncoder) -> None:
    """Find unused methods and settings with names similar to a hook's or a setting's."""
    for inner in layers_of(encoder):
        members = _members(type(inner))
        functions = [value.fget if isinstance(value, property) else value for _, value in members.values()]
        used = {name for function in functions for name in _names_in(_code_of(function))}
        for name, (cls, value) in members.items():
            if name.startswith("_") or name in used or hasattr(TaskEncoder, name) or hasattr(AugmentTaskEncoder, name):
                continue
            is_function = callable(value) or isinstance(value, (staticmethod, classmethod))
            choices = [*_HOOKS] if is_function else [*_ATTRIBUTES]
            meant = max(choices, key=lambda choice: _likeness(name, choice))
            likeness = _likeness(name, meant)
            if likeness < _ALIKE or (meant in members and issubclass(members[meant][0], cls)):
                continue
            what = f"{cls.__name__}.{name} is never {'called' if is_function else 'read'}"
            where = place_of(value)
            if likeness == 1.0:
                raise UsageError(f"{what}: did you mean {meant!r}?", where=where, fix=f"rename it to {meant}")
            if (cls, name) not in _warned:
                _warned.add((cls, name))
                logger.warning(
                    "%s: did you mean %r? If not, name it with an underscore before it.%s",
                    what,
                    meant,
                    f"\n  where: {where}" if where else "",
                )


def _members(cls: type) -> dict[str, tuple[type, Any]]:
    """Attributes of the user's classes by name, each with the class that defines it."""
    own = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("energon_lite.")]
    return {name: (base, value) for base in reversed(own) for name, value in vars(base).items()}


def _code_of(function: Any) -> Any:
    """Code of a function; None: it is not a Python function."""
    function = getattr(function, "__func__", function)
    return getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)


def _names_in(code: Any) -> Iterator[str]:
    """Yield the names that a code object uses, including nested functions."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if inspect.iscode(constant):
                yield from _names_in(constant)


def _likeness(name: str, hook: str) -> float:
    """Similarity of a name and a hook's, 0 to 1; 1: the same letters, in any order."""
    plain, other = name.lower().replace("_", ""), hook.replace("_", "")
    return 1.0 if sorted(plain) == sorted(other) else min(0.999, SequenceMatcher(None, plain, other).ratio())


def place_of(function: Any) -> str | None:
    """File and line of a function's definition; None: it is not a Python function."""
    code = _code_of(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
