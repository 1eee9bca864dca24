"""The cubin store: where a cubin is found, and that damaged, stale or contended stores end well."""

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from jax_fa_blackwell import cubins, elf, export
from jax_fa_blackwell.kernels import abi, registry

ARCH = "sm_90a"
VARIANT = registry.get_variant("delta_bfloat16")


def fake(variant=VARIANT, arch=ARCH, cubin=b"kernel", tools="tools 1"):
    """A Compiled whose cubin is not one: stores do not look inside."""
    table = abi.table(variant.parameters, 528)
    kernel = elf.KernelInfo("entry", table, 528, 40, 0, 0, (288, 1, 1))
    return export.Compiled(
        variant, arch, cubin, "ptx of " + arch, "entry", table, kernel, variant.source_hash(arch), tools, "12.9"
    )


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "PACKAGED", tmp_path / "packaged")
    return cubins.Store(tmp_path / "packaged")


@pytest.fixture
def cache(tmp_path, monkeypatch, packaged):
    monkeypatch.setenv("JAX_FA_BLACKWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cubins, "_found", {})
    return cubins.Store(tmp_path / "cache")


@pytest.fixture
def compilations(monkeypatch):
    """A toolchain that notes what it is asked for."""
    made = []

    def compile_variant(variant, arch):
        made.append((variant.name, arch))
        return fake(variant, arch, cubin=f"{variant.name} {arch} {len(made)}".encode(), tools="tools 1")

    monkeypatch.setattr(export, "toolchain", lambda: "tools 1")
    monkeypatch.setattr(export, "compile_variant", compile_variant)
    return made


def test_packaged_comes_first_and_never_compiles(packaged, cache, compilations):
    packaged.add(fake(cubin=b"packaged", tools="another toolchain"))
    cubin = cubins.find(VARIANT, ARCH)
    assert cubin.folder == packaged.folder
    assert cubin.read() == b"packaged"
    assert compilations == []


def test_compiles_once_and_remembers(cache, compilations, capsys, monkeypatch):
    first = cubins.find(VARIANT, ARCH)
    assert "compiling delta_bfloat16 for sm_90a" in capsys.readouterr().err
    assert cubins.find(VARIANT, ARCH) is first
    monkeypatch.setattr(cubins, "_found", {})  # as a new process
    assert cubins.find(VARIANT, ARCH) == first
    assert compilations == [(VARIANT.name, ARCH)]
    assert capsys.readouterr().err == ""


def test_cache_is_private(cache, compilations):
    cubins.find(VARIANT, ARCH)
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_cache_open_to_others_is_refused(cache, compilations):
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="closed to writing by others"):
        cubins.find(VARIANT, ARCH)
    assert compilations == []


def damage_cubin(store, cubin):
    cubin.path.write_bytes(cubin.read()[:-1] + b"?")


def truncate_cubin(store, cubin):
    cubin.path.write_bytes(cubin.read()[:2])


def remove_cubin(store, cubin):
    cubin.path.unlink()


def truncate_manifest(store, cubin):
    path = store.folder / cubins.MANIFEST
    path.write_bytes(path.read_bytes()[:-20])


def manifest_of_another_format(store, cubin):
    (store.folder / cubins.MANIFEST).write_text(json.dumps({"format": 99, "cubins": {}}))


def manifest_is_no_object(store, cubin):
    (store.folder / cubins.MANIFEST).write_text("[]")


def drop_symbol(store, cubin):
    change_record(store, lambda record: record.pop("symbol"))


def other_sources(store, cubin):
    change_record(store, lambda record: record.update(source_hash="0" * 64))


def other_parameters(store, cubin):
    change_record(store, lambda record: record["parameters"].pop())


def other_toolchain(store, cubin):
    change_record(store, lambda record: record.update(toolchain="tools 0"))


def change_record(store, change):
    path = store.folder / cubins.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest["cubins"][f"{VARIANT.name}/{ARCH}"])
    path.write_text(json.dumps(manifest))


