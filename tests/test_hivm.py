"""The HIVM reader: types, attributes, source places, affine maps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.virtual_npu.errors import UnknownOpError
from harness.virtual_npu.hivm import MemRef, affine_expression, read

MODULE = """#loc = loc("/somewhere/kernel_file.py":3:0)
#loc1 = loc("/somewhere/kernel_file.py":7:11)
#loc2 = loc("/opt/triton/language/standard.py":175:4)
#loc3 = loc(callsite(#loc2 at #loc1))
#map = affine_map<()[s0, s1] -> ((s0 floordiv 2) * s1)>
"builtin.module"() ({
  "func.func"() <{function_type = () -> index, sym_name = "k_infer_workspace_shape_function"}> ({
    %0 = "arith.constant"() <{value = 4096 : index}> : () -> index loc(#loc)
    "func.return"(%0) : (index) -> () loc(#loc)
  }) {hacc.function_kind = #hacc.function_kind<HOST>, hacc.host_func_type = #hacc.host_func_type<infer_workspace_shape_function>} : () -> () loc(#loc)
  "func.func"() <{arg_attrs = [{hacc.arg_type = #hacc.arg_type<workspace>}, {}], function_type = (memref<?xi8, #hivm.address_space<gm>>, i32) -> (), sym_name = "k_mix_aiv"}> ({
  ^bb0(%arg0: memref<?xi8, #hivm.address_space<gm>> loc("/somewhere/kernel_file.py":3:0), %arg1: i32 loc(unknown)):
    %1 = "arith.constant"() <{value = 64 : i64}> : () -> i64 loc(#loc)
    %2 = "hivm.hir.pointer_cast"(%1) <{operandSegmentSizes = array<i32: 1, 0>}> : (i64) -> memref<8x?xf32, strided<[?, 1], offset: ?>, #hivm.address_space<ub>> loc(#loc3)
    "hivm.hir.pipe_barrier"() <{pipe = #hivm.pipe<PIPE_V>}> : () -> () loc(#loc1)
    "func.return"() : () -> () loc(#loc)
  }) {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.part_of_mix, hacc.function_kind = #hacc.function_kind<DEVICE>} : () -> () loc(#loc)
}) : () -> () loc(#loc)
"""


def test_module_functions_and_host_values() -> None:
    module = read(MODULE)
    (function,) = module.functions
    assert (function.core, function.mix) == ("AIV", True)
    assert function.arg_kinds == ["workspace", "kernel"]
    assert module.host["infer_workspace_shape_function"] == 4096


def test_types_attributes_and_places() -> None:
    (function,) = read(MODULE).functions
    ops = {op.name: op for op in function.walk()}
    cast = ops["hivm.hir.pointer_cast"]
    assert cast.results[0].type == MemRef((8, None), "f32", "ub", (None, 1))
    assert cast.segments() == [cast.operands, []]
    # Triton's own library line is passed over in favour of the kernel's line.
    assert cast.place == "kernel_file.py:7"
    assert ops["hivm.hir.pipe_barrier"].attrs["pipe"] == "PIPE_V"


@given(a=st.integers(-1000, 1000), b=st.integers(1, 50), c=st.integers(-1000, 1000))
def test_affine_expressions(a: int, b: int, c: int) -> None:
    names = ["a", "b", "c"]
    scope = {"a": a, "b": b, "c": c}

    def value(text: str) -> list[int]:
        return [eval(item, dict(scope)) for item in affine_expression(text, names)]  # noqa: S307

    assert value("(d0, d1)[s0] -> (d0 floordiv d1 + s0, d0 mod d1)") == [a // b + c, a % b]
    assert value("()[s0, s1, s2] -> (s0 ceildiv s1)") == [-(-a // b)]
    assert value("()[s0, s1, s2] -> (s2 + s0 ceildiv s1 * 3 - 1)") == [c + -(-a // b) * 3 - 1]
    assert value("()[s0, s1, s2] -> (((s0 - s2) ceildiv s1) mod 2)") == [-(-(a - c) // b) % 2]


def test_unknown_map_is_an_error() -> None:
    with pytest.raises(UnknownOpError, match="affine map"):
        affine_expression("d0 -> d0", ["x"])
    with pytest.raises(UnknownOpError, match="with 1 operands"):
        affine_expression("(d0, d1) -> (d0)", ["x"])
