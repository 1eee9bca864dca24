"""Tests marked ``eight_devices`` run on 8 simulated CPU devices."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

import jax
import pytest

DEVICES = 8


def pytest_configure(config):
    config.addinivalue_line("markers", f"eight_devices: needs {DEVICES} devices; simulated in a process of their own")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Takes the outcome of such a test from a process that has the devices.

    JAX fixes their number when a process first uses it, and a worker's other tests must see one device. All tests of a
    file share a process.
    """
    if pyfuncitem.get_closest_marker("eight_devices") is None or jax.device_count() >= DEVICES:
        return None
    wanted = [item.nodeid for item in pyfuncitem.session.items if item.path == pyfuncitem.path]
    report, log = _run(pyfuncitem.path, pyfuncitem.config.rootpath, tuple(wanted))
    case = report.get(pyfuncitem.name)
    if case is None:
        pytest.fail(f"the process with {DEVICES} devices did not run it:\n{log}", pytrace=False)
    for failure in (*case.findall("failure"), *case.findall("error")):
        pytest.fail(failure.text or "", pytrace=False)
    for skipped in case.findall("skipped"):
        pytest.skip(skipped.get("message") or "")
    return True


@functools.cache
def _run(path: pathlib.Path, root: pathlib.Path, wanted: tuple[str, ...]) -> tuple[dict, str]:
    """The reports of a file's tests by name, and what the process printed."""
    # Most of the time is compile time, and half of that is optimisation.
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        xml = pathlib.Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={xml}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *wanted],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        cases = ElementTree.parse(xml).iter("testcase") if xml.exists() else ()
        return {case.get("name"): case for case in cases}, done.stdout
