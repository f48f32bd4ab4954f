"""Expansion: what encodes and decodes a message becomes the operators that it consists of."""

from torch import fx

from dtensor.comm.row_encoding import KERNELS

from ..stages import Pass
from .inline import Bodies


class Expand(Pass):
    """Takes apart `dtensor::encode_rows`, `dtensor::decode_rows` and `dtensor::mean_rows`, by which tensors are sent
    in 8 bits.

    Before:

        %decode_rows: f32[4,8] = dtensor.decode_rows(%message, [4, 8], 0, float8_e4m3fn, f32)

    After:

        %slice: u8[4,8] = aten.slice.Tensor(%message, 1, 0, -4)
        %slice_1: u8[4,4] = aten.slice.Tensor(%message, 1, -4)
        %clone: u8[4,4] = aten.clone(%slice_1)
        %view: f32[4,1] = aten.view.dtype(%clone, f32)
        %view_1: float8_e4m3fn[4,8] = aten.view.dtype(%slice, float8_e4m3fn)
        %convert_element_type: f32[4,8] = prims.convert_element_type(%view_1, f32)
        %mul: f32[4,8] = aten.mul.Tensor(%convert_element_type, %view)

    To the passes before, each is one node that floats with its collective, and that the backward does again after it.
    Here they become operators that Inductor fuses with those around them. These are what the kernels run, so the bits
    are the same.
    """

    name = "expand"
    stage = "overlap"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        nodes, bodies = [node for node in graph.nodes if node.target in KERNELS], Bodies()
        for node in nodes:
            bodies.inline(node, KERNELS[node.target])
        return len(nodes)


__all__ = ["Expand"]
