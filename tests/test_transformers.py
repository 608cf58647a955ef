"""moe_a2a inside models of transformers: the same numbers as the installed, unswapped model. Run by `make test-transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from rank_bodies import hf
from tiny_models import FAMILIES

pytestmark = pytest.mark.transformers

ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """A world of four ranks that have transformers loaded."""
    pool = RankPool(4, ENV)
    yield pool
    problems = pool.close()
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_two_ranks(four: RankPool, family: str) -> None:
    said = four.run(2, hf.parity, family, {}, True)
    assert "fused operator" in said[0] and "on rank 1 of 2, over cpu-shm" in said[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_family_on_four_ranks(four: RankPool, family: str) -> None:
    four.run(4, hf.parity, family, {}, True)


OWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a gate it hasn't": ("mixtral", {"hidden_act": "tanh"}, "its gate is none"),
    "no gate": ("nemotron_h", {"mlp_hidden_act": "mish"}, "its gate is none"),
}


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_models_own_experts(four: RankPool, case: str, ranks: int) -> None:
    family, changes, why = OWN[case]
    assert why in four.run(ranks, hf.parity, family, changes, False)[0]


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("experts", [3, 6])
def test_any_number_of_experts(four: RankPool, experts: int, norm_topk_prob: bool) -> None:
    changes = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": norm_topk_prob}
    four.run(4, hf.parity, "qwen3_moe", changes, True)


@pytest.mark.parametrize("mesh", hf.MESHES)
def test_at_load(four: RankPool, tmp_path: Path, mesh: str) -> None:
    hf.save_tiny(str(tmp_path), "mixtral")
    assert "at load" in four.run(4, hf.loaded, str(tmp_path), mesh, None)[0]
