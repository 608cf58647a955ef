"""The README's example, as it stands there, on two ranks under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The sizes of the page are those of a real model; here only they are changed.
SMALL = {
    "num_experts=64": "num_experts=6",
    "top_k=8": "top_k=2",
    "max_tokens=4096": "max_tokens=40",
    "=2048": "=64",
}

BEFORE = """
import os, sys, torch
RANK = int(os.environ["RANK"])
generator = torch.Generator().manual_seed(RANK)
T, H, I, E, K = (33, 17)[RANK], 64, 32, 6, 2
x = torch.randn(T, H, generator=generator).bfloat16()
topk_idx = torch.randint(-1, E, (T, K), generator=generator)
topk_weights = torch.rand(T, K, generator=generator)
shared = torch.Generator().manual_seed(9)
gate_up_all = (torch.randn(E, 2 * I, H, generator=shared) / 8).bfloat16()
down_all = (torch.randn(E, H, I, generator=shared) / 8).bfloat16()
gate_up_proj, down_proj = gate_up_all[RANK * 3 : RANK * 3 + 3], down_all[RANK * 3 : RANK * 3 + 3]
"""

AFTER = """
want = torch.zeros(T, H, dtype=torch.float64)
for t in range(T):
    for k in range(K):
        e = int(topk_idx[t, k])
        if e >= 0:
            gate, value = (gate_up_all[e].double() @ x[t].double()).chunk(2, dim=-1)
            y_row = down_all[e].double() @ (F.silu(gate) * value)
            want[t] += topk_weights[t, k].double() * y_row
for what in (out, in_one_call):
    error = (what.double() - want).abs().max() / want.abs().max()
    assert what.shape == (T, H) and error < 0.03, error
sys.stdout.write(f"README example ok on rank {RANK}\\n")  # in one piece: both ranks write to one pipe
"""


def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    for page, small in SMALL.items():
        assert page in code, f"{page} is no longer in the README's example"
        code = code.replace(page, small)
    assert "\nd = " in code
    code = code.replace("\nd = ", "\nin_one_call = out\nd = ")
    script = tmp_path / "example.py"
    script.write_text(BEFORE + code + AFTER)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"README example ok on rank 0", "README example ok on rank 1"} <= set(done.stdout.splitlines())


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "examples/README.md",
    ]:
        for target in re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_every_link_of_the_documents_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith(("http:", "https:")):
                assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
