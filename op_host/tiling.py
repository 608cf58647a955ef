"""How work is cut and how a rank waits, per target. Tables that a person can read; the numbers' sources are in
``docs/measurements.md``. First the CPU's, then the one of targets that run Triton kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

NEVER = 2**62  # bytes that no call has

PROTOCOLS = ("auto", "push", "pull")


@dataclass(frozen=True)
class Tiling:
    """What the CPU kernels are told. The field order is what :meth:`params` hands to them."""

    pauses: int  # polls with a pause between them before a waiting rank yields its core
    yields: int  # polls with a yield between them before it sleeps
    sleep_ns: int  # then it polls this far apart
    streaming_bytes: int  # what is at least this size is written past the cache
    # In a group that may push, a source pushes when fewer bytes than `below` leave it, or at least `from`; an owner in combine
    # does the same.
    dispatch_push_below: int = 0
    dispatch_push_from: int = NEVER
    combine_push_below: int = 0
    combine_push_from: int = NEVER
    flag_rows: int = 0  # pushed rows of an expert that share a flag, in fused calls too; 0: all of them
    mix: int = 0  # for tests: not 0, each call pushes or pulls by chance, with this seed

    def params(self) -> list[int]:
        return [getattr(self, field.name) for field in fields(self)]


# A rank that has a core to itself may spin for the few microseconds a peer needs to answer. With more ranks than cores the
# peer needs the core we would spin on.
ENOUGH_CORES = Tiling(pauses=400, yields=2000, sleep_ns=50_000, streaming_bytes=12 << 20)
TOO_FEW_CORES = Tiling(pauses=0, yields=4000, sleep_ns=50_000, streaming_bytes=12 << 20)


def cpu_tiling(ranks_on_host: int, cores: int | None = None, protocol: str = "auto") -> Tiling:
    """The tiling for a CPU rank that shares its host's cores with ``ranks_on_host - 1`` others.

    Args:
        cores: defaults to the cores this process may run on.
        protocol: one of PROTOCOLS.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0))
    tiling = ENOUGH_CORES if ranks_on_host <= cores else TOO_FEW_CORES
    if protocol == "push":
        return replace(tiling, dispatch_push_from=0, combine_push_from=0)
    return tiling


def may_push(protocol: str) -> bool:
    """Whether a group of this protocol needs the regions for pushing."""
    tiling = cpu_tiling(1, 1, protocol)
    thresholds = (tiling.dispatch_push_from, tiling.combine_push_from)
    return tiling.dispatch_push_below > 0 or tiling.combine_push_below > 0 or min(thresholds) < NEVER


# ------------------------------------------------------------------------------------------------------------------ Triton


@dataclass(frozen=True)
class Target:
    """The memories of a core that tiles must fit in, in bytes; a line of the table.

    Attributes:
        backend, arch, warp: as triton's GPUTarget has them.
        warps: of a program. 0: a program is a core.
        vector: what one program may hold of rows that it copies, quantises or sums: the unified buffer, or 64 registers of
            each thread.
        operands: of a product: L0A and L0B, this much each; or shared memory, for all of them together.
        stages: how many tiles of an operand are under way at once.
        sums: of a product's float32 results: L0C, or registers.
        least_m: rows that the matrix unit works on at least.
    """

    backend: str
    arch: str | int
    warp: int
    warps: int
    vector: int
    operands: int
    stages: int
    sums: int
    least_m: int

    @property
    def ascend(self) -> bool:
        return self.backend == "npu"


KB = 1024
# fmt: off
TARGETS: dict[str, Target] = {
    #                 backend arch              warp warps vector           operands stages sums     least_m
    "910B":   Target("npu",  "Ascend910B1",      0,   0,  192 * KB,          64 * KB, 2,    128 * KB, 16),
    "910_93": Target("npu",  "Ascend910_9391",   0,   0,  192 * KB,          64 * KB, 2,    128 * KB, 16),
    "950":    Target("npu",  "Ascend950PR_9589", 0,   0,  248 * KB,          64 * KB, 2,    256 * KB, 16),
    "sm_90":  Target("cuda", 90,                32,   8,  8 * 32 * 64 * 4,  227 * KB, 3,     64 * KB, 64),
    # Twice as many sums spill registers.
    "gfx942": Target("hip",  "gfx942",          64,   8,  8 * 64 * 64 * 4,   64 * KB, 2,     16 * KB, 32),
}
# fmt: on

Phase = Literal["copy", "quantise", "sum"]
MOST_ROWS = 128  # of a tile of a product, and of what one program moves between two barriers
MOST_COLUMNS = 128  # of a tile of a product, and of its operands; wider ones leave no room for a deep k
LEAST_COLUMNS = (
    128  # rather fewer rows than narrower ones; sm_90 spilled registers at 128 rows and 64 columns
)


