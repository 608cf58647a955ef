"""Train a byte-level language model with mixture-of-experts layers on this repository's own text.

    torchrun --nproc-per-node 2 examples/train_lm.py      # or `make train`; experts spread over two processes
    python examples/train_lm.py                           # one process: the same model, batches and loss curve

Prints the loss beside the entropy of single bytes, the share of a step that comes of spreading the experts, and a sample; draws
the loss and each expert's load. The last line says what was verified, or what was not; the exit code is 0 or 1 accordingly.
Shape symbols: B sequences of a rank, S bytes of a sequence, H hidden, E experts, K top-k, R ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HOW_TO_INSTALL = "run `make train`, or `pip install -e '.[demo]'` in the repository first"
try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from einops import rearrange
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from torch import Tensor, nn

    from moe_a2a import EPGroup, MoE
except ModuleNotFoundError as missing:
    print(f"NOT verified: {missing.name} is not installed; {HOW_TO_INSTALL}", flush=True)
    raise SystemExit(1) from None

ROOT = Path(__file__).resolve().parent.parent
TEXTS = (
    "README.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "examples/data/*.txt",
    "moe_a2a/*.py",
    "op_host/**/*",
    "op_kernel/**/*",
    "tests/**/*.py",
    "benchmarks/*.py",
)
SUFFIXES = (".md", ".txt", ".py", ".h", ".inc", ".cpp")
HELD_OUT = 16  # every so many blocks of the text is kept for the test
BLOCK = 4096

# How far the curves of one process and of several may be apart, in nats: in the first EARLY steps, and then in the mean of any
# WINDOW steps. The sums are the same, in another order, so at first all that is left is rounding. It grows: sooner or later a
# token whose scores nearly tie goes to another expert, and from there on the two are different runs of the same training.
# float64 puts that off.
EARLY, WINDOW = 10, 20
TOLERANCE = {"float32": (1e-3, 0.05), "float64": (1e-10, 1e-6)}


@dataclass(frozen=True)
class Settings:
    """The model and its training; the same on all ranks."""

    steps: int = 600
    batch: int = 16  # sequences of all ranks together
    length: int = 128
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    inner: int = 192
    balance: str = "bias"
    rate: float = 3e-3
    dtype: str = "float32"
    seed: int = 1
    turns: int = 8
    sample: int = 300


SHORT = Settings(
    steps=30,
    batch=7,
    length=32,
    hidden=32,
    layers=2,
    heads=2,
    experts=5,
    inner=24,
    rate=1e-2,
    turns=2,
    sample=40,
)


class Attention(nn.Module):
    """Causal self-attention; nothing of it knows of ranks."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x_BSH), "b s (three n d) -> three b n s d", three=3, n=self.heads)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(rearrange(seen, "b n s d -> b s (n d)"))
        return out


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, group: EPGroup, s: Settings, tag: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(s.hidden) for _ in range(2))
        self.attention = Attention(s.hidden, s.heads)
        self.moe = MoE(
            group,
            s.inner,
            scores="sigmoid" if s.balance == "bias" else "softmax",
            correction_bias=s.balance == "bias",
            aux_loss="switch" if s.balance == "aux" else "none",
            aux_over="group",
            shared_inner=s.inner,
            tag=tag,
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.norms[0](x_BSH))
        out: Tensor = x_BSH + self.moe(self.norms[1](x_BSH))
        return out


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out. With the same seed the same model, on any number of ranks."""

    def __init__(self, group: EPGroup, s: Settings) -> None:
        super().__init__()
        torch.manual_seed(s.seed)
        self.bytes = nn.Embedding(256, s.hidden)
        self.places = nn.Embedding(s.length, s.hidden)
        self.blocks = nn.ModuleList(Block(group, s, f"layer {i}") for i in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden)
        self.head = nn.Linear(s.hidden, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.1)
        self.to(getattr(torch, s.dtype))

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = self.bytes(ids_BS) + self.places.weight[: ids_BS.shape[1]]
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits: Tensor = self.head(self.norm(x_BSH))
        return logits

    @property
    def moes(self) -> list[MoE]:
        return [block.moe for block in self.blocks if isinstance(block, Block)]

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that all ranks have; the others are experts."""
        own = {parameter for layer in self.moes for parameter in layer.expert_parameters()}
        return [parameter for parameter in self.parameters() if parameter not in own]


