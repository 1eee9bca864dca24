"""aot: one artefact for every GPU architecture and for CPUs; loading it in a process that has neither DSL nor model."""

import hashlib
import io
import json
import os
import subprocess
import sys
import textwrap
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa_blackwell import aot, cubins, custom_call, flash_attention, lowering
from jax_fa_blackwell.kernels import abi
from jax_fa_blackwell.plan import launch
from lowered import launches

SHAPES = ((1, 130, 4, 64), (1, 130, 2, 64), (1, 130, 2, 64))
INPUTS = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES)


def loss(query, key, value):
    return flash_attention(query, key, value, is_causal=True).astype(jnp.float32).sum()


gradient = jax.jit(jax.grad(loss, (0, 1, 2)))


def arrays():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in SHAPES)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache of cubins that are none: what is in them matters only to a GPU."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("JAX_FA_BLACKWELL_CACHE", str(folder))
    monkeypatch.delenv(lowering.ARCH_VARIABLE, raising=False)

    def find(variant, arch):
        data = f"{variant.name} {arch}".encode()
        sha256 = hashlib.sha256(data).hexdigest()
        (folder / f"{sha256}.cubin").write_bytes(data)
        table = abi.table(variant.parameters, 528 if arch == "sm_90a" else 896)
        return cubins.Cubin(variant, arch, sha256, "entry", table, (288, 1, 1), 40, 0, "tools", folder)

    monkeypatch.setattr(cubins, "find", find)
    return folder


def contents(artefact: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(artefact)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def changed(artefact: bytes, **about) -> bytes:
    """The artefact with other entries in about.json."""
    files = contents(artefact)
    files["about.json"] = json.dumps(json.loads(files["about.json"]) | about).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_one_artefact_for_every_architecture_and_cpu():
    exported = aot.deserialize(aot.serialize(gradient, *INPUTS))
    assert exported.platforms == ("cuda", "cpu")
    plans = launches(exported.mlir_module())
    arches = {plan.name.split("_")[0]: [program.arch for program in plan.programs] for plan in plans}
    assert arches == {name: ["sm_100a", "sm_103a", "sm_90a"] for name in ("forward", "delta", "backward")}


def test_arches_are_the_callers():
    def programs(*arches):
        exported = aot.deserialize(aot.serialize(gradient, *INPUTS, arches=arches))
        return [[program.arch for program in plan.programs] for plan in launches(exported.mlir_module())]

    assert programs("sm_103a") == [["sm_103a"]] * 3
    assert programs("sm_90a") == [["sm_90a"]] * 3
    with pytest.raises(ValueError, match=r"arch must be one of .*; got 'sm_80'"):
        aot.serialize(gradient, *INPUTS, arches=["sm_80"])
    with pytest.raises(ValueError, match=r"arches must have at least one name, of .*; got \(\)"):
        aot.serialize(gradient, *INPUTS, arches=())


def test_what_ran_here_before_does_not_matter():
    """A jitted function that was traced for this CPU is exported with kernels, and runs on the CPU afterwards."""
    inner = jax.jit(lambda *x: flash_attention(*x, is_causal=True))
    before = inner(*arrays())
    exported = aot.deserialize(aot.serialize(inner, *INPUTS))
    assert len(launches(exported.mlir_module())) == 1
    assert lowering.named_arches() == ()
    assert custom_call.TARGET not in inner.lower(*INPUTS).as_text()
    np.testing.assert_array_equal(inner(*arrays()), before)


def test_loads_in_a_fresh_process_without_the_dsl(tmp_path):
    """Values on the CPU; cubins arrive in the cache; and neither the DSL nor the exporter is imported."""
    (tmp_path / "artefact").write_bytes(aot.serialize(gradient, *INPUTS, embed_cubins=True))
    program = """
        import pathlib, sys
        sys.modules["cutlass"] = None  # importing it raises ImportError
        import jax, numpy as np
        from jax_fa_blackwell import aot
        folder = pathlib.Path(sys.argv[1])
        exported = aot.deserialize((folder / "artefact").read_bytes())
        rng = np.random.default_rng(0)
        arrays = [jax.numpy.asarray(rng.standard_normal(aval.shape), aval.dtype) for aval in exported.in_avals]
        results = jax.jit(exported.call)(*arrays)
        np.savez(folder / "results.npz", *(np.asarray(result, np.float32) for result in results))
        loaded = [name for name in sys.modules if name.startswith("jax_fa_blackwell")]
        assert "jax_fa_blackwell.export" not in loaded and "jax_fa_blackwell.attention" in loaded, loaded
        try:
            import cutlass
        except ImportError:
            print("no DSL")
    """
    other = tmp_path / "other cache"
    environment = os.environ | {"JAX_FA_BLACKWELL_CACHE": str(other)}
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split("\n")[0] == "no DSL"
    results = np.load(tmp_path / "results.npz")
    for name, expected in zip(sorted(results.files), gradient(*arrays()), strict=True):
        np.testing.assert_array_equal(results[name], np.asarray(expected, np.float32))
    for path in other.glob("*.cubin"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    assert len(list(other.glob("*.cubin"))) == 12  # forward, dQ, dK and dV, and delta, on three architectures


def test_cubins_are_embedded_on_request(cache):
    artefact = aot.serialize(gradient, *INPUTS)
    about = json.loads(contents(artefact)["about.json"])
    needed = {cubin["sha256"] for cubin in about["cubins"]}
    assert set(contents(artefact)) == {"about.json", "program"}
    embedded = contents(aot.serialize(gradient, *INPUTS, embed_cubins=True))
    assert set(embedded) == {"about.json", "program"} | {f"{sha256}.cubin" for sha256 in needed}
    assert {path.stem for path in cache.glob("*.cubin")} == needed


def test_damaged_cubin_is_refused(cache):
    artefact = aot.serialize(gradient, *INPUTS, embed_cubins=True)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in contents(artefact).items():
            archive.writestr(name, data[:-1] + b"?" if name.endswith(".cubin") else data)
    with pytest.raises(ValueError, match=r"cubin [0-9a-f]{64} is damaged: its .* bytes have sha256"):
        aot.deserialize(out.getvalue())


def test_damaged_file_in_the_cache_is_written_again(cache):
    artefact = aot.serialize(gradient, *INPUTS, embed_cubins=True)
    files = contents(artefact)
    for path in cache.glob("*.cubin"):
        path.write_bytes(b"damaged")
    aot.deserialize(artefact)
    assert {path.name: path.read_bytes() for path in cache.glob("*.cubin")} == {
        name: data for name, data in files.items() if name.endswith(".cubin")
    }


def test_missing_cubin_is_an_error_where_a_device_needs_it(monkeypatch, cache):
    artefact = aot.serialize(gradient, *INPUTS)
    for path in cache.glob("*.cubin"):
        path.unlink()
    aot.deserialize(artefact)  # no such device here
    monkeypatch.setattr(lowering, "device_arches", lambda: ("sm_103a",))
    with pytest.raises(cubins.CubinNotFoundError, match=r"for sm_103a, cubin [0-9a-f]{64}, .*embed_cubins=True"):
        aot.deserialize(artefact)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"package_version": "0.0.9"}, r"by jax_fa_blackwell 0\.0\.9 .*; this is jax_fa_blackwell {here}"),
        ({"plan_version": 99}, r"launch plans of version 99.*; this is .*launch plans of version {plans}"),
        ({"format": 7}, r"artefact format 7\); this is .*artefact format {form}\)"),
    ],
)
def test_version_skew_names_both_versions(about, message):
    artefact = changed(aot.serialize(lambda x: x + 1, jnp.ones(2), platforms=["cpu"]), **about)
    names = {"here": aot.package_version().replace(".", r"\."), "plans": launch.VERSION, "form": aot.FORMAT}
    with pytest.raises(aot.VersionSkewError, match=message.format(**names)):
        aot.deserialize(artefact)


