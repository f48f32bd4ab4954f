"""Private APIs of Dynamo, AOTAutograd and Inductor by which what was made of a frame is data, and is a frame again."""

import copy
import importlib
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .core import disable_current_modes  # first: it checks the version of torch

# isort: split
from torch._dynamo import guards, pgo
from torch._dynamo.output_graph import OutputGraphCommon, get_builtins_dict
from torch._dynamo.package import SerializedCode
from torch._dynamo.precompile_context import PrecompileContext
from torch._dynamo.types import GuardedCode
from torch._guards import CompileId


def evaluate(expression: str, frame_locals: Any, frame_globals: dict[str, Any]) -> Any:
    """What an expression of a guard stands for in a frame.

    Raises:
        Exception: whatever it raises; there is no such thing in this frame.
    """
    return eval(expression, {**guards._get_closure_vars(), "L": frame_locals, "G": frame_globals})


def to_data(code: types.CodeType) -> SerializedCode:
    """A code object as what can be pickled."""
    return SerializedCode.from_code_object(code)


def from_data(data: SerializedCode) -> types.CodeType:
    """The code object of `to_data`."""
    return SerializedCode.to_code_object(data)


def prepare_globals(frame_globals: dict[str, Any], imports: dict[str, str]) -> None:
    """Give the modules that guards and compiled code refer to their names in a frame's globals."""
    for alias, name in imports.items():
        frame_globals[alias] = importlib.import_module(name)


class Failed(NamedTuple):
    """A guard that does not hold.

    Attributes:
        text: the guard, in torch's words.
        source: the expression that it looks at; "" if unknown.
        local_scope, global_scope: what there was when the frame was compiled, as far as guards look at it.
    """

    text: str
    source: str
    local_scope: dict[str, Any]
    global_scope: dict[str, Any]


class Guards(NamedTuple):
    """The guards of a frame: torch's manager, and what there was when it was compiled."""

    manager: Any
    local_scope: dict[str, Any]
    global_scope: dict[str, Any]

    def failed(self, frame_locals: Any) -> Failed | None:
        """The first guard that does not hold in a frame; None if all do."""
        if self.manager.check(frame_locals):
            return None
        parts = self.manager.check_verbose(frame_locals).verbose_code_parts
        text = str(parts[0]) if parts else "a guard does not hold"
        source = _looked_at(self.manager.root, text)
        return Failed(text.split("  # ")[0].strip(), source, self.local_scope, self.global_scope)


def guard_manager(pickled: bytes, code: types.CodeType, frame_globals: dict[str, Any]) -> Guards:
    """Guards from their pickled state.

    Raises:
        Exception: whatever unpickling raises; some class or function does not exist here.
    """
    with disable_current_modes():
        state = pickle.loads(pickled)
        name = state.output_graph.name_of_builtins_dict_key_in_fglobals
        if name:
            frame_globals.setdefault(name, get_builtins_dict(frame_globals))
        manager = guards.CheckFunctionManager(
            code,
            OutputGraphCommon(state.output_graph),
            shape_code_parts=state.shape_code_parts,
            runtime_global_scope=frame_globals,
        ).guard_manager
    return Guards(manager, state.output_graph.local_scope, state.output_graph.global_scope)


def _looked_at(root: Any, text: str) -> str:
    """The expression that a guard of this text looks at; "" if there is none or several."""
    found, todo = set[str](), [root]
    while todo:
        manager = todo.pop()
        todo += manager.get_child_managers()
        if hasattr(manager, "get_key_value_managers"):  # of a dict; its keys have managers, too
            todo += [part for pair in manager.get_key_value_managers().values() for part in pair if part is not None]
        if any(text in leaf.verbose_code_parts() for leaf in manager.get_leaf_guards()):
            found.add(manager.get_source())
    return found.pop() if len(found) == 1 else ""


def add_identities(manager: Any, check: Callable[[Any], bool], said: str) -> None:
    """Add to guards that `check` holds of a frame's locals."""
    manager.root.add_lambda_guard(check, [said], None)


def install(
    frame: Any, manager: Any, code: types.CodeType, resumed: dict[str, types.CodeType], backends: dict[str, Any]
) -> Any:
    """Name compiled functions and resumed code in the frame's globals; the `GuardedCode` that calls them."""
    scope = frame.f_globals
    for name, function in backends.items():
        scope[name] = torch._dynamo.disable(function)
    for name, resume in resumed.items():
        scope[name] = _resuming(resume, scope, name)
    return GuardedCode(
        code, manager, CompileId(frame_id=0, frame_compile_id=0), "Torch-Compiled Region: from a package"
    )


def _resuming(code: types.CodeType, scope: dict[str, Any], name: str) -> Any:
    if not code.co_freevars:
        return types.FunctionType(code, scope, name)
    return partial(types.FunctionType, code, scope, name, None)  # of C, so that Dynamo is not asked to compile it


def sizes_seen() -> dict[Any, dict[str, Any]]:
    """What Dynamo has seen of the sizes of inputs, by which it decides which become symbols: code -> name -> sizes."""
    return {
        code: {name: copy.copy(entry) for name, entry in state.automatic_dynamic.items()}
        for code, state in pgo.get_code_state().items()
    }


def see_sizes(seen: dict[Any, dict[str, Any]]) -> None:
    """Let Dynamo have seen these sizes, too, as if it had compiled what it was seen for."""
    state = pgo.get_code_state()
    for code, sizes in seen.items():
        known = state[code].automatic_dynamic
        for name, entry in sizes.items():
            known[name] |= entry


def sources(content: Any) -> list[str]:
    """The code that Inductor generated for the graphs of an `artifact`."""
    parts = [getattr(content, name, None) for name in ("compiled_fw", "compiled_bw")]
    return [str(getattr(part.result, "source_code", "")) for part in parts if part is not None]


def artifact(backend: str) -> Any:
    """What AOTAutograd and Inductor made of a graph, as what can be pickled; None if there is nothing."""
    found = PrecompileContext._backend_artifacts_by_key.pop(backend, None)  # pyright: ignore
    return None if found is None else found.content


def runnable(content: Any) -> Any:
    """The compiled function of an `artifact`."""
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    with disable_current_modes():
        return deserialize_bundled_cache_entry(content)


__all__ = [
    "Failed",
    "Guards",
    "add_identities",
    "artifact",
    "evaluate",
    "from_data",
    "guard_manager",
    "install",
    "prepare_globals",
    "runnable",
    "see_sizes",
    "sizes_seen",
    "sources",
    "to_data",
]
