"""The protocol between ranks that are threads of one process (tests/cpu/ranks.cpp): every value bit for bit, under random
delays; no data race and no stray access; and each rule of the protocol, when it is dropped, is missed.
"""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from thread_ranks import ROOT, SOURCES, VARIANTS, Harness, Outcome, Setup, build, variant

from moe_a2a.op_host.layout import Format

FORMATS = list(Format)
PROTOCOLS = ["pull", "push", "mixed"]
FUSING = [Format.COMPACT, Format.PORTABLE]


def rules() -> list[str]:
    """The names of enum Rule in hooks.h."""
    text = (ROOT / "op_kernel/cpu/hooks.h").read_text()
    body = re.search(r"enum class Rule[^{]*{(.*?)};", text, re.DOTALL)
    assert body is not None
    return re.findall(r"^\s*([A-Z_0-9]+),", body[1], re.MULTILINE)


def expect_ok(outcome: Outcome) -> None:
    assert outcome.verdict == "ok", outcome.output


def all_ok(harness: Harness, setups: list[Setup]) -> None:
    """Runs them two at a time: ranks wait more than they compute."""
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(harness.run, setups):
            expect_ok(outcome)


# ------------------------------------------------------------------------------------------------------- correctness


def mixture(record_format: Format, protocol: str, seed: int, **options: object) -> list[Setup]:
    """Groups of every size, with V just above what it must be and with one that never wraps, with and without waves."""
    common = {
        "steps": 4000,
        "seconds": 0.8,
        "timeout": 30,
        "delay": 0.03,
        "seed": seed,
        **ALL_KINDS,
        **options,
    }
    sizes = itertools.cycle([(2, 2), (3, 3), (4, 2), (2, 3), (3, 2), (4, 3)])
    setups = []
    for number, (codes, recv_rows) in enumerate(
        [("few", None), ("few", 5), ("many", None), ("many", 2), ("few", 1)]
    ):
        ranks, slots = next(sizes)
        setups.append(
            Setup(
                ranks=ranks,
                slots=slots,
                format=record_format,
                protocol=protocol,
                codes=2 * slots + 1 + number % 2 if codes == "few" else None,
                recv_rows=recv_rows,
                experts=(1, 7, 4)[(number + seed) % 3],
                flag_rows=(0, 1, 2)[number % 3],
                row_bytes=(48, 500, 8)[(number + seed) % 3],
                streaming=number % 2 == 1,
                options=common,
            )
        )
    return setups


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("record_format", FORMATS, ids=lambda one: one.name.lower())
def test_every_value_is_right(record_format: Format, protocol: str) -> None:
    all_ok(variant("plain"), mixture(record_format, protocol, seed=len(protocol) + record_format))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", VARIANTS)
def test_every_value_is_right_for_long(name: str, seed: int) -> None:
    for record_format, protocol in itertools.product(FORMATS, PROTOCOLS):
        setups = mixture(
            record_format, protocol, 100 + seed, seconds=1.5, delay=(0, 0.03, 0.3)[seed % 3], others=seed % 2
        )
        all_ok(variant(name), setups)


# -------------------------------------------------------------------------------------------------------- sanitizers

SANITIZED = [
    Setup(protocol="pull", codes=5, options={"others": 1, "window": 0.5}),
    Setup(protocol="push", codes=6, flag_rows=2, recv_rows=5),
    Setup(protocol="mixed", format=Format.LINE, codes=6, recv_rows=4, ranks=4),
    Setup(protocol="pull", format=Format.PORTABLE, recv_rows=3, slots=3),
    Setup(protocol="mixed", format=Format.PORTABLE, codes=7, ranks=2, slots=3),
    Setup(protocol="push", format=Format.LINE, codes=5, row_bytes=500),
    Setup(protocol="pull", codes=6, recv_rows=4, options={"fused": 0.8}),
]


@pytest.mark.parametrize("name", ["thread", "address"])
def test_sanitizers_find_nothing(name: str) -> None:
    common = {"steps": 3000, "seconds": 1.5, "timeout": 60, "delay": 0.03, **ALL_KINDS}
    all_ok(variant(name), [setup.but(**{**common, **setup.options}) for setup in SANITIZED])


@pytest.mark.parametrize("name", ["thread", "address"])
def test_ends_under_sanitizers(name: str) -> None:
    push = Setup(ranks=2, protocol="push", options={"scenario": "rebuild new", "timeout": 30})
    all_ok(
        variant(name),
        [
            push,
            *(Setup(ranks=2, options={"scenario": one, "timeout": 30}) for one in ("close", "owner drops")),
        ],
    )


