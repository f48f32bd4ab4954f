"""What sends tensors in 8 bits, taken apart behind the passes that decide what is sent when."""

import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.passes import Bucket, Expand, Lower
from dtensor.passes.graph import ir

F8 = torch.float8_e4m3fn


def sent(x, group, dim=0):
    rows = torch.ops.dtensor.encode_rows(x, dim, F8)
    shape = [n * 2 if d == dim else n for d, n in enumerate(x.shape)]
    whole = ops.all_gather(rows, 0, shape[dim], group)
    return torch.ops.dtensor.decode_rows(whole, shape, dim, F8, x.dtype)


def test_golden(bench):
    gm = bench.trace(lambda x: sent(x, bench.tp), (2, 8))
    assert bench.apply(Expand(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[2,8] = placeholder
%permute: f32[2,8] = aten.permute(%x_1, [0, 1])
%view: f32[2,8] = aten.view(%permute, [2, 8])
%convert_element_type: f32[2,8] = prims.convert_element_type(%view, f32)
%abs: f32[2,8] = aten.abs(%convert_element_type)
%amax: f32[2,1] = aten.amax(%abs, [1], True)
%div: f32[2,1] = aten.div.Tensor(%amax, 448.0)
%add: f32[2,1] = aten.add.Tensor(%div, 1.1754943508222875e-38)
%div_1: f32[2,8] = aten.div.Tensor(%convert_element_type, %add)
%convert_element_type_1: float8_e4m3fn[2,8] = prims.convert_element_type(%div_1, float8_e4m3fn)
%view_1: u8[2,8] = aten.view.dtype(%convert_element_type_1, u8)
%detach: u8[2,8] = aten.detach(%view_1)
%view_2: u8[2,4] = aten.view.dtype(%add, u8)
%detach_1: u8[2,4] = aten.detach(%view_2)
%cat: u8[2,12] = aten.cat([%detach, %detach_1], 1)
%all_gather: u8[4,12] = dtensor.all_gather(%cat, 0, 4, tp)
%slice: u8[4,8] = aten.slice.Tensor(%all_gather, 1, 0, -4)
%slice_1: u8[4,4] = aten.slice.Tensor(%all_gather, 1, -4, 9223372036854775807)
%clone: u8[4,4] = aten.clone(%slice_1, memory_format=contiguous_format)
%view_3: f32[4,1] = aten.view.dtype(%clone, f32)
%detach_2: f32[4,1] = aten.detach(%view_3)
%view_4: float8_e4m3fn[4,8] = aten.view.dtype(%slice, float8_e4m3fn)
%detach_3: float8_e4m3fn[4,8] = aten.detach(%view_4)
%convert_element_type_2: f32[4,8] = prims.convert_element_type(%detach_3, f32)
%mul: f32[4,8] = aten.mul.Tensor(%convert_element_type_2, %detach_2)
%convert_element_type_3: f32[4,8] = prims.convert_element_type(%mul, f32)
%view_5: f32[4,8] = aten.view(%convert_element_type_3, [4, 8])
%permute_1: f32[4,8] = aten.permute(%view_5, [0, 1])
return %permute_1""",
    )


def test_other_dims_and_tensors_of_one(bench):
    gm = bench.trace(lambda x, y: (sent(x, bench.tp, 1), sent(y, bench.tp)), (2, 4, 3), (5,))
    assert bench.apply(Expand(), gm) == 4


def test_means(bench):
    def f(x):
        rows = torch.ops.dtensor.encode_rows(x, 0, F8).unsqueeze(0)
        mine = ops.all_to_all(rows, 0, 1, 2, bench.tp)
        return torch.ops.dtensor.mean_rows(mine, [2, 8], 0, F8, x.dtype)

    assert bench.apply(Expand(), bench.trace(f, (4, 8))) == 2


def test_there_is_nothing_to_take_apart(bench):
    assert bench.keeps(Expand(), bench.trace(lambda x: ops.all_gather(x, 0, 4, bench.tp), (2, 8)))


def test_until_then_both_are_carriers(bench):
    """They float with their collectives, so that these share a buffer."""

    def f(x, y):
        a = sent(x, bench.tp)
        return a @ a.t(), sent(y, bench.tp)

    gm = bench.trace(f, (2, 8), (2, 8))
    Lower()(gm.graph)
    assert bench.apply(Bucket(), gm) == 1
    assert bench.apply(Expand(), gm) == 4
    assert len([n for n in gm.graph.nodes if n.target in ir.STARTS]) == 1