class Text:
    """The repository's text as bytes, in a part to train on and one to test with."""

    def __init__(self) -> None:
        files = {path for pattern in TEXTS for path in ROOT.glob(pattern) if path.suffix in SUFFIXES}
        whole = b"\n".join(path.read_bytes() for path in sorted(files))
        blocks = [whole[start : start + BLOCK] for start in range(0, len(whole), BLOCK)]
        self.files = len(files)
        self.train = self._tensor(b"".join(block for i, block in enumerate(blocks) if i % HELD_OUT))
        self.held_out = self._tensor(b"".join(blocks[::HELD_OUT]))

    @staticmethod
    def _tensor(text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @property
    def entropy(self) -> float:
        """Nats of a byte that is guessed knowing nothing but how frequent each is."""
        share = self.train.bincount(minlength=256).double() / len(self.train)
        return float(-torch.xlogy(share, share).sum())

    def batch(self, s: Settings, number: int, mine: slice, held_out: bool = False) -> Tensor:
        """[B, S + 1] bytes: the sequences ``mine`` of the batch, which depends on seed and number alone."""
        text = self.held_out if held_out else self.train
        rng = np.random.default_rng((s.seed, number, held_out))
        starts = torch.from_numpy(rng.integers(0, len(text) - s.length, s.batch)[mine])
        ids: Tensor = text[starts[:, None] + torch.arange(s.length + 1)].long()
        return ids


def share_of(s: Settings, rank: int, ranks: int) -> slice:
    """Which sequences of a batch are this rank's."""
    return slice(rank * s.batch // ranks, (rank + 1) * s.batch // ranks)


def make_group(s: Settings, ranks: int, transport: str = "auto", process_group: Any = None) -> EPGroup:
    return EPGroup(
        process_group,
        num_experts=s.experts,
        top_k=s.top_k,
        max_tokens=-(-s.batch // ranks) * s.length,
        hidden_size=s.hidden,
        dtype=getattr(torch, s.dtype),
        transport=transport,
        timeout=300.0,
    )


def loss_of(model: nn.Module, s: Settings, ids: Tensor) -> Tensor:
    """This rank's share of the mean over all ranks' bytes: the shares add up to it."""
    logits = model(ids[:, :-1])
    total = F.cross_entropy(
        rearrange(logits, "b s v -> (b s) v"), rearrange(ids[:, 1:], "b s -> (b s)"), reduction="sum"
    )
    return total / (s.batch * s.length)


@dataclass
class History:
    """What a training run leaves behind, besides the model."""

    losses: list[float] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)  # [layers, E] of each step, all ranks together
    traces: list[Tensor] = field(default_factory=list)  # [layers, B * S, K] of each step, this rank's
    seconds: list[float] = field(default_factory=list)


class Trainer:
    """One rank's part in training; with ``ranks`` 1 it is all of it, whatever torch.distributed says."""

    def __init__(self, text: Text, s: Settings, group: EPGroup) -> None:
        self.text, self.s, self.group = text, s, group
        self.mine = share_of(s, group.rank, group.world_size)
        self.model = LanguageModel(group, s)
        self.replicated = self.model.replicated()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=s.rate, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
        )
        self.history = History()
        self._chosen: list[Tensor] = []

    def train(self, told: Callable[[int, float], None]) -> History:
        hooks = [layer.router.register_forward_hook(self._note) for layer in self.model.moes]
        for step in range(self.s.steps):
            begun = time.perf_counter()
            self._step(step)
            self.history.seconds.append(time.perf_counter() - begun)
            told(step, self.history.losses[-1])
        for hook in hooks:
            hook.remove()
        return self.history

    def _note(self, _module: nn.Module, _inputs: Any, routed: Any) -> None:
        self._chosen.append(routed.topk_idx)

    def _step(self, step: int) -> None:
        s = self.s
        warm = min(1.0, (step + 1) / 20)
        for settings in self.optimizer.param_groups:
            settings["lr"] = s.rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / s.steps))
        self._chosen.clear()
        loss = loss_of(self.model, s, self.text.batch(s, step, self.mine))
        loss.backward()
        chosen = torch.stack(self._chosen)
        load = torch.stack([ids.flatten().bincount(minlength=s.experts) for ids in chosen])
        load = self._sum_gradients(loss.detach(), load)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if s.balance == "bias":
            for layer in self.model.moes:
                layer.update_correction_bias(2e-3)
        self.history.loads.append(load)
        self.history.traces.append(chosen.to(torch.uint8))

    def _sum_gradients(self, loss: Tensor, load: Tensor) -> Tensor:
        """Adds up what the ranks have of the replicated parameters' gradients, in one all-reduce; the experts' are complete."""
        grads = [parameter.grad for parameter in self.replicated if parameter.grad is not None]
        parts = [*(grad.flatten() for grad in grads), loss.flatten(), load.flatten().to(loss.dtype)]
        flat = torch.cat(parts)
        if self.group.world_size > 1:
            dist.all_reduce(flat, group=self.group.process_group)
        *summed, total, load_sum = flat.split([len(part) for part in parts])
        for grad, value in zip(grads, summed, strict=True):
            grad.copy_(value.view_as(grad))
        self.history.losses.append(float(total))
        summed_load: Tensor = load_sum.view_as(load).to(torch.int64)
        return summed_load

    @torch.no_grad()
    def test(self, batches: int = 8) -> float:
        """Mean loss over text that wasn't trained on."""
        self.model.eval()
        losses = [loss_of(self.model, self.s, self._held_out(number)) for number in range(batches)]
        self.model.train()
        total = torch.stack(losses).mean()
        if self.group.world_size > 1:
            dist.all_reduce(total, group=self.group.process_group)
        return float(total)

    def _held_out(self, number: int) -> Tensor:
        return self.text.batch(self.s, number, self.mine, held_out=True)