def test_thread_sanitizer_sees_a_fault() -> None:
    """Rows that come after the code are a race even where the values happen to be right."""
    setup = Setup(options={"drop": rules().index("PAYLOAD_BEFORE_CELL_CODE"), "steps": 2000, "timeout": 30})
    outcome = None
    for seed in range(30):  # a run takes a fraction of a second, and may be one in which nobody was early
        outcome = variant("thread").run(setup.but(seed=seed))
        if outcome.verdict == "crash" and "ThreadSanitizer: data race" in outcome.output:
            return
    pytest.fail(f"no race was seen: {outcome}")


@pytest.mark.slow
def test_orders_weaker_than_release_and_acquire_are_races(tmp_path: Path) -> None:
    """x86 orders more than C++ asks for; ThreadSanitizer knows only what C++ says."""
    for folder in ("op_kernel/cpu", "op_host/cpu", "tests/cpu"):
        (tmp_path / folder).mkdir(parents=True)
        for path in (ROOT / folder).iterdir():
            text = path.read_text()
            if path.name == "flag.h":
                assert "memory_order_release" in text and "memory_order_acquire" in text
                text = re.sub("memory_order_(release|acquire)", "memory_order_relaxed", text)
            (tmp_path / folder / path.name).write_text(text)
    relaxed = build(
        ["-DRELAXED", *VARIANTS["thread"]], sources=[tmp_path / path.relative_to(ROOT) for path in SOURCES]
    )
    outcome = Harness(relaxed, variant("thread").environment).run(
        Setup(options={"steps": 2000, "timeout": 30})
    )
    assert "ThreadSanitizer: data race" in outcome.output, outcome.output


# ----------------------------------------------------------------------------------------------------- seeded faults

# What a rank does beside dispatch and combine is left away where it only makes a fault rarer.
PLAIN = {"abort": 0, "small": 0, "tag": 0, "bad": 0, "again": 0}
SUM_LATE = {"focus": "before sum:0.3:2000"}
TAKE_LATE = {"focus": "take rows:0.2:2000"}
GIVE_LATE = {"focus": "before cell:0.2:2000"}
PUSH_LATE = {"focus": "push row:0.2:2000"}
# Rows of one type and size, so that a stale word is no mismatch of types but a wrong value.
SAME = {"one_type": 1}
# Dense rows and nothing beside them.
NOTHING_ELSE = dict.fromkeys(
    ["abort", "small", "tag", "bad", "again", "async", "sparse", "weights", "align", "pad", "window"], 0
)

# Fused calls and little else; ALL_KINDS: fused calls, rounds and pairs among dispatches, in every mixture.
FUSED = {"fused": 1.0, "weights": 0, "pad": 0}
ALL_KINDS = {"fused": 0.35, "round": 0.15, "pairs": 0.2}

