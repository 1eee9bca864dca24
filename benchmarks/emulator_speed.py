"""How fast the PTX emulator is on this machine: `make bench-emulator`.

Rates of the interpreter on two loops (integer code, and the mix of a softmax), of the tensor core on one GEMM tile, and
the time of the forward attention kernel of one head. Times are the best of several runs; the goal is a forward kernel
of 1024 x 1024, d = 128, in under 4 s on 2 cores.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import emulator
from emulator import attention_kernels
from emulator.core_kernels import module
from emulator.kernels import build, gemm

LOOP = """mov.b32 r0, 0; mov.b64 d0, {%t, %t}; L: add.u32 r0, r0, 1; BODY
setp.lt.u32 p0, r0, 20000; @p0 bra L; st.global.u32 [%out], r1;"""
INTEGER = """mul.lo.u32 r1, r1, 3; xor.b32 r1, r1, r0; shr.u32 r2, r1, 3; add.u32 r1, r1, r2; and.b32 r3, r1, 255;
selp.b32 r4, r3, r1, p0;"""
SOFTMAX = """fma.rn.f32x2 d1, d0, d0, d1; mov.b64 {r4, r5}, d1; ex2.approx.ftz.f32 r6, r4; ex2.approx.ftz.f32 r7, r5;
cvt.rn.bf16x2.f32 r1, r7, r6; mov.b64 d2, {r6, r7}; add.rn.f32x2 d3, d3, d2; max.f32 r8, r8, r4;"""


def best(function: Callable[[], emulator.Report], repeat: int) -> tuple[float, emulator.Report]:
    """Seconds of the fastest run, and its report."""
    times, report = [], None
    for _ in range(repeat):
        start = time.perf_counter()
        report = function()
        times.append(time.perf_counter() - start)
    assert report is not None
    return min(times), report


def interpreter(body: str, ctas: int, repeat: int) -> tuple[float, emulator.Report]:
    program = emulator.load(module(LOOP.replace("BODY", body)))
    out = np.zeros(1, np.uint32)
    return best(lambda: program.launch(grid=(ctas, 1, 1), block=(128, 1, 1), params=[out]), repeat)


def tensor_core(repeat: int) -> tuple[float, emulator.Report, float]:
    """One GEMM of the emulator's own test kernels; also the FLOP of its MMAs."""
    config = gemm.Config(source="SS", cta_group=1, m=128, n=128, dtype="bf16")
    build.prepare([config])
    program = emulator.load(build.ptx(config))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, config.k)).astype(ml_dtypes.bfloat16) for rows in (config.m, config.n))
    c = np.zeros((config.m, config.n), np.float32)
    maps = [emulator.TensorMap(x, dtype="bf16", **config.map_of(name)) for name, x in (("a", a), ("b", b))]
    params = [maps[0], bytes(8), maps[1], bytes(8), c]
    seconds, report = best(
        lambda: program.launch(grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=config.shared_bytes, params=params),
        repeat,
    )
    return seconds, report, 2.0 * config.m * config.n * config.k


def forward(length: int, repeat: int) -> tuple[float, emulator.Report]:
    from attention_cases import Case, Shape

    case = Case("full", Shape(1, length, length, 1, 1, 128, 128))
    rng = np.random.default_rng(0)
    names = ("query", "key", "value")
    inputs = {name: rng.standard_normal((1, length, 1, 128)).astype(ml_dtypes.bfloat16) for name in names}
    return best(lambda: attention_kernels.forward(case, inputs)[2], repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the PTX emulator is on this machine.")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement; the best counts")
    parser.add_argument("--length", type=int, default=1024, help="rows and columns of the attention kernel")
    arguments = parser.parse_args()
    rows = []
    for name, body in (("integer loop", INTEGER), ("softmax mix", SOFTMAX)):
        seconds, report = interpreter(body, 8, arguments.repeat)
        rows.append(
            (name, seconds, report.instructions, f"{report.instructions / seconds / 1e6:.1f} M warp instructions/s")
        )
    seconds, report, flop = tensor_core(arguments.repeat)
    rows.append(
        ("GEMM tile, launch and all", seconds, report.instructions, f"{flop / seconds / 1e9:.2f} GFLOP/s of MMA")
    )
    seconds, report = forward(arguments.length, arguments.repeat)
    flop = 4.0 * arguments.length**2 * 128
    label = f"forward {arguments.length} x {arguments.length}, d = 128"
    rate = f"{report.instructions / seconds / 1e6:.1f} M warp instructions/s, {flop / seconds / 1e9:.2f} GFLOP/s of MMA"
    rows.append((label, seconds, report.instructions, rate))
    print(f"{'what':<32}{'seconds':>9}{'warp instructions':>19}  rate")
    for name, seconds, instructions, rate in rows:
        print(f"{name:<32}{seconds:>9.3f}{instructions:>19,}  {rate}")


if __name__ == "__main__":
    main()