FAULTS = [
    damage_cubin,
    truncate_cubin,
    remove_cubin,
    truncate_manifest,
    manifest_of_another_format,
    manifest_is_no_object,
    drop_symbol,
    other_sources,
    other_parameters,
    other_toolchain,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_bad_cache_entry_is_made_again(cache, compilations, monkeypatch, fault):
    first = cubins.find(VARIANT, ARCH)
    fault(cache, first)
    monkeypatch.setattr(cubins, "_found", {})
    second = cubins.find(VARIANT, ARCH)
    assert len(compilations) == 2
    assert second.sha256 != first.sha256
    assert cache.get(VARIANT, ARCH) == second


@pytest.mark.parametrize("fault", FAULTS[:-1], ids=lambda fault: fault.__name__)
def test_bad_packaged_entry_is_not_used(packaged, cache, compilations, fault):
    packaged.add(fake(cubin=b"packaged"))
    fault(packaged, packaged.get(VARIANT, ARCH))
    assert cubins.find(VARIANT, ARCH).folder == cache.folder


def test_other_entries_survive_a_new_one(cache):
    cache.add(fake(arch="sm_100a", cubin=b"one"))
    cache.add(fake(arch="sm_90a", cubin=b"two"))
    assert cache.get(VARIANT, "sm_100a").read() == b"one"
    assert cache.get(VARIANT, "sm_90a").read() == b"two"


def test_without_dsl_the_error_states_the_command(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)  # as where it is not installed
    with pytest.raises(cubins.CubinNotFoundError) as raised:
        cubins.find(VARIANT, ARCH)
    message = str(raised.value)
    assert "pip install 'jax_fa_blackwell[export]'" in message
    command = next(line for line in message.splitlines() if "jax_fa_blackwell.export" in line)
    assert command.split()[1:] == [
        *("-m", "jax_fa_blackwell.export", "--arch", ARCH),
        *("--kernel", VARIANT.name, "-o", str(cache.folder)),
    ]


def test_without_dsl_the_cache_is_used_whatever_made_it(cache, monkeypatch):
    cache.add(fake(tools="tools of long ago"))
    monkeypatch.setitem(sys.modules, "cutlass", None)
    cache.folder.chmod(0o700)
    assert cubins.find(VARIANT, ARCH).toolchain == "tools of long ago"


def test_failed_compilation_is_reported_and_leaves_nothing(cache, compilations, monkeypatch, capsys):
    def fail(variant, arch):
        raise export.CompileError("no luck")

    monkeypatch.setattr(export, "compile_variant", fail)
    with pytest.raises(export.CompileError, match="no luck"):
        cubins.find(VARIANT, ARCH)
    assert capsys.readouterr().err.endswith("failed\n")
    assert cache.records() == {}


def test_unknown_arch_is_named(cache):
    with pytest.raises(ValueError, match=r"arch of delta_bfloat16 must be one of .*; got 'sm_80'"):
        cubins.find(VARIANT, "sm_80")


def test_default_cache_folder(monkeypatch):
    monkeypatch.delenv("JAX_FA_BLACKWELL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cubins.cache_folder() == pathlib.Path("/somewhere/jax_fa_blackwell")
    monkeypatch.delenv("XDG_CACHE_HOME")
    home = pathlib.Path("somebody").absolute()
    monkeypatch.setenv("HOME", str(home))
    assert cubins.cache_folder() == home / ".cache" / "jax_fa_blackwell"


def test_threads_share_one_compilation(cache, compilations):
    found = []
    threads = [threading.Thread(target=lambda: found.append(cubins.find(VARIANT, ARCH))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(compilations) == 1


CONTENDER = """
import pathlib, sys, time
import test_cubins
from jax_fa_blackwell import cubins, export
from jax_fa_blackwell.kernels import registry

started = pathlib.Path(sys.argv[1])
cubins.PACKAGED = started / "none"
export.toolchain = lambda: "tools 1"

def compile_variant(variant, arch):
    (started / f"compiled-{sys.argv[2]}-{arch}").touch()
    time.sleep(0.2)
    return test_cubins.fake(variant, arch, cubin=f"{sys.argv[2]} {arch}".encode() * 100_000)

export.compile_variant = compile_variant
(started / f"ready-{sys.argv[2]}").touch()
while not (started / "go").exists():
    time.sleep(0.001)
for arch in ("sm_90a", "sm_100a"):
    cubin = cubins.find(registry.get_variant("delta_bfloat16"), arch)
    print(cubin.sha256, len(cubin.read()))
"""


def test_processes_share_one_compilation(tmp_path, cache):
    paths = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", CONTENDER, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < len(processes):
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(list(tmp_path.glob("compiled-*"))) == 2  # one for each architecture
    assert sum(err.count("compiling") for _, err in outputs) == 2
    assert not list(cache.folder.glob(".new-*"))
