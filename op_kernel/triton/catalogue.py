"""Every kernel as it is compiled: what `make ascend-check`, `make gpu-check` and the execution on x86 go through.

Sizes: ``small`` R = 2, E = 4, K = 2, H = 64, I = 32; ``large`` R = 8, E = 64, K = 8, H = 7168, I = 2048, as in a large decoder.

>>> [variant.name for variant in variants("ascend") if variant.spins and variant.uses_dot]
[]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from .begin import begin, clear
from .combine import combine, fetch
from .experts import experts
from .fused import fused
from .give import give
from .partner import finish, gate
from .push import push
from .record import await_records, publish
from .take import pull, take
from .wave import clear_flags, hear, say
from .words import DO_AWAIT, DO_COMBINE, DO_EXPERTS, DO_PUBLISH, DO_PUSH, DO_RETURN

TARGETS = ("ascend", "gpu", "x86")

ALL = (
    DO_PUBLISH.value | DO_PUSH.value | DO_AWAIT.value | DO_EXPERTS.value | DO_RETURN.value | DO_COMBINE.value
)
SEND = DO_PUBLISH.value | DO_PUSH.value | DO_AWAIT.value
RETURN = DO_RETURN.value | DO_COMBINE.value


@dataclass(frozen=True)
class Variant:
    """A kernel with its arguments' types and its constants.

    Attributes:
        name: as tables print it.
        kernel: the ``@triton.jit`` function.
        signature: argument -> "*bf16", "i64", "i32", ... in argument order, constexprs left out.
        constants: constexpr argument -> value.
        targets: of {"ascend", "gpu", "x86"}, where it is meant to run.
        cross_card: it writes to or polls other ranks' memory.
        spins: loops that poll, in the kernel as compiled with these constants.
        signals: stores of a code (or of zeros in its place) to whole blocks; a payload before one wants a barrier between.
        uses_dot: it uses the matrix unit.
        warps: warps of a program on a GPU.
        arch: "sm_90" or "gfx942" where the tiles are only one GPU's, "" otherwise.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    targets: frozenset[str]
    cross_card: bool
    spins: int
    signals: int
    uses_dot: bool
    warps: int = 4
    arch: str = ""


@dataclass(frozen=True)
class Size:
    """A group's numbers and the tiles that go with them: BR rows and BH columns that move, BT tokens that are summed."""

    name: str
    R: int
    E: int
    K: int
    H: int
    I: int
    BR: int
    BH: int
    BT: int
    SUM_BH: int


SIZES = (
    Size("small", R=2, E=4, K=2, H=64, I=32, BR=8, BH=64, BT=8, SUM_BH=64),
    Size("large", R=8, E=64, K=8, H=7168, I=2048, BR=2, BH=8192, BT=2, SUM_BH=2048),
)

_TYPES = {
    "windows": "*i64",
    "layout": "*i64",
    "call": "*i64",
    "sources": "*i64",
    "x": "*bf16",
    "y": "*bf16",
    "out": "*bf16",
    "gate_up": "*bf16",
    "down": "*bf16",
    "act": "*bf16",
    "weights": "*fp32",
    "scales": "*fp32",
    "x_stride": "i64",
    "stride": "i64",
    "scales_at": "i64",
    "weight_at": "i64",
}
_SCALARS = frozenset(
    [
        "me",
        "program0",
        "programs",
        "polls",
        "entries",
        "T",
        "rows",
        "kind",
        "mark",
        "first",
        "last",
        "first_expert",
        "align",
        "matrix_stride",
    ]
)


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``value`` and ``least``.

    >>> power_of_two(5), power_of_two(1, 8)
    (8, 8)
    """
    return max(least, 1 << max(0, value - 1).bit_length())


def accumulator(itemsize: int) -> Any:
    """The type that rows of so many bytes an element are summed in: float64 for float64, else float32."""
    return tl.float64 if itemsize == 8 else tl.float32


def signature_of(kernel: Any, constants: dict[str, Any], **types: str) -> dict[str, str]:
    """Types of a kernel's arguments: those of the catalogue (bfloat16 rows, float32 weights) but for ``types``."""
    names = [name for name in kernel.arg_names if name not in constants]
    known = {**_TYPES, **types}
    return {name: known.get(name, "i32" if name in _SCALARS else "*i32") for name in names}


