"""Every Python block of README.md and docs/ runs, and prints what the text block right after it says.

The blocks of a page run in order in one fresh process, with eight simulated devices for pages about meshes.
"""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path) -> list[tuple[int, str, str | None]]:
    """First line, source and expected output, if any, of each Python block."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, match.start(1)), match[1], match[2]) for match in BLOCK.finditer(text)]


def run(page: pathlib.Path) -> None:
    namespace = {"__name__": "__main__"}
    for line, source, expected in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + source, str(page), "exec"), namespace)
        if expected is not None and printed.getvalue() != expected:
            raise SystemExit(f"{page}:{line + 1} printed\n{printed.getvalue()}instead of\n{expected}")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=str)
def test_page_runs(page, tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_FA_BLACKWELL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, __file__, str(page)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr


def test_pages_have_blocks():
    assert {path.name for path in PAGES if blocks(path)} >= {
        "README.md",
        "errors.md",
        "jax_export.md",
        "long_context.md",
        "masks.md",
        "models.md",
        "numerics.md",
    }


def test_named_tests_exist():
    """A test that a page names in backquotes, as ``test_file.py::test_name``, is there."""
    named = {
        name for page in PAGES for name in re.findall(r"`(test_\w+\.py::\w+(?:::\w+)?)`", (ROOT / page).read_text())
    }
    assert named
    for name in named:
        file, *parts = name.split("::")
        (path,) = (ROOT / "tests").rglob(file)
        source = path.read_text()
        assert all(re.search(rf"^\s*(?:def|class) {part}\b", source, re.MULTILINE) for part in parts), name


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]))
