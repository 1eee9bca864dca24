"""The Hopper kernels under NVIDIA's compute-sanitizer: every variant on small shapes, the tools side by side.

    python tests/gpu/sanitize.py [--tools memcheck racecheck synccheck] [--out FOLDER] [--seconds 420]

Each case is a forward and a backward whose results are checked too. Blocks walk several items each, as in large calls:
plans are made for a GPU of few SMs. Allocations are XLA's own, one for each array, with padding between them, and the
forward and the backward are programs of their own, so that memcheck sees where an array ends. Only our kernels are
looked at. A kernel with a planted fault shows for memcheck and racecheck that the set-up finds one. Prints a JSON line
for each tool; the exit status is 1 if a tool has found anything, or has not seen every kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve()
TOOLS = ("memcheck", "racecheck", "synccheck")
OPTIONS = {
    "memcheck": ("--padding", "512", "--report-api-errors", "no"),
    "racecheck": ("--num-cuda-barriers", "64"),  # it counts those that the compiler names, and ours have no names
    "synccheck": ("--num-cuda-barriers", "64"),
}
NAMES = ("_sm90_", "delta_")  # what our kernels' names have
FAULTS = {"memcheck": "write_sm90_fault", "racecheck": "race_sm90_fault"}
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
FEW_SMS = 3

# Writes 128 words behind the 128 of y; or reads what another warp writes to shared memory, without a barrier.
FAULTY_PTX = """
.visible .entry write_sm90_fault(.param .u64 y)
{
    .reg .b32 %r; .reg .b64 %d<3>;
    mov.u32 %r, %tid.x;
    ld.param.u64 %d0, [y];
    cvta.to.global.u64 %d0, %d0;
    mul.wide.u32 %d1, %r, 4;
    add.s64 %d2, %d0, %d1;
    st.global.u32 [%d2+512], %r;
    ret;
}
.visible .entry race_sm90_fault(.param .u64 y)
{
    .shared .align 4 .b8 words[512];
    .reg .b32 %r<6>; .reg .b64 %d<3>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, words;
    shl.b32 %r2, %r0, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r0;
    xor.b32 %r2, %r2, 256;
    add.u32 %r4, %r1, %r2;
    ld.shared.u32 %r5, [%r4];
    ld.param.u64 %d0, [y];
    cvta.to.global.u64 %d0, %d0;
    mul.wide.u32 %d1, %r0, 4;
    add.s64 %d2, %d0, %d1;
    st.global.u32 [%d2], %r5;
    ret;
}
"""


def make_cases() -> list[tuple[Any, int]]:
    """(case, seed); the seed decides the dtype. float16 for one class of head dims, bfloat16 for all."""
    from attention_cases import Case, Shape

    causal = ("is_causal", True)
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"options": (causal,)},
        "packed": {"options": (causal,), "segments": True},
        "cap": {"options": (causal, ("logits_soft_cap", 15.0)), "sinks": True},
        "deterministic": {"options": (causal, ("deterministic", True))},
    }
    cases = []
    for H, Hv in DIMS:
        for name, fields in masks.items():
            shape = Shape(1, 200, 280, 2 if name == "none" else 4, 2, H, Hv)
            cases.append((Case(f"{H}x{Hv} {name}", shape, **fields), 1))
            if H == 128:
                cases.append((Case(f"{H}x{Hv} {name} float16", shape, **fields), 3))
    return cases


def run_cases() -> None:
    """In the child: all cases, with a JSON line for each and one at the end for the kernels that ran."""
    import jax

    import attention_grid
    from jax_fa_blackwell import custom_call, flash_attention
    from jax_fa_blackwell.kernels import registry
    from jax_fa_blackwell.plan import hopper, launch
    from jax_fa_blackwell.plan.target import TARGETS

    TARGETS[hopper.ARCH] = dataclasses.replace(TARGETS[hopper.ARCH], sm_count=FEW_SMS)

    def evaluate(case, inputs, cotangents):
        differentiable = ("query", "key", "value", "sinks")
        wanted = {name: array for name, array in inputs.items() if name in differentiable}
        fixed = {name: array for name, array in inputs.items() if name not in differentiable}
        options = {**dict(case.options), "implementation": "cuda", "return_lse": True}

        def forward(wanted, fixed):
            return jax.vjp(lambda wanted: flash_attention(**wanted, **fixed, **options), wanted)

        (out, lse), pullback = jax.jit(forward)(wanted, fixed)
        (gradients,) = jax.jit(lambda pullback, cotangents: pullback(cotangents))(pullback, cotangents)
        return {"out": out, "lse": lse, **{f"d_{name}": gradient for name, gradient in gradients.items()}}

    with custom_call.recorded_plans() as plans:
        for case, seed in make_cases():
            said: dict[str, Any] = {"case": case.name}
            began = time.perf_counter()
            try:
                attention_grid.check(case, 1.0, seed, evaluate)
            except Exception as error:  # the tool's view of the other cases is worth having
                said["wrong"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps({**said, "seconds": round(time.perf_counter() - began, 2)}), flush=True)
    steps = [step for plan in plans for program in plan.programs for step in program.steps]
    ran = {step.kernel for step in steps if isinstance(step, launch.Launch)}
    wanted = {
        name for name, variant in registry.VARIANTS.items() if hopper.ARCH in variant.arches and "bfloat16" in name
    }
    print(json.dumps({"kernels": sorted(ran), "missing": sorted(wanted - ran)}), flush=True)


def run_fault(symbol: str) -> None:
    """In the child: a kernel with a planted fault."""
    import jax
    import jax.numpy as jnp
    import ptx_kernels

    from jax_fa_blackwell import custom_call
    from jax_fa_blackwell.plan import hopper
    from jax_fa_blackwell.plan.launch import Launch, LaunchPlan, Pointer, Program

    jax.block_until_ready(jnp.zeros(1))  # makes the device's context
    image = ptx_kernels.assemble(f".version 8.0\n.target {hopper.ARCH}\n.address_size 64\n{FAULTY_PTX}", 90)
    sha256 = hashlib.sha256(image).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / f"{sha256}.cubin").write_bytes(image)
        custom_call.add_cubin_directory(pathlib.Path(folder))
        step = Launch(symbol, sha256, symbol, (1, 1, 1), (128, 1, 1), (Pointer(0),))
        plan = LaunchPlan("planted fault", (), (512,), (Program(hopper.ARCH, (step,)),))
        call = jax.jit(lambda: custom_call.call(plan, [], [jax.ShapeDtypeStruct((128,), jnp.dtype("int32"))]))
        jax.block_until_ready(call())


def find_sanitizer() -> str:
    """Path of compute-sanitizer, on PATH or in the CUDA toolkit."""
    found = shutil.which("compute-sanitizer") or next(
        map(str, pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None
    )
    if found is None:
        sys.exit("sanitize: no compute-sanitizer on PATH or in /usr/local/cuda*")
    return found


class Checked:
    """A child under a tool: started at once, asked later."""

    def __init__(self, tool: str, what: str, folder: pathlib.Path):
        self.log, self.printed = (folder / f"{tool}-{what}.{kind}" for kind in ("log", "out"))
        filters = [word for name in NAMES for word in ("--kernel-name", f"kns={name}")]
        command = [find_sanitizer(), "--tool", tool, *OPTIONS[tool], *filters, "--print-limit", "20"]
        command += ["--launch-timeout", "120", "--log-file", str(self.log), sys.executable, str(HERE), "--run", what]
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=",
        }
        self.began = time.perf_counter()
        with open(self.printed, "wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, until: float) -> dict[str, Any]:
        """Waits, at most until that time, and returns what the tool and the child said."""
        try:
            status = self.process.wait(max(until - time.perf_counter(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            status = "out of time"
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        printed = self.printed.read_text(errors="replace")
        found = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) \w+.*", log)
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in printed.splitlines() if re.match(r'\{"(case|kernels)"', line)
        ]
        return {
            "status": status,
            "seconds": round(time.perf_counter() - self.began),
            "found": sum(map(int, found)) if found else None,
            "first": [line for line in log.splitlines() if "=========" in line][1:4] if found != ["0"] else [],
            "cases": sum("case" in line for line in lines),
            "wrong": [line for line in lines if "wrong" in line][:3],
            **next(({**line, "kernels": len(line["kernels"])} for line in lines if "kernels" in line), {}),
        }


def main() -> int:
    """Runs the tools side by side; returns the exit status."""
    parser = argparse.ArgumentParser(description="The Hopper kernels under compute-sanitizer.")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--out", type=pathlib.Path, help="folder for what the tools and the programs print")
    parser.add_argument("--seconds", type=float, default=420, help="for all; a tool that takes longer is ended")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.append(str(HERE.parents[1]))
    if args.run:
        run_cases() if args.run == "cases" else run_fault(args.run)
        return 0
    folder = args.out or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    until = time.perf_counter() + args.seconds
    started = {tool: Checked(tool, "cases", folder) for tool in args.tools}
    faults = {tool: Checked(tool, FAULTS[tool], folder) for tool in args.tools if tool in FAULTS}
    total, good = len(make_cases()), True
    for tool, child in started.items():
        said = child.finish(until)
        clean = said["found"] == said["status"] == 0 and said["cases"] == total
        clean = clean and said["wrong"] == said.get("missing") == []
        planted = (faults[tool].finish(until)["found"] or 0) > 0 if tool in faults else None
        print(json.dumps({"tool": tool, "clean": clean, "of": total, "planted fault found": planted, **said}))
        good &= clean and planted is not False
    print(f"logs: {folder}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
