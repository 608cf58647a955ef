"""The oracle against loops that share nothing with it and numbers worked out by hand; the argument checks.

The loops compute with numpy scalars and round to bf16 with integers: torch's arithmetic is checked as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rank_bodies.inputs import assert_bits, bits
from torch import Tensor

from moe_a2a import reference
from moe_a2a.errors import BadType, BadValue, MoeA2AError
from moe_a2a.op_host.layout import expert_ranges

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAN, INF = float("nan"), float("inf")


def random_case(
    tokens: Sequence[int],
    experts: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    seed: int,
    drop: float = 0.2,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """xs, idxs, weights of all ranks, with duplicates, and with -1 whose weights are NaN."""
    rng = torch.Generator().manual_seed(seed)
    xs, idxs, weights = [], [], []
    for count in tokens:
        xs.append(torch.randn(count, hidden, generator=rng, dtype=torch.float64).to(dtype))
        idx_TK = torch.randint(0, experts, (count, top_k), generator=rng)
        dropped = torch.rand(count, top_k, generator=rng) < drop
        idxs.append(torch.where(dropped, -1, idx_TK))
        weights.append((torch.rand(count, top_k, generator=rng) * 3 - 1).masked_fill(dropped, NAN))
    return xs, idxs, weights


def pairs_by_loop(idxs: Sequence[Tensor], experts: range) -> list[tuple[int, int, int, int]]:
    """(expert, rank, token, k) of what the owner of ``experts`` receives, in order, by four nested loops."""
    lists = [idx.tolist() for idx in idxs]
    return [
        (expert, rank, token, k)
        for expert in experts
        for rank, rows in enumerate(lists)
        for token, row in enumerate(rows)
        for k, value in enumerate(row)
        if value == expert
    ]


def to_bf16(value: np.float32) -> float:
    """Round a finite float32 to bf16, to nearest even, with integers."""
    word = int(np.asarray(value, dtype=np.float32).view(np.uint32))
    word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
    return float(np.asarray(word, dtype=np.uint32).view(np.float32))


def sum_by_loop(terms: list[tuple[float, float | None]], dtype: torch.dtype) -> float:
    """The combine rule for one element: terms are (row element, weight) in k order."""
    acc: Any = np.float64 if dtype == torch.float64 else np.float32
    total = None
    for element, weight in terms:
        term = acc(element) if weight is None else acc(acc(element) * acc(weight))
        total = term if total is None else acc(total + term)
    if total is None:
        return 0.0
    if dtype == torch.bfloat16:
        return to_bf16(total)
    return float(np.float16(total)) if dtype == torch.float16 else float(total)


# ---------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize(
    ("experts", "ranks", "sizes"),
    [
        (1, 1, [1]),
        (7, 3, [3, 2, 2]),
        (8, 3, [3, 3, 2]),
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (4, 8, [1, 1, 1, 1, 0, 0, 0, 0]),
        (6, 2, [3, 3]),
    ],
)
def test_expert_owner(experts: int, ranks: int, sizes: list[int]) -> None:
    """Every expert once, in order, the first E mod R ranks one more; the window layout says the same."""
    owners = reference.expert_owner(experts, ranks)
    assert [len(owner) for owner in owners] == sizes
    assert list(itertools.chain(*owners)) == list(range(experts))
    assert owners == expert_ranges(experts, ranks)


# ------------------------------------------------------------------------------------------------ send_counts


def test_send_counts_by_hand() -> None:
    """Slots go up in (token, k) order per expert, duplicates in a row included; -1 has no slot."""
    counts_E, slot_TK = reference.send_counts_reference(torch.tensor([[2, 0, 2], [-1, 2, 3], [0, -1, -1]]), 5)
    assert counts_E.tolist() == [2, 0, 3, 1, 0]
    assert slot_TK.tolist() == [[0, 0, 1], [-1, 2, 0], [1, -1, -1]]
    assert (counts_E.dtype, slot_TK.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 3, 4), (1, 1, 1), (17, 1, 5), (33, 7, 3), (65, 4, 130)]
)
def test_send_counts_by_loop(tokens: int, top_k: int, experts: int, ids: torch.dtype) -> None:
    """Contiguous and strided ids, all dropped included."""
    rng = torch.Generator().manual_seed(tokens)
    wide = torch.randint(-1, experts, (tokens, 2 * top_k), generator=rng).to(ids)
    for idx_TK in (wide[:, :top_k].contiguous(), wide[:, ::2], torch.full_like(wide, -1)[:, top_k:]):
        counts, slots = [0] * experts, []
        for row in idx_TK.tolist():
            slots.append([counts[expert] if expert >= 0 else -1 for expert in row])
            for k, expert in enumerate(row):
                if expert >= 0:
                    slots[-1][k] = counts[expert]
                    counts[expert] += 1
        counts_E, slot_TK = reference.send_counts_reference(idx_TK, experts)
        assert counts_E.tolist() == counts
        assert slot_TK.tolist() == slots
        assert slot_TK.shape == idx_TK.shape


# --------------------------------------------------------------------------------------------------- dispatch


def test_dispatch_by_hand() -> None:
    """2 ranks, 3 experts: rank 0 owns 0 and 1, rank 1 owns 2; a duplicate, a dropped slot, an idle expert."""
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])]
    idxs = [torch.tensor([[2, 0], [0, 0]]), torch.tensor([[-1, 2], [0, 2]])]
    weights = [torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([[NAN, 0.6], [0.7, 0.8]])]
    first, second = reference.dispatch_reference(xs, idxs, 3, weights)
    assert first.x_NH.tolist() == [[1.0], [2.0], [2.0], [20.0]]
    assert first.source_N3.tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 1, 0]]
    assert first.counts.tolist() == [4, 0] and first.offsets.tolist() == [0, 4, 4]
    assert second.x_NH.tolist() == [[1.0], [10.0], [20.0]]
    assert second.source_N3.tolist() == [[0, 0, 0], [1, 0, 1], [1, 1, 1]]
    assert second.counts.tolist() == [3] and second.offsets.tolist() == [0, 3]
    assert first.weights_N is not None and second.weights_N is not None
    assert_bits(first.weights_N, torch.tensor([0.2, 0.3, 0.4, 0.7]), "weights of rank 0")
    assert_bits(second.weights_N, torch.tensor([0.1, 0.6, 0.8]), "weights of rank 1")
    assert (first.counts.dtype, first.offsets.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden"),
    [((5,), 1, 1, 1), ((7, 0, 3), 7, 3, 5), ((0, 0), 4, 2, 3), ((4, 9), 1, 2, 7), ((3, 1, 0, 6, 2), 3, 5, 2)],
)
def test_dispatch_by_loop(
    tokens: tuple[int, ...], experts: int, top_k: int, hidden: int, dtype: torch.dtype
) -> None:
    """Order, rows, weights and counts; more ranks than experts, empty ranks, E that R doesn't divide."""
    xs, idxs, weights = random_case(tokens, experts, top_k, hidden, dtype, seed=sum(tokens))
    received = reference.dispatch_reference(xs, idxs, experts, weights)
    without = reference.dispatch_reference(xs, [idx.int() for idx in idxs], experts)
    assert len(received) == len(tokens)
    owners = reference.expert_owner(experts, len(tokens))
    for got, bare, owner in zip(received, without, owners, strict=True):
        pairs = pairs_by_loop(idxs, owner)
        want = [xs[rank][token] for _, rank, token, _ in pairs]
        assert_bits(got.x_NH, torch.stack(want) if want else torch.empty(0, hidden, dtype=dtype), "rows")
        want = [weights[rank][token, k] for _, rank, token, k in pairs]
        assert got.weights_N is not None
        assert_bits(got.weights_N, torch.stack(want) if want else torch.empty(0), "weights")
        assert got.source_N3.tolist() == [[rank, token, k] for _, rank, token, k in pairs]
        counts = [sum(e == expert for e, *_ in pairs) for expert in owner]
        assert got.counts.tolist() == counts
        assert got.offsets.tolist() == [0, *itertools.accumulate(counts)]
        assert bare.weights_N is None
        assert_bits(bare.x_NH, got.x_NH, "rows without weights, int32 ids")


