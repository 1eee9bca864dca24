"""Compiles the test kernels to PTX, without a GPU, and keeps the text under build/.

A test kernel NAME of this folder is two modules: NAME.py has a frozen dataclass `Config`, NAME_kernel.py a function
`compile_ptx(config)`, which imports the DSL. NAME.py may list further SOURCES that the kernel is made of. That happens
in a child process only: it takes a second, and its warnings are not ours.
"""

import argparse
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parents[2] / "build" / "emulator-kernels"


class CompileError(RuntimeError):
    """A test kernel did not compile; the text says which and why."""


def _module_name(config: Any) -> str:
    return type(config).__module__.rsplit(".", 1)[-1]


def _path(config: Any, arch: str) -> pathlib.Path:
    """Where the PTX of a configuration lies; the name holds everything that it depends on."""
    module = _module_name(config)
    more = getattr(sys.modules[type(config).__module__], "SOURCES", ())
    parts = [
        *(path.read_text() for path in (HERE / f"{module}.py", HERE / f"{module}_kernel.py", HERE / "dsl.py", *more)),
        importlib.metadata.version("nvidia-cutlass-dsl"),
        arch,
        json.dumps(dataclasses.asdict(config), sort_keys=True),
    ]
    return CACHE / f"{module}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.ptx"


def prepare(configs: Sequence[Any], arch: str = "sm_100a"):
    """Compiles those of `configs` that have no PTX yet, all in one child process. Raises CompileError."""
    missing = [config for config in configs if not _path(config, arch).exists()]
    if not missing:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    jobs = [
        {"module": _module_name(c), "config": dataclasses.asdict(c), "path": str(_path(c, arch)), "arch": arch}
        for c in missing
    ]
    with tempfile.TemporaryDirectory() as dump:
        environment = dict(os.environ, CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=dump)
        environment["PYTHONPATH"] = os.pathsep.join((str(HERE.parent), str(HERE.parents[2])))
        done = subprocess.run(
            [sys.executable, str(HERE / "build.py")],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            env=environment,
            cwd=dump,
            timeout=900,
        )
    if done.returncode:
        raise CompileError(
            f"{len(missing)} kernels to compile; the child said:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def ptx(config: Any, arch: str = "sm_100a") -> str:
    """The PTX text of one configuration, compiled if need be. Raises CompileError."""
    prepare([config], arch)
    return _path(config, arch).read_text()


def _child():
    argparse.ArgumentParser(description="Reads jobs as JSON from standard input.").parse_args()
    failures = []
    for job in json.load(sys.stdin):
        config = importlib.import_module(f"kernels.{job['module']}").Config(**job["config"])
        try:
            text = importlib.import_module(f"kernels.{job['module']}_kernel").compile_ptx(config)
        except Exception as error:  # the parent reports all of them
            failures.append(f"{job['module']} {job['config']}: {type(error).__name__}: {error}")
            continue
        partial = pathlib.Path(job["path"]).with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.rename(job["path"])
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    _child()
