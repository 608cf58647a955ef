"""Each seeded fault is found by its rule and by no other, each clean kernel passes: on every target, in both modes.

Needs triton-ascend, so this runs in the environment of `make ascend-check`, without this folder's conftest's torch.
"""

from __future__ import annotations

import pytest
import seeds

from moe_a2a import ascend_lint
from moe_a2a.op_host.ascend.lower import TARGETS
from moe_a2a.op_host.ascend.rules import RULES

CASES = [(variant, "") for variant in seeds.CLEAN] + seeds.FAULTY


@pytest.fixture(scope="module")
def results() -> list[ascend_lint.Result]:
    return ascend_lint.lint_all([ascend_lint.declared(variant) for variant in seeds.VARIANTS])


@pytest.mark.parametrize("mode", ascend_lint.MODES)
@pytest.mark.parametrize("target", [target.arch for target in TARGETS])
@pytest.mark.parametrize(
    ("variant", "rule"), CASES, ids=[ascend_lint.declared(variant).name for variant, _ in CASES]
)
def test_seed(results, variant, rule, target, mode) -> None:
    name = ascend_lint.declared(variant).name
    (result,) = [r for r in results if (r.kernel, r.target, r.mode) == (name, target, mode)]
    expected = (
        rule if isinstance(rule, str) else next(said for family, said in rule.items() if family in target)
    )
    assert {fault.rule for fault in result.faults} == ({expected} if expected else set()), result.faults


def test_every_rule_has_a_seed() -> None:
    """But the one that no kernel known to us breaks; tests/test_ascend_lint.py breaks it by hand."""
    named = {
        name for _, rule in seeds.FAULTY for name in (rule.values() if isinstance(rule, dict) else [rule])
    }
    assert named - {""} == set(RULES) - {"unmatched-write"}
