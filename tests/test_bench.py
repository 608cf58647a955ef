"""The benchmark harness: what it writes, what makes it fail, and that its numbers mean what they say."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_dispatch_combine  # noqa: E402
import bench_moe  # noqa: E402
import bench_rank  # noqa: E402
from bench_plan import Size  # noqa: E402

import moe_a2a  # noqa: E402

OWN = ("ours", "ours-window")
SPREAD_FIELDS = {"median", "min", "p99", "max"}


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str
    record: dict[str, Any]


def run_benchmark(out: Path, *options: str) -> Run:
    command = [sys.executable, str(BENCHMARKS / "bench_dispatch_combine.py"), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert out.exists(), f"no JSON was written (exit code {done.returncode}):\n{done.stdout}\n{done.stderr}"
    return Run(done.returncode, done.stdout, done.stderr, json.loads(out.read_text()))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_benchmark(tmp_path_factory.mktemp("bench") / "short.json", "--short", "--seconds", "0.3")


def test_short_passes_and_says_so(short_run: Run) -> None:
    assert short_run.code == 0, short_run.stderr
    assert short_run.record["verdict"] == {"ok": True, "failures": []}
    assert "times as fast as gloo" in short_run.stdout
    assert "shared-memory path was taken" in short_run.stdout


def test_json_says_where_and_how_it_was_measured(short_run: Run) -> None:
    record = short_run.record
    assert record["schema"] == 1
    assert record["command"][:2] == ["python", "benchmarks/bench_dispatch_combine.py"]
    assert "--short" in record["command"]
    assert set(record["git"]) == {"commit", "modified"}
    machine = record["machine"]
    assert machine["cpu"] and machine["cores"] >= 1 and machine["memory_GiB"] > 0
    assert set(machine["thp"]) == {"enabled", "defrag", "shmem_enabled"}
    assert {"python", "torch", "numpy"} <= set(record["versions"])
    settings = record["settings"]
    assert settings["ranks"] == 2
    assert settings["malloc"]["MALLOC_MMAP_MAX_"] == "0"
    assert settings["mpi"]["reason"]
    # Unbound: every rank may run wherever the benchmark may.
    assert record["placement"] == [machine["usable_cores"]] * 2


def test_json_has_every_contender_at_every_size(short_run: Run) -> None:
    record = short_run.record
    assert [
        Size(*(s[k] for k in Size._fields)) for s in record["sizes"]
    ] == bench_dispatch_combine.SHORT_SIZES
    assert record["sizes"][0]["T"] == 1
    expected = {*OWN, "gloo-pair", "gloo-packed"}
    if record["settings"]["mpi"]["used"]:
        expected |= {"mpi-pair", "mpi-packed", "mpi-bare", "mpi-bare-copy"}
    for size in record["sizes"]:
        assert set(size["contenders"]) == expected
        for name, row in size["contenders"].items():
            for field in ("dispatch_us", "combine_us", "total_us", "start_skew_us", "arrival_spread_us"):
                assert set(row[field]) == SPREAD_FIELDS
                assert 0 <= row[field]["min"] <= row[field]["median"] <= row[field]["max"]
                assert row[field]["median"] <= row[field]["p99"] <= row[field]["max"]
            assert row["dispatch_us"]["min"] > 0 and row["combine_us"]["min"] > 0
            assert row["samples"] == size["rounds"] * size["block"]
            assert row["checked"] >= 2 * 3, f"{name} wasn't checked on both ranks"
        for own in OWN:
            for family, best in size["best"].items():
                ratio = size["ratios"][own][family]
                if best is None:
                    assert ratio is None
                    continue
                totals = [size["contenders"][name]["total_us"]["median"] for name in (best, own)]
                assert math.isclose(ratio, totals[0] / totals[1])


def test_bytes_are_the_routed_ones(short_run: Run) -> None:
    for size in short_run.record["sizes"]:
        row_bytes = size["H"] * 2
        sent = size["T"] * size["K"] * row_bytes  # nothing is dropped
        assert size["routed_bytes_per_rank"] == [sent, sent]
        assert sum(rank["ours"]["dispatch_out"] for rank in size["copied_bytes"]) == 2 * sent
        for rank in size["copied_bytes"]:
            assert rank["ours-window"]["dispatch_in"] == rank["ours-window"]["combine_in"] == 0
            assert rank["ours"]["combine_out"] == size["T"] * row_bytes
        for row in size["contenders"].values():
            assert math.isclose(row["dispatch_GBps"], sent / row["dispatch_us"]["median"] / 1e3)


def test_wrong_row_fails_the_run(tmp_path: Path) -> None:
    run = run_benchmark(
        tmp_path / "fault.json",
        *(
            "--sizes",
            "3,64,4,2",
            "--seconds",
            "0.1",
            "--mpi",
            "off",
            "--check",
            "--inject-fault",
            "wrong-row",
        ),
    )
    assert run.code == 1
    assert "benchmark failed: T=3 H=64 E=4 K=2: ours on rank" in run.stderr
    assert "combine's result differs from the oracle" in run.stderr
    assert run.record["verdict"]["ok"] is False
    # Only the contender whose expert was spoiled is blamed.
    assert all(": ours on rank" in text for text in run.record["verdict"]["failures"])


def test_late_rank_is_not_in_the_times(tmp_path: Path) -> None:
    run = run_benchmark(
        tmp_path / "late.json",
        *("--sizes", "1,64,4,2", "--seconds", "0.1", "--mpi", "off", "--delay-ms", "50"),
    )
    assert run.code == 0, run.stderr
    for name, row in run.record["sizes"][0]["contenders"].items():
        late = row["arrival_spread_us"]["median"]
        assert late > 40_000, f"{name}: rank 1 wasn't late, so this shows nothing"
        assert row["dispatch_us"]["median"] < late / 2, name
        assert row["combine_us"]["median"] < late / 2, name


def test_nothing_routed_has_no_bandwidth(tmp_path: Path) -> None:
    out = tmp_path / "dropped.json"
    run = run_benchmark(
        out, "--sizes", "4,64,8,2", "--seconds", "0.1", "--mpi", "off", "--check", "--routing", "dropped"
    )
    assert run.code == 0, run.stderr
    size = run.record["sizes"][0]
    assert size["routed_bytes_per_rank"] == [0, 0]
    assert all(rank["ours"]["dispatch_out"] == 0 for rank in size["copied_bytes"])
    for row in size["contenders"].values():
        assert row["dispatch_GBps"] is None and row["combine_GBps"] is None
    assert "n/a" in run.stdout
    assert "Infinity" not in out.read_text() and "NaN" not in out.read_text()


def test_experts_that_do_not_divide_evenly(tmp_path: Path) -> None:
    """The peers' padding of counts, and more ranks than experts of some rank."""
    run = run_benchmark(
        tmp_path / "uneven.json", "--sizes", "5,64,7,3", "--ranks", "3", "--seconds", "0.1", "--check"
    )
    assert run.code == 0, run.stderr


