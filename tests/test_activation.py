"""What stands between an expert's two matrix products (op_kernel/cpu/activation.inc): torch's formulas, forward and backward.

The reference is torch in float64 on the same inputs. Kernels compute in float (float64 for float64) and round once, so an error
is at most one rounding to the element type, and a few units in the last place of the accumulator at the size of the terms:
see :func:`tolerance`. N rows, I inner columns, W = 2 I with a gate, else I.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moe_a2a
from moe_a2a.op_host import native
from moe_a2a.op_host.experts import ACTIVATIONS, Spec

ROOT = Path(__file__).resolve().parent.parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTHS = [1, 63, 64, 65, 130]
LIMIT, ALPHA = 7.0, 1.702
# (activation, gated, interleaved)
FORMS = [
    (activation, gated, interleaved)
    for activation in ACTIVATIONS
    for gated, interleaved in ((False, False), (True, False), (True, True))
    if gated or activation != "clamped"
]
# The largest input: whose result times another one a float16 holds.
SIZES = {"relu2": 30.0}


def halves(h_NW: Tensor, gated: bool, interleaved: bool) -> tuple[Tensor, Tensor | None]:
    """Gate and up [N, I]."""
    if not gated:
        return h_NW, None
    if interleaved:
        return h_NW[:, 0::2], h_NW[:, 1::2]
    return h_NW.chunk(2, dim=1)[0], h_NW.chunk(2, dim=1)[1]


def formula(h_NW: Tensor, activation: str, gated: bool, interleaved: bool) -> Tensor:
    """[N, I] as torch has it."""
    gate, up = halves(h_NW, gated, interleaved)
    if activation == "clamped":
        assert up is not None
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "relu2": lambda x: functional.relu(x).square(),
    }
    result = acts[activation](gate)
    return result if up is None else result * up


def ran(h_NW: Tensor, grad_NI: Tensor, form: tuple[str, bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Forward, forward once more as backward makes it, and the gradient of h."""
    activation, gated, interleaved = form
    code = Spec(activation, gated, False, interleaved).code
    N, W = h_NW.shape
    inner = grad_NI.shape[1]
    # Products with diagonals are exact: y's first I columns are the activation.
    up, down = torch.eye(W, dtype=h_NW.dtype)[None], torch.eye(W, inner, dtype=h_NW.dtype)[None]
    offsets = torch.tensor([0, N], dtype=torch.int32)
    ops = torch.ops.moe_a2a
    y_NW, _ = ops.experts_raw(h_NW, offsets, up, down, None, None, code, LIMIT, ALPHA, False)
    out_NI, back_NW = ops.activation_backward_raw(h_NW, grad_NI, code, LIMIT, ALPHA)
    return y_NW[:, :inner], out_NI, back_NW


