"""The kernels of each instruction set give the same bits, on every value that a 16-bit row can hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pool import RankPool
from rank_bodies import steps as bodies
from rank_bodies.inputs import GroupSpec, Step

CODE = """
import sys
import torch, moe_a2a
from moe_a2a.op_host import native
from moe_a2a.reference import combine_reference

native.pool_fill(0xFF)
print(native.cpu_kernels())
torch.manual_seed(0)
digest = []
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for H in (1, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1025):
        for K in (1, 2, 3, 8):
            T = 5
            group = moe_a2a.EPGroup(num_experts=4, top_k=K, max_tokens=T, hidden_size=H, dtype=dtype)
            x = torch.randn(T, H, dtype=torch.float64).mul(torch.randn(T, 1).exp2() * 64).to(dtype)
            idx = torch.randint(-1, 4, (T, K))
            w = torch.rand(T, K) - 0.5
            d = moe_a2a.dispatch(x, idx, group)
            for weights in (None, w):
                out = moe_a2a.combine(d.x, d.handle, weights)
                want = combine_reference([d.x], [idx], 4, None if weights is None else [weights])[0]
                assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), (dtype, H, K)
                digest.append(out.double().nan_to_num().sum().item())
                d = moe_a2a.dispatch(x, idx, group)
            group.close()

# Every 16-bit pattern through load, multiply by one, round: what isn't a NaN comes back as it was.
for dtype in (torch.bfloat16, torch.float16):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1024)
    group = moe_a2a.EPGroup(num_experts=1, top_k=2, max_tokens=64, hidden_size=1024, dtype=dtype)
    idx = torch.tensor([[0, -1]]).repeat(64, 1)
    d = moe_a2a.dispatch(every, idx, group)
    assert torch.equal(d.x.view(torch.int16), every.view(torch.int16))
    out = moe_a2a.combine(d.x, d.handle, torch.ones(64, 2))
    nan = every.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out.view(torch.int16)[~nan], every.view(torch.int16)[~nan])
    # and every rounding: sums of two neighbours, halves included, up to overflow
    idx = torch.zeros(64, 2, dtype=torch.int64)
    w = torch.rand(64, 2) * 3
    d = moe_a2a.dispatch(every, idx, group)
    out = moe_a2a.combine(d.x, d.handle, w)
    want = combine_reference([d.x], [idx], 1, [w])[0]
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.view(torch.int16)[~out.isnan()], want.view(torch.int16)[~out.isnan()]), dtype
print(digest)
"""


def run(kernels: str | None) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key != "MOE_A2A_CPU"}
    if kernels is not None:
        environment["MOE_A2A_CPU"] = kernels
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def portable() -> list[str]:
    return run("portable")


def test_portable_kernels_match_the_reference(portable: list[str]) -> None:
    assert portable[0] == "portable"


def test_the_best_kernels_match_the_reference_and_the_portable_ones(portable: list[str]) -> None:
    best = run(None)
    flags = Path("/proc/cpuinfo").read_text()
    assert best[0] == ("avx2" if " avx2 " in flags and " f16c " in flags else "portable")
    assert best[1] == portable[1]


def test_portable_kernels_between_ranks() -> None:
    """Two ranks on the portable kernels, against the oracle."""
    spec = GroupSpec(5, 3, 33, 129, "bfloat16")
    steps = [Step((33, 17), 3, 129, dtype, seed=seed) for seed, dtype in enumerate(("bfloat16", "float16"))]
    ranks = RankPool(2, env={"MOE_A2A_CPU": "portable"})
    try:
        assert ranks.run(2, bodies.kernels_in_use) == ["portable", "portable"]
        ranks.run(2, bodies.steps_match, spec, steps)
    finally:
        assert not ranks.close()