# Rule -> setups in which dropping it shows: the first one always runs, the others in the long form.
FAULTS: dict[str, list[Setup]] = {
    "RECORD_SLOTS": [
        Setup(options={"focus": "record read:0.2:2000"}),
        Setup(format=Format.PORTABLE, options={"focus": "record read:0.2:2000"}),
        Setup(format=Format.LINE, options={"focus": "record read:0.2:2000"}),
    ],
    "SLOT_BY_DISPATCH": [
        Setup(options=SUM_LATE),
        Setup(slots=3, options=SUM_LATE),
        Setup(format=Format.LINE, protocol="push", options=SUM_LATE),
    ],
    "ZERO_RECORDS": [Setup(), Setup(format=Format.PORTABLE), Setup(format=Format.LINE)],
    # A rank that waits later has slots whose rows it hasn't taken yet; one that waits at once may push into them.
    "RECORDS_BEFORE_ROWS": [
        Setup(
            protocol="push",
            format=record_format,
            options={"reuse": 0.7, "async": 0.8, "mixed": 1, **TAKE_LATE},
        )
        for record_format in (Format.COMPACT, Format.LINE)
    ],
    "REUSE_HAS_RECORDS": [Setup()],
    "RECORDS_BEFORE_Y": [Setup(options=SUM_LATE), Setup(format=Format.LINE, options=SUM_LATE)],
    "Y_SLOTS": [Setup(options=SUM_LATE), Setup(format=Format.PORTABLE, options=SUM_LATE)],
    "OWN_WORDS_FOR_CELLS": [Setup(), Setup(format=Format.PORTABLE)],
    "ONE_COMBINE": [
        Setup(
            protocol=protocol,
            recv_rows=recv_rows,
            options={"again": 0.5, "again_runs": 1, "give": 0, **SUM_LATE},
        )
        for protocol, recv_rows in (("pull", None), ("push", None), ("pull", 3))
    ],
    "SOURCE_SLOTS": [Setup(ranks=ranks, options={"focus": "before gather:0.3:2000"}) for ranks in (3, 2)],
    # Sparse routing: a code that every call writes anew is never stale.
    "CLEAR_IN_A_NEW_LAP": [
        Setup(codes=5, options={**SAME, **GIVE_LATE}),
        Setup(codes=5, protocol="push", options={**SAME, **PUSH_LATE, "drop_handle": 1}),
        Setup(codes=5, protocol="push", format=Format.LINE, options={**SAME, **PUSH_LATE, "drop_handle": 1}),
        Setup(codes=5, recv_rows=3, options={**SAME, "focus": "give wave:0.2:2000"}),
        Setup(
            codes=5,
            protocol="push",
            recv_rows=3,
            options={**SAME, "drop_handle": 1, "focus": "wave read:0.2:2000"},
        ),
    ],
    # NS divides V: the last use of a slot in a lap has the code of its last use in the next one.
    "CLEAR_TWICE": [
        Setup(
            codes=6,
            protocol=protocol,
            format=record_format,
            options={**SAME, **GIVE_LATE, "bad": 0.4, "drop_handle": 0.4},
        )
        for protocol, record_format in (
            ("pull", Format.COMPACT),
            ("push", Format.COMPACT),
            ("pull", Format.PORTABLE),
        )
    ],
    "CLEAR_BEFORE_RECORD": [
        Setup(
            codes=5,
            protocol=protocol,
            format=record_format,
            recv_rows=rows,
            options={"focus": "lap:0.3:2000", **more},
        )
        for protocol, record_format, rows, more in (
            ("pull", Format.COMPACT, None, {}),
            ("push", Format.COMPACT, None, {"drop_handle": 1}),
            ("push", Format.LINE, None, {"drop_handle": 1}),
            ("pull", Format.COMPACT, 3, {}),
        )
    ],
    "SLOT_FROM_FULL_EPOCH": [Setup(codes=5), Setup(codes=7, slots=3, format=Format.PORTABLE)],
    "CODE_IS_NEVER_ZERO": [
        Setup(codes=5, options={**SAME, **GIVE_LATE}),
        Setup(codes=5, protocol="push", options={**SAME, **PUSH_LATE, "drop_handle": 1}),
        Setup(codes=5, protocol="push", format=Format.LINE, options={**SAME, **PUSH_LATE, "drop_handle": 1}),
    ],
    "CODES_COMPARE_EQUAL": [Setup(codes=5, format=record_format) for record_format in FORMATS],
    "ABORT_TO_ALL": [Setup(), Setup(ranks=4, format=Format.LINE)],
    "ABORT_INSTEAD_OF_RECORD": [Setup(options={"focus": "abort:0.5:2000"})],
    "RECORDS_ARE_READ": [
        Setup(options={"abort": 0.2, "burst": 0.8, "focus": "before records:0.2:2000"}),
        Setup(options={"abort": 0, "async": 1, "mixed": 0, "focus": "before records:0.2:2000"}),
    ],
    "PAYLOAD_BEFORE_RECORD_CODE": [
        Setup(format=record_format, options={"focus": "record code:0.2:2000"})
        for record_format in (Format.COMPACT, Format.PORTABLE)
    ],
    "PAYLOAD_BEFORE_ROW_FLAG": [
        Setup(protocol="push", options={"focus": "row flag:0.2:2000"}),
        Setup(protocol="push", format=Format.PORTABLE, flag_rows=1, options={"focus": "row flag:0.2:2000"}),
    ],
    "PAYLOAD_BEFORE_CELL_CODE": [
        Setup(protocol=protocol, recv_rows=recv_rows, options={"focus": "cell code:0.2:2000"})
        for protocol, recv_rows in (("pull", None), ("push", None), ("pull", 3))
    ],
    "PAYLOAD_BEFORE_LINE_CODE": [
        Setup(protocol="push", format=Format.LINE, options={"focus": "line code:0.1:2000"})
    ],
    # Rows whose last half cache line waits for its other half; a reader on another core that looks without a pause.
    "FENCE_AFTER_STREAMING": [
        Setup(
            ranks=2,
            protocol="push",
            experts=2,
            top_k=1,
            tokens=4,
            row_bytes=528,
            streaming=True,
            spin=True,
            options={**NOTHING_ELSE, **SAME, "steps": 300_000},
        )
    ],
    "WAVE_IS_READ": [
        Setup(protocol="push", recv_rows=4, options=TAKE_LATE),
        Setup(recv_rows=3, options={"focus": "take wave:0.3:2000"}),
        Setup(protocol="push", recv_rows=4, format=Format.LINE, options=TAKE_LATE),
        Setup(recv_rows=3, format=Format.LINE, options={"focus": "take wave:0.3:2000"}),
    ],
    "WAVE_IS_CLEARED": [
        Setup(protocol="push", recv_rows=4, options=PUSH_LATE),
        Setup(protocol="push", recv_rows=4, format=Format.LINE, options=PUSH_LATE),
        Setup(protocol="push", recv_rows=4, format=Format.PORTABLE, flag_rows=1, options=PUSH_LATE),
    ],
    "CLEAR_BEFORE_WAVE_READ": [
        Setup(protocol="push", recv_rows=4, format=record_format, options={"focus": "wave clear:0.2:2000"})
        for record_format in (Format.COMPACT, Format.LINE)
    ],
    "WAVE_MARK_HAS_CODE": [
        Setup(protocol="push", recv_rows=4, options=TAKE_LATE),
        Setup(recv_rows=3, options={"focus": "take wave:0.3:2000,give wave:0.2:2000"}),
        Setup(protocol="push", recv_rows=4, format=Format.LINE, options=TAKE_LATE),
    ],
    "MARK_BEFORE_WAVE_CODE": [
        Setup(protocol="push", recv_rows=4, options={"focus": "wave code:0.2:2000"}),
        Setup(recv_rows=3, options={"focus": "wave code:0.3:2000"}),
        Setup(protocol="push", recv_rows=4, format=Format.LINE, options={"focus": "wave code:0.2:2000"}),
    ],
    "RECORDS_ARE_WHOLE": [
        Setup(
            ranks=2,
            experts=400,  # four lines
            codes=5,
            format=Format.LINE,
            options={"reuse": 0.8, "sparse": 0, "focus": "line payload:0.5:500"},
        )
    ],
    "EXPERT_HAS_ALL_ROWS": [
        Setup(protocol=protocol, format=record_format, options={**FUSED, **PUSH_LATE})
        for protocol, record_format in (
            ("pull", Format.COMPACT),
            ("push", Format.COMPACT),
            ("pull", Format.PORTABLE),
        )
    ],
    "LOST_PEER_IS_MISSING": [
        Setup(
            ranks=3,
            format=record_format,
            options={"scenario": "leave late", "focus": "look for losses:1:4000"},
        )
        for record_format in FORMATS
    ],
}


