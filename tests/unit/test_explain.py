import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_fa_blackwell import explain as explain_module
from jax_fa_blackwell.cubins import Cubin
from jax_fa_blackwell.explain import explain, format_plan, main
from jax_fa_blackwell.plan import backward, delta, forward, hopper_backward, hopper_forward
from jax_fa_blackwell.plan import spec as spec_module
from jax_fa_blackwell.plan.launch import Bytes, Fill, Float32, Int32, Launch, LaunchPlan, Pointer, Program, TensorMap
from jax_fa_blackwell.plan.target import get_target


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


Q, K, V = struct(2, 64, 8, 72), struct(2, 96, 4, 72), struct(2, 96, 4, 40)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that takes head dims up to 128 on sm_100a only."""

    def supports(spec, target):
        if target.arch != "sm_100a":
            return "needs Tensor Memory"
        return None if spec.head_dim <= 128 else f"head dim {spec.head_dim} above 128"

    monkeypatch.setattr(spec_module, "KERNELS", {"forward_test": supports})


def test_spec_is_that_of_the_call():
    explanation = explain(Q, K, V, is_causal=True, logits_soft_cap=30.0, deterministic=True, arch="sm_103a")
    spec = explanation.spec
    assert (spec.batch, spec.query_length, spec.key_value_length) == (2, 64, 96)
    assert (spec.query_heads, spec.key_value_heads, spec.head_dim, spec.value_head_dim) == (8, 4, 72, 40)
    assert (spec.dtype, spec.mask_form, spec.logits_soft_cap, spec.deterministic) == ("bfloat16", "affine", 30.0, True)
    assert explanation.arch == "sm_103a"
    assert str(explanation).splitlines()[1:3] == [
        "architecture    sm_103a",
        f"implementation  {explanation.implementation}",
    ]
    assert spec.describe() in str(explanation)
    assert explanation.reason in str(explanation)


def test_arrays_and_structs_explain_the_same():
    arrays = [jnp.zeros(x.shape, x.dtype) for x in (Q, K, V)]
    lengths = jnp.array([3, 4])
    from_arrays = explain(*arrays, query_seq_lengths=lengths, return_lse=True, arch="sm_100a")
    assert from_arrays == explain(Q, K, V, query_seq_lengths=struct(2, dtype="int32"), arch="sm_100a")
    assert from_arrays.spec.mask_form == "rows"


@pytest.mark.parametrize(
    ("arch", "head_dim", "implementation", "reason"),
    [
        ("sm_100a", 128, "cuda", "forward_test"),
        ("sm_100a", 192, "xla", "head dim 192 above 128"),
        ("sm_90a", 128, "xla", "needs Tensor Memory"),
        (None, 128, "xla", "no GPU of a supported architecture"),
    ],
)
def test_reason_is_the_limit_met(kernel, monkeypatch, arch, head_dim, implementation, reason):
    monkeypatch.setattr(explain_module, "device_arch", lambda: None)
    x = struct(1, 16, 2, head_dim)
    explanation = explain(x, x, x, arch=arch)
    assert explanation.implementation == implementation
    assert reason in explanation.reason


def test_default_arch_is_that_of_the_device(kernel, monkeypatch):
    monkeypatch.setattr(explain_module, "device_arch", lambda: "sm_100a")
    x = struct(1, 16, 2, 64)
    assert (explain(x, x, x).arch, explain(x, x, x).implementation) == ("sm_100a", "cuda")


def test_plan_of_the_kernels_is_shown(kernel):
    query, key, value = struct(2, 300, 8, 128), struct(2, 400, 4, 128), struct(2, 400, 4, 64)
    explanation = explain(query, key, value, is_causal=True, arch="sm_100a")
    target = get_target("sm_100a")
    tiles = forward.plan_forward(explanation.spec, target)
    text = str(explanation)
    assert f"{tiles.item_tiles} of 128 query rows" in text
    for plan in (tiles, *backward.plan_backward(explanation.spec, target)):
        for name, first, end in plan.tensor_memory_map():
            assert f"{name} {first}..{end - 1}" in text
        assert f"{plan.shared_bytes:,} of {target.shared_bytes:,} bytes" in text
    assert "pass for dQ" in text
    assert "matrix products where one pass costs 5" in text
    assert re.search(r"launch forward_sm100_bfloat16_\dtile\w*\n +cubin +found when a program is lowered", text)
    assert re.search(r" query_length=300 key_value_length=400\s", text)


def test_plan_of_the_hopper_kernels_is_shown():
    query, key, value = struct(2, 300, 8, 160), struct(2, 400, 4, 160), struct(2, 400, 4, 64)
    explanation = explain(query, key, value, is_causal=True, arch="sm_90a")
    assert explanation.reason == "kernel sm90 on sm_90a"
    target = get_target("sm_90a")
    text = str(explanation)
    for plan in (
        hopper_forward.plan_forward(explanation.spec, target),
        *hopper_backward.plan_backward(explanation.spec, target),
    ):
        assert f"launch {plan.kernel}\n" in text
        assert f"{plan.shared_bytes:,} of {target.shared_bytes:,} bytes" in text
        assert f"about {plan.tile.registers} of {plan.tile.consumer_registers} a thread" in text
    assert "3; 11.4286 matrix products where one pass costs 5" in text  # 8 of 160 x 160 for those of 160 x 64
    assert re.search(r" rows=300 columns=400\s", text)


def test_requested_implementation(kernel):
    assert explain(Q, K, V, implementation="reference", arch="sm_100a").implementation == "reference"
    with pytest.raises(NotImplementedError, match="needs Tensor Memory"):
        explain(Q, K, V, implementation="cuda", arch="sm_90a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "sm_80"}, "arch must be one of .*sm_100a.*'sm_80'"),
        ({"arch": "sm_100a", "scale": "a"}, "scale must be a Python number"),
        ({"arch": "sm_100a", "query_segment_ids": struct(2, 64, dtype="int32")}, "without key_value_segment_ids"),
        ({"arch": "sm_100a", "implementation": "fast"}, "implementation must be None or one of"),
    ],
)
def test_malformed_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        explain(Q, K, V, **options)


def test_command_needs_no_device():
    # With a platform that this machine may lack, JAX fails as soon as anything asks for a device.
    command = "--query 2,4096,16,192 --dtype bfloat16 --causal --arch sm_100a"
    run = subprocess.run(
        [sys.executable, "-m", "jax_fa_blackwell.explain", *command.split()],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=True,
    )
    x = struct(2, 4096, 16, 192)
    assert run.stdout == f"{explain(x, x, x, is_causal=True, arch='sm_100a')}\n"


def test_command_line_options(capsys):
    command = (
        "--query 2,64,8,72 --kv-heads 4 --value 2,64,4,40 --dtype float16 --window 5,none --soft-cap 20 --sinks "
        "--segment-ids --query-seq-lengths --key-value-seq-lengths --bias 8,1,64 --mask 64,64 --scale 0.1 "
        "--deterministic --implementation xla --arch sm_90a"
    )
    main(command.split())
    key = struct(2, 64, 4, 72, dtype="float16")
    ids, lengths = struct(2, 64, dtype="int32"), struct(2, dtype="int32")
    expected = explain(
        struct(2, 64, 8, 72, dtype="float16"),
        key,
        struct(2, 64, 4, 40, dtype="float16"),
        struct(8, 1, 64, dtype="float32"),
        struct(64, 64, dtype="bool"),
        scale=0.1,
        local_window_size=(5, None),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        logits_soft_cap=20.0,
        sinks=struct(8, dtype="float32"),
        deterministic=True,
        implementation="xla",
        arch="sm_90a",
    )
    assert capsys.readouterr().out == f"{expected}\n"
    assert expected.spec.has_sinks
    assert (expected.spec.bias_shape, expected.spec.mask_shape) == ((1, 8, 1, 64), (1, 1, 64, 64))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("--query 2,64", 2, "--query must have 3 or 4 extents"),
        ("--query 2,64,x,3", 2, "must be extents such as"),
        ("--query 64,8,72 --window 1,2,3", 2, "must be an int or left,right"),
        ("--query 64,8,72 --kv-heads 3", 2, "multiple of key's heads"),
        ("--query 64,8,72 --key 64,4,72 --kv-heads 2", 2, "contradicts --key"),
        ("--query 64,8,72 --dtype float12", 2, "float12"),
        ("--query 64,8,600 --implementation cuda", 1, "not implemented"),
    ],
)
def test_command_line_errors(kernel, capsys, arguments, status, message):
    with pytest.raises(SystemExit) as stop:
        main([*arguments.split(), "--arch", "sm_100a"])
    assert stop.value.code == status
    assert message in capsys.readouterr().err


def test_format_plan():
    tensor_map = TensorMap(0, "bfloat16", (64, 8), (128,), (64, 8), 16, (1, 2), "128B", "nan", "256B")
    params = (tensor_map, Pointer(2, 32), Int32(-5), Float32(0.25), Bytes(b"\x01\xff"))
    launch = Launch(
        "test", "ab" * 32, "kernel_delta", (6, 2, 1), (128, 1, 1), params, (2, 1, 1), 4096, programmatic=True
    )
    steps = (Fill(1, 256, 0x7F800000), launch)
    plan = LaunchPlan("delta", (1040, 1024), (64,), (Program("sm_90a", steps), Program("sm_100a", ())))
    assert format_plan(plan) == (
        "plan delta\n"
        "  argument 0     1,040 bytes\n"
        "  argument 1     1,024 bytes\n"
        "  result 0       64 bytes\n"
        "  sm_90a\n"
        "    fill argument 1 with 256 words of 0x7f800000\n"
        "    launch test\n"
        "      cubin          sha256 abababababab, symbol kernel_delta\n"
        "      grid           6 x 2 x 1\n"
        "      block          128 x 1 x 1\n"
        "      cluster        2 x 1 x 1\n"
        "      shared memory  4,096 bytes, dynamic\n"
        "      start          may overlap the end of the launch before\n"
        "      parameter      0  tensor map of argument 0 + 16 bytes: bfloat16, dims 64 x 8, strides 128 bytes,"
        " box 64 x 8, swizzle 128B, outside nan, L2 promotion 256B, element strides 1 x 2\n"
        "      parameter      1  pointer to result 0 + 32 bytes\n"
        "      parameter      4  2 bytes 01ff\n"
        "      numbers        2=-5 3=0.250000\n"
        "  sm_100a"
    )


def test_format_plan_names_the_parameters_of_our_kernels():
    spec = delta.DeltaSpec(2, 100, 4, 192, "bfloat16", has_grad_lse=True)
    cubins = [
        Cubin(spec.variant, arch, "0f" * 32, "kernel_delta", (), (320, 1, 1), 64, 0, "", pathlib.Path())
        for arch in ("sm_90a", "sm_100a")
    ]
    plan = delta.make_plan(spec, cubins)
    text = format_plan(plan)
    launch = plan.program("sm_100a").steps[0]
    assert isinstance(launch, Launch)
    assert text.count(f"launch {spec.variant.name}") == 2
    assert f"grid           {launch.grid[0]} x 1 x 1" in text
    assert f"shared memory  {launch.shared_bytes:,} bytes" in text
    lines = text[text.index("sm_100a") :].splitlines()
    printed = {words[1]: words[2:] for words in map(str.split, lines) if words[0] == "parameter"}
    numbers = dict(re.findall(r"(\w+)=(\S+)", "\n".join(lines)))
    assert {*printed, *numbers} == {parameter.name for parameter in spec.variant.parameters}
    assert numbers["tokens"] == "100"
    assert printed["grad_lse"] == ["pointer", "to", "argument", "2"]
    assert printed["grad_out_map"][:6] == ["tensor", "map", "of", "argument", "1:", "uint32,"]