def whole_model(model: LanguageModel, s: Settings, group: EPGroup, alone: EPGroup) -> LanguageModel:
    """A copy with every expert on every rank."""
    whole = LanguageModel(alone, s)
    parts: list[dict[str, Tensor]] = [model.state_dict()]
    if group.world_size > 1:
        parts = [{} for _ in range(group.world_size)]
        dist.all_gather_object(parts, model.state_dict(), group=group.process_group)
    experts = {f"blocks.{i}.moe.{name}" for i in range(s.layers) for name in ("gate_up_proj", "down_proj")}
    state = {
        name: torch.cat([part[name] for part in parts]) if name in experts else parts[0][name]
        for name in parts[0]
    }
    whole.load_state_dict(state)
    return whole


class Timed:
    """The exchange of a collective group, with a clock."""

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.exchange, name)
        return self._clocked(value) if name in ("dispatch", "combine", "combine_again") else value

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return clocked


@dataclass(frozen=True)
class Cost:
    """Medians over turns of the ranks' mean forward and backward, on identical batches, in seconds."""

    collective: float
    exchanges: float  # of it, in dispatch and combine: packing rows, all_to_all, waiting
    windows: float
    waits: float  # of it, waiting for peers

    @property
    def before(self) -> float:
        """Part of the collective step that isn't computing."""
        return self.exchanges / self.collective

    @property
    def after(self) -> float:
        """Part of the other step that isn't computing. Exchange and experts are one call there, so computing is taken from the
        collective step, which makes the same products with the same code.
        """
        return 1 - (self.collective - self.exchanges) / self.windows


def measure(trainer: Trainer, s: Settings, group: EPGroup, collective: EPGroup) -> Cost:
    """Times the model with its rows over gloo's all_to_all and through windows, in turns."""
    moes, pg = trainer.model.moes, group.process_group
    clock = Timed(collective._exchange)
    collective._exchange = clock  # type: ignore[assignment]
    found: dict[EPGroup, list[list[float]]] = {collective: [], group: []}

    def aside(kind: EPGroup) -> float:
        return clock.seconds if kind is collective else sum(group.stats().get("wait_seconds", ()))

    for turn in range(-1, s.turns):
        ids = trainer.text.batch(s, s.steps + turn, trainer.mine)
        for kind in (group, collective) if turn % 2 else (collective, group):
            for layer in moes:
                layer.group = kind
            dist.barrier(group=pg)
            before, begun = aside(kind), time.perf_counter()
            loss_of(trainer.model, s, ids).backward()
            mine = torch.tensor([time.perf_counter() - begun, aside(kind) - before], dtype=torch.float64)
            trainer.optimizer.zero_grad()
            dist.all_reduce(mine, group=pg)
            if turn >= 0:  # the first one touches memory for the first time
                found[kind].append((mine / group.world_size).tolist())
    for layer in moes:
        layer.group = group
        layer.load.zero_()
    medians = [statistics.median(column) for kind in found for column in zip(*found[kind], strict=True)]
    return Cost(*medians)


