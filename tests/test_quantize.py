"""quantize_rows and dequantize_rows: bits as the oracle has them, on every instruction set; what is broken stays broken."""

from __future__ import annotations

import ctypes
import doctest
import math
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import moe_a2a
from moe_a2a import quantization, reference
from moe_a2a.errors import BadType, BadValue
from moe_a2a.op_host import native, quant

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMATS = ["int8", "fp8_e4m3"]
LIMIT = {"int8": 127.0, "fp8_e4m3": 448.0}
NAN_BITS = 0x7FC00000
TINY = 2.0**-149  # the smallest float32
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_format = pytest.mark.parametrize("quantize", FORMATS)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """What the kernel doesn't write is a NaN, not a zero by luck."""
    native.pool_fill(0xFF)
    yield
    native.pool_fill(-1)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 4: torch.int32}[tensor.element_size()])


def check(x: Tensor, quantize: str) -> tuple[Tensor, Tensor]:
    """Quantises, compares every bit with the oracle."""
    q, scales = moe_a2a.quantize_rows(x, quantize)
    want_q, want_scales = reference.quantize_rows_reference(x, quantize)
    assert q.dtype == want_q.dtype and q.shape == want_q.shape == x.shape and q.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == want_scales.shape and scales.is_contiguous()
    assert torch.equal(bits(scales), bits(want_scales))
    assert torch.equal(bits(q), bits(want_q))
    return q, scales


