"""The examples with transformers and the benchmark, run as a user runs them; and what is said where it isn't installed."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from as_user import run_as_user

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LIMIT = 230.0


def verdict(printed: str) -> str:
    """The one line that says what was verified."""
    lines = re.findall("^(?:NOT )?verified: .*", printed, re.MULTILINE)
    assert len(lines) == 1, printed
    return str(lines[0])


@pytest.mark.transformers
@pytest.mark.ep_implementation  # with an older version it would say nothing more
def test_generate_starts_its_ranks(tmp_path: Path) -> None:
    code, printed = run_as_user(tmp_path, str(ROOT / "examples/transformers_generate.py"), limit=LIMIT)
    assert code == 0, printed
    assert verdict(printed).startswith("verified: 2 ranks, the text of the whole model on each"), printed
    assert printed.count("fused operator (silu, gated); experts 0..3 of 8 on rank 0 of 2, over cpu-shm") == 2
    assert "rank 0: 'To be, or not to be" in printed and "rank 1: 'The rest is" in printed


@pytest.mark.transformers
def test_generate_at_load_under_torchrun(tmp_path: Path) -> None:
    program = str(ROOT / "examples/transformers_generate.py")
    code, printed = run_as_user(
        tmp_path, *TORCHRUN, "2", program, "--at-load", "--tokens", "4", limit=LIMIT, OMP_NUM_THREADS="1"
    )
    assert code == 0, printed
    assert verdict(printed).startswith("verified: 2 ranks, "), printed
    assert printed.count("experts 0..3 of 8 on rank 0 of 2, over cpu-shm; converted") == 0
    assert len(re.findall("over cpu-shm; (at load|by its first call)", printed)) == 2, printed


@pytest.mark.transformers
@pytest.mark.ep_implementation  # as above
def test_convert_and_train(tmp_path: Path) -> None:
    out = tmp_path / "trained"
    code, printed = run_as_user(
        tmp_path, str(ROOT / "examples/convert_and_train.py"), "--steps", "40", "--out", str(out), limit=LIMIT
    )
    assert code == 0, printed
    found = re.fullmatch(
        r"verified: 2 ranks, 40 steps, loss (\S+) -> (\S+), and the saved model has it in one piece, .*",
        verdict(printed),
    )
    assert found is not None and float(found[2]) < float(found[1]) - 1.0, printed
    assert (out / "model.safetensors").exists()


@pytest.mark.transformers
@pytest.mark.ep_implementation  # as above
def test_an_untrained_model_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    program = importlib.import_module("convert_and_train")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"the loss was 5\.\d+ and is 5\.\d+"):
            program.main(argparse.Namespace(steps=0, out=None))
    finally:
        dist.destroy_process_group()


@pytest.mark.transformers
@pytest.mark.ep_implementation
def test_benchmark(tmp_path: Path) -> None:
    program, results = str(ROOT / "benchmarks/bench_transformers.py"), tmp_path / "results.json"
    code, printed = run_as_user(tmp_path, program, "--short", "--json", str(results), limit=LIMIT)
    assert code == 0, printed
    found = json.loads(results.read_text())["results"]
    assert found.keys() == {"1, 64, 64, 8, 2, 2", "16, 64, 64, 8, 2, 2"}
    for size, modes in found.items():
        assert modes.keys() == ({"forward"} if size.startswith("1,") else {"forward", "training"})
        for row in (row for mode in modes.values() for row in mode.values()):
            assert 0 < row["experts_median_us"] < row["median_us"] and row["calls"] >= 5
    code, printed = run_as_user(
        tmp_path, program, "--short", "--inject-fault", "--json", str(tmp_path / "none.json"), limit=LIMIT
    )
    assert code == 1 and "forward: moe_a2a differs from all_to_all by 0.01" in printed, printed
    assert not (tmp_path / "none.json").exists()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What this package knows of transformers forgotten, and nothing of it importable."""
    for name in list(sys.modules):
        if name.startswith("moe_a2a.integrations.") and name.rsplit(".", 1)[1] not in ("experts", "models"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    return monkeypatch


def test_the_sentence_without_transformers(without: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError) as found:
        importlib.import_module("moe_a2a.integrations.transformers")
    assert str(found.value) == (
        "moe_a2a.integrations.transformers: needs transformers 5, which isn't installed; run: "
        "pip install 'moe_a2a[transformers]'"
    )


def test_the_sentence_with_an_older_one(without: pytest.MonkeyPatch) -> None:
    older: Any = types.ModuleType("transformers")
    older.__version__ = "4.57.1"
    without.setitem(sys.modules, "transformers", older)
    with pytest.raises(ImportError, match=r"needs transformers 5; this is 4\.57\.1\. Run: pip install"):
        importlib.import_module("moe_a2a.integrations.transformers")


@pytest.mark.parametrize("program", ["transformers_generate.py", "convert_and_train.py"])
def test_examples_without_transformers(
    without: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    without.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")
    assert end.value.code == 1
    assert capsys.readouterr().out == (
        "NOT verified: transformers is not installed; run `pip install 'moe_a2a[transformers]'`\n"
    )
