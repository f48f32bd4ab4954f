"""Modules and optimizers in the state of a checkpoint: what is written in their place, and how they are given it again.

    given       {"model": model, "optimizer": optimizer}
    written     {"model": {"0.weight": ...}, "optimizer": {"state": {"0.weight": {"step": ..., "exp_avg": ...}},
                                                           "param_groups": [{"params": ["0.weight"], "lr": ...}]}}

An optimizer is written by the names of its parameters, with the state that it has. Which state that is differs from
optimizer to optimizer and from parameter to parameter, so that loading asks the index of the checkpoint first. This is
also the layout of torch's `get_state_dict`, whose checkpoints can be loaded into the objects.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..parallel.modules.replaced import follow

SCALARS = {"step", "eta", "mu", "mu_product"}
"""State that is one number for each parameter: a plain tensor, even for a parameter without dimensions."""

HOW = {"foreach", "fused", "capturable", "differentiable"}
"""Settings of an optimizer that determine how a step is computed, not what: those of the object stay on loading."""

_COMPILED = "_orig_mod."
"""What `torch.compile(module)` adds to names."""

Path = tuple[str, ...]


def to_save(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict in which objects, at any depth, are replaced by what is written for them.

    Raises:
        CheckpointError: an optimizer holds parameters of no module in `state`, or the dict is that of an optimizer.
    """
    names = _names(state)
    return _replaced(state, lambda x, _: _of_optimizer(x, names) if isinstance(x, Optimizer) else _of_object(x))