def row_of(total: float) -> dict[str, Any]:
    return {"total_us": {"median": total}}


def test_the_better_peer_counts() -> None:
    rows = {
        "ours": row_of(10.0),
        "ours-window": row_of(5.0),
        "gloo-pair": row_of(400.0),
        "gloo-packed": row_of(300.0),
    }
    found = bench_rank.compare(rows)
    assert found["best"] == {"gloo": "gloo-packed", "mpi": None, "bare_mpi": None}
    assert found["ratios"]["ours"] == {"gloo": 30.0, "mpi": None, "bare_mpi": None}
    assert found["ratios"]["ours-window"]["gloo"] == 60.0


@pytest.mark.parametrize(("ratio", "fails"), [(2.9, True), (3.1, False)])
def test_short_wants_three_times_gloo_at_one_token(ratio: float, fails: bool) -> None:
    sizes = bench_dispatch_combine.SHORT_SIZES
    arguments = argparse.Namespace(sizes=sizes, short=True, routing="uniform")
    results = [
        # The second size is slower than gloo here, and only T=1 counts.
        {**size._asdict(), "failures": [], "ratios": {"ours": {"gloo": ratio if size.T == 1 else 0.5}}}
        for size in sizes
    ]
    failures = bench_dispatch_combine.verdict(arguments, results)
    assert len(failures) == fails
    if fails:
        assert "T=1 H=2048 E=8 K=2: only 2.90 times as fast as gloo" in failures[0]


