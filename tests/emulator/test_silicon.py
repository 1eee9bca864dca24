"""Micro kernels in the emulator against what an H200 computed: bit for bit, approximations within their stated error.

h200.npz is written by silicon/record.py on a GPU and needs none here.
"""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator.silicon import all_cases
from emulator.silicon.micro import Map, Micro, Pointer

RECORDED = pathlib.Path(__file__).parent / "silicon" / "h200.npz"
CASES = {case.name: case for case in all_cases()}
FLOATS = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED) as data:
        return {name: data[name] for name in data.files}


@pytest.fixture(scope="module")
def about(recorded: dict[str, np.ndarray]) -> dict[str, dict[str, str]]:
    """The device; what the GPU refused ("errors") and which version ran ("digests"), by name of the micro kernel."""
    return json.loads(recorded["about"].tobytes())


def launch(case: Micro, schedule: emulator.Schedule) -> dict[str, np.ndarray]:
    """The micro kernel's outputs in the emulator. Raises Verdict."""
    memory = {name: array.copy() for name, array in case.buffers.items()}
    params = []
    for parameter in case.params:
        if isinstance(parameter, Map):
            fields = {k: v for k, v in vars(parameter).items() if k != "buffer"}
            params.append(emulator.TensorMap(memory[parameter.buffer], **fields))
        elif isinstance(parameter, Pointer):
            params.append(emulator.Pointer(memory[parameter.buffer], parameter.offset))
        else:
            params.append(parameter)
    emulator.load(case.ptx).launch(
        grid=case.grid, block=case.block, cluster=case.cluster, params=params, schedule=schedule
    )
    return {name: memory[name] for name in case.outputs}


def differences(case: Micro, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Which elements are wrong; of approximations those outside the stated error."""
    if case.max_ulp == 0:
        return got != want
    dtype = FLOATS[case.ulp_dtype]
    got, want = got.view(dtype), want.view(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    mantissa = ml_dtypes.finfo(dtype).nmant
    exact = want.astype(np.float64)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(ml_dtypes.finfo(dtype).smallest_normal))))
        error = np.abs(got.astype(np.float64) - exact)
        near = (error <= case.max_ulp * np.exp2(exponent - mantissa)) | (error <= case.absolute)
    # zeros by sign, infinities and NaN must be the same
    special = ~np.isfinite(exact) | ~np.isfinite(got.astype(np.float64)) | (exact == 0)
    return np.where(special, got.view(bits) != want.view(bits), ~near)


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_as_on_silicon(name: str, recorded: dict[str, np.ndarray], about: dict[str, dict[str, str]]):
    case, errors = CASES[name], about["errors"]
    schedule = emulator.Schedule(seed=len(name), async_="random", spurious_wait=0.1)
    if name in errors:
        assert "CUDA_ERROR_ILLEGAL" in errors[name], errors[name]
        with pytest.raises(emulator.Verdict):
            launch(case, schedule)
        return
    for output, got in launch(case, schedule).items():
        want = recorded[f"{name}/{output}"]
        wrong = np.flatnonzero(differences(case, got, want))
        listed = ", ".join(
            f"[{i}] {got.ravel()[i // _per_word(case)]:#x} is {want.ravel()[i // _per_word(case)]:#x}"
            for i in wrong[:8]
        )
        assert not len(wrong), f"{output}: {len(wrong)} of {got.size} differ (emulator is GPU): {listed}"


def _per_word(case: Micro) -> int:
    return 2 if case.max_ulp and case.ulp_dtype != "f32" else 1


def test_every_micro_kernel_was_recorded_as_it_is_now(
    recorded: dict[str, np.ndarray], about: dict[str, dict[str, str]]
):
    have = {key.split("/")[0] for key in recorded} - {"about"}
    want = set(CASES)
    assert have | set(about["errors"]) == want
    assert len(have) >= 40
    changed = [name for name in want if about["digests"][name] != CASES[name].digest()]
    assert not changed, "record these again with silicon/record.py --merge"


def test_recorded_outputs_are_not_the_initial_content(recorded: dict[str, np.ndarray]):
    """A kernel that wrote nothing would agree with an emulator that does nothing."""
    for name, case in CASES.items():
        if f"{name}/{case.outputs[0]}" in recorded:
            assert any(np.any(recorded[f"{name}/{o}"] != case.buffers[o]) for o in case.outputs), name