@pytest.mark.parametrize("data", [b"", b"no archive", None])
def test_not_an_artefact(data):
    whole = aot.serialize(lambda x: x + 1, jnp.ones(2), platforms=["cpu"])
    with pytest.raises(ValueError, match=r"data must be an artefact that aot\.serialize made, whole; got"):
        aot.deserialize(whole[: len(whole) // 2] if data is None else data)


def test_loaded_program_can_be_differentiated():
    exported = aot.deserialize(aot.serialize(jax.jit(loss), *INPUTS, vjp_order=1))
    got = jax.jit(jax.grad(exported.call, (0, 1, 2)))(*arrays())
    for one, expected in zip(got, gradient(*arrays()), strict=True):
        np.testing.assert_array_equal(one, expected)


def test_works_with_jax_export_itself():
    check = aot.DISABLED_CHECKS
    with lowering.lowering_for(["sm_100a"]):
        exported = jax.export.export(jax.jit(lambda *x: loss(*x)), platforms=["cuda"], disabled_checks=check)(*INPUTS)
    assert custom_call.TARGET in exported.mlir_module()
    with lowering.lowering_for(["sm_100a"]), pytest.raises(ValueError, match=custom_call.TARGET):
        jax.export.export(jax.jit(lambda *x: loss(*x)), platforms=["cuda"])(*INPUTS)


def test_symbolic_shapes_are_refused():
    (b,) = jax.export.symbolic_shape("b")
    query, key, value = (jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in INPUTS)
    with pytest.raises(NotImplementedError, match=r"query must have a shape of integers.*\[b, 130, 4, 64\]"):
        aot.serialize(gradient, query, key, value)


def test_flatbuffers_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for function in (lambda: aot.serialize(gradient, *INPUTS), lambda: aot.deserialize(b"")):
        with pytest.raises(ImportError, match=r"pip install 'jax_fa_blackwell\[aot\]'"):
            function()
