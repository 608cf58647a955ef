"""Calls that end in odd ways: by signals, other threads, forks, and tensors that aren't what they were."""

from __future__ import annotations

import pytest
from pool import RankPool
from rank_bodies import ends


@pytest.mark.parametrize("also", ["", "dispatch"])
def test_a_signal_handler_may_close_the_group_of_the_call_it_interrupts(pool: RankPool, also: str) -> None:
    mine, peer = pool.run(2, ends.handler_closes, also)
    assert mine["raised"] == "GroupClosed" and mine["seconds"] < ends.QUICK and mine["stats"] == 2
    if also:
        assert mine["nested"] == "GroupBusy"
    assert "rank 0" in peer["peer"]


def test_an_interrupt_is_not_lost_when_the_peer_comes_meanwhile(pool: RankPool) -> None:
    assert pool.run(2, ends.interrupt_is_not_lost)[0] == "wanted"


def test_close_ends_a_call_that_waits_in_another_thread(pool: RankPool) -> None:
    took, raised, epoch = pool.run(2, ends.closed_by_another_thread)[0]
    assert took < ends.QUICK and raised == "GroupClosed" and epoch == 2


def test_a_fork_in_the_middle_of_a_call(pool: RankPool) -> None:
    assert pool.run(2, ends.forked_in_a_call) == [0, 0]


def test_close_races_with_window_tensors(pool: RankPool) -> None:
    pool.run(2, ends.close_races_with_empty)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_of_window_tensors(pool: RankPool, ranks: int) -> None:
    pool.run(ranks, ends.one_row_views)


@pytest.mark.parametrize("part", ["tokens", "offset"])
def test_a_handle_that_was_written_to_is_an_error(pool: RankPool, part: str) -> None:
    assert "was written to" in pool.run(1, ends.tampered, part)[0]


@pytest.mark.parametrize("part", ["row", "expert", "copies", "matrix of zeros", "matrix too large"])
def test_combine_takes_the_routing_from_the_group_not_from_the_tensor(pool: RankPool, part: str) -> None:
    assert pool.run(2, ends.tampered, part) == ["combined", "combined"]


@pytest.mark.parametrize("kind", ["subclass", "None", "meta"])
def test_peers_hear_of_a_bad_x_of_any_kind(pool: RankPool, kind: str) -> None:
    (peer, took), (mine, _) = pool.run(2, ends.bad_x_of_any_kind_is_told, kind)
    assert mine in ("BadType", "BadValue") and peer == "PeerAborted" and took < ends.QUICK


def test_bad_weights_cost_only_the_rank_that_gave_them(pool: RankPool) -> None:
    (peer, took), (mine, _) = pool.run(2, ends.bad_weights_under_another_device)
    assert mine == "BadType" and peer == "ok" and took < ends.QUICK


def test_creation_that_is_interrupted_leaves_nothing(pool: RankPool) -> None:
    assert pool.run(1, ends.interrupted_creation) == [(0, 0)]


def test_groups_are_not_copied(pool: RankPool) -> None:
    pool.run(1, ends.groups_are_not_copied)


@pytest.mark.parametrize("kind", ["list", "sparse", "meta", "quantised", "None", "bool", "subclass"])
def test_peers_hear_of_a_bad_y_of_any_kind(pool: RankPool, kind: str) -> None:
    (peer, took), (mine, _) = pool.run(2, ends.bad_y_of_any_kind_is_told, kind)
    assert mine in ("BadType", "BadValue") and peer == "PeerAborted" and took < ends.QUICK


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 4])
def test_descriptors_run_out_on_one_rank(pool: RankPool, spare: int) -> None:
    first, second = pool.run(2, ends.descriptors_run_out, spare)
    assert first == second
    assert first in ("cpu-shm", "collective", "TransportUnavailable", "OutOfMemory")
