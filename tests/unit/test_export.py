"""The exporter: what it compiles, checks and skips; the cubin reader; kernels as the registry declares them."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jax_fa_blackwell import cubins, elf, export
from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.plan import launch
from jax_fa_blackwell.plan.target import TARGETS

needs_dsl = pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed")
VARIANT = registry.get_variant("delta_bfloat16")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with one variant for two architectures, whose cubins have different layouts."""
    folder = tmp_path_factory.mktemp("store")
    status = export.main(
        ["--arch", "sm_90a", "sm_100a", "--kernel", VARIANT.name, "-o", str(folder), "--ptx", "--jobs", "2"]
    )
    assert status == 0
    return cubins.Store(folder)


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
class TestCompiled:
    def test_cubin_is_what_the_manifest_says(self, store, arch):
        record = store.records()[f"{VARIANT.name}/{arch}"]
        info = elf.read(store.get(VARIANT, arch).read())
        (kernel,) = info.kernels
        assert info.arch == arch
        assert record["symbol"] == kernel.symbol
        assert kernel.symbol.startswith(VARIANT.name)
        assert [(p["offset"], p["size"]) for p in record["parameters"]] == list(kernel.parameters)
        assert [p["name"] for p in record["parameters"]] == [p.name for p in VARIANT.parameters]
        assert record["registers"] == kernel.registers
        assert 16 <= kernel.registers <= 64  # two blocks of nine warps an SM, and no spills
        assert record["local_bytes"] == kernel.local_bytes == 0
        assert tuple(record["block"]) == kernel.block == (288, 1, 1)
        assert record["toolchain"] == export.toolchain()
        assert re.fullmatch(r"1[23]\.\d", record["cuda"])

    def test_ptx_is_of_the_same_kernel(self, store, arch):
        cubin = store.get(VARIANT, arch)
        ptx = cubin.path.with_suffix(".ptx").read_text()
        assert f".entry {cubin.symbol}(" in ptx
        assert f".target {arch}" in ptx
        assert ptx.count("cp.async.bulk.tensor.4d") == 2

    def test_reader_agrees_with_cuobjdump(self, store, arch):
        tool = shutil.which("cuobjdump") or next(pathlib.Path(sys.prefix).glob("**/nvidia/*/bin/cuobjdump"), None)
        if tool is None:
            pytest.skip("no cuobjdump")
        cubin = store.get(VARIANT, arch)
        (kernel,) = elf.read(cubin.read()).kernels
        run = [str(tool), "-res-usage", "-elf", str(cubin.path)]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"Ordinal : (0x\w+)\s+Offset  : (0x\w+)\s+Size    : (0x\w+)", text)
        table = {int(ordinal, 16): (int(offset, 16), int(size, 16)) for ordinal, offset, size in found}
        assert tuple(table[i] for i in range(len(table))) == kernel.parameters
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
        assert usage is not None
        assert tuple(map(int, usage.groups())) == (kernel.registers, 0, kernel.shared_bytes, 0)

    def test_damaged_cubin_is_refused_not_misread(self, store, arch):
        cubin = store.get(VARIANT, arch).read()
        for size in range(0, len(cubin), 97):
            with pytest.raises(ValueError, match="cubin"):
                elf.read(cubin[:size])