_TILES = {  # (target or arch, by vectors): BM rows, BN columns of a result, BK of what is summed
    ("ascend", False): (32, 128, 128),
    ("ascend", True): (16, 64, 256),
    ("sm_90", False): (64, 64, 64),
    ("gfx942", False): (32, 64, 64),
    ("", True): (16, 64, 64),  # GPUs
    ("x86", False): (16, 32, 32),
    ("x86", True): (16, 32, 32),
}


def tiles(target: str, vector: bool = False, arch: str = "") -> dict[str, Any]:
    """Tile sizes of the experts, and the type of the product, for compiling where nothing can be asked of a device."""
    BM, BN, BK = _TILES[arch if target == "gpu" else target, vector]
    dot = tl.float32 if target == "x86" else tl.bfloat16
    return {"BM": BM, "BN": BN, "BK": BK, "ACC": tl.float32, "DOT": dot, "ROUND": False}


def _cut(size: Size) -> dict[str, Any]:
    return {
        "R": size.R,
        "RP": power_of_two(size.R),
        "E": size.E,
        "EP": power_of_two(size.E, 8),
        "ELP": power_of_two(-(-size.E // size.R), 8),
        "K": size.K,
        "H": size.H,
        "I": size.I,
    }


def _phases(target: str, size: Size) -> Iterator[Variant]:
    """The kernels of one phase each."""
    gpu = target == "gpu"
    moved = {"H": size.H, "BR": size.BR, "BH": size.BH}
    words = {"R": size.R, "WORDS": size.E, "WORDS_P": power_of_two(size.E, 8), "SYS": gpu}
    one_row = {"SCALES": 0, "SCALES_P": 1, "WEIGHTED": True, "FUSED": False}
    summed = {
        "R": size.R,
        "K": size.K,
        "H": size.H,
        "WEIGHTED": True,
        "FETCHED": False,
        "ACC": tl.float32,
        "ROUND": False,
        "BT": size.BT,
        "BH": size.SUM_BH,
        "SYS": gpu,
    }

    def variant(
        name: str, kernel: Any, constants: dict[str, Any], spins: int = 0, signals: int = 0, **types: str
    ) -> Variant:
        return Variant(
            f"{name}-{size.name}",
            kernel,
            signature_of(kernel, constants, **types),
            constants,
            targets=frozenset(TARGETS),
            cross_card=kernel not in (begin, clear, clear_flags, gate, finish),
            spins=spins,
            signals=signals,
            uses_dot=False,
            warps=8 if size.BH * size.BR > 4096 else 4,
        )

    if size is SIZES[0]:
        yield variant("begin", begin, {})
        yield variant("clear", clear, {"R": size.R, "BLOCK": 1024}, signals=3)
        yield variant("clear-flags", clear_flags, {}, signals=1)
        yield variant("say", say, {"R": size.R, "SYS": gpu}, signals=2)
        yield variant("hear", hear, {"R": size.R, "SYS": gpu}, spins=2)
        yield variant("gate", gate, {"SYS": gpu}, spins=1)
        yield variant("finish", finish, {"SYS": gpu}, signals=1)
    yield variant("publish", publish, words, signals=1)
    yield variant("await-records", await_records, words, spins=1)
    for name, quant, weighted, fused_rows in (
        ("push", 0, True, False),
        ("push-fused", 0, False, True),
        ("push-int8", 1, True, False),
        ("push-fp8", 2, True, False),
    ):
        kind = {"FUSED": fused_rows, "QUANT": quant, "WEIGHTED": weighted, "GPU": gpu, "SYS": gpu}
        # A value that is quantised takes many times its bytes on the way.
        cut = {**moved, "BH": min(size.BH, 256)} if quant == 1 else moved
        yield variant(name, push, {**cut, **kind}, signals=1)
    yield variant("take", take, {**moved, **one_row, "SYS": gpu}, spins=1)
    for name, scales in (("int8", 1), ("fp8", -(-size.H // 128))):
        scaled = {**one_row, "SCALES": scales, "SCALES_P": power_of_two(scales)}
        yield variant(f"take-{name}", take, {**moved, **scaled, "SYS": gpu}, spins=1, out="*i8")
    yield variant("pull", pull, {**moved, "SCALES": 0, "SCALES_P": 1, "WEIGHTED": True})
    yield variant("give", give, {**moved, "R": size.R, "SYS": gpu}, spins=1, signals=1)
    yield variant("fetch", fetch, {**moved, "R": size.R, "SYS": gpu}, spins=1)
    yield variant("combine", combine, summed, spins=1)
    yield variant("pairs", combine, {**summed, "WEIGHTED": False, "K": 1}, spins=1)


def _experts(target: str, size: Size) -> Iterator[Variant]:
    """The fused kernel's variants and the experts alone."""
    gpu = target == "gpu"
    cut = _cut(size)
    shape = {name: cut[name] for name in ("R", "RP", "ELP", "H", "I")}
    archs = ("sm_90", "gfx942") if gpu else ("",)
    for name, in_window in (("experts", False), ("experts-window", True)):
        for arch in archs:
            constants = {
                **shape,
                "PARTS": 1,
                "IN_WINDOW": in_window,
                "VECTOR": False,
                **tiles(target, arch=arch),
            }
            yield Variant(
                f"{name}-{size.name}",
                experts,
                signature_of(experts, constants),
                constants,
                targets=frozenset(TARGETS),
                cross_card=False,
                spins=0,
                signals=0,
                uses_dot=True,
                warps=8,
                arch=arch,
            )
    everywhere, safe = frozenset(TARGETS), frozenset({"gpu", "x86"})
    for name, phases, vector, partner, spins, signals, targets in (
        ("fused", ALL, False, False, 4, 3, safe),
        ("fused-vector", ALL, True, False, 4, 3, everywhere),
        ("fused-send", SEND, True, False, 2, 2, everywhere),
        ("fused-return", RETURN, True, False, 2, 1, everywhere),
        ("fused-partner", ALL & ~DO_EXPERTS.value, True, True, 5, 4, everywhere),
    ):
        for arch in ("",) if vector else archs:
            constants = {
                **cut,
                "PHASES": phases,
                "WEIGHTED": True,
                "REUSED": False,
                "PARTNER": partner,
                "VECTOR": vector,
                "PARTS": 1,
                **tiles(target, vector, arch),
                "BR": size.BR,
                "BT": size.BT,
                "BH": size.SUM_BH,
                "GPU": gpu,
                "SYS": gpu,
            }
            yield Variant(
                f"{name}-{size.name}",
                fused,
                signature_of(fused, constants),
                constants,
                targets=targets,
                cross_card=True,
                spins=spins,
                signals=signals,
                uses_dot=bool(phases & DO_EXPERTS.value) and not vector,
                # With eight, ptxas takes fewer registers than a kernel of small rows needs.
                warps=8 if phases & DO_EXPERTS.value or size.BH * size.BR > 4096 else 4,
                arch=arch,
            )


def variants(target: str) -> list[Variant]:
    """All kernels that are meant for a target, in small and large sizes.

    Args:
        target: "ascend", "gpu" or "x86".

    Raises:
        ValueError: for another target.
    """
    if target not in TARGETS:
        raise ValueError(f"catalogue.variants: target = {target!r}; expected one of {', '.join(TARGETS)}")
    found = [variant for size in SIZES for family in (_phases, _experts) for variant in family(target, size)]
    return [variant for variant in found if target in variant.targets]
