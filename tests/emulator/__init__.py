"""Runs the compiled PTX of Blackwell kernels on a CPU, instruction by instruction, and says what is wrong with them.

    program = emulator.load(ptx)
    report = program.launch(grid=(1, 1, 1), block=(128, 1, 1), params=[array, np.int32(5)])

docs/emulator.md describes the machine, the verdicts and how to add instructions.
"""

from emulator.launch import Checks, Pointer, Program, Schedule, TensorMap, load
from emulator.plans import run_plan
from emulator.report import Report, TraceRow, Verdict, Waiting

__all__ = [
    "Checks",
    "Pointer",
    "Program",
    "Report",
    "Schedule",
    "TensorMap",
    "TraceRow",
    "Verdict",
    "Waiting",
    "load",
    "run_plan",
]