@needs_dsl
class TestExport:
    def test_skips_what_is_up_to_date(self, store, monkeypatch):
        def refuse(*_):
            raise AssertionError("compiled again")

        monkeypatch.setattr(export, "compile_variant", refuse)
        seen = []
        made = export.export(
            [VARIANT], ["sm_90a", "sm_100a"], store.folder, ptx=True, progress=lambda *step: seen.append(step)
        )
        assert [cubin.arch for cubin in made] == ["sm_90a", "sm_100a"]
        assert sorted(done for done, _, _ in seen) == [1, 2]
        assert all("up to date" in what for _, _, what in seen)

    def test_other_toolchain_or_missing_ptx_is_not_up_to_date(self, store, monkeypatch):
        assert export.up_to_date(store, VARIANT, "sm_90a", ptx=True)
        assert not export.up_to_date(store, VARIANT, "sm_103a")
        monkeypatch.setattr(export, "toolchain", lambda: "another")
        assert not export.up_to_date(store, VARIANT, "sm_90a")

    def test_list_prints_a_row_for_each(self, store, capsys):
        assert export.main(["--list", "--kernel", VARIANT.name, "-o", str(store.folder)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert {row[1]: row[6] for row in rows[1:]} == {"sm_90a": "good", "sm_100a": "good", "sm_103a": "absent"}

    def test_wrong_parameters_are_refused(self, store, monkeypatch):
        cubin = store.get(VARIANT, "sm_90a").read()
        kernel = registry.KERNELS["delta"]
        shorter = registry.Kernel("delta", kernel.sources, kernel.parameters[:-1])
        monkeypatch.setitem(registry.KERNELS, "delta", shorter)
        with pytest.raises(export.CompileError, match=r"parameters .* are declared"):
            export.checked(VARIANT, "sm_90a", cubin, "", "", "")

    def test_wrong_arch_is_refused(self, store):
        cubin = store.get(VARIANT, "sm_90a").read()
        with pytest.raises(export.CompileError, match=r"one kernel for sm_100a; it holds .* for sm_90a"):
            export.checked(VARIANT, "sm_100a", cubin, "", "", "")

    def test_spills_are_refused(self, store, monkeypatch):
        cubin = store.get(VARIANT, "sm_90a").read()
        at = cubin.index(b"\x04\x11\x08\x00")  # FRAME_SIZE: symbol, bytes
        spilling = cubin[: at + 8] + (16).to_bytes(4, "little") + cubin[at + 12 :]
        with pytest.raises(export.CompileError, match="16 bytes of local memory"):
            export.checked(VARIANT, "sm_90a", spilling, "", "", "")

    def test_compiler_errors_come_back(self, monkeypatch, tmp_path):
        broken = registry.KernelVariant("broken", "delta", (("dtype", "int4"),))
        with pytest.raises(export.CompileError, match=r"(?s)compiling broken for sm_90a failed:.*Error"):
            export.compile_variant(broken, "sm_90a")


def test_failures_are_collected_and_the_rest_is_kept(tmp_path, monkeypatch):
    from test_cubins import fake

    def compile_variant(variant, arch):
        if arch == "sm_100a":
            raise export.CompileError("no luck on sm_100a")
        return fake(variant, arch)

    monkeypatch.setattr(export, "compile_variant", compile_variant)
    with pytest.raises(export.CompileError, match=r"(?s)1 of 2 failed:.*no luck on sm_100a"):
        export.export([VARIANT], ["sm_90a", "sm_100a"], tmp_path)
    assert cubins.Store(tmp_path).get(VARIANT, "sm_90a").read() == b"kernel"


def test_prune_removes_only_what_the_manifest_does_not_name(tmp_path):
    from test_cubins import fake

    store = cubins.Store(tmp_path)
    store.add(fake(cubin=b"old"), ptx=True)
    cubin = store.add(fake(cubin=b"new"), ptx=True)
    store.prune()
    assert {path.stem for path in tmp_path.iterdir() if path.suffix in (".cubin", ".ptx")} == {cubin.sha256}


def test_without_dsl_compiling_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    assert export.toolchain() is None
    with pytest.raises(export.CompileError, match=re.escape("pip install 'jax_fa_blackwell[export]'")):
        export.compile_variant(VARIANT, "sm_90a")


def test_importing_the_package_imports_no_dsl():
    code = (
        "import sys, jax_fa_blackwell, jax_fa_blackwell.export, jax_fa_blackwell.delta, jax_fa_blackwell.cubins;"
        "assert not {'cutlass', 'cuda'} & set(sys.modules), 'DSL imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRegistry:
    @pytest.mark.parametrize("kernel", registry.KERNELS.values(), ids=lambda kernel: kernel.name)
    def test_sources_are_the_module_and_all_that_it_imports(self, kernel):
        # What these two say of a kernel, its parameters and options, is in the hash itself.
        reached, new = {"abi.py", "registry.py"}, [kernel.sources[0]]
        while new:
            source = new.pop()
            reached.add(source)
            if source.startswith(".."):
                continue  # of the plan modules, the names that a kernel takes from them, not all that they import
            for node in ast.walk(ast.parse((registry.ROOT / source).read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_fa_blackwell"):
                    module = registry.ROOT.parents[1] / (node.module or "").replace(".", "/")
                    files = [module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names)]
                    names = [os.path.relpath(file, registry.ROOT) for file in files if file.is_file()]
                    new += [name for name in names if name not in reached]
        assert reached - {"abi.py", "registry.py"} == set(kernel.sources)

    def test_delta_signature_is_the_declared_one(self):
        tree = ast.parse((registry.ROOT / "delta.py").read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "kernel"]
        (kernel,) = functions
        names = [argument.arg for argument in kernel.args.args[1:]]
        assert names == [parameter.name for parameter in registry.KERNELS["delta"].parameters]

    def test_core_has_every_architecture(self):
        assert {arch for variant in registry.get_set("core") for arch in variant.arches} == set(TARGETS)

    def test_hash_depends_on_options_arch_and_sources(self, tmp_path, monkeypatch):
        hashes = {variant.source_hash(arch) for variant in registry.VARIANTS.values() for arch in variant.arches}
        assert len(hashes) == sum(len(variant.arches) for variant in registry.VARIANTS.values())
        before = VARIANT.source_hash("sm_90a")
        shutil.copytree(registry.ROOT, tmp_path / "kernels")
        monkeypatch.setattr(registry, "ROOT", tmp_path / "kernels")
        assert VARIANT.source_hash("sm_90a") == before
        with open(tmp_path / "kernels" / "common" / "tma.py", "a") as file:
            file.write("# changed\n")
        assert VARIANT.source_hash("sm_90a") != before

    def test_unknown_names_are_listed(self):
        with pytest.raises(ValueError, match=r"must be one of delta_bfloat16.*; got 'nothing'"):
            registry.get_variant("nothing")
        with pytest.raises(ValueError, match=r"must be one of core.*; got 'nothing'"):
            registry.get_set("nothing")


class TestAbi:
    def test_offsets_follow_addresses(self):
        declared = abi.parameters(n="int32", a="tensor_map", p="pointer", x="float32", b="tensor_map")
        assert abi.table(declared, 896) == ((0, 4), (64, 128), (192, 8), (200, 4), (256, 128))
        # 528 = 8 * 64 + 16: 48 bytes to the next multiple of 64
        assert abi.table(declared[1:2], 528) == ((48, 128),)
        assert abi.table(declared, 528) == ((0, 4), (48, 128), (176, 8), (184, 4), (240, 128))

    def test_bind_orders_and_checks(self):
        declared = abi.parameters(p="pointer", n="int32")
        values = {"n": launch.Int32(3), "p": launch.Pointer(0)}
        assert abi.bind(declared, values) == (launch.Pointer(0), launch.Int32(3))
        with pytest.raises(ValueError, match=r"missing \['n'\], unknown \['m'\]"):
            abi.bind(declared, {"p": launch.Pointer(0), "m": launch.Int32(3)})
        with pytest.raises(ValueError, match="'n' must be a int32"):
            abi.bind(declared, {"p": launch.Pointer(0), "n": launch.Float32(3)})

    def test_unknown_kind_is_named(self):
        with pytest.raises(ValueError, match=r"kind of parameter 'x' must be one of .*; got 'double'"):
            abi.Parameter("x", "double")
