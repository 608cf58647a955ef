"""Builds moe_a2a. Everything that can be said statically is in pyproject.toml; here is what needs torch or the compiler."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

HOW = "pip install --no-build-isolation ."

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError:
    sys.exit(f"moe_a2a: torch must be importable while building. Install torch first, then run: {HOW}")

if platform.system() != "Linux":
    sys.exit(f"moe_a2a: builds on Linux only (its windows are memfd files); this is {platform.system()}")
if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
    sys.exit(f"moe_a2a: no C++ compiler found. Install one (Debian: apt-get install g++), then run: {HOW}")

ROOT = Path(__file__).parent

if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit(
        f"moe_a2a: the headers of Python are missing (Debian: apt-get install python3-dev); then run: {HOW}"
    )
COMPILER = (
    os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or "c++"
)
CPP20 = "#include <atomic>\nint n; int main() { return std::atomic_ref<int>(n).load(); }\n"
if subprocess.run(
    [*COMPILER.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
    input=CPP20,
    text=True,
    capture_output=True,
).returncode:
    sys.exit(
        f"moe_a2a: {COMPILER} doesn't know C++20's std::atomic_ref; g++ 10 or newer does. Set CXX, then run: {HOW}"
    )

SOURCES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("op_kernel/cpu", "op_host/cpu")
    for path in (ROOT / folder).glob("*.cpp")
)
HEADERS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("op_kernel/cpu", "op_host/cpu")
    for pattern in ("*.h", "*.inc")
    for path in (ROOT / folder).glob(pattern)
)

setup(
    packages=[
        "moe_a2a",
        "moe_a2a.op_host",
        "moe_a2a.op_host.ascend",
        "moe_a2a.op_kernel",
        "moe_a2a.op_kernel.triton",
    ],
    # The folders stand at the top; links of the same names inside the package let tools that read the tree find them.
    package_dir={
        "moe_a2a.op_host": "op_host",
        "moe_a2a.op_kernel": "op_kernel",
        "moe_a2a.op_kernel.triton": "op_kernel/triton",
    },
    package_data={"moe_a2a": ["py.typed", "_C.pyi"]},
    ext_modules=[
        CppExtension(
            "moe_a2a._C",
            SOURCES,
            depends=HEADERS,
            py_limited_api=True,
            define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
            # No contraction: multiply, then add, each rounded, on every CPU alike.
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=shutil.which("ninja") is not None)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
