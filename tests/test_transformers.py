"""moe_a2a inside models of transformers: the numbers of the installed, unswapped model. Run by `make transformers-test`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from rank_bodies import hf, hf_docs
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


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """A world of two."""
    pool = RankPool(2, ENV)
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


def test_a_fault_in_the_models_own_experts(two: RankPool) -> None:
    two.run(2, hf.faults_in_own_experts)


@pytest.mark.parametrize("activation", ["silu", "tanh"])
def test_ranks_without_rows_or_experts(four: RankPool, activation: str) -> None:
    four.run(4, hf.one_expert_is_all, activation)


def test_ranks_with_the_same_tokens(four: RankPool) -> None:
    four.run(4, hf.same_batch)


def test_a_deep_copy(two: RankPool) -> None:
    two.run(2, hf.copied)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("experts", [3, 6])
def test_any_number_of_experts(four: RankPool, experts: int, norm_topk_prob: bool) -> None:
    changes = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": norm_topk_prob}
    four.run(4, hf.parity, "qwen3_moe", changes, True)


@pytest.mark.ep_implementation
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_at_load(two: RankPool, tmp_path: Path, family: str) -> None:
    hf.save_tiny(str(tmp_path), family)
    assert "fused operator" in two.run(2, hf.loaded_family, str(tmp_path))[0]


@pytest.mark.ep_implementation
@pytest.mark.parametrize("mesh", hf.MESHES)
def test_at_load(four: RankPool, tmp_path: Path, mesh: str) -> None:
    hf.save_tiny(str(tmp_path), "mixtral")
    assert "at load" in four.run(4, hf.loaded, str(tmp_path), mesh, None)[0]


NATIVE = [False, pytest.param(True, marks=pytest.mark.ep_implementation)]


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("fused", [False, True])
def test_states_go_round(four: RankPool, two: RankPool, tmp_path: Path, fused: bool, native: bool) -> None:
    one, saved = str(tmp_path / "one"), str(tmp_path / "saved")
    hf.save_tiny(one, "mixtral", fused)
    assert any(name.endswith("gate_up_proj") for name in hf.saved_names(one)) == fused
    if native:
        four.run(4, hf.loaded, one, "experts over pairs", saved)
    else:
        four.run(4, hf.convert_and_save, one, saved)
    two.run(2, hf.read_on_two, one, saved, native)


@pytest.mark.parametrize("native", NATIVE)
def test_generate(two: RankPool, tmp_path: Path, native: bool) -> None:
    hf.save_tiny(str(tmp_path), "qwen3_moe")
    two.run(2, hf.generated, str(tmp_path), native)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_logits_and_auxiliary_loss(two: RankPool, family: str) -> None:
    two.run(2, hf.router_outputs, family)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_autocast(two: RankPool, weights: str) -> None:
    two.run(2, hf.autocast, weights)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(two: RankPool, reentrant: bool) -> None:
    two.run(2, hf.checkpointed, reentrant)


def test_options(two: RankPool) -> None:
    two.run(2, hf.options)


@pytest.mark.parametrize("transport", ["cpu-shm", "collective"])
def test_modes_and_growing_batches(two: RankPool, transport: str) -> None:
    two.run(2, hf.modes, transport)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_data_parallel_around_it(four: RankPool, wrapper: str) -> None:
    four.run(4, hf.data_parallel, wrapper)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model(two: RankPool, backend: str) -> None:
    family = {"aot_eager": "gpt_oss", "inductor": "mixtral"}[backend]
    two.run(2, hf.compiled_model, family, backend, timeout=150)


@pytest.mark.parametrize("activation", ["silu", "tanh"])
def test_compiled_layer_with_any_number_of_tokens(two: RankPool, activation: str) -> None:
    two.run(2, hf.compiled_layer, activation, timeout=150)


@pytest.mark.ep_implementation
def test_compiled_at_load(two: RankPool, tmp_path: Path) -> None:
    hf.save_tiny(str(tmp_path), "mixtral")
    two.run(2, hf.compiled_at_load, str(tmp_path), timeout=150)


def test_refusals(two: RankPool) -> None:
    two.run(2, hf.refusals)


@pytest.mark.ep_implementation
@pytest.mark.parametrize("optimizer", [hf_docs.SGD, hf_docs.ADAM], ids=["SGD", "Adam"])
def test_the_recipe_of_the_docs(four: RankPool, tmp_path: Path, optimizer: str) -> None:
    one, saved = str(tmp_path / "one"), str(tmp_path / "saved")
    hf.save_tiny(one, "qwen3_moe")
    four.run(4, hf_docs.recipe, one, saved, optimizer, timeout=200)


def test_an_optimizer_made_before(two: RankPool) -> None:
    two.run(2, hf_docs.optimizer_made_before)
