"""Small kernels with one fault each, and clean ones: what the lint must find, and what it must let pass.

Also a file as others would write one: ``python -m moe_a2a.ascend_lint tests/ascend/seeds.py``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

R8 = tl.constexpr(8)  # int32 of a record
LIMIT = tl.constexpr(1000000)


@triton.jit
def signal(flag, code):
    """Payload before, record after."""
    tl.debug_barrier()
    tl.store(flag + tl.arange(0, R8), tl.zeros((R8,), tl.int32) + code)


@triton.jit
def wait(flag, code):
    """Polls a record until all of it is the code, or the bound is reached; returns what it saw least."""
    i = tl.arange(0, R8)
    record = tl.load(flag + i, volatile=True)
    least, most = tl.min(record, 0), tl.max(record, 0)
    polls = 0
    while ((least != code) | (most != code)) & (polls < LIMIT):
        record = tl.load(flag + i, volatile=True)
        least, most = tl.min(record, 0), tl.max(record, 0)
        polls += 1
    tl.debug_barrier()
    return least


@triton.jit
def copy(source, target, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(target + i, tl.load(source + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def product(a, b, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    return at, tl.dot(tl.load(a + at), tl.load(b + at))


# Clean


@triton.jit
def send_and_wait(x, windows, out, code, me, peer, n, B: tl.constexpr):
    window = tl.load(windows + peer)
    copy(x, (window + 512).to(tl.pointer_type(tl.bfloat16)), n, B)
    signal((window + 64).to(tl.pointer_type(tl.int32)), code)
    mine = tl.load(windows + me)
    wait((mine + 64).to(tl.pointer_type(tl.int32)), code)
    copy((mine + 512).to(tl.pointer_type(tl.bfloat16)), out, n, B)


@triton.jit
def rows_to_peers(x, index, windows, code, n, peers, H: tl.constexpr):
    c = tl.arange(0, H)
    for r in range(tl.program_id(0), peers, tl.num_programs(0)):
        window = tl.load(windows + r)
        for t in range(n):
            d = tl.load(index + r * n + t)
            if d >= 0:
                row = (window + 4096 + d.to(tl.int64) * (H * 2)).to(tl.pointer_type(tl.bfloat16))
                tl.store(row + c, tl.load(x + t * H + c))
        signal(window.to(tl.pointer_type(tl.int32)), code)


@triton.jit
def count_after_payload(x, y, counter, flags, n, B: tl.constexpr):
    copy(x, y, n, B)
    tl.debug_barrier()
    tl.atomic_add(counter, 1)
    seen = wait(flags, n)
    tl.store(counter + 1, seen)


@triton.jit
def count_masked(index, counts, n, B: tl.constexpr):
    i = tl.arange(0, B)
    e = tl.load(index + i, mask=i < n, other=0)
    tl.atomic_add(counts + e, tl.where(i < n, 1, 0))


@triton.jit
def multiply(a, b, y, n, B: tl.constexpr):
    for q in range(tl.program_id(0), n, tl.num_programs(0)):
        at, c = product(a + q * B * B, b, B)
        tl.store(y + q * B * B + at, (c * tl.sigmoid(c)).to(tl.bfloat16))


@triton.jit
def whole_mask(x, y, B: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < N, other=0.0), mask=i < N)


# One fault each


@triton.jit
def forgets_what_it_polled(flag, x, y, code, n, B: tl.constexpr):
    v = tl.load(flag, volatile=True)
    while v != code:
        v = tl.load(flag, volatile=True)
    copy(x, y, n, B)


@triton.jit
def exchanges(x, y, flag, code, n, B: tl.constexpr):
    copy(x, y, n, B)
    tl.debug_barrier()
    tl.atomic_xchg(flag, code)


@triton.jit
def compares_and_swaps(flag, out, code):
    tl.store(out, tl.atomic_cas(flag, 0, code))


@triton.jit
def polls_then_multiplies(a, b, y, flag, code, B: tl.constexpr):
    wait(flag, code)
    at, c = product(a, b, B)
    tl.store(y + at, c.to(tl.bfloat16))


@triton.jit
def multiplies_then_signals(a, b, y, flags, code, B: tl.constexpr):
    at, c = product(a, b, B)
    tl.store(y + at, c.to(tl.bfloat16))
    tl.debug_barrier()
    tl.store(
        flags + tl.arange(0, 16), tl.zeros((16,), tl.int32) + code
    )  # two records, one for each vector core


@triton.jit
def signals_then_multiplies(a, b, y, flag, code, B: tl.constexpr):
    signal(flag, code)
    at, c = product(a, b, B)
    tl.store(y + at, c.to(tl.bfloat16))


@triton.jit
def no_barrier(x, y, flag, code, n, B: tl.constexpr):
    copy(x, y, n, B)
    tl.store(flag + tl.arange(0, R8), tl.zeros((R8,), tl.int32) + code)


@triton.jit
def barrier_on_one_path(x, y, flag, code, n, B: tl.constexpr):
    copy(x, y, n, B)
    if n > 7:
        tl.debug_barrier()
    tl.store(flag + tl.arange(0, R8), tl.zeros((R8,), tl.int32) + code)


@triton.jit
def barrier_of_the_round_before(x, y, flag, code, n, B: tl.constexpr):
    for q in range(n):
        tl.debug_barrier()
        copy(x + q * B, y + q * B, B, B)
        tl.store(flag + q * R8 + tl.arange(0, R8), tl.zeros((R8,), tl.int32) + code)


@triton.jit
def counts_before_payload_is_out(x, y, counter, n, B: tl.constexpr):
    copy(x, y, n, B)
    tl.atomic_add(counter, 1)


@triton.jit
def polls_a_scalar(flag, out, code):
    v = tl.load(flag, volatile=True)
    while v != code:
        v = tl.load(flag, volatile=True)
    tl.store(out, v)


@triton.jit
def tile_too_large(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def masked_scalar_atomic(count, n):
    tl.atomic_add(count, 1, mask=n > 3)


@triton.jit
def masked_slots(index, counts, slots, n, B: tl.constexpr):
    i = tl.arange(0, B)
    e = tl.load(index + i, mask=i < n, other=0)
    tl.store(slots + i, tl.atomic_add(counts + e, 1, mask=i < n), mask=i < n)


@triton.jit
def masks_by_data(x, window, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(window + i, v, mask=v > 3)


@triton.jit
def not_volatile(flag, out, code):
    i = tl.arange(0, R8)
    v = tl.max(tl.load(flag + i), 0)
    while v != code:
        v = tl.max(tl.load(flag + i), 0)
    tl.store(out, v)


@triton.jit
def offset_after_the_cast(windows, code):
    tl.store(tl.load(windows).to(tl.pointer_type(tl.int32)) + 1, code)


BF, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
MOVE = {"x": BF, "y": BF, "flag": I32, "code": "i32", "n": "i32"}
DOT = {"a": BF, "b": BF, "y": BF, "flag": I32, "code": "i32"}
POLL = {"flag": I32, "out": I32, "code": "i32"}
SEND = {"x": BF, "windows": I64, "out": BF, "code": "i32", "me": "i32", "peer": "i32", "n": "i32"}
ROWS = {"x": BF, "index": I32, "windows": I64, "code": "i32", "n": "i32", "peers": "i32"}


def seed(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any] | None = None, **said: Any
) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "signature": signature,
        "constants": constants or {},
        "cross_card": True,
        **said,
    }


CLEAN = [
    seed(send_and_wait, SEND, {"B": 1024}, spins=1, signals=1),
    seed(rows_to_peers, ROWS, {"H": 256}, signals=1),
    seed(
        count_after_payload,
        {"x": BF, "y": BF, "counter": I32, "flags": I32, "n": "i32"},
        {"B": 1024},
        spins=1,
    ),
    seed(count_masked, {"index": I32, "counts": I32, "n": "i32"}, {"B": 128}),
    seed(multiply, {"a": BF, "b": BF, "y": BF, "n": "i32"}, {"B": 32}),
    seed(whole_mask, {"x": BF, "y": BF}, {"B": 64, "N": 64}),
    seed(whole_mask, {"x": BF, "y": BF}, {"B": 64, "N": 48}, name="part_mask"),
    seed(compares_and_swaps, POLL, cross_card=False, name="lock_of_one_card"),
]

# The rule that must speak, and no other; by target where they differ ("910" both of that family), "" where nothing is wrong.
FAULTY: list[tuple[dict[str, Any], str | dict[str, str]]] = [
    (seed(forgets_what_it_polled, MOVE, {"B": 1024}, spins=1), "vanished-loop"),
    (seed(exchanges, MOVE, {"B": 1024}, cross_card=False), {"910": "lost-atomic", "950": ""}),
    (
        seed(exchanges, MOVE, {"B": 1024}, name="exchanges_across"),
        {"910": "lost-atomic", "950": "launch-lock"},
    ),
    (seed(compares_and_swaps, POLL), "launch-lock"),
    (seed(polls_then_multiplies, DOT, {"B": 32}, spins=1), "poll-in-mix"),
    (
        seed(multiplies_then_signals, {**DOT, "flags": I32}, {"B": 32}, signals=1),
        {"910": "unordered-flag", "950": "missing-barrier"},
    ),
    (seed(signals_then_multiplies, DOT, {"B": 32}, signals=1), {"910": "split-record", "950": ""}),
    (seed(no_barrier, MOVE, {"B": 1024}, signals=1), "missing-barrier"),
    (seed(barrier_on_one_path, MOVE, {"B": 1024}, signals=1), "missing-barrier"),
    (seed(barrier_of_the_round_before, MOVE, {"B": 1024}, signals=1), "missing-barrier"),
    (
        seed(counts_before_payload_is_out, {"x": BF, "y": BF, "counter": I32, "n": "i32"}, {"B": 1024}),
        "missing-barrier",
    ),
    (seed(polls_a_scalar, POLL, spins=1), "cached-poll"),
    (seed(tile_too_large, {"x": F32, "y": F32}, {"B": 65536}), "ub-overflow"),
    (seed(masked_scalar_atomic, {"count": I32, "n": "i32"}), "dropped-mask"),
    (
        seed(
            masked_slots,
            {"index": I32, "counts": I32, "slots": I32, "n": "i32"},
            {"B": 128},
            cross_card=False,
        ),
        "dropped-mask",
    ),
    (seed(masks_by_data, {"x": I32, "window": I32}, {"B": 128}), "rewritten-mask"),
    (seed(not_volatile, POLL, spins=1), "no-volatile"),
    (seed(send_and_wait, SEND, {"B": 1024}, spins=2, signals=1, name="declares_a_wait_more"), "spin-count"),
    (seed(send_and_wait, SEND, {"B": 1024}, spins=0, signals=1, name="declares_no_wait"), "spin-count"),
    (seed(send_and_wait, SEND, {"B": 1024}, spins=1, signals=2, name="declares_a_flag_more"), "signal-count"),
    (seed(offset_after_the_cast, {"windows": I64, "code": "i32"}), "not-lowered"),
]

for _variant, _rule in FAULTY:
    _variant.setdefault("name", _variant["kernel"].__name__)

VARIANTS = CLEAN + [variant for variant, _ in FAULTY]
