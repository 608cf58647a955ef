"""The lint's own parts, where triton-ascend isn't installed: reading MLIR, loops and data flow, rules on IR written by hand.

What it finds in kernels as really lowered: tests/ascend, by `make ascend-check`.
"""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from moe_a2a import ascend_lint
from moe_a2a.op_host.ascend import flow, hivm, lower, mlir, rules, source

GM, UB = "memref<8xi32, #hivm.address_space<gm>>", "memref<8xi32, #hivm.address_space<ub>>"


def module(body: str, arguments: str = "", attributes: str = "") -> mlir.Operation:
    """A module with one vector-core function."""
    types = ", ".join(one.partition(": ")[2] for one in arguments.split(", %")) if arguments else ""
    return mlir.parse(
        f"""
        #map = affine_map<(d0) -> (d0)>
        "builtin.module"() ({{
          "func.func"() <{{function_type = ({types}) -> (), sym_name = "kernel"}}> ({{
          ^bb0({arguments}):
            {body}
            "func.return"() : () -> ()
          }}) {{hacc.entry, hivm.func_core_type = #hivm.func_core_type<AIV>}} : () -> ()
        }}) {{{attributes}}} : () -> ()
        """
    )


def kernel_of(parsed: mlir.Operation) -> hivm.Function:
    return hivm.Module(parsed).functions[0]


POLL_SCF = f"""
    %c = "arith.constant"() <{{value = 0 : i64}}> : () -> i64
    %at = "arith.constant"() <{{value = 0 : index}}> : () -> index
    %b = "hivm.hir.pointer_cast"(%c) : (i64) -> {UB}
    %r = "scf.while"(%code) ({{
    ^bb0(%seen: i32):
      %more = "arith.cmpi"(%seen, %code) <{{predicate = 1 : i64}}> : (i32, i32) -> i1
      "scf.condition"(%more, %seen) : (i1, i32) -> ()
    }}, {{
    ^bb0(%unused: i32):
      "func.call"(%flag, %b) <{{callee = @load_gm_to_ubuf_1d_int32_t}}> : ({GM}, {UB}) -> ()
      %v = "memref.load"(%b, %at) : ({UB}, index) -> i32
      "scf.yield"(%v) : (i32) -> ()
    }}) : (i32) -> i32
"""
POLL_CF = f"""
    %c = "llvm.mlir.constant"() <{{value = 0 : i64}}> : () -> i64
    %at = "llvm.mlir.constant"() <{{value = 0 : index}}> : () -> index
    %b = "hivm.hir.pointer_cast"(%c) : (i64) -> {UB}
    "cf.br"(%code)[^bb1] : (i32) -> ()
  ^bb1(%seen: i32):  // 2 preds: ^bb0, ^bb2
    %more = "llvm.icmp"(%seen, %code) <{{predicate = 1 : i64}}> : (i32, i32) -> i1
    "cf.cond_br"(%more, %seen)[^bb2, ^bb3] <{{operandSegmentSizes = array<i32: 1, 1, 0>}}> : (i1, i32) -> ()
  ^bb2(%unused: i32):
    "func.call"(%flag, %b) <{{callee = @load_gm_to_ubuf_1d_int32_t}}> : ({GM}, {UB}) -> ()
    %v = "memref.load"(%b, %at) : ({UB}, index) -> i32
    "cf.br"(%v)[^bb1] : (i32) -> ()
  ^bb3:
"""
COUNTS = f"""
    %zero = "arith.constant"() <{{value = 0 : index}}> : () -> index
    %one = "arith.constant"() <{{value = 1 : index}}> : () -> index
    %n = "memref.load"(%flag, %zero) : ({GM}, index) -> i32
    %end = "arith.index_cast"(%n) : (i32) -> index
    "scf.for"(%zero, %end, %one) ({{
    ^bb0(%i: index):
      %w = "memref.load"(%flag, %i) : ({GM}, index) -> i32
      "scf.yield"() : () -> ()
    }}) : (index, index, index) -> ()
"""


