"""Training of a transformers model whose experts are spread over processes, and a checkpoint that knows nothing of that.

    python examples/convert_and_train.py                          # two processes, a tiny Mixtral of bytes, one minute
    torchrun --nproc-per-node 4 examples/convert_and_train.py     # other numbers of processes

What training needs beside moe_a2a.convert: gradients of experts are sums over ranks already, so they stay out of
DistributedDataParallel, which averages the others, and are divided by the number of ranks. Activations are checkpointed.
Afterwards the saved model is loaded in one piece and compared. The last line says what was verified, or what was not; the
exit code is 0 or 1.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from transformers_ranks import HOW_TO_INSTALL, run, tiny_config

try:
    import torch
    import torch.distributed as dist
    import transformers
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM

    import moe_a2a
except ModuleNotFoundError as missing:
    print(f"NOT verified: {missing.name} is not installed; {HOW_TO_INSTALL}", flush=True)
    raise SystemExit(1) from None

TEXT = Path(__file__).resolve().parent / "data" / "hamlet.txt"
LENGTH, BATCH = 64, 8  # bytes of a sequence, sequences of a rank
HELD_OUT = 16 * LENGTH  # bytes at the end of the text


def batches(text: Tensor, rank: int, steps: int) -> Tensor:
    """[steps, BATCH, LENGTH] of a rank."""
    places = torch.randint(
        len(text) - HELD_OUT - LENGTH, (steps, BATCH), generator=torch.Generator().manual_seed(rank)
    )
    return text[places[..., None] + torch.arange(LENGTH)]


def around(model: Any) -> Any:
    """DistributedDataParallel that leaves the experts alone."""
    experts = [name for name, _ in moe_a2a.expert_parameters(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    return DistributedDataParallel(model)


@torch.no_grad()
def loss_of(model: Any, text: Tensor) -> float:
    """On what wasn't trained on; the same on all ranks."""
    model.eval()
    ids = text[-HELD_OUT:].view(-1, LENGTH)
    return float(model(ids, labels=ids).loss)


def main(arguments: argparse.Namespace) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transformers.utils.logging.disable_progress_bar()
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(0)  # the same model on every rank, before convert
    model = moe_a2a.convert(AutoModelForCausalLM.from_config(tiny_config()), max_tokens=BATCH * LENGTH)
    older = model.gradient_checkpointing_enable  # what activation_checkpointing_enable was called
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    if rank == 0:
        moe_a2a.explain(model)
    before = loss_of(model, text)

    parallel = around(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step, ids in enumerate(batches(text, rank, arguments.steps)):
        loss = parallel(ids, labels=ids, use_cache=False).loss
        loss.backward()
        for _, value in moe_a2a.expert_parameters(model):
            assert value.grad is not None  # zeros where no token came
            value.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    after = loss_of(model, text)

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch)
        model.save_pretrained(folder)  # by all ranks; the first writes
        if rank == 0:
            whole = loss_of(AutoModelForCausalLM.from_pretrained(folder), text)
            if abs(whole - after) > 1e-5:
                raise ValueError(f"the saved model's loss is {whole}, the spread one's {after}")
    if not after < before - 0.5:
        raise ValueError(f"the loss was {before:.3f} and is {after:.3f}")
    dist.barrier()
    return (
        f"{ranks} ranks, {arguments.steps} steps, loss {before:.3f} -> {after:.3f}, and the saved model has it in one piece, "
        f"transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="keep the trained model in this folder")
    given = parser.parse_args()
    run(lambda: main(given), ranks=2)