def test_unmeasured_sizes_fail_the_run() -> None:
    arguments = argparse.Namespace(sizes=bench_dispatch_combine.SHORT_SIZES, short=False, routing="uniform")
    assert bench_dispatch_combine.verdict(arguments, []) == ["0 of 2 sizes were measured"]


@pytest.mark.parametrize("size", ["1,2,3", "1,2048,8,0", "1,2048,4,5", "one,2,3,4"])
def test_bad_size_is_named(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_dispatch_combine.parse_arguments(["--sizes", size])
    assert stopped.value.code == 2
    assert repr(size) in capsys.readouterr().err


def run_layer_benchmark(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "bench_moe.py"), "--json", str(out), "--seconds", "0.1"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_the_layer_benchmark(tmp_path: Path) -> None:
    """Every contender is timed, on two ranks and on one, and in both modes; a routing trace is used."""
    trace = tmp_path / "some.npz"
    np.savez(trace, I=np.random.default_rng(1).integers(0, 6, (2, 3, 64, 2), dtype=np.uint8))
    done = run_layer_benchmark(tmp_path / "moe.json", "--layers", "3,16,8,6,2", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "moe.json").read_text())["results"]
    for ranks, names in (("2", {"fused", "unfused", "gloo"}), ("1", {"fused", "unfused", "plain"})):
        assert [layer.split(", ")[-1] for layer in results[ranks]] == ["uniform", "some"]
        for row in results[ranks].values():
            assert set(row) == {"forward", "training"}
            for contenders in row.values():
                assert set(contenders) == names
                assert all(0 < c["min_us"] <= c["median_us"] and c["calls"] >= 4 for c in contenders.values())


@pytest.mark.slow
def test_a_wrong_layer_fails_the_benchmark(tmp_path: Path) -> None:
    done = run_layer_benchmark(tmp_path / "moe.json", "--layers", "3,16,8,6,2", "--inject-fault", "unfused")
    assert done.returncode != 0 and "unfused, forward" in done.stderr and "differs by" in done.stderr
    assert not (tmp_path / "moe.json").exists()


@pytest.mark.parametrize("routing", ["uniform", "some"])
def test_the_layers_agree(routing: str) -> None:
    """The contenders of one rank compute the same layer, forward and backward, from the inputs that are timed."""
    layer = bench_moe.layer_of("5,16,8,6,2,float32")._replace(routing=routing)
    trace = np.random.default_rng(1).integers(0, 6, (2, 3, 64, 2), dtype=np.uint8)
    with moe_a2a.EPGroup(num_experts=6, top_k=2, max_tokens=5, hidden_size=16, dtype=torch.float32) as group:
        inputs = bench_moe.make_inputs(layer, 0, 6, {"some": trace})
        if routing == "some":
            assert torch.equal(inputs.idx, torch.from_numpy(trace.reshape(-1, 2)[:5].astype(np.int64)))
        (expected,) = bench_moe.infer(bench_moe.fused, group, inputs)
        for value in (inputs.x, inputs.weights, inputs.up, inputs.down):
            value.requires_grad_()
        for contender in bench_moe.ALONE.values():
            (out,) = bench_moe.infer(contender, group, inputs)
            torch.testing.assert_close(out, expected)
            want = bench_moe.train(bench_moe.fused, group, inputs)
            for got, grad in zip(bench_moe.train(contender, group, inputs), want, strict=True):
                torch.testing.assert_close(got, grad)
    with pytest.raises(argparse.ArgumentTypeError, match="float8"):
        bench_moe.layer_of("5,16,8,6,2,float8")
