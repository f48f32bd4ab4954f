"""C++ kernels that are built several at a time: each is as if it were built alone."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.testing import run_threads
from dtensor.torch_private.kernels import units

TYPES = ["const float*", "float*"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_cache():
        yield


def _kernel(term: str) -> str:
    """A kernel; all have a helper of one name."""
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
static float helper(float x) {{ return x {term}; }}
extern "C" void kernel(const float* in_ptr0, float* out_ptr0) {{ out_ptr0[0] = helper(in_ptr0[0]); }}
"""


def _loaded(sources: list[str]) -> list[float]:
    """What the kernels of a module make of 3.0."""
    compiling = AsyncCompile()
    scope = {f"cpp_{k}": units._cpp_pybinding(compiling, TYPES, source) for k, source in enumerate(sources)}
    units._wait(compiling, scope)
    x, y, found = torch.tensor([3.0]), torch.empty(1), list[float]()
    for k in range(len(sources)):
        assert not isinstance(scope[f"cpp_{k}"], units._Kernel)
        scope[f"cpp_{k}"](x, y)
        found.append(y.item())
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_several_are_one_library(threads: int) -> None:
    own = units._Units.load_async
    with (
        mock.patch.object(units, "MOST", 2),
        mock.patch.object(torch._inductor.config, "compile_threads", threads),
        mock.patch.object(units._Units, "load_async", wraps=own) as built,
        mock.patch.object(
            CppPythonBindingsCodeCache, "load_pybinding", wraps=CppPythonBindingsCodeCache.load_pybinding
        ) as alone,
    ):
        assert _loaded([_kernel(f"* {k}") for k in range(1, 6)]) == [3.0, 6.0, 9.0, 12.0, 15.0]
    assert (built.call_count, alone.call_count) == (2, 1)  # the fifth has nobody to be built with


def test_what_cannot_be_built_together_is_built_alone() -> None:
    once = '#ifdef MET\n#error "met twice"\n#endif\n#define MET\n'
    own, together = CppPythonBindingsCodeCache.load_pybinding, units._Units.load_async
    with (
        mock.patch.object(CppPythonBindingsCodeCache, "load_pybinding", wraps=own) as alone,
        mock.patch.object(units._Units, "load_async", wraps=together) as tried,
    ):
        assert _loaded([once + _kernel(f"+ {k}") for k in range(3)]) == [3.0, 4.0, 5.0]
    assert (tried.call_count, alone.call_count) == (1, 3)


def test_a_source_of_two() -> None:
    text = units._source([(TYPES, _kernel("+ 1")), (TYPES, _kernel("* 2"))])
    assert text.count("#include <torch/csrc/inductor/cpp_prefix.h>") == 1
    first, second = text.index("namespace of_kernel_0 {"), text.index("namespace of_kernel_1 {")
    assert max(text.rindex("#include"), text.index("#define kernel kernel_0")) < first < second
    assert "PyInit_kernel_0" in text
    assert "PyInit_kernel_1" in text


def test_a_compiled_program_is_built_in_units() -> None:
    def step(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])

        def several(x: torch.Tensor) -> torch.Tensor:
            return (x.softmax(0) @ x.mT).cumsum(1).exp().softmax(1)

        return torch.allclose(torch.compile(several)(x).full_tensor(), several(x).full_tensor())

    with mock.patch.object(units._Units, "load_async", wraps=units._Units.load_async) as built:
        assert run_threads(step, 1) == [True]
    assert built.call_count == 1