@torch.no_grad()
def sample(model: LanguageModel, s: Settings, prompt: bytes) -> str:
    """What the model writes behind the prompt."""
    model.eval()
    generator = torch.Generator().manual_seed(s.seed)
    ids = torch.tensor([list(prompt)])
    for _ in range(s.sample):
        logits = model(ids[:, -s.length :])[0, -1].float() / 0.7
        ids = torch.cat([ids, torch.multinomial(logits.softmax(0), 1, generator=generator)[None]], 1)
    model.train()
    return bytes(ids[0].tolist()).decode("utf-8", errors="replace")


# -------------------------------------------------------------------------------------------------------------- what is shown


def draw_loss(path: Path, losses: Sequence[float], other: Sequence[float] | None, entropy: float) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, label="this run", linewidth=1.5)
    if other is not None:
        axes.plot(other, "--", label="one process", linewidth=1)
    axes.axhline(entropy, color="grey", linestyle=":", label=f"single bytes' entropy, {entropy:.2f}")
    axes.set(
        xlabel="step", ylabel="loss [nats a byte]", title="A byte-level model with mixture-of-experts layers"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_load(path: Path, loads: Tensor) -> None:
    """[steps, layers, E] pairs -> a picture with a line for each expert."""
    share = loads.double() / loads.double().mean(2, keepdim=True)
    layers = share.shape[1]
    figure = Figure(figsize=(8, 1.5 + 1.6 * layers), layout="constrained")
    all_axes = figure.subplots(layers, 1, sharex=True, squeeze=False)
    for layer, axes in enumerate(all_axes[:, 0]):
        image = axes.imshow(
            share[:, layer].T.numpy(), aspect="auto", interpolation="nearest", vmin=0, vmax=2, cmap="RdBu_r"
        )
        axes.set(ylabel=f"layer {layer}\nexpert")
    all_axes[-1, 0].set(xlabel="step")
    figure.colorbar(image, ax=list(all_axes[:, 0]), label="load / mean load")
    figure.savefig(path, dpi=120)


@contextlib.contextmanager
def bar(console: Console, what: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar; without a terminal a line now and then instead."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=steps)

        def told(step: int, loss: float) -> None:
            progress.update(task, completed=step + 1, description=f"{what}: loss {loss:.3f}")
            if not console.is_terminal and (step + 1) * 4 // steps > step * 4 // steps:
                console.print(f"{what}: step {step + 1} of {steps}, loss {loss:.3f}")

        yield told


def curve_problems(losses: Sequence[float], other: Sequence[float], dtype: str) -> tuple[str, list[str]]:
    """What to say of two loss curves that should be one, and what is wrong with it."""
    early, late = TOLERANCE[dtype]
    gaps = np.array(losses) - np.array(other)
    width = min(WINDOW, len(gaps))
    first = np.abs(gaps[:EARLY]).max()
    most = np.abs(np.convolve(gaps, np.full(width, 1 / width), "valid")).max()
    text = (
        f"one process: curves differ by at most {first:.1e} in the first {min(EARLY, len(gaps))} steps (allowed {early:g}), "
        f"means of {width} steps by {most:.1e} (allowed {late:g})"
    )
    # Written so that a loss that is no number is a problem.
    return text, [] if first <= early and most <= late else [
        f"the curves of one process and several differ: {text}"
    ]


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=None, help=f"of training (default {Settings.steps})")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of parameters and batches")
    parser.add_argument("--short", action="store_true", help="a much smaller model and fewer steps: seconds")
    parser.add_argument(
        "--balance",
        choices=("bias", "aux", "none"),
        default="bias",
        help="of the experts' load: by a correction of the choice, or by a loss",
    )
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32", help="of everything")
    parser.add_argument(
        "--check", action="store_true", help="train in one process, too, and compare the loss curves"
    )
    parser.add_argument("--out", type=Path, default=Path("train_out"), help="folder for the pictures")
    parser.add_argument(
        "--save-traces",
        type=Path,
        default=None,
        metavar="FILE.npz",
        help="I: uint8 [layers, steps, tokens of all ranks, K], the experts chosen; load: [steps, layers, E]; loss: [steps]",
    )
    args = parser.parse_args(argv)
    settings = SHORT if args.short else Settings()
    settings = replace(settings, seed=args.seed, balance=args.balance, dtype=args.dtype)
    if args.steps is not None:
        if args.steps < 1:
            parser.error(f"--steps must be at least 1, got {args.steps}")
        settings = replace(settings, steps=args.steps)
    return args, settings


def save_traces(path: Path, s: Settings, history: History, group: EPGroup) -> None:
    """Collects the ranks' ids and writes them on the first one."""
    mine = rearrange(torch.stack(history.traces), "steps layers t k -> layers steps t k").numpy()
    parts = [mine]
    if group.world_size > 1:
        parts = [mine] * group.world_size
        dist.all_gather_object(parts, mine, group=group.process_group)
    if group.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            I=np.concatenate(parts, axis=2),
            tokens=np.array([part.shape[2] for part in parts]),
            load=torch.stack(history.loads).numpy(),
            loss=np.array(history.losses),
            experts=s.experts,
        )