def test_dispatch_keeps_every_bit() -> None:
    """-0.0, subnormals and NaN payloads arrive as they were; a dropped token's row doesn't."""
    words = [0x80000000, 0x80000001, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000]
    x_TH = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)[:, None].repeat(1, 3)
    idx_TK = torch.tensor([[1], [0], [1], [-1], [0], [1], [0]])
    (received,) = reference.dispatch_reference([x_TH], [idx_TK], 2)
    order = [1, 4, 6, 0, 2, 5]
    assert bits(received.x_NH).tolist() == bits(x_TH)[order].tolist()


@pytest.mark.parametrize("align", [1, 2, 3, 16])
@pytest.mark.parametrize("spare", [None, 0, 5])
def test_padding_by_loop(align: int, spare: int | None) -> None:
    """Each expert's rows, then zeros up to the multiple, then zeros up to pad_to; ids of dropped pairs nowhere."""
    tokens, experts = (7, 0, 3), 7
    xs, idxs, weights = random_case(tokens, experts, 3, 4, torch.float32, seed=align)
    owners = reference.expert_owner(experts, len(tokens))
    layouts: list[list[tuple[int, int, int] | None]] = []
    offsets: list[list[int]] = []
    for owner in owners:
        layout: list[tuple[int, int, int] | None] = []
        first = [0]
        for expert in owner:
            layout += [pair[1:] for pair in pairs_by_loop(idxs, range(expert, expert + 1))]
            while len(layout) % align:
                layout.append(None)
            first.append(len(layout))
        layouts.append(layout)
        offsets.append(first)
    pads = None if spare is None else [len(layout) + spare + rank for rank, layout in enumerate(layouts)]
    for layout, pad in zip(layouts, pads or [0] * len(layouts), strict=True):
        layout += [None] * (pad - len(layout))
    received = reference.dispatch_reference(xs, idxs, experts, weights, pad_to=pads, align=align)
    plain = reference.dispatch_reference(xs, idxs, experts)
    ys = []
    for rank, (got, layout) in enumerate(zip(received, layouts, strict=True)):
        want = [torch.zeros(4) if at is None else xs[at[0]][at[1]] for at in layout]
        assert_bits(got.x_NH, torch.stack(want) if want else torch.empty(0, 4), "rows")
        want = [torch.zeros(()) if at is None else weights[at[0]][at[1], at[2]] for at in layout]
        assert got.weights_N is not None
        assert_bits(got.weights_N, torch.stack(want) if want else torch.empty(0), "weights")
        assert got.source_N3.tolist() == [[-1] * 3 if at is None else list(at) for at in layout]
        assert got.offsets.tolist() == offsets[rank] and got.offsets.dtype == torch.int32
        assert got.counts.tolist() == plain[rank].counts.tolist()
        padding = torch.tensor([at is None for at in layout], dtype=torch.bool)
        ys.append(got.x_NH.masked_fill(padding[:, None], NAN))
    outs = reference.combine_reference(ys, idxs, experts, weights, pad_to=pads, align=align)
    wants = reference.combine_reference([p.x_NH for p in plain], idxs, experts, weights)
    for out, want_TH in zip(outs, wants, strict=True):
        assert_bits(out, want_TH, "sums")


