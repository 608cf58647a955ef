"""What is installed is what is in the tree: sdist -> wheel -> import, and the sentences of a build that can't be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 200) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, (
        f"{command} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, not from the tree: what a user of the package index would get."""
    out = tmp_path_factory.mktemp("dist")
    # Only what git would give a fresh clone; build products of the tree must not help.
    clone = tmp_path_factory.mktemp("clone")
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(None, files):
        source, target = ROOT / name, clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_file():
            target.write_bytes(source.read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=clone)
    (built,) = out.glob("*.whl")
    assert list(out.glob("*.tar.gz"))
    return built


def test_the_wheel_is_abi3_and_whole(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for module in [*(ROOT / "moe_a2a").glob("*.py"), *(ROOT / "moe_a2a").glob("*.pyi")]:
        assert f"moe_a2a/{module.name}" in names
    for folder in ("op_host", "op_kernel"):
        for module in (ROOT / folder).rglob("*.py"):
            assert f"moe_a2a/{module.relative_to(ROOT)}" in names
    assert {"moe_a2a/py.typed", "moe_a2a/_C.abi3.so"} <= names
    assert not [name for name in names if name.startswith(("op_", "tests", "benchmarks", "examples"))]


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
        cwd=tmp_path,
    )
    code = (
        "import torch, moe_a2a\n"
        "g = moe_a2a.EPGroup(num_experts=3, top_k=2, max_tokens=5, hidden_size=4, dtype=torch.float32)\n"
        "x = torch.randn(5, 4); idx = torch.randint(0, 3, (5, 2))\n"
        "d = moe_a2a.dispatch(x, idx, g)\n"
        "assert torch.equal(moe_a2a.combine(d.x, d.handle), x + x)\n"
        "print(moe_a2a.__file__, moe_a2a.op_host.layout.__file__, moe_a2a._C.__file__, sep='\\n')\n"
    )
    places = run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(target)}).split()
    assert len(places) == 3 and all(place.startswith(str(target)) for place in places), places


def test_without_torch_the_build_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\")\n"
    )
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("moe_a2a: torch must be importable while building.")
    assert "pip install --no-build-isolation" in line


def test_without_a_compiler_the_build_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("moe_a2a: no C++ compiler found.") and "pip install" in line


def test_kernels_know_no_framework() -> None:
    for source in [*(ROOT / "op_kernel/cpu").iterdir()]:
        text = source.read_text()
        for name in ("torch/", "Python.h", "ATen", "c10"):
            assert name not in text, f"{source.name} includes {name}"
    for source in (ROOT / "op_kernel/triton").glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) ([\w.]+)", source.read_text(), re.MULTILINE)
        assert not [name for name in imports if name.startswith(("torch", "numpy"))], source.name