def rows(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of different sizes; in each, values of different sizes."""
    generator = torch.Generator().manual_seed(seed + 1000 * tokens + hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spread = 2.0 if dtype == torch.float16 else 10.0
    return (normal(tokens, hidden) * (normal(tokens, hidden) + spread * normal(tokens, 1)).exp2()).to(dtype)


def patterns(dtype: torch.dtype) -> Tensor:
    """Every value that a 16-bit dtype has."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


# ---------------------------------------------------------------------------------------------------------- the oracle


def nearest_fp8(ratio: Fraction) -> tuple[float, bool]:
    """The nearest e4m3fn value and whether it was a tie, from the format's definition."""
    values = [Fraction(m, 512) for m in range(8)]  # subnormals
    values += [Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
    distances = [abs(abs(ratio) - value) for value in values]
    near = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = near[0] if len(near) == 1 else next(code for code in near if code % 2 == 0)
    return math.copysign(float(values[code]), ratio), len(near) == 2


def test_the_oracle_by_hand() -> None:
    x = torch.tensor([[127.0, -126.5, 63.5, 0.5, 1.5, -0.49, -127.0, 0.0]])
    q, scales = reference.quantize_rows_reference(x, "int8")
    assert scales.tolist() == [1.0] and q.tolist() == [[127, -126, 64, 0, 2, 0, -127, 0]]
    assert reference.dequantize_rows_reference(q, scales * 3).tolist() == [
        [381, -378, 192, 0, 6, 0, -381, 0],
    ]
    # 2^-6 is the smallest normal value, 2^-9 the smallest of all; 17 lies between 16 and 18, 19 between 18 and 20.
    x = torch.tensor([[448.0, 17.0, 19.0, -(2**-9), 3 * 2**-11, 2**-10, -(2**-6), 432.0]])
    q, scales = reference.quantize_rows_reference(x, "fp8_e4m3")
    assert scales.tolist() == [[1.0]]
    assert q.float().tolist() == [[448, 16, 20, -(2**-9), 2**-9, 0, -(2**-6), 448]]
    assert bits(q).tolist() == [[0x7E, 0x58, 0x5A, 0x81, 0x01, 0x00, 0x88, 0x7E]]


def test_the_oracle_by_exact_arithmetic() -> None:
    """Quotients as fractions, each rounded once to the format: no float arithmetic but the scale's."""
    generator = torch.Generator().manual_seed(5)
    ties = 0
    for quantize in FORMATS:
        for scale in (1.0, 2.0**-30, 2.0**40):
            x = (torch.randn(2, 64, generator=generator).exp2() * 8).round(decimals=1).clamp(max=100)
            if quantize == "fp8_e4m3":
                x[:, 32:] = (
                    torch.arange(64).view(2, 32) / 1024
                )  # subnormals and what is next to them, ties among them
            x[:, 1::2] *= -1
            x[:, 0] = LIMIT[quantize]
            q, scales = reference.quantize_rows_reference(x * scale, quantize)
            assert set(scales.flatten().tolist()) == {scale}
            for value, code in zip((x * scale).flatten().tolist(), q.float().flatten().tolist(), strict=True):
                exact = Fraction(value) / Fraction(scale)
                if quantize == "int8":
                    assert code == round(exact)
                else:
                    want, tie = nearest_fp8(exact)
                    assert code == want
                    ties += tie
    assert ties > 20


def test_examples_in_docstrings() -> None:
    for module in (quantization, quant):
        found = doctest.testmod(module, extraglobs={"torch": torch})
        assert found.attempted and not found.failed
    finder = doctest.DocTestFinder()
    for test in finder.find(reference.quantize_rows_reference, globs=vars(reference).copy()):
        assert test.examples and not doctest.DocTestRunner().run(test).failed


# ------------------------------------------------------------------------------------------------- bits as the oracle's


@every_dtype
@every_format
@pytest.mark.parametrize("hidden", [1, 5, 31, 32, 33, 127, 128, 129, 300, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rows_of_every_width(dtype: torch.dtype, quantize: str, hidden: int, tokens: int) -> None:
    check(rows(tokens, hidden, dtype), quantize)


@every_dtype
@every_format
def test_strided_rows(dtype: torch.dtype, quantize: str) -> None:
    wide = rows(40, 300, dtype)
    before = wide.clone()
    for x in (
        wide[:, 1:],  # rows start anywhere
        wide[3::2, 7:136],
        wide[:, ::2],  # columns apart
        wide.t(),
        wide.t()[5:6],
        wide[:, 9:10],
        wide[:1].expand(7, 300),
        wide[:, :1].expand(40, 129),
        rows(1, 129, dtype).t(),
    ):
        check(x, quantize)
    assert torch.equal(wide, before)


@every_dtype
@every_format
@pytest.mark.parametrize("hidden", [5, 129, 160])
def test_rows_at_any_address(dtype: torch.dtype, quantize: str, hidden: int) -> None:
    x = rows(3, hidden, dtype)
    want = moe_a2a.quantize_rows(x, quantize)
    for shift in (1, 3):
        memory = bytearray(x.nbytes + shift)
        memory[shift:] = bytes(x.view(torch.uint8).flatten().tolist())
        moved = torch.frombuffer(memory, dtype=dtype, offset=shift).view(3, hidden)
        assert moved.data_ptr() % 2 == 1
        got = moe_a2a.quantize_rows(moved, quantize)
        assert torch.equal(bits(got[0]), bits(want[0])) and torch.equal(bits(got[1]), bits(want[1]))


@every_dtype
@every_format
@pytest.mark.parametrize("hidden", [1, 3, 31, 33, 100, 127, 130, 255])
def test_nothing_beside_the_row_is_touched(dtype: torch.dtype, quantize: str, hidden: int) -> None:
    """x ends where memory ends, and what lies behind q stays as it was."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    x = torch.frombuffer(memory, dtype=dtype, offset=page - hidden * dtype.itemsize, count=hidden)
    x.copy_(rows(1, hidden, dtype)[0])
    q, _ = check(x.view(1, hidden), quantize)
    if q.nbytes % 64:
        behind = ctypes.string_at(q.data_ptr() + q.nbytes, 64 - q.nbytes % 64)
        assert set(behind) == {0xFF}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_format
@pytest.mark.parametrize("width", [128, 7])
def test_every_16_bit_value_among_its_neighbours(dtype: torch.dtype, quantize: str, width: int) -> None:
    every = patterns(dtype)
    check(every[: len(every) // width * width].view(-1, width), quantize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_format
def test_every_16_bit_value_beside_a_larger_one(dtype: torch.dtype, quantize: str) -> None:
    """With an amax that leads to scales of all kinds, so that quotients are of all kinds."""
    finite = patterns(dtype)[patterns(dtype).isfinite()]
    for amax in (1.0, 3.7, 1000.0, 1e-3, 6e4):
        small = finite[finite.abs() <= amax]
        x = torch.nn.functional.pad(small, (0, -len(small) % 127)).view(-1, 127)
        check(torch.nn.functional.pad(x, (1, 0), value=amax), quantize)


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**5])
def test_fp8_is_what_torch_makes_of_it(dtype: torch.dtype, scale: float) -> None:
    """The scale is known here, so torch's conversion alone says what q is; no line of the oracle does."""
    every = patterns(torch.bfloat16).float()
    fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    fp8 = fp8[fp8.isfinite()].sort().values
    edges = torch.cat([fp8, (fp8[1:] + fp8[:-1]) / 2])  # values, and the places between two of them
    up, down = edges.nextafter(torch.tensor(math.inf)), edges.nextafter(torch.tensor(-math.inf))
    values = torch.cat([every, edges, up, down, torch.tensor([-0.0, 0.0])])
    values = values[values.abs() <= 448]
    values = values[(values * scale).to(dtype) == values * scale]  # what the dtype holds
    values = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(values, (1, 0), value=448.0)
    q, scales = moe_a2a.quantize_rows((x * scale).to(dtype), "fp8_e4m3")
    assert set(scales.flatten().tolist()) == {scale}
    assert torch.equal(bits(q), bits(x.to(torch.float8_e4m3fn)))
    assert len(bits(q).unique()) == 254  # all but the two NaNs, -0 among them


@every_dtype
def test_int8_ties_go_to_even(dtype: torch.dtype) -> None:
    steps = torch.arange(-508, 509) / 4  # quarters from -127 to 127: exact in every dtype but bf16
    steps = steps[steps.to(dtype) == steps]
    x = torch.cat([torch.tensor([127.0]), steps])[None].to(dtype)
    q, scales = moe_a2a.quantize_rows(x, "int8")
    assert scales.tolist() == [1.0]
    assert q[0].tolist() == [round(value) for value in x[0].tolist()]  # Python rounds ties to even
    assert set(q[0].tolist()) >= {-127, -126, -1, 0, 1, 126, 127}


def test_float64_is_rounded_to_float32_first() -> None:
    """In one rounding 127.5 - 2^-40 would be 127; by way of float32 it is a tie."""
    x = torch.tensor([[127.0, 62.5 - 2.0**-40, 61.5 + 2.0**-40, 0.5 + 2.0**-40]], dtype=torch.float64)
    q, scales = check(x, "int8")
    assert scales.tolist() == [1.0] and q.tolist() == [[127, 62, 62, 0]]
    # The largest float32, and the first float64 that rounds beyond it.
    most = torch.finfo(torch.float32).max
    for value, broken in (
        (most, False),
        (most * (1 + 2.0**-25 - 2.0**-50), False),
        (most * (1 + 2.0**-24), True),
    ):
        for quantize in FORMATS:
            _, scales = check(torch.tensor([[1.0, -value]], dtype=torch.float64), quantize)
            assert bool(scales.isnan().all()) == broken, value


# ---------------------------------------------------------------------------------------------------- rows that are special


@every_dtype
@every_format
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_broken_row_is_broken_visibly_and_alone(dtype: torch.dtype, quantize: str, value: float) -> None:
    columns = (0, 1, 7, 8, 126, 127, 128, 255, 256, 296, 299)
    good = rows(len(columns) + 1, 300, dtype)
    q_good, scales_good = check(good, quantize)
    x = good.clone()
    for row, column in enumerate(columns):
        x[row, column] = value
    q, scales = check(x, quantize)
    back = moe_a2a.dequantize_rows(q, scales)
    for row, column in enumerate(columns):
        part = slice(0, 300) if quantize == "int8" else slice(column // 128 * 128, column // 128 * 128 + 128)
        scale = scales[row] if quantize == "int8" else scales[row, column // 128]
        assert int(bits(scale[None])) == NAN_BITS and back[row, part].isnan().all()
        assert not bits(q)[row, part].any()
        assert int(back[row].isnan().sum()) == back[row, part].numel()
        q_good[row, part] = 0
        scales_good.view(len(good), -1)[row, column // 128 if quantize == "fp8_e4m3" else 0] = math.nan
    assert torch.equal(bits(q), bits(q_good)) and torch.equal(bits(scales), bits(scales_good))


@every_format
def test_every_kind_of_nan(quantize: str) -> None:
    """Signalling ones, payloads, signs: one scale says it all."""
    kinds = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC12345, -1, -0x7FFFFF, -0x400000], dtype=torch.int32)
    x = torch.ones(len(kinds), 9)
    x[:, 4] = kinds.view(torch.float32)
    assert x[:, 4].isnan().all()
    q, scales = check(x, quantize)
    assert (bits(scales) == NAN_BITS).all() and not bits(q).any()


@every_dtype
@every_format
def test_zeros(dtype: torch.dtype, quantize: str) -> None:
    for zero in (0.0, -0.0):
        q, scales = check(torch.full((2, 150), zero, dtype=dtype), quantize)
        assert not bits(q).any() and not bits(scales).any()  # +0, both


@every_dtype
def test_the_sign_of_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[448.0, -0.0, 0.0, -(2.0**-12), 2.0**-12, 2.0**-10, -(2.0**-10)]], dtype=dtype)
    q, _ = check(x, "fp8_e4m3")
    assert bits(q).tolist() == [[0x7E, 0x80, 0, 0x80, 0, 0, 0x80]]
    q, _ = check(x, "int8")
    assert q.tolist() == [[127, 0, 0, 0, 0, 0, 0]]


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [1, 130])
def test_constant_rows(quantize: str, dtype: torch.dtype, hidden: int) -> None:
    """Every value whose scale is normal stands at the end of the range; half of the columns are negative."""
    values = patterns(dtype)
    values = values[values.isfinite() & (values.float().abs() >= LIMIT[quantize] * 2.0**-126)]
    assert len(values) > 60000
    x = values[:, None].repeat(1, hidden)
    x[:, hidden // 2 :] *= -1
    q, _ = moe_a2a.quantize_rows(x, quantize)
    assert torch.equal(q.float(), x.sign().float() * LIMIT[quantize])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_format
def test_subnormal_scales(dtype: torch.dtype, quantize: str) -> None:
    amax = torch.cat(
        [torch.arange(1, 2000), torch.tensor([2**20 + 1, 2**23 - 1, 2**23, 2**29 + 64, 2**30 - 64])]
    )
    x = (amax.double() * TINY)[:, None] * torch.tensor(
        [1.0, -1.0, 0.5, 0.26, -0.01, 0.0, -0.0, 0.9], dtype=torch.float64
    )
    _, scales = check(x.to(dtype), quantize)
    assert 0 < int((scales.flatten() > 0).sum()) < len(amax)
    # By hand: the scale is amax / LIMIT in whole steps of 2^-149, and amax is up to half a step a column off.
    limit = int(LIMIT[quantize])
    for steps, scale, largest in (
        (limit // 2, 0, 0),
        (limit // 2 + 1, 1, limit // 2 + 1),
        (limit, 1, limit),
        ((3 * limit - 1) // 2, 1, limit),
        (3 * limit // 2 + 1, 2, (3 * limit // 2 + 1) / 2),
    ):
        q, scales = check(torch.tensor([[steps * TINY]], dtype=dtype), quantize)
        assert scales.item() == (scale * TINY), steps
        assert q.float().item() == pytest.approx(largest, abs=0.5 if quantize == "int8" else 16), steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_format
def test_huge_rows(dtype: torch.dtype, quantize: str) -> None:
    most = torch.finfo(dtype if dtype != torch.float64 else torch.float32).max
    below = torch.tensor(most).nextafter(torch.tensor(0.0)).item()
    for amax in (most, below):
        x = torch.tensor([[amax, -amax, amax / 3, 1.0, 1e-38, -amax / 448, 0.0] * 20], dtype=dtype)
        q, scales = check(x, quantize)
        assert q.float()[0, :2].tolist() == [LIMIT[quantize], -LIMIT[quantize]]
        back = moe_a2a.dequantize_rows(q, scales)
        if quantize == "int8" and dtype != torch.bfloat16 and amax == most:
            # 127 * float32(most / 127) rounds beyond float32, as the docstring says, and for this one amax only.
            assert back[0, :2].tolist() == [math.inf, -math.inf]
            back = back[:, [column for column in range(140) if column % 7 > 1]]
        else:
            assert back[0, 0].item() == pytest.approx(amax, rel=2.0**-7 if dtype == torch.bfloat16 else 1e-6)
        assert back.isfinite().all()


@every_format
def test_flushed_denormals(quantize: str) -> None:
    """Subnormals count as zero then, as a scale and as x; everything else has the bits it always has."""
    limit = LIMIT[quantize]
    normal = rows(3, 140, torch.float32)
    least = 2.0**-126  # the smallest normal float32
    tiny_scale = torch.full((1, 140), least * limit / 2)  # normal values, subnormal scale
    tiny = torch.full((1, 140), least / 2)  # subnormal values
    edge = torch.full((1, 140), least * limit)
    edge[0, 1::2] = least * 0.75  # subnormal values, normal scale: 0.75 would be q = 1
    x = torch.cat([normal, tiny_scale, tiny, edge])
    usual_q, usual_scales = check(x, quantize)
    assert usual_q.float()[3:].ne(0).all(), "this test needs rows that are not zero without the flag"
    for dtype in (torch.float32, torch.float64):
        y = x.to(dtype)
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU doesn't flush denormals")
        try:
            q, scales = moe_a2a.quantize_rows(y, quantize)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(bits(q)[:3], bits(usual_q)[:3])
        assert torch.equal(bits(scales)[:3], bits(usual_scales)[:3])
        assert not bits(q)[3:5].any() and not bits(scales)[3:5].any()
        assert torch.equal(bits(scales)[5], bits(usual_scales)[5])
        assert q.float()[5, ::2].eq(limit).all() and q.float()[5, 1::2].eq(0).all()


@every_format
def test_rows_beyond_32_bits(quantize: str) -> None:
    """Rows 2 GiB apart (virtual memory only)."""
    stride = 2**29
    x = torch.empty(4 * stride + 3).as_strided((5, 3), (stride, 1))
    for row in range(5):
        x[row] = torch.tensor([row + 1.0, -row, 0.3])
    check(x, quantize)


# ---------------------------------------------------------------------------------------------------------- accuracy


def bound(x: Tensor, scales_TH: Tensor, quantize: str) -> Tensor:
    """The docstring's promise, in fp64."""
    size, scale = x.abs(), scales_TH.double()
    if quantize == "int8":
        step = scale / 2
    else:
        step = torch.where(size >= 2.0**-6 * scale, 2.0**-4 * size, 2.0**-10 * scale)
    return step + 2.0**-22 * size + LIMIT[quantize] * 2.0**-150


def spread(scales: Tensor, hidden: int) -> Tensor:
    return (
        scales[:, None].expand(-1, hidden)
        if scales.dim() == 1
        else scales.repeat_interleave(128, 1)[:, :hidden]
    )


@every_dtype
@every_format
def test_accuracy(dtype: torch.dtype, quantize: str) -> None:
    generator = torch.Generator().manual_seed(3)
    octaves = -14 * torch.rand(64, 1000, generator=generator)  # small values beside large ones
    x = rows(64, 1000, dtype)
    x = torch.cat([x, (x * octaves.exp2()).to(dtype), (x * 1e-40).to(dtype)])
    q, scales = moe_a2a.quantize_rows(x, quantize)
    back = moe_a2a.dequantize_rows(q, scales)
    scales_TH = spread(scales, 1000)
    exact = x.float().double()  # of float64, its rounding to float32 is promised apart
    error = (back.double() - exact).abs()
    allowed = bound(exact, scales_TH, quantize)
    assert (error <= allowed).all()
    usual = scales_TH >= 2.0**-126
    assert (error[usual] / allowed[usual]).max() > 0.99, "a bound that nothing comes near says nothing"
    if quantize == "fp8_e4m3":
        subnormal = usual & (exact.abs() < 2.0**-6 * scales_TH.double())
        assert int(subnormal.sum()) > 100 and (error[subnormal] / allowed[subnormal]).max() > 0.99
    if dtype == torch.float64:
        assert ((exact - x).abs() <= 2.0**-24 * x.abs() + 2.0**-150).all()
    for result, unit, least in ((torch.bfloat16, 2.0**-8, 2.0**-133), (torch.float16, 2.0**-11, 2.0**-24)):
        narrow = moe_a2a.dequantize_rows(q, scales, result)
        held = back.abs() <= torch.finfo(result).max
        rounding = (narrow.double() - back.double()).abs()
        assert (rounding <= unit * back.double().abs() + least / 2)[held].all()


# -------------------------------------------------------------------------------------------------------- dequantise


@every_format
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_dequantise(quantize: str, hidden: int, tokens: int) -> None:
    x = rows(tokens, hidden, torch.float32)
    if tokens > 1:
        x[1, hidden // 2] = math.nan
    q, scales = moe_a2a.quantize_rows(x, quantize)
    want = reference.dequantize_rows_reference(q, scales)
    for dtype in DTYPES:
        got = moe_a2a.dequantize_rows(q, scales, dtype)
        assert got.dtype == dtype and got.shape == x.shape
        assert torch.equal(got.nan_to_num(nan=-1), want.to(dtype).nan_to_num(nan=-1))
        assert torch.equal(got.isnan(), want.isnan())
    assert moe_a2a.dequantize_rows(q, scales).dtype == torch.float32


def test_every_quantised_value_comes_back_as_itself() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    int8, fp8 = every.view(torch.int8)[None], every.view(torch.float8_e4m3fn)[None]
    for scale in (1.0, 2.0**-40, 0.3):
        one = torch.tensor([scale])
        assert torch.equal(moe_a2a.dequantize_rows(int8, one), int8.float() * one)
        got = moe_a2a.dequantize_rows(fp8, torch.full((1, 2), scale))
        assert torch.equal(got.nan_to_num(nan=7e7), (fp8.float() * one).nan_to_num(nan=7e7))


def test_scales_belong_to_their_columns() -> None:
    q = torch.ones(2, 300).to(torch.float8_e4m3fn)
    back = moe_a2a.dequantize_rows(q, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert [[int(n) for n in row.unique_consecutive(return_counts=True)[1]] for row in back] == [
        [128, 128, 44]
    ] * 2
    assert back[:, [0, 127, 128, 255, 256, 299]].tolist() == [[1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]]
    back = moe_a2a.dequantize_rows(torch.ones(2, 300, dtype=torch.int8), torch.tensor([1.0, 2.0]))
    assert back.unique(dim=1).tolist() == [[1.0], [2.0]]


# --------------------------------------------------------------------------------------------- operator, errors, kernels


@every_dtype
@every_format
@pytest.mark.parametrize("tokens", [0, 3])
def test_opcheck(dtype: torch.dtype, quantize: str, tokens: int) -> None:
    x = rows(tokens, 130, dtype)
    for view in (x, x.t().contiguous().t()):
        opcheck(torch.ops.moe_a2a.quantize_rows.default, (view, quantize))


@every_format
def test_shapes_without_data(quantize: str) -> None:
    real = moe_a2a.quantize_rows(torch.ones(5, 300), quantize)
    fake = moe_a2a.quantize_rows(torch.ones(5, 300, device="meta"), quantize)
    for ours, theirs in zip(real, fake, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and theirs.device.type == "meta"
    with pytest.raises(BadValue, match='quantize = "int4"'):
        moe_a2a.quantize_rows(torch.ones(5, 300, device="meta"), "int4")


@every_format
def test_gradients_are_refused_in_a_sentence_not_lost(quantize: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    q, scales = moe_a2a.quantize_rows(x, quantize)
    assert scales.requires_grad
    with pytest.raises(RuntimeError, match=r"there is no gradient through quantize_rows"):
        moe_a2a.dequantize_rows(q, scales).sum().backward()
    with torch.no_grad():
        assert not moe_a2a.quantize_rows(x, quantize)[1].requires_grad


@pytest.mark.parametrize(
    ("x", "quantize", "kind", "words"),
    [
        (torch.ones(2, 3), "int4", BadValue, ('quantize = "int4"', '"int8" or "fp8_e4m3"')),
        (torch.ones(2, 3), "", BadValue, ('quantize = ""',)),
        (torch.ones(2, 3), "INT8", BadValue, ('quantize = "INT8"',)),
        (torch.ones(2, 3), 1, BadType, ("quantize is a int", '"int8" or "fp8_e4m3"')),
        (torch.ones(2, 3), None, BadType, ("quantize is a NoneType",)),
        (torch.ones(3), "int8", BadValue, ("x has shape [3]", "[T, H]")),
        (torch.ones(2, 3, 4), "fp8_e4m3", BadValue, ("x has shape [2, 3, 4]", "[T, H]")),
        (torch.ones(2, 0), "int8", BadValue, ("x has shape [2, 0]", "H >= 1")),
        (torch.ones(2, 3, dtype=torch.int8), "int8", BadType, ("x has dtype int8;", "float32, bfloat16")),
        (torch.ones(2, 3, dtype=torch.complex64), "int8", BadType, ("x has dtype complex64;",)),
        (torch.ones(2, 3).to(torch.float8_e4m3fn), "int8", BadType, ("x has dtype float8_e4m3fn;",)),
        (torch.ones(2, 3).to_sparse(), "int8", BadType, ("Sparse", "on cpu")),
        ([[1.0]], "int8", BadType, ("x is a list", "torch.Tensor [T, H]")),
    ],
)
def test_what_cannot_be_quantised(
    x: Any, quantize: Any, kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        moe_a2a.quantize_rows(x, quantize)
    for word in ("moe_a2a.quantize_rows: ", *words):
        assert word in str(caught.value)


Q = torch.ones(2, 300, dtype=torch.int8)
Q8 = Q.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (([1], torch.ones(1)), BadType, "q is a list"),
        ((Q, 1.0), BadType, "scales is a float"),
        ((Q.float(), torch.ones(2)), BadType, "q has dtype torch.float32"),
        ((Q, torch.ones(2).double()), BadType, "scales has dtype torch.float64"),
        ((Q, torch.ones(2), torch.int32), BadType, "dtype = torch.int32"),
        ((Q, torch.ones(2), "float32"), BadType, "dtype = float32"),
        ((Q[0], torch.ones(2)), BadValue, "q has shape [300]"),
        ((Q, torch.ones(3)), BadValue, "scales has shape [3]; expected [2] for int8 rows [2, 300]"),
        ((Q, torch.ones(2, 3)), BadValue, "scales has shape [2, 3]; expected [2] for"),
        ((Q8, torch.ones(2)), BadValue, "scales has shape [2]; expected [2, 3] for fp8_e4m3 rows [2, 300]"),
        ((Q8, torch.ones(2, 2)), BadValue, "scales has shape [2, 2]; expected [2, 3] for"),
    ],
)
def test_what_cannot_be_dequantised(arguments: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        moe_a2a.dequantize_rows(*arguments)
    assert str(caught.value).startswith("moe_a2a.dequantize_rows: ") and words in str(caught.value)


def test_the_kernels_meant_are_the_kernels_used() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    best = "avx2" if " avx2 " in flags and " f16c " in flags else "portable"
    assert native.cpu_kernels() == os.environ.get("MOE_A2A_CPU", best)


# What depends on the instruction set.
INNER = "not oracle and not docstrings and not dequantise and not cannot and not gradients and not opcheck and not same_tests"


@pytest.mark.skipif("MOE_A2A_CPU" in os.environ, reason="is the inner run")
def test_portable_kernels_pass_the_same_tests() -> None:
    """This file once more; both instruction sets give the oracle's bits, so they give the same bits."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", INNER],
        env={**os.environ, "MOE_A2A_CPU": "portable"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (passed,) = re.findall(r"^(\d+) passed, \d+ deselected", done.stdout, re.MULTILINE)
    assert int(passed) > 400