def test_pad_to_is_a_limit() -> None:
    """One number for all ranks; too small a one names the rank."""
    xs, idxs = [torch.ones(2, 1)] * 2, [torch.tensor([[0], [1]])] * 2
    assert [len(got.x_NH) for got in reference.dispatch_reference(xs, idxs, 2, pad_to=2)] == [2, 2]
    with pytest.raises(ValueError, match="rank 0 receives 4 rows; pad_to = 3"):
        reference.dispatch_reference(xs, idxs, 2, pad_to=3, align=4)
    with pytest.raises(ValueError, match="rank 1 receives 2 rows; pad_to = 1"):
        reference.combine_reference([torch.ones(2, 1)] * 2, idxs, 2, pad_to=[None, 1])


# --------------------------------------------------------------------------------------------------- quantise


def fp8_values() -> list[float]:
    """What float8_e4m3fn can hold from 0 up: 3 bits of mantissa, exponents -6..8, subnormals below, no infinity."""
    return [m / 8 * 2.0**-6 for m in range(8)] + [
        (1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
    ]


def nearest_fp8(value: float) -> float:
    """To nearest, ties to the even mantissa; the list's index is the code, so its parity is the mantissa's."""
    values = fp8_values()
    at = min(range(len(values)), key=lambda i: (abs(values[i] - abs(value)), i % 2))
    return float(np.copysign(values[at], value))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("quantize", ["int8", "fp8_e4m3"])
def test_quantize_by_loop(quantize: str, hidden: int, dtype: torch.dtype) -> None:
    """Element by element in float32 of numpy; rows of zeros, with a NaN or an infinity, and tiny ones."""
    x_TH = torch.randn(6, hidden, generator=torch.Generator().manual_seed(hidden), dtype=torch.float64).to(
        dtype
    )
    x_TH[1], x_TH[2, -1], x_TH[3, 0], x_TH[4] = 0.0, NAN, -INF, torch.finfo(dtype).smallest_normal
    (got,) = reference.dispatch_reference([x_TH], [torch.zeros(6, 1).long()], 1, quantize=quantize)
    assert got.scales is not None and got.scales.dtype == torch.float32
    block, limit = (hidden, np.float32(127)) if quantize == "int8" else (128, np.float32(448))
    blocks = -(-hidden // block)
    assert got.scales.shape == ((6,) if quantize == "int8" else (6, blocks))
    assert got.x_NH.dtype == (torch.int8 if quantize == "int8" else torch.float8_e4m3fn)
    assert got.x_NH.shape == x_TH.shape
    scales, q = got.scales.view(6, -1).numpy(), got.x_NH.float().numpy()
    rows = x_TH.double().numpy().astype(np.float32)
    for row in range(6):
        for b in range(blocks):
            part = slice(b * block, (b + 1) * block)
            largest = np.float32(np.abs(rows[row, part]).max())
            if not np.isfinite(largest):
                assert np.isnan(scales[row, b]) and not q[row, part].any()
                continue
            scale = np.float32(largest / limit)
            assert scales[row, b] == scale
            for value, code in zip(rows[row, part], q[row, part], strict=True):
                if scale == 0:
                    assert code == 0
                    continue
                quotient = np.clip(np.float32(value / scale), -limit, limit)
                assert code == (np.round(quotient) if quantize == "int8" else nearest_fp8(float(quotient)))


def test_quantize_by_hand() -> None:
    """127 and its halves: ties go to the even number; 448 and 240 in fp8, where 17 lies between 16 and 18."""
    idx = [torch.tensor([[0]])]
    (got,) = reference.dispatch_reference(
        [torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.0]])], idx, 1, quantize="int8"
    )
    assert got.scales is not None
    assert got.x_NH.tolist() == [[127, 0, 2, -2, 0]] and got.scales.tolist() == [1.0]
    x_TH = torch.zeros(1, 130)
    x_TH[0, :4], x_TH[0, 128:] = torch.tensor([448.0, 240.0, 17.0, -19.0]), torch.tensor([896.0, 34.0])
    (got,) = reference.dispatch_reference([x_TH], idx, 1, quantize="fp8_e4m3")
    assert got.scales is not None and got.scales.tolist() == [[1.0, 2.0]]
    assert got.x_NH.float()[0, [0, 1, 2, 3, 128, 129]].tolist() == [448.0, 240.0, 16.0, -20.0, 448.0, 16.0]