def live_bytes(target: Target, phase: Phase, itemsize: int) -> int:
    """Bytes that a program holds for each element of its tile.

    ========  ===================================================  ==============================
    phase     GPU, counted                                         Ascend, as the compiler lays it out
    ========  ===================================================  ==============================
    copy      a tile on its way in, one on its way out             twice that where rows are gathered
    quantise  the same in, widened, scaled, rounded; bytes out     measured: masks and divisions take most
    sum       a row's tile in, one being summed, widened, times    twelve wide tiles, masks included
              its weight, the sum and the next; the result out
    ========  ===================================================  ==============================

    >>> [live_bytes(TARGETS["sm_90"], phase, 2) for phase in ("copy", "quantise", "sum")]
    [4, 18, 22]
    """
    wide = max(4, itemsize)
    if target.ascend:
        return {"copy": 4 * itemsize, "quantise": 256, "sum": 12 * wide}[phase]
    return {"copy": 2 * itemsize, "quantise": 2 * itemsize + 3 * 4 + 2, "sum": 3 * itemsize + 4 * wide}[phase]


def row_tile(target: Target, phase: Phase, *, hidden: int, itemsize: int, rows: int) -> tuple[int, int]:
    """(rows, columns) of a tile, powers of two: as wide as a row if that fits, then as many rows as fit.

    Args:
        hidden: H. itemsize: bytes of an element of x or y.
        rows: how many a program has to move or sum, about; more in a tile would leave other programs idle.

    >>> row_tile(TARGETS["910B"], "copy", hidden=7168, itemsize=2, rows=100)  # 192 KB / 8 bytes = 3 rows of 8192 columns
    (2, 8192)
    >>> row_tile(TARGETS["910B"], "sum", hidden=7168, itemsize=2, rows=100)  # 192 KB / 48 bytes = 2 rows of 2048
    (2, 2048)
    >>> row_tile(TARGETS["910B"], "copy", hidden=64, itemsize=2, rows=100)
    (128, 64)
    """
    least = 2 if target.ascend else 1  # a tile of one row that is gathered doesn't lower
    room = target.vector // live_bytes(target, phase, itemsize)
    columns = min(_at_least(hidden), _at_most(room // least))
    return max(least, min(_at_least(rows), _at_most(room // columns), MOST_ROWS)), columns


def product_tile(
    target: Target, *, hidden: int, intermediate: int, itemsize: int, rows: int
) -> tuple[int, int, int]:
    """(m, n, k) of an expert's gate and up products, powers of two: m by the rows there are, n by the room for sums, k by
    that for operands.

    Args:
        hidden, intermediate: H and I. itemsize: bytes of an element of x and the weights.
        rows: of an expert, about.

    >>> product_tile(TARGETS["sm_90"], hidden=7168, intermediate=2048, itemsize=2, rows=16)
    (64, 128, 64)
    >>> product_tile(TARGETS["910B"], hidden=7168, intermediate=2048, itemsize=2, rows=16)
    (16, 128, 128)
    """
    sums = target.sums // (2 * 4)  # float32, of gate and of up
    m = max(target.least_m, min(_at_least(rows), _at_most(sums // LEAST_COLUMNS), MOST_ROWS))
    n = max(LEAST_SIDE, min(_at_least(intermediate), _at_most(sums // m), MOST_COLUMNS))
    if target.ascend:
        n = min(n, _at_most(target.vector // (ACTIVATION_BYTES * m)))
    room = _at_most(target.operands // product_operands(target, m, n, 1, itemsize))
    return m, n, max(LEAST_SIDE, min(_at_least(hidden), room, MOST_COLUMNS))


LEAST_SIDE = 16  # what tl.dot takes
ACTIVATION_BYTES = 10  # of unified buffer for each element of silu(gate) * up, as the compiler lays it out


def product_operands(target: Target, m: int, n: int, k: int, itemsize: int) -> int:
    """Bytes of ``target.operands`` that an (m, n, k) tile takes: on Ascend each side has memory of its own and gate and up take
    turns; on a GPU the rows and both weights' tiles stand side by side."""
    return target.stages * itemsize * k * (max(m, n) if target.ascend else m + 2 * n)


def _at_most(value: int) -> int:
    """The largest power of two that isn't above ``value`` (1 for less)."""
    return 1 << max(0, value.bit_length() - 1)


def _at_least(value: int) -> int:
    """The smallest power of two that isn't below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def target_of(device: torch.device) -> str:
    """The line of the table for a device. Raises ValueError, which names the device's kind, where there is none."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            name = properties.gcnArchName.split(":")[0]
        else:
            name = f"sm_{properties.major}{properties.minor}"
    elif device.type == "npu":
        chip = _npu().get_device_name(device)
        prefixes = {"Ascend910B": "910B", "Ascend910_93": "910_93", "Ascend950": "950"}
        name = next((line for prefix, line in prefixes.items() if chip.startswith(prefix)), chip)
    else:
        name = device.type
    if name not in TARGETS:
        raise ValueError(
            f"op_host/tiling.py has no line for {name} (device {device}); it has {', '.join(TARGETS)}: add one, with the "
            "bytes of its memories"
        )
    return name


def device_cores(device: torch.device) -> int:
    """Programs of a kernel that run at the same time: as many may wait for each other in one launch, not one more.

    On Ascend the vector cores that the current stream may use, which can be fewer than the chip has. On a CPU 1: the
    interpreter runs one program after another.
    """
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "npu":
        npu = _npu()
        return int(npu.get_stream_limit(npu.current_stream(device))["vector_core_num"])
    return 1


def _npu() -> Any:
    """torch.npu, which importing torch_npu adds."""
    import torch

    return torch.npu  # type: ignore[attr-defined]