# The same for what fused calls and rounds do by the rules that dispatches follow.
MORE_FAULTS: dict[str, list[Setup]] = {
    # Rank 0's rows for an owner's first expert need no record to be placed. A third rank still sums what they overwrite.
    "RECORDS_BEFORE_ROWS": [Setup(format=one, options={**FUSED, **SUM_LATE}) for one in FUSING],
    "REUSE_HAS_RECORDS": [
        Setup(format=one, options={"round": 1.0, "fused": 0.3, **SUM_LATE}) for one in FORMATS
    ],
    "RECORDS_BEFORE_Y": [Setup(format=one, options={**FUSED, **SUM_LATE}) for one in FUSING],
    "Y_SLOTS": [Setup(format=one, options={**FUSED, **SUM_LATE}) for one in FUSING],
    # In a group without push, whose row flags are of fused calls only.
    "CLEAR_IN_A_NEW_LAP": [
        Setup(codes=5, format=one, options={**FUSED, **SAME, **PUSH_LATE, "drop_handle": drop})
        for one in FUSING
        for drop in (0.12, 0.9)
    ],
    # Rows that come when their owner has refused its own and gone on.
    "CLEAR_TWICE": [
        Setup(codes=6, format=one, options={**FUSED, **SAME, **PUSH_LATE, "bad": 0.4, "drop_handle": 0.4})
        for one in FUSING
    ],
    "CLEAR_BEFORE_RECORD": [
        Setup(codes=5, format=one, options={**FUSED, "focus": "lap:0.3:2000"}) for one in FUSING
    ],
    "PAYLOAD_BEFORE_ROW_FLAG": [
        Setup(format=one, options={**FUSED, "focus": "row flag:0.2:2000"}) for one in FUSING
    ],
    "WAVE_IS_READ": [Setup(recv_rows=4, format=one, options={**FUSED, **TAKE_LATE}) for one in FUSING],
    "WAVE_IS_CLEARED": [Setup(recv_rows=4, format=one, options={**FUSED, **PUSH_LATE}) for one in FUSING],
    "CLEAR_BEFORE_WAVE_READ": [
        Setup(recv_rows=4, format=one, options={**FUSED, "focus": "wave clear:0.2:2000"}) for one in FUSING
    ],
}


