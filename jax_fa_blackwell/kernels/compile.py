"""Compiles one kernel variant with the DSL: ``python -m jax_fa_blackwell.kernels.compile VARIANT ARCH FOLDER``.

VARIANT is the name of one in the registry, or any in the JSON of ``KernelVariant.to_json``. Writes ``FOLDER/cubin`` and
``FOLDER/ptx``, both of one compilation. A process of its own, because the DSL reads its environment when it is
imported; no GPU is needed.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys


def main(variant_text: str, arch: str, folder: str) -> None:
    """Compiles and writes; exceptions end the process with a traceback for the exporter to show."""
    out = pathlib.Path(folder)
    dump = out / "dump"
    dump.mkdir()
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_DUMP_DIR=str(dump),
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    import cutlass.cute as cute  # after the environment is set  # pyright: ignore[reportMissingImports]

    from jax_fa_blackwell.kernels import registry

    if variant_text.startswith("{"):
        fields = json.loads(variant_text)
        variant = registry.KernelVariant(fields["name"], fields["kernel"], tuple(fields["options"].items()))
    else:
        variant = registry.get_variant(variant_text)
    module = importlib.import_module(registry.KERNELS[variant.kernel].module)
    host, arguments = module.build(variant.name, dict(variant.options))
    compiled = cute.compile(host, *arguments)
    (out / "cubin").write_bytes(compiled.artifacts.CUBIN)
    (out / "ptx").write_text(compiled.artifacts.PTX)


if __name__ == "__main__":
    main(*sys.argv[1:])
