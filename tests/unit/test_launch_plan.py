"""LaunchPlan: its byte format, and that every rule is enforced with a message that names the value."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
from hypothesis import given, settings

from jax_fa_blackwell.plan import launch
from jax_fa_blackwell.plan.launch import Bytes, Fill, Float32, Int32, Launch, LaunchPlan, Pointer, Program, TensorMap
from launch_plans import plans

DIGEST = "0123456789abcdef" * 4


def tensor_map(**changes) -> TensorMap:
    fields = {"operand": 0, "dtype": "bfloat16", "dims": (64, 4, 2), "strides_bytes": (256, 1024), "box": (32, 2, 1)}
    return TensorMap(**{**fields, **changes})


def kernel(**changes) -> Launch:
    fields = {"kernel": "k", "sha256": DIGEST, "symbol": "s", "grid": (4, 2, 1), "block": (128, 1, 1), "params": ()}
    return Launch(**{**fields, **changes})


def plan(*steps, arguments=(4096,), results=(64,), arch="sm_90a") -> LaunchPlan:
    return LaunchPlan("p", arguments, results, (Program(arch, steps),))


@given(plans())
@settings(max_examples=300, deadline=None)
def test_decode_inverts_encode(p):
    assert LaunchPlan.decode(p.encode()) == p


def test_every_truncation_is_an_error():
    data = plan(Fill(1, 4), kernel(params=(tensor_map(), Pointer(1), Int32(1), Float32(1.0), Bytes(b"x")))).encode()
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r"launch plan|legal|must|printable"):
            LaunchPlan.decode(data[:size])
    with pytest.raises(ValueError, match="1 bytes too many"):
        LaunchPlan.decode(data + b"x")


def test_another_version_names_both():
    data = plan().encode()
    with pytest.raises(ValueError, match=f"version 7; this package reads version {launch.VERSION}"):
        LaunchPlan.decode(data[:4] + struct.pack("<I", 7) + data[8:])
    with pytest.raises(ValueError, match="wrong first four bytes"):
        LaunchPlan.decode(b"PLAN" + data[4:])


def test_a_nan_survives():
    decoded = LaunchPlan.decode(plan(kernel(params=(Float32(math.nan),))).encode())
    (step,) = decoded.programs[0].steps
    assert isinstance(step, Launch)
    (param,) = step.params
    assert isinstance(param, Float32)
    assert math.isnan(param.value)


def test_float32_is_rounded():
    assert Float32(0.1).value == struct.unpack("<f", struct.pack("<f", 0.1))[0] != 0.1


def test_program_names_what_the_plan_has():
    p = LaunchPlan("p", (), (), (Program("sm_90a", ()), Program("sm_100a", ())))
    assert p.program("sm_100a").arch == "sm_100a"
    with pytest.raises(ValueError, match="no program for sm_103a; it has: sm_90a, sm_100a"):
        p.program("sm_103a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"dims": (64,) * 6, "strides_bytes": (16,) * 5, "box": (8,) * 6}, "rank must be 1 to 5"),
        ({"dims": ()}, "rank must be 1 to 5"),
        ({"dims": (64, 0, 2)}, "dims must be 1 to"),
        ({"dims": (2**32 + 1, 4, 2)}, "dims must be 1 to"),
        ({"strides_bytes": (256,)}, "needs 2 strides"),
        ({"strides_bytes": (256, 1000)}, "multiples of 16"),
        ({"strides_bytes": (256, 2**40)}, "below 2\\*\\*40"),
        ({"box": (32, 2)}, "box must have 3 extents"),
        ({"box": (32, 257, 1)}, "box must have 3 extents of 1 to 256"),
        ({"box": (4, 2, 1)}, "box rows must be multiples of 16 bytes; got 8"),
        ({"swizzle": "32B"}, "rows of 64 bytes exceed the 32B swizzle"),
        ({"swizzle": "16B"}, "swizzle must be one of"),
        ({"fill": "one"}, "fill must be one of"),
        ({"dtype": "int32", "box": (16, 2, 1), "fill": "nan"}, "fill 'nan' needs a float"),
        ({"l2_promotion": "1B"}, "l2_promotion must be one of"),
        ({"element_strides": (1, 9, 1)}, "steps of 1 to 8"),
        ({"element_strides": (2, 1, 1)}, "must begin with 1"),
        ({"offset_bytes": 8}, "offset must be a multiple of 16"),
    ],
)
def test_tensor_map_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        tensor_map(**changes)


def test_tensor_map_sizes():
    m = tensor_map(element_strides=(1, 2, 1), offset_bytes=16)
    assert m.box_bytes == 32 * 1 * 1 * 2
    assert m.end_bytes == 16 + 64 * 2 + 3 * 256 + 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": ""}, "kernel name must be printable"),
        ({"symbol": "a\0b"}, "symbol must be printable"),
        ({"sha256": DIGEST.upper()}, "lower-case hexadecimal"),
        ({"sha256": DIGEST[:-1]}, "64 lower-case"),
        ({"grid": (1, 65536, 1)}, "grid must be three extents"),
        ({"grid": (0, 1, 1)}, "grid must be three extents"),
        ({"block": (1, 1, 65)}, "block must be three extents"),
        ({"block": (512, 4, 1)}, "more than 1024 threads"),
        ({"cluster": (32, 1, 1), "grid": (32, 1, 1)}, "cluster must be three extents"),
        ({"cluster": (4, 4, 2), "grid": (4, 4, 2)}, "more than 16 blocks"),
        ({"cluster": (3, 1, 1)}, "does not divide"),
        ({"shared_bytes": 232449}, "shared_bytes must be 0 to 232448; got 232449"),
        ({"params": (Int32(0),) * 257}, "257 parameters; at most 256"),
        ({"params": (tensor_map(),) * 33}, "parameters of 4224 bytes; at most 4096"),
    ],
)
def test_launch_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        kernel(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int32(2**31), "Int32 parameter out of range"),
        (lambda: Float32(1e39), "Float32 parameter out of range"),
        (lambda: Bytes(b""), "1 to 4096 bytes; got 0"),
        (lambda: Fill(0, 0), "at least one word"),
        (lambda: Fill(0, 1, 2**32), "unsigned 32-bit"),
        (lambda: Fill(0, 1, 0, 2), "multiple of 4"),
        (lambda: plan(arch="sm_90"), "arch must name one compute capability"),
        (lambda: plan(arguments=(-1,)), "buffer size out of range"),
        (lambda: plan(arguments=(8,) * 65), "66 operands; at most 64"),
        (lambda: LaunchPlan("", (), (), ()), "plan name must be printable"),
        (lambda: LaunchPlan("p", (), (), (Program("sm_90a", ()),) * 2), "an architecture twice"),
        (lambda: plan(Fill(2, 1)), "names operand 2 of 2"),
        (lambda: plan(Fill(1, 17)), "ends at byte 68 of operand 1, which has 64"),
        (lambda: plan(Fill(1, 1, 0, -4)), "ends at byte 0 of operand 1"),
        (lambda: plan(kernel(params=(Pointer(1, 64),))), "Pointer ends at byte 65"),
        (lambda: plan(kernel(params=(Pointer(-1),))), "names operand -1"),
        (lambda: plan(kernel(params=(tensor_map(operand=1),))), "TensorMap ends at byte 1920 of operand 1"),
    ],
)
def test_plan_rules(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_empty_operands_have_a_beginning():
    p = plan(kernel(params=(Pointer(0),)), arguments=(0,))
    assert LaunchPlan.decode(p.encode()) == p
    with pytest.raises(ValueError, match="Pointer ends at byte 1"):
        plan(kernel(params=(Pointer(0, 1),)), arguments=(0,))
    with pytest.raises(ValueError, match="TensorMap ends at byte 1 of operand 0, which has 0"):
        plan(kernel(params=(TensorMap(0, "uint8", (1,), (), (16,)),)), arguments=(0,))


def test_parameter_bytes_aligns():
    params = (Int32(1), tensor_map(), Bytes(b"123"), Pointer(0))
    assert launch.parameter_bytes(params) == 64 + 128 + 8 + 8


def test_plans_are_hashable_and_frozen():
    p = plan(kernel(params=(tensor_map(),)))
    assert hash(p) == hash(dataclasses.replace(p))
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.name = "q"  # pyright: ignore[reportAttributeAccessIssue]