def run(args: argparse.Namespace, s: Settings, rank: int, ranks: int) -> int:
    """One rank's run, from the text to the verdict; the exit code."""
    begun = time.perf_counter()
    console = Console(quiet=rank > 0, highlight=False, soft_wrap=True)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    text = Text()
    # A group of this rank alone, and one with the rows over gloo: everybody makes all process groups, in the same order.
    own = [dist.new_group([peer]) for peer in range(ranks)][rank] if ranks > 1 else None
    group = make_group(s, ranks)
    trainer = Trainer(text, s, group)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(
        f"{len(text.train) + len(text.held_out):,} bytes of {text.files} files; {ranks} ranks, {s.layers} layers, "
        f"{s.experts} experts, top {s.top_k}, {count:,} parameters on rank 0; {s.steps} steps of {s.batch} x {s.length} bytes"
    )
    console.print(f"transport: {group.transport.name}, because {group.transport.reason}")
    with bar(console, "training", s.steps) as told:
        history = trainer.train(told)
    held_out = trainer.test()
    tail = history.losses[-max(1, s.steps // 20) :]
    final, step_seconds = statistics.fmean(tail), statistics.median(history.seconds)
    console.print(
        f"loss: {history.losses[0]:.3f} at first, {final:.3f} at the end, {held_out:.3f} on text held out; entropy of single "
        f"bytes {text.entropy:.3f} (nats a byte)"
    )
    console.print(f"step: {step_seconds * 1e3:.0f} ms (median), training took {sum(history.seconds):.0f} s")

    alone = make_group(s, 1, process_group=own)
    whole = whole_model(trainer.model, s, group, alone)
    if ranks > 1:
        with make_group(s, ranks, transport="collective") as collective:
            cost = measure(trainer, s, group, collective)
        console.print(
            f"communication, of forward + backward (medians of {s.turns} turns on the same batches, mean of the ranks):\n"
            f"  before, rows over gloo's all_to_all: {cost.before:.0%} of {cost.collective * 1e3:.1f} ms, in its calls\n"
            f"  after, {group.transport.name}: {cost.after:.0%} of {cost.windows * 1e3:.1f} ms are more than computing takes; "
            f"waiting for peers: {cost.waits * 1e3:.1f} ms"
        )
    problems = []
    if not final < (history.losses[0] if args.short else text.entropy):
        problems.append(f"the loss is {final:.3f} at the end")
    single: list[float] | None = None
    if args.check and ranks > 1:
        if rank == 0:
            with bar(console, "one process", s.steps) as told:
                single = Trainer(text, s, alone).train(told).losses
            said, wrong = curve_problems(history.losses, single, s.dtype)
            console.print(said)
            problems += wrong
        dist.barrier(group=group.process_group)
    if args.save_traces is not None:
        save_traces(args.save_traces, s, history, group)
    if rank == 0:
        written = sample(whole, s, b"    def ")
        console.print("a sample:", style="bold")
        console.print("\n".join("  | " + line for line in written.splitlines()), markup=False)
        draw_loss(args.out / "loss.png", history.losses, single, text.entropy)
        draw_load(args.out / "expert_load.png", torch.stack(history.loads))
        console.print(f"pictures: {args.out / 'loss.png'}, {args.out / 'expert_load.png'}")
    if ranks > 1:
        dist.barrier(group=group.process_group)
    group.close()
    alone.close()
    took = f"{time.perf_counter() - begun:.0f} s"
    if problems:
        console.print("NOT verified: " + "; ".join(problems))
    else:
        checked = ", the same curve as one process" if single is not None else ""
        console.print(
            f"verified: {ranks} ranks, {s.steps} steps, loss {final:.3f} (single bytes: {text.entropy:.3f}){checked}; "
            f"took {took}"
        )
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    args, settings = parse_arguments(argv)
    if "RANK" not in os.environ:
        return run(args, settings, 0, 1)
    dist.init_process_group("gloo")
    try:
        return run(args, settings, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