def test_every_rule_has_a_seeded_fault() -> None:
    assert ["NONE", *FAULTS] == rules()


def needs_a_machine(rule: str) -> None:
    """Stores that bypass the cache are kept back by real hardware only, and seen by another core only."""
    if rule != "FENCE_AFTER_STREAMING":
        return
    flags = Path("/proc/cpuinfo").read_text()
    if " avx2 " not in flags or " f16c " not in flags or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("takes AVX2 and two cores")


def is_missed(rule: str, setup: Setup, seeds: range, control_seconds: float) -> None:
    """Without the rule a run ends badly within seconds; with it the same run goes on for longer."""
    needs_a_machine(rule)
    steps = {"steps": 20_000, "timeout": 1, **setup.options}
    dropped = replace(setup, options={**steps, "drop": rules().index(rule), "seconds": 8})
    for seed in seeds:
        outcome = variant("plain").run(dropped.but(seed=seed))
        if outcome.verdict in ("wrong", "hang"):
            break
    else:
        pytest.fail(f"nobody missed {rule}: {outcome.output}")
    control = variant("plain").run(
        replace(setup, options={**steps, "timeout": 30, "seed": seed, "seconds": control_seconds})
    )
    expect_ok(control)
    print(f"{rule}: {outcome.line[:100]} after {outcome.seconds:.2f} s; with it: {control.line}")


@pytest.mark.parametrize("rule", FAULTS)
def test_a_dropped_rule_is_missed(rule: str) -> None:
    is_missed(rule, FAULTS[rule][0], range(1, 4), control_seconds=0.5)


@pytest.mark.parametrize("rule", MORE_FAULTS)
def test_a_dropped_rule_is_missed_in_fused_calls_and_rounds(rule: str) -> None:
    is_missed(rule, MORE_FAULTS[rule][0], range(1, 4), control_seconds=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "number"), [(rule, i) for rule, setups in MORE_FAULTS.items() for i in range(len(setups))]
)
def test_a_dropped_rule_is_missed_in_every_fused_setup(rule: str, number: int) -> None:
    is_missed(rule, MORE_FAULTS[rule][number], range(11, 14), control_seconds=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "number"), [(rule, i) for rule, setups in FAULTS.items() for i in range(len(setups))]
)
def test_a_dropped_rule_is_missed_in_every_setup(rule: str, number: int) -> None:
    is_missed(rule, FAULTS[rule][number], range(11, 14), control_seconds=5)


@pytest.mark.parametrize("record_format", FORMATS, ids=lambda one: one.name.lower())
def test_codes_must_not_divide_the_record_slots(record_format: Format) -> None:
    """With V = NREC a record of the lap before passes for a new one."""
    options: dict[str, object] = {"steps": 20_000, "delay": 0.05, "timeout": 1, "seconds": 8}
    outcome = variant("plain").run(Setup(format=record_format, codes_by_hand=4, options=options))
    assert outcome.verdict in ("wrong", "hang"), outcome.output
    expect_ok(
        variant("plain").run(
            Setup(format=record_format, codes=5, options={**options, "timeout": 30, "seconds": 0.5})
        )
    )


@pytest.mark.parametrize("record_format", FORMATS, ids=lambda one: one.name.lower())
def test_a_rebuilt_group_takes_new_windows(record_format: Format) -> None:
    """A rank that was given up may still push: on the old windows, cleared as they are, into the new group's rows."""
    setup = Setup(ranks=2, format=record_format, protocol="push", options={"timeout": 10})
    same, new = (variant("plain").run(setup.but(scenario=f"rebuild {which}")) for which in ("same", "new"))
    assert same.verdict == "wrong" and "is token 0 of rank 1 in call 0" in same.line, same.output
    expect_ok(new)


@pytest.mark.parametrize("scenario", ["owner drops", "close"])
def test_a_rank_that_stays_away(scenario: str) -> None:
    """The owner of rows drops its handle: the source's message says where the owner is. A rank closes its group: its call ends,
    what it had sent is good, and the next call says that it has left.
    """
    for record_format in FORMATS:
        expect_ok(
            variant("plain").run(
                Setup(ranks=2, format=record_format, options={"scenario": scenario, "timeout": 10})
            )
        )