def test_doctests() -> None:
    assert doctest.testmod(mlir).failed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"a.b"() : () -> ', "line 1: the text ends too early"),
        ('"a.b"() {k = [1, 2} : () -> ()', "the text ends too early"),
        ('"a.b"() <{k = #x.y<z} : () -> ()', "the text ends too early"),
        ('"a.b"() ({\n "c.d"() : () -> ()\n', "line 3: expected a string, found ''"),
        ('%0 = "a.b"() : () -> (i32, i32)', "expected 1 result types, found 2"),
        ('"a.b"() : () -> () "c.d"() : () -> ()', "expected the end"),
    ],
)
def test_what_is_not_mlir_is_refused(text: str, message: str) -> None:
    with pytest.raises(mlir.ParseError, match=message):
        mlir.parse(text)


def test_regions_scopes_and_nested_brackets() -> None:
    parsed = mlir.parse(
        '"m"() ({\n^bb0(%a: memref<?x4xf32, strided<[?, 1], offset: ?>>):\n %0:2 = "x"(%a) {k = [1, {b, c = "}>"}], '
        'd = dense<[[1, 2], [3, 4]]> : tensor<2x2xi32>, f = (i32) -> (), u = #x.y<z<1>, "UB" : 7 : i32>} : '
        '(memref<?x4xf32, strided<[?, 1], offset: ?>>) -> (i1, i32)\n "y"(%0#1) ({ %1 = "in"(%0#0) : (i1) -> i8 }, '
        '{ %1 = "in"(%a) : (memref<?x4xf32, strided<[?, 1], offset: ?>>) -> i8 }) : (i32) -> () }) : () -> ()'
    )
    x, y, first, second = list(parsed.walk())[1:]
    assert x.attributes["k"] == [1, {"b": True, "c": "}>"}]
    assert x.attributes["u"] == mlir.Attribute("x.y", (mlir.Attribute("z", (1,)), "UB", 7, "i32"))
    assert y.operands == [x.results[1]] and first.operands == [x.results[0]] and x.results[1].type == "i32"
    assert first.results[0] is not second.results[0]  # each region names its own values
    assert mlir.shaped(second.operands[0].type) == mlir.Shaped((None, 4), "f32", None)


@pytest.mark.parametrize(
    ("body", "polls"), [(POLL_SCF, 1), (POLL_CF, 1), (COUNTS, 0)], ids=["scf", "cf", "for"]
)
def test_a_poll_is_a_loop_that_ends_by_what_it_reads(body: str, polls: int) -> None:
    function = kernel_of(module(body, f"%flag: {GM}, %code: i32"))
    assert len(function.graph.loops) == 1
    found = [loop for loop in function.graph.loops if rules._depends(function, loop, scalar_only=False)]
    assert len(found) == polls
    assert not [loop for loop in found if rules._depends(function, loop, scalar_only=True)]


def test_a_barrier_counts_only_if_it_is_on_every_path() -> None:
    store = (
        f'"func.call"(%b, %flag, %m) <{{callee = @store_ubuf_to_gm_1d_int32_t}}> : ({UB}, {GM}, i32) -> ()'
    )
    barrier = '"hivm.hir.pipe_barrier"() <{pipe = #hivm.pipe<PIPE_ALL>}> : () -> ()'
    other = '"hivm.hir.pipe_barrier"() <{pipe = #hivm.pipe<PIPE_V>}> : () -> ()'

    def reached(between: str) -> int:
        start = '%c = "arith.constant"() <{value = 0 : i64}> : () -> i64'
        pointer = f'%b = "hivm.hir.pointer_cast"(%c) : (i64) -> {UB}'
        graph = kernel_of(
            module("\n".join([start, pointer, store, between, store]), f"%flag: {GM}, %m: i32, %q: i1")
        ).graph
        first, second = (op for op in graph.operations if op.name == "func.call")
        return len(rules._reached(graph, {first}, hivm.is_barrier, {second}))

    branch = '"scf.if"(%q) ({{ {} "scf.yield"() : () -> () }}, {{ {} }}) : (i1) -> ()'
    assert reached("") == 1 and reached(other) == 1 and reached(barrier) == 0
    assert reached(branch.format(barrier, "")) == 1
    assert reached(branch.format(barrier, barrier + ' "scf.yield"() : () -> ()')) == 0


def case(hivm_module: mlir.Operation | None = None, ttir: str = "", linalg: str = "") -> list[rules.Fault]:
    def triton(body: str) -> mlir.Operation:
        return mlir.parse(
            '"builtin.module"() ({ "tt.func"() <{sym_name = "k"}> ({ ^bb0(%p: !tt.ptr<i32>, %v: i32): '
            f'{body} "tt.return"() : () -> () }}) : () -> () }}) : () -> ()'
        )

    lowered = lower.Lowered(
        triton(ttir), triton(ttir), module(linalg, "%d: memref<1xi32>, %v: tensor<1xi32>"), hivm_module, ""
    )
    return rules.check(lower.Kernel("k", None, {}), lowered)


