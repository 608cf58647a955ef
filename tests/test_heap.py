"""Symmetric memory: whose windows they are, how peers see them, and their end.

Torch symmetric memory has no CPU backend (torch 2.13: "does not support device type cpu"), so what is tested of it here
is everything but torch's own part: a stand-in with torch's calls hands out shared memory.
"""

from __future__ import annotations

import pytest
import torch
from lanes import slow
from pool import RankPool
from rank_bodies import heap

from moe_a2a.op_host.heap import TorchSymmetricHeap, symmetric_memory_missing
from moe_a2a.op_host.layout import window_layout
from moe_a2a.op_host.meeting import Meeting

PAGE = 2 << 20  # a window's size is a multiple of it


@pytest.mark.parametrize(("ranks", "delay"), [(1, 0.0), (2, 0.2), (3, 0.05)])
def test_shared_memory_from_making_to_end(pool: RankPool, ranks: int, delay: float) -> None:
    pool.run(ranks, heap.shared_memory, delay)


def test_a_forgotten_heap_gives_everything_back(pool: RankPool) -> None:
    pool.run(2, heap.dropped)


@pytest.mark.parametrize("see_processes", [True, False])
def test_torch_symmetric_memory_from_making_to_end(pool: RankPool, see_processes: bool) -> None:
    pool.run(3, heap.by_torch, see_processes)


@pytest.mark.parametrize(
    ("fault", "kind", "sentences"),
    [
        ("backend", "HeapUnavailable", ("rank 0", "rank 1", "no symmetric memory for device cpu")),
        ("memory", "OutOfMemory", (f"need {PAGE} bytes on each device", "rank 1", "size_hint")),
        ("unmapped", "HeapUnavailable", ("some peer's memory isn't mapped here",)),
        ("offset", "HeapUnavailable", ("rank 0", "this rank's block is at")),
        ("swapped", "HeapUnavailable", ("rank 0", "the block of rank 1", "nonce differs")),
    ],
)
def test_torch_symmetric_memory_that_cannot_be_had(
    pool: RankPool, fault: str, kind: str, sentences: tuple[str, ...]
) -> None:
    first, *others = pool.run(2, heap.by_torch_fails, fault)
    assert others == [first], "every rank says the same"
    assert first.startswith(kind)
    for sentence in sentences:
        assert sentence in first


@pytest.mark.parametrize("kernels", ["auto", slow("triton")])
def test_a_group_on_devices(interpreted: RankPool, kernels: str) -> None:
    for described in interpreted.run(2, heap.group_on_devices, kernels):
        assert described.startswith(
            "cuda: asked for; all 2 ranks' memory is mapped on cpu; rows moved by Triton"
        )


def test_cpp_kernels_cannot_move_rows_of_devices(pool: RankPool) -> None:
    for rank, text in enumerate(pool.run(2, heap.cpu_kernels_on_devices)):
        assert f"kernels = 'cpu' on rank {rank}" in text and "expected kernels = 'auto' or 'triton'" in text


def test_no_room_has_the_numbers(pool: RankPool) -> None:
    for text in pool.run(2, heap.no_room):
        assert text.startswith("moe_a2a.EPGroup: the windows need")
        assert str(2 * PAGE) in text and str(2**20) in text


def test_a_rank_alone_needs_no_symmetric_memory() -> None:
    layout = window_layout(world_size=1, num_experts=1, top_k=1, max_tokens=1, row_bytes=4, recv_rows=1)
    alone = TorchSymmetricHeap(Meeting(None, 0, 1), layout, torch.device("cpu"))
    assert alone.addresses == [alone.block(0).data_ptr()] and alone.pidfds == [-1]
    alone.close()
    assert alone.addresses == []


def test_why_there_is_no_symmetric_memory() -> None:
    for device in ("cpu", "cuda"):
        reason = symmetric_memory_missing(torch.device(device))
        if device == "cpu" or torch.version.cuda is None:
            assert f"no symmetric memory for device {device}" in reason