def test_padding_of_quantised_rows() -> None:
    """Rows and scales of padding are zero, whatever was quantised."""
    x_TH = torch.full((3, 4), NAN)
    (got,) = reference.dispatch_reference(
        [x_TH], [torch.tensor([[0], [1], [0]])], 2, pad_to=9, align=4, quantize="int8"
    )
    assert got.scales is not None and not got.x_NH.any()
    assert got.scales.isnan().tolist() == [True, True, False, False, True, False, False, False, False]
    assert got.scales.nan_to_num(0.0).eq(0).all()


# ---------------------------------------------------------------------------------------------------- combine


def combine_one(
    rows: Sequence[float],
    dtype: torch.dtype,
    weights: Sequence[float] | None,
    weight_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One token, one expert per slot, one rank: the sum of ``rows`` in k order, as a [1] tensor."""
    idx_TK = torch.arange(len(rows))[None]
    weights_TK = (
        None if weights is None else [torch.tensor([list(weights)], dtype=torch.float64).to(weight_dtype)]
    )
    (out,) = reference.combine_reference(
        [torch.tensor(list(rows), dtype=torch.float64).to(dtype)[:, None]], [idx_TK], len(rows), weights_TK
    )
    assert out.dtype == dtype and out.shape == (1, 1)
    return out[0]


@pytest.mark.parametrize("weight_dtype", [*FLOATS, None])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden"), [((5,), 1, 1, 1), ((7, 0, 3), 7, 3, 5), ((4, 9, 2, 1), 3, 8, 3)]
)
def test_combine_by_loop(
    tokens: tuple[int, ...],
    experts: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
) -> None:
    """Every element bit by bit: duplicates, dropped slots with NaN weights, uneven E, empty ranks."""
    _, idxs, all_weights = random_case(tokens, experts, top_k, hidden, dtype, seed=experts, drop=0.3)
    weights = None if weight_dtype is None else [w.to(weight_dtype) for w in all_weights]
    owners = reference.expert_owner(experts, len(tokens))
    place = {
        pair[1:]: (r, n)
        for r, owner in enumerate(owners)
        for n, pair in enumerate(pairs_by_loop(idxs, owner))
    }
    rng = torch.Generator().manual_seed(1)
    ys = [
        torch.randn(len(pairs_by_loop(idxs, owner)), hidden, generator=rng, dtype=torch.float64).to(dtype)
        for owner in owners
    ]
    outs = reference.combine_reference(ys, idxs, experts, weights)
    assert len(outs) == len(tokens)
    for rank, out_TH in enumerate(outs):
        want = torch.empty(tokens[rank], hidden, dtype=torch.float64)
        for token, column in itertools.product(range(tokens[rank]), range(hidden)):
            terms = []
            for k in range(top_k):
                if (rank, token, k) in place:
                    owner, row = place[rank, token, k]
                    weight = None if weights is None else weights[rank][token, k].item()
                    terms.append((ys[owner][row, column].item(), weight))
            want[token, column] = sum_by_loop(terms, dtype)
        assert_bits(out_TH, want.to(dtype), f"rank {rank}")  # exact: sum_by_loop has rounded already


@pytest.mark.parametrize("weights", [(1, 1, 1), None])
def test_bf16_is_summed_in_fp32(weights: tuple[int, ...] | None) -> None:
    """1 + 2**-9 - 1 is 2**-9; with bf16 partial sums it would be 0."""
    assert combine_one([1, 2**-9, -1], torch.bfloat16, weights).item() == 2**-9


def test_products_are_not_rounded_to_the_rows_dtype() -> None:
    """1 * (1 + 2**-10) - 1 = 2**-10: neither weight nor product may become bf16."""
    assert combine_one([1, 1], torch.bfloat16, [1 + 2**-10, -1]).item() == 2**-10


def test_one_rounding_at_the_end() -> None:
    """256 + 1 + 1 is 258 in bf16 (spacing 2); rounding after each addition would give 256."""
    assert combine_one([256, 1, 1], torch.bfloat16, None).item() == 258
    assert combine_one([2048, 1, 1], torch.float16, None).item() == 2050


def test_weights_become_acc_before_the_product() -> None:
    """An fp64 weight of 1 + 2**-24 is 1 in fp32; multiplied in fp64, 3 * it would round to 3 + 2**-22."""
    assert combine_one([3], torch.float32, [1 + 2**-24], torch.float64).item() == 3.0
    assert combine_one([3], torch.float64, [1 + 2**-24], torch.float64).item() == 3.0 + 3 * 2**-24


def test_multiply_then_add_is_not_fused() -> None:
    """(1 + 2**-12)**2 - 1 is 2**-11 when the product is rounded; a fused add would keep the 2**-24."""
    a = 1 + 2**-12
    assert combine_one([1, a], torch.float32, [-1, a]).item() == 2**-11


def test_terms_are_added_in_k_order() -> None:
    """2**24 + 1 + 1 loses both ones in fp32, 1 + 1 + 2**24 keeps them; the order is k's, not the expert's."""
    assert combine_one([2**24, 1, 1], torch.float32, None).item() == 2**24
    assert combine_one([1, 1, 2**24], torch.float32, None).item() == 2**24 + 2
    # Rows lie in expert order 0, 1, 2; k runs over experts 2, 1, 0 and 0, 1, 2.
    ys = [torch.tensor([[2.0**24], [2.0**24], [1.0], [1.0], [1.0], [1.0]])]
    (out,) = reference.combine_reference(ys, [torch.tensor([[2, 1, 0], [0, 1, 2]])], 3)
    assert out.flatten().tolist() == [2**24 + 2, 2**24]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sum_starts_with_the_first_term(dtype: torch.dtype) -> None:
    """-0.0 stays -0.0, which 0 + -0.0 is not; -0.0 + 0.0 is +0; a dropped slot in front changes nothing."""
    assert torch.signbit(combine_one([-0.0], dtype, None)).item()
    assert torch.signbit(combine_one([-0.0, -0.0], dtype, [1, 2])).item()
    assert torch.signbit(combine_one([0.0], dtype, [-1])).item()
    assert not torch.signbit(combine_one([-0.0, 0.0], dtype, [1, 1])).item()
    y = torch.tensor([[-0.0]], dtype=dtype)
    (out,) = reference.combine_reference(
        [y], [torch.tensor([[-1, 0, -1]])], 1, [torch.tensor([[NAN, 1.0, INF]])]
    )
    assert_bits(out, y, "one -0.0 between dropped slots")


@pytest.mark.parametrize("dtype", FLOATS)
def test_identity(dtype: torch.dtype) -> None:
    """R1 E1 K1 w=1 gives x, bit by bit, signs of zero, subnormals and infinities included."""
    x_TH = torch.randn(9, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    x_TH[0], x_TH[1], x_TH[2], x_TH[3] = (
        -0.0,
        torch.finfo(dtype).smallest_normal / 2,
        -INF,
        torch.finfo(dtype).max,
    )
    idxs = [torch.zeros(9, 1, dtype=torch.int64)]
    for weights in (None, [torch.ones(9, 1)]):
        (out,) = reference.moe_reference([x_TH], idxs, weights, lambda _, rows: rows, 1)
        assert_bits(out, x_TH, "identity")


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropped_slots_do_not_leak(dtype: torch.dtype) -> None:
    """Rows of only -1 hold Inf or NaN and have NaN weights: exact +0 there, and clean sums elsewhere."""
    xs = [torch.ones(4, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)]
    xs[0][0], xs[0][2], xs[1][1] = INF, NAN, -INF
    idxs = [torch.tensor([[-1, -1], [-1, 2], [-1, -1], [1, -1]]), torch.tensor([[0, 2], [-1, -1]])]
    weights = [
        torch.tensor([[NAN, INF], [NAN, 2.0], [NAN, NAN], [4.0, INF]]),
        torch.tensor([[1.0, 3.0], [NAN, NAN]]),
    ]
    received = reference.dispatch_reference(xs, idxs, 3)
    assert all(r.x_NH.isfinite().all() for r in received)
    for w, want in ((weights, [[0, 2, 0, 4], [4, 0]]), (None, [[0, 1, 0, 1], [2, 0]])):
        for out, expected in zip(
            reference.moe_reference(xs, idxs, w, lambda _, rows: rows, 3), want, strict=True
        ):
            assert_bits(out, torch.tensor(expected, dtype=dtype)[:, None].expand(-1, 3), "sums")
    # A NaN or Inf that does belong to a kept slot shows, and only in its own token.
    ys = [received[0].x_NH.clone(), received[1].x_NH.clone()]
    ys[0][0] = NAN
    outs = reference.combine_reference(ys, idxs, 3, weights)
    assert [out.isfinite().all(1).tolist() for out in outs] == [[True] * 4, [False, True]]


def test_duplicates_are_summed() -> None:
    """Ids [1, 1, 3] with weights .25, .5, 2: both slots of expert 1 count, each with its own weight."""
    xs, idxs = [torch.tensor([[3.0]])], [torch.tensor([[1, 1, 3]])]
    (out,) = reference.moe_reference(xs, idxs, [torch.tensor([[0.25, 0.5, 2.0]])], lambda e, x: x * 10**e, 4)
    assert out.item() == 0.75 * 30 + 2 * 3000


def test_no_tokens_at_all() -> None:
    """Zero tokens on every rank, and only -1: shapes and dtypes hold, nothing is received."""
    for tokens in (0, 2):
        xs = [torch.full((tokens, 3), NAN, dtype=torch.bfloat16)] * 3
        idxs = [torch.full((tokens, 2), -1)] * 3
        for received in reference.dispatch_reference(xs, idxs, 2, [torch.full((tokens, 2), NAN)] * 3):
            assert received.x_NH.shape == (0, 3) and received.x_NH.dtype == torch.bfloat16
            assert received.weights_N is not None and received.weights_N.shape == (0,)
        for out in reference.moe_reference(xs, idxs, None, lambda _, rows: rows.double(), 2):
            assert_bits(out, torch.zeros(tokens, 3, dtype=torch.float64), "sums")


def test_combine_refuses_rows_that_do_not_fit() -> None:
    """A row too many on one rank and one too few on another is noticed, though the total is right."""
    idxs = [torch.tensor([[0, 1]]), torch.tensor([[1, 1]])]
    with pytest.raises(ValueError, match=r"\[2, 2\] rows; expected \[1, 3\]"):
        reference.combine_reference([torch.zeros(2, 1), torch.zeros(2, 1)], idxs, 2)


# ------------------------------------------------------------------------------------------------------ layer


def test_truth_by_hand() -> None:
    """fp64 from bf16 rows and fp32 weights: 2 tokens, duplicates, a dropped slot with a NaN weight."""
    xs = [torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16), torch.tensor([[5.0]], dtype=torch.bfloat16)]
    idxs = [torch.tensor([[0, 1], [1, 1]]), torch.tensor([[-1, 0]])]
    weights = [torch.tensor([[0.5, -2.0], [0.25, 1.0]]), torch.tensor([[NAN, 4.0]])]

    def expert_fn(expert: int, rows: Tensor) -> Tensor:
        return rows * 10 + expert

    truth = reference.moe_truth_fp64(xs, idxs, weights, expert_fn, 2)
    assert [t.flatten().tolist() for t in truth] == [[0.5 * 10 - 2 * 11, 1.25 * 31], [4 * 50]]
    assert all(t.dtype == torch.float64 for t in truth)
    magnitude = reference.moe_magnitude_fp64(xs, idxs, weights, expert_fn, 2)
    assert [m.flatten().tolist() for m in magnitude] == [[0.5 * 10 + 2 * 11, 1.25 * 31], [4 * 50]]
    bare = reference.moe_truth_fp64(xs, idxs, None, expert_fn, 2)
    assert [t.flatten().tolist() for t in bare] == [[21.0, 62.0], [50.0]]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_against_truth(dtype: torch.dtype, weighted: bool) -> None:
    """Experts that differ, E that R doesn't divide, ranks without tokens or experts: within rounding."""
    for tokens, experts in (((13, 0, 6), 7), ((3, 5, 2, 4), 3)):
        xs, idxs, all_weights = random_case(tokens, experts, 4, 5, dtype, seed=experts)
        weights = all_weights if weighted else None
        mix = torch.randn(experts, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

        def expert_fn(expert: int, rows: Tensor, mix: Tensor = mix) -> Tensor:
            return (rows.double() @ mix[expert]).to(rows.dtype)

        outs = reference.moe_reference(xs, idxs, weights, expert_fn, experts)
        truth = reference.moe_truth_fp64(xs, idxs, weights, expert_fn, experts)
        magnitude = reference.moe_magnitude_fp64(xs, idxs, weights, expert_fn, experts)
        for out, exact, size in zip(outs, truth, magnitude, strict=True):
            assert out.dtype == dtype
            # The expert rounds each term once to dtype, combine the sum once; the rest is far below.
            bound = 2 * torch.finfo(dtype).eps * size
            assert ((out.double() - exact).abs() <= bound).all()


# ----------------------------------------------------------------------------------------------------- checks

LIMITS = reference.Limits(num_experts=8, top_k=3, max_tokens=5, hidden_size=6, dtype=torch.float32)
X = torch.zeros(4, 6)
IDX = torch.zeros(4, 2, dtype=torch.int64)


def with_id(value: int) -> Tensor:
    """IDX with ``value`` at [3, 1] and another bad id behind it, where there is room."""
    return torch.cat([IDX[:3], torch.tensor([[0, value]])])


@pytest.mark.parametrize(
    ("x", "idx", "weights", "error", "parts"),
    [
        ([1.0], IDX, None, BadType, ["x is a list on rank 2", "[T, H]"]),
        (X, None, None, BadType, ["topk_idx is a NoneType on rank 2", "[T, K]"]),
        (X, IDX, (1, 2), BadType, ["topk_weights is a tuple"]),
        (X.int(), IDX, None, BadType, ["x has dtype torch.int32 on rank 2", "torch.bfloat16", "convert"]),
        (X, IDX.float(), None, BadType, ["topk_idx has dtype torch.float32", "torch.int32, torch.int64"]),
        (X, IDX.short(), None, BadType, ["topk_idx has dtype torch.int16"]),
        (X, IDX.bool(), None, BadType, ["topk_idx has dtype torch.bool"]),
        (X, IDX, IDX, BadType, ["topk_weights has dtype torch.int64"]),
        (X.to_sparse(), IDX, None, BadType, ["x is a torch.sparse_coo tensor", "to_dense"]),
        (X.to("meta"), IDX, None, BadType, ["x is a torch.strided tensor on meta", "expected", "cpu"]),
        (X[0], IDX, None, BadValue, ["x has shape [6] on rank 2", "2 dimensions, [T, H]"]),
        (X, IDX[:, 0], None, BadValue, ["topk_idx has shape [4]", "[T, K]"]),
        (
            X,
            IDX[:3],
            None,
            BadValue,
            ["topk_idx has shape [3, 2] but x has shape [4, 6] on rank 2", "[4, K]"],
        ),
        (X, IDX, torch.ones(4, 3), BadValue, ["topk_weights has shape [4, 3] but topk_idx has shape [4, 2]"]),
        (
            torch.zeros(6, 6),
            torch.zeros(6, 2).int(),
            None,
            BadValue,
            ["6 tokens on rank 2", "max_tokens = 5"],
        ),
        (X, torch.zeros(4, 4).int(), None, BadValue, ["K = 4 columns on rank 2", "top_k = 3"]),
        (torch.zeros(4, 0), IDX, None, BadValue, ["x has shape [4, 0] on rank 2", "at least one column"]),
        (
            torch.zeros(4, 7),
            IDX,
            None,
            BadValue,
            ["28 bytes (H = 7, torch.float32)", "24", "hidden_size = 6"],
        ),
        (torch.zeros(4, 4).double(), IDX, None, BadValue, ["32 bytes (H = 4, torch.float64)", "24"]),
        (
            X,
            with_id(9),
            None,
            BadValue,
            [
                "topk_idx[3, 1] = 9 is outside -1..7 on rank 2 (num_experts = 8); ",
                "; ids must be global expert ids, or -1 for no expert",
            ],
        ),
        (X, with_id(8), None, BadValue, ["topk_idx[3, 1] = 8 is outside -1..7"]),
        (X, with_id(-2), None, BadValue, ["topk_idx[3, 1] = -2 is outside -1..7"]),
        (X, with_id(2**31), None, BadValue, ["topk_idx[3, 1] = 2147483648 is outside"]),
        (X, with_id(2**32), None, BadValue, ["topk_idx[3, 1] = 4294967296 is outside"]),
        (X, with_id(-(2**31)).int(), None, BadValue, ["topk_idx[3, 1] = -2147483648 is outside"]),
        (
            X,
            torch.tensor([[0, 0], [9, -5], [0, 0], [0, 8]]),
            None,
            BadValue,
            ["topk_idx[1, 0] = 9 is outside"],
        ),
    ],
)
def test_dispatch_checks(x: Any, idx: Any, weights: Any, error: type[MoeA2AError], parts: list[str]) -> None:
    """The message names operation, argument, value, rank and what was expected."""
    with pytest.raises(error) as caught:
        reference.check_dispatch(x, idx, weights, LIMITS, 2)
    for part in ["moe_a2a.dispatch: ", "rank 2", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("pad_to", "align", "quant", "part"),
    [
        (-2, 1, 0, "pad_to = -2"),
        (2**31, 1, 0, "pad_to = 2147483648"),
        (-1, 0, 0, "align = 0"),
        (-1, 2**20 + 1, 0, "align = 1048577"),
        (-1, 1, -1, "quantisation -1"),
        (-1, 1, 3, "quantisation 3"),
    ],
)
def test_option_checks(pad_to: int, align: int, quant: int, part: str) -> None:
    """Values at the limits pass, those beyond are named."""
    with pytest.raises(BadValue) as caught:
        reference.check_options(pad_to, align, quant, 2)
    for said in ["moe_a2a.dispatch: ", "rank 2", part]:
        assert said in str(caught.value)
    reference.check_options(-1, 1, 0, 0)
    reference.check_options(2**31 - 1, 2**20, 2, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dispatch_checks_let_good_arguments_pass(dtype: torch.dtype) -> None:
    """At the limits: T = max_tokens, K = top_k, the widest row, ids 0, E-1 and -1; zero tokens; strides."""
    hidden = 24 // dtype.itemsize
    idx_TK = torch.tensor([[0, 7, -1]] * 5)
    for x_TH in (torch.zeros(5, hidden, dtype=dtype), torch.zeros(hidden, 10, dtype=dtype).t()[::2]):
        for ids in (idx_TK, idx_TK.int(), idx_TK.repeat(1, 2)[:, ::2]):
            reference.check_dispatch(x_TH, ids, None, LIMITS, 0)
            reference.check_dispatch(x_TH, ids, torch.full((5, 3), NAN, dtype=dtype), LIMITS, 0)
    reference.check_dispatch(torch.zeros(0, 1, dtype=dtype), idx_TK[:0], torch.zeros(0, 3), LIMITS, 0)
    reference.check_dispatch(torch.zeros(5, 1, dtype=dtype), idx_TK[:, :0], None, LIMITS, 0)


@pytest.mark.parametrize(
    ("y", "error", "parts"),
    [
        (None, BadType, ["y is a NoneType on rank 1", "[N, H]"]),
        (torch.zeros(7, 4).int(), BadType, ["y has dtype torch.int32"]),
        (torch.zeros(7), BadValue, ["y has shape [7]", "2 dimensions"]),
        (torch.zeros(6, 4), BadValue, ["y has shape [6, 4] on rank 1", "[7, H]", "d.x"]),
        (torch.zeros(8, 4), BadValue, ["y has shape [8, 4] on rank 1", "[7, H]"]),
        (torch.zeros(7, 0), BadValue, ["y has shape [7, 0] on rank 1", "at least one column"]),
        (torch.zeros(7, 4).double(), BadValue, ["a row of y has 32 bytes", "24"]),
    ],
)
def test_combine_checks_rows(y: Any, error: type[MoeA2AError], parts: list[str]) -> None:
    """y has to have the rows of the dispatch, and to fit the group's row."""
    with pytest.raises(error) as caught:
        reference.check_combine_rows(y, 7, LIMITS, 1)
    for part in ["moe_a2a.combine: ", "rank 1", *parts]:
        assert part in str(caught.value)
    reference.check_combine_rows(torch.zeros(7, 6), 7, LIMITS, 1)
    reference.check_combine_rows(torch.zeros(12, 7, dtype=torch.float16).t(), 7, LIMITS, 1)


@pytest.mark.parametrize(
    ("weights", "error", "parts"),
    [
        (1.0, BadType, ["topk_weights is a float on rank 1"]),
        (torch.zeros(3, 2).long(), BadType, ["topk_weights has dtype torch.int64"]),
        (torch.zeros(3), BadValue, ["topk_weights has shape [3]"]),
        (torch.zeros(2, 3), BadValue, ["topk_weights has shape [2, 3] on rank 1", "[3, 2]"]),
    ],
)
def test_combine_checks_weights(weights: Any, error: type[MoeA2AError], parts: list[str]) -> None:
    """topk_weights has to have the shape of the ids that were dispatched."""
    with pytest.raises(error) as caught:
        reference.check_combine_weights(weights, 3, 2, 1)
    for part in ["moe_a2a.combine: ", "rank 1", *parts]:
        assert part in str(caught.value)
    for good in (None, torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(2, 3).t()):
        reference.check_combine_weights(good, 3, 2, 1)