STORE = '"tt.store"(%p, %v) : (!tt.ptr<i32>, i32) -> ()'
STORED = '"bufferization.materialize_in_destination"(%v, %d) : (tensor<1xi32>, memref<1xi32>) -> ()'


def test_a_store_that_the_adapter_loses_is_found() -> None:
    empty = module("")
    assert case(empty, STORE * 2, STORED * 2) == []
    assert case(empty, STORE * 2, STORED) == [
        rules.Fault("unmatched-write", "2 stores and atomics in the Triton IR, 1 after the adapter")
    ]


def test_a_buffer_beyond_the_unified_buffer_is_found() -> None:
    spec = 'x = #dlti.target_system_spec<"NPU" : #hacc.device<#dlti.dl_entry<"UB_SIZE", {} : i32>>>'
    body = f'%c = "arith.constant"() <{{value = 32 : i64}}> : () -> i64 %b = "hivm.hir.pointer_cast"(%c) : (i64) -> {UB}'
    assert case(module(body, attributes=spec.format(512))) == []
    (fault,) = case(module(body, attributes=spec.format(504)))
    assert fault == rules.Fault(
        "ub-overflow", "a buffer of 256 bits at byte 32, while the unified buffer has 504 bits"
    )


@pytest.mark.parametrize(
    ("mask", "always"),
    [
        ('%m = "arith.constant"() <{value = dense<true> : tensor<8xi1>}> : () -> tensor<8xi1>', True),
        ('%b = "arith.constant"() <{value = dense<8> : tensor<8xi32>}> : () -> tensor<8xi32> ', True),
        ('%b = "arith.constant"() <{value = dense<7> : tensor<8xi32>}> : () -> tensor<8xi32> ', False),
        ('%b = "tt.splat"(%v) : (i32) -> tensor<8xi32> ', False),
    ],
    ids=["constant", "range", "one-off", "unknown"],
)
def test_a_mask_that_masks_nothing_is_none(mask: str, always: bool) -> None:
    if "%m =" not in mask:
        mask += '%i = "tt.make_range"() <{start = 0 : i32, end = 8 : i32}> : () -> tensor<8xi32> '
        mask += '%m = "arith.cmpi"(%i, %b) <{predicate = 2 : i64}> : (tensor<8xi32>, tensor<8xi32>) -> tensor<8xi1>'
    parsed = mlir.parse(
        '"builtin.module"() ({ "tt.func"() <{sym_name = "k"}> ({ ^bb0(%p: tensor<8x!tt.ptr<i32>>, %v: i32, %x: tensor<8xi32>): '
        f'{mask} "tt.store"(%p, %x, %m) : (tensor<8x!tt.ptr<i32>>, tensor<8xi32>, tensor<8xi1>) -> () '
        '"tt.return"() : () -> () }) : () -> () }) : () -> ()'
    )
    (store,) = source.writes(parsed)
    assert (source.mask(store) is None) == always


def test_helpers_stand_where_they_are_called() -> None:
    parsed = mlir.parse(
        '"builtin.module"() ({ "tt.func"() <{sym_name = "k"}> ({ ^bb0(%p: !tt.ptr<i32>, %v: i32): '
        '%a = "tt.call"(%v) <{callee = @fill}> : (i32) -> tensor<8xi32> '
        '%b = "tt.call"(%v) <{callee = @fill}> : (i32) -> tensor<8xi32> '
        '%q = "tt.splat"(%p) : (!tt.ptr<i32>) -> tensor<8x!tt.ptr<i32>> '
        '"tt.store"(%q, %a) : (tensor<8x!tt.ptr<i32>>, tensor<8xi32>) -> () '
        '"tt.store"(%q, %b) : (tensor<8x!tt.ptr<i32>>, tensor<8xi32>) -> () "tt.return"() : () -> () }) : () -> () '
        '"tt.func"() <{sym_name = "fill", sym_visibility = "private"}> ({ ^bb0(%x: i32): '
        '%t = "tt.splat"(%x) : (i32) -> tensor<8xi32> '
        '"tt.return"(%t) : (tensor<8xi32>) -> () ^bb1: %u = "ub.poison"() : () -> tensor<8xi32> '
        '"tt.return"(%u) : (tensor<8xi32>) -> () }) : () -> () }) : () -> ()'
    )
    graph = source.graph(parsed)
    assert isinstance(graph, flow.Graph)
    assert len(source.flags(graph)) == 2
    assert sum(op.name == "tt.splat" for op in graph.operations) == 3


