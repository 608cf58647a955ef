"""The training example, run as a user runs it: its verdict, its pictures, its traces, and the curve of one process."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from as_user import run_as_user

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
train_lm = importlib.import_module("train_lm")


def run_train(out: Path, ranks: int, *arguments: str, limit: float = 150.0) -> tuple[int, str, list[str]]:
    """(exit code, everything printed, its last line) of the short form; its whole process group is gone afterwards."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = (*start, str(EXAMPLES / "train_lm.py"), "--short", "--out", str(out / "made"), *arguments)
    code, printed = run_as_user(out, *command, limit=limit, OMP_NUM_THREADS="1")
    return code, printed, re.findall("^(?:NOT )?verified: .*", printed, re.MULTILINE)


def check_picture(path: Path) -> None:
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 700
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50, f"{path.name} is nearly empty"


def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    """In float64, so that the curves agree in all but the last digits; the process that is started for it agrees, too."""
    traces = ("--dtype", "float64", "--save-traces")
    code, printed, verdicts = run_train(tmp_path, 2, "--check", *traces, str(tmp_path / "two.npz"))
    assert code == 0 and len(verdicts) == 1, printed
    assert re.fullmatch(
        r"verified: 2 ranks, 30 steps, loss \d\.\d+ \(single bytes: \d\.\d+\), the same curve as one process; took \d+ s",
        verdicts[0],
    ), printed
    apart = re.search(
        r"curves differ by at most (\S+) in the first 10 steps .*, means of 20 steps by (\S+) ", printed
    )
    assert apart is not None and max(float(apart[1]), float(apart[2])) < 1e-11, printed
    assert re.search(r"before, rows over gloo's all_to_all: \d+% of [\d.]+ ms", printed), printed
    assert re.search(r"after, cpu-shm: -?\d+% of [\d.]+ ms .* waiting for peers: [\d.]+ ms", printed), printed
    check_picture(tmp_path / "made" / "loss.png")
    check_picture(tmp_path / "made" / "expert_load.png")

    alone = ["--short", "--out", str(tmp_path / "alone"), *traces, str(tmp_path / "one.npz")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train_lm.main(alone) == 0
    finally:
        torch.set_num_threads(threads)
    two, one = np.load(tmp_path / "two.npz"), np.load(tmp_path / "one.npz")
    s = train_lm.SHORT
    assert two["I"].shape == (s.layers, s.steps, s.batch * s.length, s.top_k) and two["I"].dtype == np.uint8
    assert two["tokens"].tolist() == [3 * s.length, 4 * s.length] and one["tokens"].tolist() == [
        s.batch * s.length
    ]
    assert np.abs(two["loss"] - one["loss"]).max() < 1e-11
    assert two["loss"][-1] < two["loss"][0] - 1.0
    # The same experts for the same tokens, and loads that are the ids, counted.
    assert (two["I"] == one["I"]).all() and len(np.unique(two["I"])) == int(two["experts"]) == s.experts
    counted = [[np.bincount(ids.ravel(), minlength=s.experts) for ids in layer] for layer in two["I"]]
    assert (np.array(counted).transpose(1, 0, 2) == two["load"]).all()
    assert (two["I"][..., 0] != two["I"][..., 1]).all()


def test_uneven_ranks_and_a_loss_for_balance(tmp_path: Path) -> None:
    """7 sequences and 5 experts on 3 ranks; float32, as by default."""
    code, printed, verdicts = run_train(
        tmp_path, 3, "--check", "--balance", "aux", "--steps", "10", "--seed", "3"
    )
    assert code == 0 and len(verdicts) == 1, printed
    assert verdicts[0].startswith("verified: 3 ranks, 10 steps, ") and "the same curve" in verdicts[0], (
        printed
    )


def test_a_different_curve_is_not_verified() -> None:
    """A single early step, or many later ones; not what rounding does."""
    curve = [3.0 - 0.01 * step for step in range(60)]
    for dtype, (early, late) in {"float32": (1e-3, 0.05), "float64": (1e-10, 1e-6)}.items():
        for begin, end, gap, fine in (
            (0, 60, 0.0, True),
            (3, 10, 0.9 * early, True),
            (10, 60, 0.8 * late, True),
            (30, 31, 10 * late, True),
            (9, 10, 1.1 * early, False),
            (10, 60, 1.2 * late, False),
            (10, 60, -1.2 * late, False),
            (50, 51, math.nan, False),
            (0, 1, math.inf, False),
        ):
            other = [loss + gap if begin <= step < end else loss for step, loss in enumerate(curve)]
            problems = train_lm.curve_problems(curve, other, dtype)[1]
            assert (not problems) == fine, f"{gap} in steps {begin} to {end}, {dtype}"


def test_batches() -> None:
    """Each sequence is a rank's or another's; training and test share no block; entropy is of the bytes that are there."""
    text, s = train_lm.Text(), train_lm.SHORT
    whole = text.batch(s, 4, slice(None))
    for ranks in (1, 2, 4, 5):
        parts = [text.batch(s, 4, train_lm.share_of(s, rank, ranks)) for rank in range(ranks)]
        assert sum(len(part) for part in parts) == s.batch
        assert (np.concatenate(parts) == whole.numpy()).all()
        assert max(len(part) for part in parts) <= -(-s.batch // ranks)
    assert whole.shape == (s.batch, s.length + 1) and not (whole == text.batch(s, 5, slice(None))).all()
    assert text.files > 50 and 0.03 < len(text.held_out) / len(text.train) < 0.1
    counts = np.bincount(text.train.numpy(), minlength=256)
    share = counts[counts > 0] / counts.sum()
    assert text.entropy == pytest.approx(float(-(share * np.log(share)).sum()))
    assert 2.5 < text.entropy < 4.0


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--balance", "luck"), ("--dtype", "int8")])
def test_bad_arguments_are_refused(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train_lm.main(list(arguments))
    assert end.value.code == 2 and arguments[0] in capsys.readouterr().err
