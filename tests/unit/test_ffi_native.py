"""Builds tests/ffi with CMake and runs it: the executor on a fake CUDA driver, sanitizers, the fuzzer; and compares the
C++ reader of launch plans with the Python one."""

from __future__ import annotations

import hashlib
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_fa_blackwell.plan.launch import LaunchPlan
from launch_plans import describe, plans

ROOT = pathlib.Path(__file__).resolve().parents[2]
FUZZ_INPUTS = 1_000_000


def _run(command: list, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def build() -> pathlib.Path:
    """The folder of the native tests' programs, built for this Python's jaxlib headers."""
    folder = ROOT / "build" / f"native-tests-{sysconfig.get_python_version()}"
    _run(["cmake", "-S", ROOT / "ffi", "-B", folder, "-DJFA_BUILD_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}"])
    _run(["cmake", "--build", folder, "--target", "jfa_native_tests", "-j", os.cpu_count() or 1])
    return folder / "tests"


# A driver that is not there or too old cannot be had in a process that has found another, so these run on their own.
@pytest.mark.parametrize(
    ("program", "driver", "suites"),
    [
        ("native_tests", "driver", ("plan", "executor", "handler")),
        ("native_tests", "broken_driver", ("no_driver", "handler_without_driver")),
        ("native_tests", "old_driver", ("old_driver",)),
        ("native_tests", "no_param_info", ("no_param_info",)),
        ("thread_tests", "driver", ("executor",)),
    ],
    ids=["fake driver", "no driver", "old driver", "driver without parameter info", "thread sanitizer"],
)
def test_executor(build, program, driver, suites):
    output = _run([build / program, *suites], LD_LIBRARY_PATH=str(build / driver))
    assert " 0 failures" in output


def test_fuzz(build):
    # No allocation may come from a count that the data cannot hold: every one above 8 MiB ends the program.
    limits = "max_allocation_size_mb=8:quarantine_size_mb=16"
    each = FUZZ_INPUTS // 2
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda seed: _run([build / "fuzz_plan", each, seed], ASAN_OPTIONS=limits), (1, 2)))
    for output in outputs:
        found = re.match(r"(\d+) inputs, (\d+) accepted", output)
        assert found, output
        assert int(found[1]) == each
        assert 0.02 * each < int(found[2]) < 0.5 * each  # most inputs are wrong, but not all for the first reason


def _dump(build: pathlib.Path, inputs: list[bytes], folder: pathlib.Path, *options: str) -> list[str]:
    path = folder / "inputs"
    path.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in inputs))
    return _run([build / "dump_plan", *options, path]).splitlines()


# The fixtures are a folder and a scratch file, which the examples may share.
SHARED_FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@given(batch=st.lists(plans(), min_size=1, max_size=25))
@settings(max_examples=25, deadline=None, suppress_health_check=SHARED_FIXTURES)
def test_readers_agree_on_plans(build, tmp_path, batch):
    assert _dump(build, [plan.encode() for plan in batch], tmp_path) == [describe(plan) for plan in batch]


def _python_reads(data: bytes) -> str:
    try:
        return describe(LaunchPlan.decode(data))
    except ValueError:
        return "error launch plan: "


@given(plan=plans(), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=SHARED_FIXTURES)
def test_readers_agree_on_damaged_plans(build, tmp_path, plan, seed):
    rng = random.Random(seed)
    words = [struct.pack("<I", word) for word in (0, 1, 2, 5, 2**31)]
    batch = []
    for _ in range(60):
        data = bytearray(plan.encode())
        at = rng.randrange(len(data))
        new = rng.choice([rng.randbytes(1), rng.choice(words)])
        data[at : at + len(new)] = new
        batch.append(bytes(data))
    for data, line in zip(batch, _dump(build, batch, tmp_path), strict=True):
        want = _python_reads(data)
        assert line.startswith(want) if want.startswith("error") else line == want, data.hex()


def test_sha256(build, tmp_path):
    data = random.Random(0).randbytes(300)
    inputs = [data[:size] for size in range(len(data))] + [b"a" * 1_000_000]
    assert _dump(build, inputs, tmp_path, "--sha256") == [hashlib.sha256(i).hexdigest() for i in inputs]