def test_table_and_details() -> None:
    fault = rules.Fault("cached-poll", "a loop")
    results = [
        ascend_lint.Result("a", "X", "plain", (fault,)),
        ascend_lint.Result("a", "X", "block loop", ()),
        ascend_lint.Result("b", "X", "plain", (fault,)),
        ascend_lint.Result("b", "X", "block loop", (fault,)),
        ascend_lint.Result("c", "X", "plain", ()),
        ascend_lint.Result("c", "X", "block loop", ()),
    ]
    assert [line.split(maxsplit=1) for line in ascend_lint.table(results).splitlines()[2:]] == [
        ["a", "cached-poll (plain)"],
        ["b", "cached-poll"],
        ["c", "clean"],
    ]
    assert ascend_lint.details(results) == [
        "a: cached-poll: a loop [X plain]",
        "b: cached-poll: a loop [everywhere]",
    ]


def test_declarations() -> None:
    kernel = ascend_lint.declared({"kernel": len, "signature": {"x": "i32"}, "spins": 2})
    assert (kernel.name, kernel.function, kernel.spins, kernel.signals, kernel.cross_card) == (
        "len",
        len,
        2,
        0,
        False,
    )
    with pytest.raises(ValueError, match="a variant has 'spin'; known are name, kernel,"):
        ascend_lint.declared({"kernel": len, "signature": {}, "spin": 2})
    with pytest.raises(ValueError, match="has no 'signature'"):
        ascend_lint.declared({"kernel": len})


def test_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert ascend_lint.main(["--rules"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(rules.RULES)
    assert ascend_lint.main([]) == 2
    said = capsys.readouterr().err
    assert (
        "triton-ascend is not installed" in said
        and "triton-ascend==3.2.0" in said
        and "make ascend-check" in said
    )
    monkeypatch.setattr(ascend_lint, "versions", dict)
    assert ascend_lint.main([str(tmp_path / "none.py")]) == 2
    assert "no file" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("")
    assert ascend_lint.main([str(tmp_path / "empty.py")]) == 2
    assert "neither VARIANTS nor variants(target)" in capsys.readouterr().err
    (tmp_path / "one.py").write_text("VARIANTS = [{'kernel': len, 'signature': {}}]\n")
    assert ascend_lint.main([str(tmp_path / "one.py"), "--kernel", "two"]) == 2
    assert "no kernel 'two'; there are len" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, runpy\nsys.modules['torch'] = None\nsys.argv = ['ascend_lint', '--rules']\n"
        "try:\n    runpy.run_module('moe_a2a.ascend_lint', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "from moe_a2a import ascend_lint\nimport moe_a2a\n"
        "try:\n    moe_a2a.EPGroup\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "vanished-loop" in done.stdout
    assert done.stdout.splitlines()[-1] == "moe_a2a.EPGroup needs torch, which isn't installed; see README.md"


@pytest.mark.parametrize("crashes, ends", [(lower.RUNS - 1, True), (lower.RUNS, False)])
def test_a_tool_that_crashes_now_and_then_is_run_again(tmp_path: Path, crashes: int, ends: bool) -> None:
    runs, tool = tmp_path / "runs", tmp_path / "tool"
    tool.write_text(
        f"#!/bin/sh\necho run >> {runs}\n[ $(wc -l < {runs}) -gt {crashes} ] || kill -SEGV $$\necho made\n"
    )
    tool.chmod(0o755)
    if ends:
        assert lower._run([tool]) == "made\n"
    else:
        with pytest.raises(RuntimeError, match="ended with -11"):
            lower._run([tool])
    assert len(runs.read_text().splitlines()) == lower.RUNS


def test_a_tool_that_fails_is_not_run_again(tmp_path: Path) -> None:
    runs, tool = tmp_path / "runs", tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\necho run >> {runs}\necho no such option >&2\nexit 1\n")
    tool.chmod(0o755)
    with pytest.raises(RuntimeError, match="no such option"):
        lower._run([tool])
    assert runs.read_text() == "run\n"
