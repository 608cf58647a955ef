"""The experts function "moe_a2a" of transformers 5.0 to 5.22; run by `make transformers-test-5.14.1`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pool import RankPool
from rank_bodies import hf_function
from tiny_models import make_model

pytestmark = [pytest.mark.transformers, pytest.mark.experts_function]

ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    pool = RankPool(2, ENV)
    yield pool
    problems = pool.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make_model("mixtral").save_pretrained(tmp_path / "one")
    return str(tmp_path / "one")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_one_argument_at_load(two: RankPool, tmp_path: Path, family: str) -> None:
    make_model(family).save_pretrained(tmp_path / "one")
    said = two.run(2, hf_function.at_load, str(tmp_path / "one"), True, str(tmp_path / "saved"))
    assert "fused operator" in said[0] and "experts 4..7 of 8 on rank 1 of 2, over cpu-shm" in said[1]
    assert "by its first call" in said[0]


def test_own_experts(two: RankPool, tmp_path: Path) -> None:
    make_model("mixtral", hidden_act="tanh").save_pretrained(tmp_path / "one")
    said = two.run(2, hf_function.at_load, str(tmp_path / "one"), False, str(tmp_path / "saved"))
    assert "own experts, since its gate is none" in said[0]


def test_the_first_call_compiled(two: RankPool, folder: str) -> None:
    two.run(2, hf_function.first_call_compiled, folder)


def test_sharded_before(two: RankPool, folder: str) -> None:
    two.run(2, hf_function.sharded, folder)
