"""One rank of the demonstration: text -> router -> dispatch -> SwiGLU experts -> combine, every row checked.

Shapes: T tokens of a rank in a batch, H hidden, E experts, K top-k, R ranks, I expert width, N received rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_types import SPEED_REPEATS, SPEED_SIDES, Failure, RankReport, Settings, Span, plan_batches
from einops import rearrange

import moe_a2a
from moe_a2a import reference

Tensor = torch.Tensor
# Room for fp32 arithmetic inside the experts, as a share of a token's largest sum |w f|. Rounding y and the
# output to the payload's dtype is a separate, larger term.
FP32_SLACK = 1e-5


class TextModel:
    """A small MoE layer with fixed random weights over the bytes of a text. The same on every rank."""

    def __init__(self, text: bytes, settings: Settings, dtype: torch.dtype) -> None:
        H = self.hidden = settings.hidden
        E, width = settings.experts, settings.expert_width
        self.top_k, self.dtype = settings.top_k, dtype
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        rng = torch.Generator().manual_seed(settings.seed)
        # A token is a byte seen with the two bytes before it, as a byte-level language model would embed it.
        self.tables = [torch.randn(256, H, generator=rng) * scale for scale in (1.0, 0.6, 0.4)]
        self.router_EH = torch.randn(E, H, generator=rng) * 2 / H**0.5
        # gate_up_proj [E, 2I, H] and down_proj [E, H, I]. A rank computes only its own experts; the others
        # are here for the fp64 check, which must not depend on any communication.
        self.gate_up_proj = torch.randn(E, 2 * width, H, generator=rng) / H**0.5
        self.down_proj = torch.randn(E, H, width, generator=rng) / width**0.5

    def embed(self, span: Span) -> Tensor:
        """[T, H] hidden states of the bytes in ``span``, in the payload dtype."""
        position_T = torch.arange(span.start, span.start + span.length)
        x_TH = torch.zeros(span.length, self.hidden)
        for back, table in enumerate(self.tables):
            x_TH += table[self.text[(position_T - back).clamp(min=0)]]
        # The position makes every row different from every other: a row in the wrong place can't look right.
        half = (self.hidden + 1) // 2
        rates = torch.exp(-torch.arange(half) / half * 9.0)
        angle = position_T[:, None] * rates
        x_TH += 0.5 * rearrange([angle.sin(), angle.cos()], "two t h -> t (h two)")[:, : self.hidden]
        return F.rms_norm(x_TH, (self.hidden,)).to(self.dtype)

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(topk_idx [T, K] int64, topk_weights [T, K] fp32 that sum to 1 per token)."""
        probs_TE = torch.softmax(x_TH.float() @ self.router_EH.T, dim=-1)
        weights_TK, idx_TK = probs_TE.topk(self.top_k, dim=-1)
        return idx_TK, weights_TK / weights_TK.sum(-1, keepdim=True)

    @staticmethod
    def swiglu(x_NH: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """down(silu(gate x) * (up x)) for rows of one expert; gate_up [2I, H], down [H, I]."""
        gate_NI, up_NI = (x_NH @ gate_up.T).chunk(2, dim=-1)
        return (F.silu(gate_NI) * up_NI) @ down.T

    def experts(self, x_NH: Tensor, offsets: list[int], local: range, y_NH: Tensor) -> None:
        """Run each local expert on its group of rows; y_NH is written in place, in its own dtype."""
        for i, e in enumerate(local):
            begin, end = offsets[i], offsets[i + 1]
            if end > begin:
                y_NH[begin:end] = self.swiglu(
                    x_NH[begin:end].float(), self.gate_up_proj[e], self.down_proj[e]
                )

    def truth(self, x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(out [T, H], sum over k of |w f| [T, H]) in fp64, with no dispatch and no combine."""
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
        scale_TH = torch.zeros_like(out_TH)
        for e in range(self.router_EH.shape[0]):
            token, k = torch.nonzero(idx_TK == e, as_tuple=True)
            if len(token):
                weights = self.gate_up_proj[e].double(), self.down_proj[e].double()
                f = self.swiglu(x_TH[token].double(), *weights)
                f *= weights_TK[token, k, None].double()
                out_TH.index_add_(0, token, f)
                scale_TH.index_add_(0, token, f.abs())
        return out_TH, scale_TH


class AllToAll:
    """The same dispatch and combine with torch.distributed.all_to_all_single, as one would write it by hand.

    Counts first, then the rows; at the receiver a second permutation groups them by expert.
    """

    def __init__(self, experts_per_rank: list[int]) -> None:
        self.experts_per_rank = experts_per_rank
        self.num_experts = sum(experts_per_rank)

    def dispatch(self, x_TH: Tensor, idx_TK: Tensor) -> Tensor:
        """[N, H] in (local expert, source rank, token, k) order."""
        K = self.top_k = idx_TK.shape[1]
        R = len(self.experts_per_rank)
        local = self.experts_per_rank[dist.get_rank()]
        flat = idx_TK.reshape(-1)
        self.order = torch.argsort(flat, stable=True)
        sent_E = torch.bincount(flat, minlength=self.num_experts)
        received = torch.empty(R * local, dtype=torch.int64)
        dist.all_to_all_single(received, sent_E, [local] * R, self.experts_per_rank)
        received_Rl = received.view(R, local)
        self.send_splits = [int(part.sum()) for part in torch.split(sent_E, self.experts_per_rank)]
        self.recv_splits: list[int] = received_Rl.sum(1).tolist()
        rows = torch.empty(sum(self.recv_splits), x_TH.shape[1], dtype=x_TH.dtype)
        dist.all_to_all_single(rows, x_TH[self.order // K], self.recv_splits, self.send_splits)
        # Blocks arrive as (source, expert); the stable sort by expert keeps the sources in order.
        expert_N = torch.arange(local).repeat(R).repeat_interleave(received_Rl.reshape(-1))
        self.by_expert = torch.argsort(expert_N, stable=True)
        return rows[self.by_expert]

    def combine(self, y_NH: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]: sum over k of weight * row, in fp32 and in k order, rounded once."""
        T, K = weights_TK.shape
        to_source = torch.empty_like(y_NH)
        to_source[self.by_expert] = y_NH
        back = torch.empty(T * K, y_NH.shape[1], dtype=y_NH.dtype)
        dist.all_to_all_single(back, to_source, self.send_splits, self.recv_splits)
        position = torch.empty_like(self.order)
        position[self.order] = torch.arange(T * K)
        position_TK = position.view(T, K)
        acc_TH = back[position_TK[:, 0]].float().mul_(weights_TK[:, :1])
        for k in range(1, K):
            acc_TH += back[position_TK[:, k]].float().mul_(weights_TK[:, k : k + 1])
        return acc_TH.to(y_NH.dtype)


def as_bits(x: Tensor) -> Tensor:
    """The same bytes as integers: NaN equals NaN and -0.0 differs from +0.0."""
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def count_distinct(x_AH: Tensor) -> int:
    """How many rows differ from all others, at least: by a hash, and equal hashes count as equal rows."""
    factors_H = torch.randint(-(2**62), 2**62, x_AH.shape[1:], generator=torch.Generator().manual_seed(1))
    return len((as_bits(x_AH).long() * factors_H).sum(-1).unique())


def gather_rows(x_AH: Tensor, lengths: list[int]) -> list[Tensor]:
    """Every rank's tensor, over gloo and padded to one length: a way that shares nothing with the windows."""
    padded = x_AH.new_zeros(max(lengths, default=0), *x_AH.shape[1:])
    padded[: x_AH.shape[0]] = x_AH
    # gloo gathers only some dtypes; bytes always.
    raw = padded.view(torch.uint8)
    everyone = [torch.empty_like(raw) for _ in lengths]
    dist.all_gather(everyone, raw)
    return [part.view(x_AH.dtype)[:n] for part, n in zip(everyone, lengths, strict=True)]


class RankRun:
    """One rank's share of the run. ``say`` sends a progress message to the parent."""

    def __init__(self, rank: int, settings: Settings, store_file: str, say: Callable[..., None]) -> None:
        self.rank, self.settings, self.say = rank, settings, say
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // settings.ranks))
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        say("stage", "joining the process group")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store_file}",
            rank=rank,
            world_size=settings.ranks,
            timeout=timedelta(seconds=settings.timeout),
        )
        say("stage", "creating the group's windows")
        self.group = moe_a2a.EPGroup(
            num_experts=settings.experts,
            top_k=settings.top_k,
            max_tokens=settings.tokens,
            hidden_size=settings.hidden,
            dtype=self.dtype,
            # A text loads experts unevenly: room for the worst case, every row on one rank.
            max_recv_rows=settings.ranks * settings.tokens * settings.top_k,
            transport=settings.transport,
            timeout=settings.timeout / 2,
            warmup_timeout=settings.timeout,
        )
        text = Path(settings.text_path).read_bytes()
        self.model = TextModel(text, settings, self.dtype)
        self.plan = plan_batches(len(text), settings.ranks, settings.tokens, settings.batches, settings.seed)
        self.baseline = AllToAll([len(self.group.expert_range(r)) for r in range(settings.ranks)])
        local = self.group.local_experts
        self.report = RankReport(
            rank,
            (local.start, local.stop),
            self.group.transport.name,
            self.group.transport.reason,
            {name: str(value) for name, value in self.group.transport.describe().items()},
            np.zeros(settings.experts, np.int64),
            np.zeros((settings.experts, 256), np.int64),
        )
        self.fault = settings.inject_fault if rank == settings.ranks - 1 else None
        self.previous_out_TH: Tensor | None = None

    def run(self) -> RankReport:
        """Go through all batches and hand back what was measured and what didn't hold."""
        for batch, spans in enumerate(self.plan):
            self.step(batch, spans)
            self.say("batch", batch)
        if self.fault is not None:
            raise RuntimeError(f"the fault {self.fault!r} was asked for, but no batch had the rows it needs")
        self.say("stage", "closing")
        self.group.close()
        dist.destroy_process_group()
        return self.report

    def step(self, batch: int, spans: list[Span]) -> None:
        """One batch: the layer itself, timed by phase; then its checks; then the speed comparison."""
        model, now = self.model, time.monotonic_ns
        x_TH = model.embed(spans[self.rank])
        dist.barrier()

        t0 = now()
        idx_TK, weights_TK = model.route(x_TH)
        t1 = now()
        d = moe_a2a.dispatch(x_TH, idx_TK, self.group, topk_weights=weights_TK)
        t2 = now()
        self.spoil_received(batch, d.x)
        t3 = now()
        y_NH = d.empty_like_rows()
        model.experts(d.x, d.offsets.tolist(), self.group.local_experts, y_NH)
        t4 = now()
        self.spoil_expert_output(y_NH)
        # y is in the group's memory, which later calls use again; the checks need what it holds now.
        kept_y_NH = y_NH.clone()
        t5 = now()
        out_TH = moe_a2a.combine(y_NH, d.handle, topk_weights=weights_TK)
        t6 = now()
        for phase, start, end in (
            ("route", t0, t1),
            ("dispatch", t1, t2),
            ("experts", t3, t4),
            ("combine", t5, t6),
        ):
            self.report.phase_spans[phase].append((start, end))
        self.spoil_output(batch, out_TH)

        lengths = [span.length for span in spans]
        want_rows_NH, want_out_TH = self.check(batch, lengths, x_TH, idx_TK, weights_TK, d, kept_y_NH, out_TH)
        self.compare_speed(batch, x_TH, idx_TK, weights_TK, kept_y_NH, want_rows_NH, want_out_TH)
        bytes_TK = model.text[spans[self.rank].start :][: len(x_TH), None].expand(idx_TK.shape)
        pairs = torch.bincount((idx_TK * 256 + bytes_TK).flatten(), minlength=self.report.bytes_E256.size)
        self.report.bytes_E256 += pairs.view(-1, 256).numpy()

    def check(
        self,
        batch: int,
        lengths: list[int],
        x_TH: Tensor,
        idx_TK: Tensor,
        weights_TK: Tensor,
        d: Any,
        y_NH: Tensor,
        out_TH: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Every row received, every count and every output of this rank, against the oracle and against fp64.

        Returns what the oracle expects: the rows [N, H] and the output [T, H].
        """
        E, rank = self.settings.experts, self.rank
        xs, ids = gather_rows(x_TH, lengths), gather_rows(idx_TK, lengths)
        weights = gather_rows(weights_TK, lengths)
        counts_RE = torch.stack([reference.send_counts_reference(ids_TK, E)[0] for ids_TK in ids])
        # The oracle handles one row at a time, and a rank needs only the rows of its own experts from it.
        local = self.group.local_experts
        own_ids = [torch.where((i_TK >= local.start) & (i_TK < local.stop), i_TK, -1) for i_TK in ids]
        want = reference.dispatch_reference(xs, own_ids, E, weights)[rank]
        rows_per_rank = [
            int(part.sum()) for part in torch.split(counts_RE.sum(0), self.baseline.experts_per_rank)
        ]
        ys = gather_rows(y_NH, rows_per_rank)
        want_out_TH = reference.combine_reference(ys, ids, E, weights)[rank]
        truth_TH, scale_TH = self.model.truth(x_TH, idx_TK, weights_TK)
        if self.fault == "skip-batch" and batch == len(self.plan) - 1:
            self.fault = None
            return want.x_NH, want_out_TH

        self.compare("send-count matrix", batch, d.handle.send_count_matrix, counts_RE.int())
        self.compare("rows per expert", batch, d.counts, want.counts)
        self.compare("group offsets", batch, d.offsets, want.offsets)
        self.compare("received weights", batch, d.weights, want.weights_N)
        self.compare("received rows", batch, d.x, want.x_NH)
        self.report.rows_checked += len(want.x_NH)
        self.compare("combined tokens", batch, out_TH, want_out_TH)
        self.report.tokens_checked += len(want_out_TH)
        self.compare_fp64(batch, out_TH, truth_TH, scale_TH)
        self.report.tokens_end_to_end += len(truth_TH)
        self.report.sent_E += d.handle.send_count_matrix[rank].numpy()
        if rank == 0:
            everyone = torch.cat(xs)
            self.report.tokens_seen += len(everyone)
            self.report.tokens_distinct += count_distinct(everyone)
        return want.x_NH, want_out_TH

    def compare(self, what: str, batch: int, got: Tensor | None, want: Tensor | None) -> None:
        """Bitwise and in order; ``what`` names the check in the report."""
        assert want is not None
        if got is None:
            self.fail(what, batch, len(want), len(want), "nothing came back")
            return
        if got.shape != want.shape or got.dtype != want.dtype:
            detail = f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
            self.fail(what, batch, len(want), len(want), detail)
            return
        wrong_items = as_bits(got) != as_bits(want)
        wrong = torch.nonzero(wrong_items.view(len(want), -1).any(-1) if len(want) else wrong_items).flatten()
        if len(wrong):
            self.fail(what, batch, len(wrong), len(want), f"first at index {int(wrong[0])}")

    def compare_fp64(self, batch: int, out_TH: Tensor, truth_TH: Tensor, scale_TH: Tensor) -> None:
        """|out - fp64 truth| <= eps sum|w f| + slack for every element; eps: two roundings to the dtype."""
        if not len(truth_TH):
            return
        eps = torch.finfo(self.dtype).eps
        allowed_TH = eps * (1 + eps) * scale_TH + FP32_SLACK * scale_TH.amax(-1, keepdim=True)
        # not (a <= b), so that a NaN counts as wrong
        error_TH = (out_TH.double() - truth_TH).abs()
        wrong = torch.nonzero(~(error_TH <= allowed_TH).all(-1)).flatten()
        self.report.tolerance_used = max(self.report.tolerance_used, float((error_TH / allowed_TH).max()))
        if len(wrong):
            t = int(wrong[0])
            worst = float((error_TH[t] / allowed_TH[t]).max())
            detail = f"first at token {t}: off by {worst:.3g} times the tolerance"
            self.fail("end-to-end result (fp64)", batch, len(wrong), len(truth_TH), detail)

    def fail(self, what: str, batch: int, wrong: int, of: int, detail: str) -> None:
        self.report.failures.append(Failure(what, self.rank, batch, wrong, of, detail))

    def compare_speed(
        self,
        batch: int,
        x_TH: Tensor,
        idx_TK: Tensor,
        weights_TK: Tensor,
        y_NH: Tensor,
        want_rows_NH: Tensor,
        want_out_TH: Tensor,
    ) -> None:
        """Time dispatch + combine on both sides, same input, no experts; they take turns in going first."""

        def ours() -> tuple[Tensor, Tensor]:
            d = moe_a2a.dispatch(x_TH, idx_TK, self.group)
            return d.x, moe_a2a.combine(y_NH, d.handle, topk_weights=weights_TK)

        def theirs() -> tuple[Tensor, Tensor]:
            rows = self.baseline.dispatch(x_TH, idx_TK)
            return rows, self.baseline.combine(y_NH, weights_TK)

        sides = {"moe_a2a": ours, "all_to_all": theirs}
        for repeat in range(SPEED_REPEATS):
            order = SPEED_SIDES if (batch + repeat) % 2 == 0 else SPEED_SIDES[::-1]
            for side in order:
                dist.barrier()
                start = time.monotonic_ns()
                got_rows_NH, got_out_TH = sides[side]()
                self.report.speed_spans[side].append((start, time.monotonic_ns()))
                if side == "all_to_all" and self.fault == "baseline-row" and len(got_rows_NH):
                    got_rows_NH[0] += 1
                    self.fault = None
                self.compare(f"{side} rows, timed", batch, got_rows_NH, want_rows_NH)
                self.compare(f"{side} output, timed", batch, got_out_TH, want_out_TH)
                self.report.timed_rows_checked[side] += len(want_rows_NH)
                self.report.timed_tokens_checked[side] += len(want_out_TH)

    # Faults on request, on the last rank only. Each acts once, as soon as a batch has the rows it needs.

    def spoil_received(self, batch: int, rows_NH: Tensor) -> None:
        if self.fault == "crash" and batch == 1:
            os._exit(70)
        if self.fault == "stall" and batch == 1:
            time.sleep(10 * self.settings.timeout)
        different = torch.nonzero((as_bits(rows_NH) != as_bits(rows_NH[:1])).any(-1)).flatten()
        if not len(different):
            return
        if self.fault == "drop-row":
            rows_NH[: len(rows_NH) - 1] = rows_NH[1:].clone()
            self.fault = None
        elif self.fault == "swap-rows":
            rows_NH[[0, int(different[0])]] = rows_NH[[int(different[0]), 0]]
            self.fault = None

    def spoil_expert_output(self, y_NH: Tensor) -> None:
        if self.fault == "wrong-expert" and len(y_NH):
            y_NH[-1] *= -1
            self.fault = None

    def spoil_output(self, batch: int, out_TH: Tensor) -> None:
        """stale-row: the first token keeps its value of the batch before, as if it hadn't been written."""
        if self.fault != "stale-row":
            return
        if self.previous_out_TH is not None and len(out_TH):
            out_TH[0] = self.previous_out_TH[0]
            self.fault = None
        elif len(out_TH):
            self.previous_out_TH = out_TH.clone()