def to_load(state: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """A state dict in which objects, at any depth, are replaced by what is to be read for them from a checkpoint.

    Raises:
        CheckpointError: as in `to_save`, or the checkpoint does not have the state of these parameters.
    """
    names = _names(state)
    return _replaced(
        state, lambda x, at: _wanted(x, names, at, metadata) if isinstance(x, Optimizer) else _of_object(x)
    )


def give_back(state: dict[str, Any], found: dict[str, Any]) -> None:
    """Give the objects in `state` what was read for them, and put other values into it."""
    names = _names(state)

    def give(container: Any, found: Any) -> None:
        for key, x in _items(container):
            value = found[str(key)] if isinstance(container, list) or container is state else found[key]
            if isinstance(x, Optimizer):
                _set(x, names, value)
            elif isinstance(x, nn.Module):
                x.load_state_dict({name: value[name.replace(_COMPILED, "")] for name in x.state_dict()})
            elif isinstance(x, Stateful):
                x.load_state_dict(value)
            elif _has_objects(x):
                give(x, value)
            else:
                container[key] = value

    give(state, found)


def _replaced(state: Any, replace: Callable[[Any, Path], Any], at: Path = ()) -> Any:
    if isinstance(state, Stateful):
        return replace(state, at)
    if isinstance(state, Mapping):
        _check_keys(state, at)
        _check_numbers(state, at)
    if not _has_objects(state) and at:
        for key, x in _items(state):  # for what is not ours to replace, but would be lost
            _replaced(x, replace, (*at, str(key)))
        return state
    # The names in a checkpoint are the same; torch sorts the outermost keys.
    as_key = str if isinstance(state, list) or not at else lambda key: key
    return {as_key(key): _replaced(x, replace, (*at, str(key))) for key, x in _items(state)}


def _items(x: Any) -> list[tuple[Any, Any]]:
    return list(x.items()) if isinstance(x, dict) else list(enumerate(x)) if isinstance(x, list) else []


def _has_objects(x: Any) -> bool:
    return any(isinstance(inner, Stateful) or _has_objects(inner) for _, inner in _items(x))


def _check_keys(state: Any, at: Path) -> None:
    """Raise if two keys have one name in a checkpoint, which names values by text."""
    names = dict[str, Any]()
    for key in state:
        if str(key) in names:
            where = f" of {'.'.join(at)!r}" if at else ""
            raise CheckpointError(
                f"the keys {names[str(key)]!r} and {key!r}{where} have one name in a checkpoint; rename one of them"
            )
        names[str(key)] = key


def _check_numbers(state: Any, at: Path) -> None:
    """Raise if `state` is `optimizer.state_dict()`. That of a fresh optimizer has no place for moments."""
    groups = state.get("param_groups")
    if "state" in state and isinstance(groups, list) and any(_by_number(group) for group in groups):
        where = f"{'.'.join(at)!r} is" if at else "the state has"
        raise CheckpointError(
            f"{where} the state_dict() of an optimizer, which numbers its parameters and has a place only for state "
            'that is there already; give the optimizer itself: {"model": model, "optimizer": optimizer}'
        )


def _by_number(group: Any) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and any(isinstance(p, int) for p in params)


def _of_object(x: Any) -> Any:
    state = x.state_dict()
    if isinstance(x, nn.Module):
        return {name.replace(_COMPILED, ""): value for name, value in state.items()}
    _replaced(state, lambda inner, _: inner, (type(x).__name__,))
    return state


class _Names:
    """The names of the parameters of an optimizer: those in the module of the state that has them.

    Where an optimizer has parameters of several modules, their names begin with the place of the module in the state.
    """

    def __init__(self, modules: list[tuple[Path, nn.Module]]) -> None:
        self.modules = modules

    def of(self, optimizer: Optimizer) -> dict[int, list[str]]:
        """`id` of a parameter -> its names; several if it is tied.

        Raises:
            CheckpointError: the optimizer holds parameters of no module in the state.
        """
        follow(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        left, found = {id(p) for p in params}, []
        for at, module in self.modules:
            names: dict[int, list[str]] = {}
            for name, p in module.named_parameters(remove_duplicate=False):
                if id(p) in left:
                    names.setdefault(id(p), []).append(name.replace(_COMPILED, ""))
            if names:
                found.append((at, names))
                left -= set(names)
        if left:
            shapes = [list(p.shape) for p in params if id(p) in left]
            raise CheckpointError(
                f"the state has no module with {len(left)} of the {len(params)} parameters that the "
                f"{type(optimizer).__name__} holds, of shapes {', '.join(map(str, shapes[:3]))}"
                f"{', …' if len(shapes) > 3 else ''}; an optimizer is written by the names of its parameters: give the "
                'model too, as a module: {"model": model, "optimizer": optimizer}'
            )
        prefix = len(found) > 1
        return {p: [".".join((*at, n)) if prefix else n for n in ns] for at, names in found for p, ns in names.items()}


def _names(state: dict[str, Any]) -> _Names:
    def modules(x: Any, at: Path) -> Iterator[tuple[Path, nn.Module]]:
        if isinstance(x, nn.Module):
            yield at, x
        for key, inner in _items(x):
            yield from modules(inner, (*at, str(key)))

    return _Names(list(modules(state, ())))


def _of_optimizer(optimizer: Optimizer, of_state: _Names) -> dict[str, Any]:
    names = of_state.of(optimizer)
    strangers = [key for key in optimizer.state if id(key) not in names]
    if strangers:
        raise CheckpointError(
            f"the {type(optimizer).__name__} has state for {len(strangers)} keys that are none of its parameters, such "
            f"as a {type(strangers[0]).__name__}; remove them from optimizer.state, and put them into the dict that is "
            "saved"
        )
    groups = [
        {k: v for k, v in group.items() if k != "param_names"} | {"params": [names[id(p)][0] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": {names[id(p)][0]: dict(x) for p, x in optimizer.state.items() if x}, "param_groups": groups}


def _by_name(optimizer: Optimizer, names: dict[int, list[str]]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each name of a parameter, and its number -> the parameter and its group."""
    held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    return {str(i): x for i, x in enumerate(held)} | {name: x for x in held for name in names[id(x[0])]}


def _wanted(optimizer: Optimizer, of_state: _Names, at: Path, metadata: Metadata) -> dict[str, Any]:
    """What the checkpoint has for `optimizer`, with tensors to read into on the placements of the parameters."""
    held = _by_name(optimizer, of_state.of(optimizer))
    wanted: dict[str, Any] = {"state": {}}
    for flat, path in (metadata.planner_data or {}).items():
        path = tuple(map(str, path))
        if path[: len(at)] != at or len(path) == len(at):
            continue
        kind, (part, *rest) = metadata.state_dict_metadata[flat], path[len(at) :]
        tensor = (kind.size, kind.properties.dtype) if isinstance(kind, TensorStorageMetadata) else None
        value = torch.empty(*tensor[:1], dtype=tensor[1]) if tensor else None
        if part == "state":
            if rest[0] not in held:
                raise CheckpointError(
                    f"the checkpoint has state of {'.'.join(at)!r} for a parameter {rest[0]!r}, which the "
                    f"{type(optimizer).__name__} does not hold; make it with the parameters that it had, or "
                    'load({"model": model}) and go on with a new one'
                )
            value = _target(optimizer, *held[rest[0]], rest[1:], *tensor) if tensor else None
        owner = wanted
        for key in (part, *rest[:-1]) if rest else ():
            owner = owner.setdefault(key, {})
        owner[rest[-1] if rest else part] = value
    if "param_groups" not in wanted:
        raise CheckpointError(
            f"the checkpoint has no optimizer {'.'.join(at)!r}; write the name that it had, or "
            f'load({{"model": model}}) '
            "and go on with a new one"
        )
    return wanted


def _target(optimizer: Optimizer, p: Any, group: Any, keys: list[str], shape: torch.Size, dtype: torch.dtype) -> Any:
    """The tensor to read a part of the state of `p` into: the one that is there, or one as the optimizer makes it."""
    there = optimizer.state[p].get(keys[0]) if len(keys) == 1 and p in optimizer.state else None
    if isinstance(there, torch.Tensor) and there.shape == shape and there.dtype == dtype:
        return there
    p = p.detach()
    if not shape and (p.ndim or keys[-1] in SCALARS):
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=dtype, device=p.device if on_device else "cpu")
    return torch.zeros_like(p, dtype=dtype) if p.shape == shape else p.new_zeros(tuple(shape), dtype=dtype)


def _set(optimizer: Optimizer, of_state: _Names, found: dict[str, Any]) -> None:
    """Set the state and the settings of `optimizer` to those of the checkpoint.

    Raises:
        CheckpointError: the parameters are grouped in another way; then nothing is set.
    """
    names = of_state.of(optimizer)
    held = _by_name(optimizer, names)
    saved = {str(p): i for i, group in enumerate(_listed(found["param_groups"])) for p in group["params"]}
    numbers = {id(p): number for number, (p, _) in held.items() if number.isdigit()}
    settings = []
    for i, group in enumerate(optimizer.param_groups):
        of_params = {names[id(p)][0]: _first(saved, (*names[id(p)], numbers.get(id(p)))) for p in group["params"]}
        missing = [name for name, index in of_params.items() if index is None]
        if missing:
            raise CheckpointError(
                f"group {i} of the {type(optimizer).__name__} holds {missing[0]!r}, which the optimizer in the "
                'checkpoint did not; make it with the parameters that it had, or load({"model": model}) and go on '
                "with a new one"
            )
        if len({*of_params.values()}) > 1:
            by_group = {index: name for name, index in of_params.items()}
            raise CheckpointError(
                f"group {i} of the {type(optimizer).__name__} holds parameters that are in different groups of the "
                f"checkpoint: {', '.join(f'{name!r} in group {index}' for index, name in by_group.items())}; make the "
                "optimizer with the groups that it had"
            )
        settings.append(_listed(found["param_groups"])[next(iter(of_params.values()))] if of_params else {})
    for group, of_group in zip(optimizer.param_groups, settings):
        for key, value in of_group.items():
            if key in ("params", "param_names") or (key in HOW and key in group):
                continue
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[key] = value.item() if isinstance(value, torch.Tensor) and now is not None else value
    optimizer.state.clear()
    for name, state in found["state"].items():
        optimizer.state[held[name][0]] = {key: _listed(value) for key, value in state.items()}


def _first(saved: dict[str, int], names: tuple[str | None, ...]) -> int | None:
    return next((saved[name] for name in names if name in saved), None)


def _listed(x: Any) -> Any:
    """Lists in which tensors were written one by one, which are dicts by number here, as lists again."""
    if not isinstance(x, dict):
        return x
    inner = {key: _listed(value) for key, value in x.items()}
    if inner and all(key.isdigit() for key in inner):
        return [inner[str(i)] for i in range(len(inner))]
    return inner


__all__ = ["give_back", "to_load", "to_save"]
