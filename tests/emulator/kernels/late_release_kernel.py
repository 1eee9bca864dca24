"""The kernel of late_release.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses

import cutlass
import cutlass.cute as cute

from jax_fa_blackwell.kernels.common import ptx
from jax_fa_blackwell.kernels.sm100 import backward, slices

from .late_release import Config


class LateRelease(backward.BackwardKernel):
    @cute.jit
    def scores(self, p, smem, slot, phase, tmem):
        ring, first = smem.ring, slot
        slot, phase = slices.multiply_dims(ring, slot, phase, tmem, smem.a1, p.a1_steps, p.score_instruction, False)
        for index in cutlass.range(slices.slots_of(ring, p.a1_steps * 16), unroll=1):
            with cute.arch.elect_one():
                ptx.tcgen05_commit(ring.empty + 8 * ((first + index) % ring.slots), ring.group)
        with cute.arch.elect_one():
            ptx.tcgen05_commit(smem.s_full, ring.group)
        return slot, phase


def compile_ptx(config: Config) -> str:
    backward.BackwardKernel = LateRelease
    host, arguments = backward.build("late_release", dataclasses.asdict(config))
    text = cute.compile(host, *arguments).artifacts.PTX
    if not text:
        raise RuntimeError("the compiler kept no PTX; CUTE_DSL_KEEP=ptx must be set before it is imported")
    return text
