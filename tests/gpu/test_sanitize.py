"""What sanitize.py runs; the running itself needs a GPU."""

import dataclasses

import ml_dtypes
import numpy as np
import sanitize

import attention_cases
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.plan import hopper, launch
from jax_fa_blackwell.plan.target import TARGETS
from lowered import launches, lower_for_cuda, named_cubins


def test_every_attention_kernel_is_sanitized(monkeypatch):
    monkeypatch.setitem(TARGETS, hopper.ARCH, dataclasses.replace(TARGETS[hopper.ARCH], sm_count=sanitize.FEW_SMS))
    ran = set()
    with named_cubins(hopper.ARCH):
        for case, seed in sanitize.make_cases():
            dtype = ml_dtypes.bfloat16 if seed % 3 else np.float16
            inputs = attention_cases.make_inputs(case, seed, dtype)
            cotangents = attention_cases.make_cotangents(case, seed, dtype)
            text = lower_for_cuda(attention_cases.flash_evaluator(case, "cuda"), inputs, cotangents)
            steps = [step for plan in launches(text) for program in plan.programs for step in program.steps]
            ran |= {step.kernel for step in steps if isinstance(step, launch.Launch)}
    names = {name for name in registry.SETS["hopper"] if "bfloat16" in name}
    assert names <= ran
    assert any("_float16_" in name for name in ran)