def tolerance(want: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding to the element type, and 16 roundings of the accumulator at the terms' size; below the smallest normal
    number of the type results are steps apart.
    """
    info = torch.finfo(dtype)
    accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return want.abs() * info.eps / 2 + 8 * accumulator * size + info.smallest_normal * info.eps + 1e-36


def inputs(
    form: tuple[str, bool, bool], width: int, dtype: torch.dtype, rows: int = 9
) -> tuple[Tensor, Tensor]:
    """h [N, W] with values of many sizes, zeros and limits; grad [N, I]."""
    activation, gated, _ = form
    rng = torch.Generator().manual_seed(width * 64 + FORMS.index(form))
    W = 2 * width if gated else width
    h = torch.randn(rows, W, generator=rng, dtype=torch.float64)
    h *= torch.rand(rows, 1, generator=rng, dtype=torch.float64).mul(14).sub(7).exp2()
    h = h.clamp(-SIZES.get(activation, 90.0), SIZES.get(activation, 90.0))
    special = torch.tensor([0.0, -0.0, LIMIT, -LIMIT, 1.0, -1.0, LIMIT + 0.125], dtype=torch.float64)
    h[0] = special[torch.arange(W) % len(special)]
    h[1] = special[torch.arange(W) // 2 % len(special)]
    return h.to(dtype), torch.randn(rows, width, generator=rng, dtype=torch.float64).to(dtype)


def check_all() -> str:
    """Every form, width and dtype; a digest of all results."""
    digest = hashlib.blake2b(digest_size=8)
    for form, width, dtype in itertools.product(FORMS, WIDTHS, DTYPES):
        what = f"{form}, I = {width}, {dtype}"
        activation, gated, interleaved = form
        h_NW, grad_NI = inputs(form, width, dtype)
        y_NI, out_NI, back_NW = ran(h_NW, grad_NI, form)
        leaf = h_NW.double().requires_grad_()
        want_NI = formula(leaf, *form)
        want_NI.backward(grad_NI.double())
        want_NI = want_NI.detach()
        assert leaf.grad is not None
        gate, up = halves(leaf.detach(), gated, interleaved)
        if activation == "clamped":
            assert up is not None
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        up = torch.ones_like(gate) if up is None else up.abs()
        gate, grad = gate.abs(), grad_NI.double().abs()
        value = gate.square() if activation == "relu2" else gate
        slope = 2 * gate if activation == "relu2" else 1 + gate
        normal = (out_NI.abs() >= torch.finfo(dtype).smallest_normal) | (
            out_NI == 0
        )  # a product may flush others
        assert torch.equal(y_NI[normal], out_NI[normal]), what
        wrong = (y_NI.double() - want_NI).abs() > tolerance(want_NI, value * up, dtype)
        assert not wrong.any(), (what, h_NW[wrong.any(1)][0], y_NI[wrong], want_NI[wrong])
        backs, wants = halves(back_NW.double(), gated, interleaved), halves(leaf.grad, gated, interleaved)
        for back, want, size in zip(backs, wants, (grad * up * slope, grad * value), strict=True):
            if back is None or want is None:
                continue
            wrong = (back - want).abs() > tolerance(want, size, dtype)
            assert not wrong.any(), (what, back[wrong], want[wrong])
        for result in (out_NI, back_NW):
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_formulas_on_both_instruction_sets() -> None:
    """Within the tolerances, and the same bits on both."""
    code = "import test_activation as t; print(t.native.cpu_kernels(), t.check_all())"
    environment = {**os.environ, "MOE_A2A_CPU": "portable"}
    path = os.pathsep.join([str(ROOT / "tests"), environment.get("PYTHONPATH", "")])
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    here = check_all()
    out, _ = other.communicate(timeout=120)
    assert other.returncode == 0 and out.split() == ["portable", here], out


def test_the_tolerances_tell_formulas_apart() -> None:
    """The two kinds of gelu differ by 5e-4 at most, and silu from the clamped gate by its alpha."""
    h = torch.linspace(-6, 6, 4001, dtype=torch.float64)[:, None]
    a, b = (formula(h, kind, False, False) for kind in ("gelu", "gelu_tanh"))
    assert (a - b).abs().max() < 5e-4
    assert ((a - b).abs() > tolerance(a, h.abs(), torch.float32)).double().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: str(one).removeprefix("torch."))
def test_what_is_not_finite(dtype: torch.dtype) -> None:
    """NaN stays NaN wherever it enters. Infinities and the largest numbers give their limits, as torch's formulas do in
    float64; where torch makes NaN of -inf, the limit 0 would be right, too.
    """
    nan, inf, most = float("nan"), float("inf"), torch.finfo(dtype).max
    for form in FORMS:
        activation, gated, interleaved = form
        N = 6
        gate = torch.tensor([nan, inf, -inf, most, -most, 1.0], dtype=dtype)
        h_NW = torch.stack([gate, torch.full_like(gate, 0.5)], 1) if gated else gate[:, None]
        grad_N1 = torch.ones(N, 1, dtype=dtype)
        code = Spec(activation, gated, False, interleaved).code
        out_N1, back_NW = torch.ops.moe_a2a.activation_backward_raw(h_NW, grad_N1, code, LIMIT, ALPHA)
        want = formula(h_NW.double(), *form).to(dtype)
        assert out_N1[0].isnan().all() and back_NW[0, 0].isnan() == (activation not in ("relu", "relu2")), (
            form
        )
        for row in range(1, N):
            got, ours = out_N1[row].item(), want[row].item()
            same = got == pytest.approx(ours, rel=4 * torch.finfo(dtype).eps, nan_ok=True)
            assert same or (row == 2 and (got == 0 or got != got)), (form, gate[row], got, ours)
        if gated:  # in up
            up = torch.tensor([[1.0, nan]], dtype=dtype)
            out_11, back_12 = torch.ops.moe_a2a.activation_backward_raw(up, grad_N1[:1], code, LIMIT, ALPHA)
            assert out_11.isnan().all() and back_12[0, 0].isnan(), form


EXP = """
#include "rows_portable.cpp"
static float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
extern "C" float one(float x) { return moe_a2a::portable::fast_exp(moe_a2a::portable::F32V{} + x)[0]; }
// The largest error in units in the last place over every `step`th float between the bit patterns, of one sign.
extern "C" double worst(uint32_t begin, uint32_t end, uint32_t step, float* at) {
  double most = 0;
  for (uint64_t bits = begin; bits <= end; bits += step) {
    const float x = from_bits(static_cast<uint32_t>(bits));
    const double want = std::exp(static_cast<double>(x));
    int exponent;
    std::frexp(want, &exponent);
    const double error = std::fabs(one(x) - want) / std::ldexp(1.0, exponent - 24);
    if (error > most) most = error, *at = x;
  }
  return most;
}
"""


def compiled_exp(folder: Path, *flags: str) -> ctypes.CDLL:
    """fast_exp by itself."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "the package was built with a compiler; where is it?"
    source, library = folder / "exp.cpp", folder / "exp.so"
    source.write_text(EXP)
    include = f"-I{ROOT / 'op_kernel/cpu'}"
    common = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", include]
    subprocess.run(
        [*compiler.split(), *common, *flags, str(source), "-o", str(library)], check=True, timeout=120
    )
    found = ctypes.CDLL(str(library))
    found.worst.restype = ctypes.c_double
    found.worst.argtypes = [ctypes.c_uint32] * 3 + [ctypes.POINTER(ctypes.c_float)]
    found.one.restype, found.one.argtypes = ctypes.c_float, [ctypes.c_float]
    return found


def bits_of(value: float) -> int:
    """The bit pattern of a float32."""
    return int(torch.tensor(value).view(torch.int32).item()) & 0xFFFFFFFF


@pytest.mark.parametrize("step", [1021, pytest.param(1, marks=pytest.mark.slow)])
def test_accuracy_of_exp(tmp_path: Path, step: int) -> None:
    """At most one unit in the last place wherever exp(x) is a normal float: 0.9904 is the most of all of them."""
    library = compiled_exp(tmp_path)
    at = ctypes.c_float()
    found = {}
    for name, begin, end in (
        ("below", bits_of(-1e-30), bits_of(-87.0)),
        ("above", bits_of(1e-30), bits_of(88.3)),
    ):
        found[name] = library.worst(begin, end, step, ctypes.byref(at)), at.value
    print(found)
    assert max(error for error, _ in found.values()) <= 1, found
    for x, low, high in ((0.0, 1.0, 1.0), (-0.0, 1.0, 1.0), (-1e30, 0.0, 2e-38), (float("-inf"), 0.0, 2e-38)):
        assert low <= library.one(x) <= high, x
    for x in (89.0, 1e4, 3e38, float("inf")):
        assert library.one(x) == float("inf"), x
    nan = library.one(float("nan"))
    assert nan != nan


def test_examples() -> None:
    """Those of the header."""
    ops = torch.ops.moe_a2a
    h = torch.tensor([[1.0, -1.0, 5.0, 7.0]])
    for interleaved, want in ((False, [[5.0, 0.0]]), (True, [[-1.0, 35.0]])):
        code = Spec("relu", True, False, interleaved).code
        assert ops.activation_backward_raw(h, torch.ones(1, 2), code, 7.0, 1.702)[0].tolist() == want
    out, back = ops.activation_backward_raw(
        torch.tensor([[2.0, 5.0]]), torch.ones(1, 1), Spec("relu").code, 7.0, 1.702
    )
    assert out.tolist() == [[10.0]] and back.tolist() == [[5.0, 2.0]]
    assert moe_a2a.__file__ and native.cpu_kernels()
