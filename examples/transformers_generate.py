"""Text of a transformers model whose experts are spread over processes: the text of the whole model.

    python examples/transformers_generate.py                            # two processes, a tiny model with random weights
    python examples/transformers_generate.py --model PATH               # a checkpoint of yours, with its tokenizer
    torchrun --nproc-per-node 4 examples/transformers_generate.py       # other numbers of processes
    ... --at-load                                                       # spread by an argument of from_pretrained

Each process continues a prompt of its own, of another length than the others', by as many tokens as it likes, and compares with
the same model in one piece. The last line says what was verified, or what was not, and the exit code is 0 or 1.
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import moe_a2a
except ModuleNotFoundError as missing:
    print(f"NOT verified: {missing.name} is not installed; {HOW_TO_INSTALL}", flush=True)
    raise SystemExit(1) from None

PROMPTS = ("To be, or not to be", "The rest is", "Though this be madness, yet there is method in", "Brevity")


class Bytes:
    """Text as its bytes, for the model without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(one for one in ids if one < 256).decode("latin-1")


def at_load() -> dict[str, Any]:
    """The argument of from_pretrained that spreads the experts, in the installed version."""
    import moe_a2a.integrations.transformers  # noqa: F401  (registers "moe_a2a")

    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version < (5, 23):
        return {"experts_implementation": "moe_a2a"}
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="moe_a2a")
    return {"distributed_config": config}


def saved_by_first(folder: Path) -> Path:
    """Where the first rank has saved a model with random weights."""
    folders = [folder]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(initializer_range=0.3)).save_pretrained(folder)
    dist.broadcast_object_list(folders)
    return folders[0]


def main(arguments: argparse.Namespace) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        path: Any = arguments.model
        tokenizer: Any = Bytes()
        if path is None:
            path = saved_by_first(Path(scratch))
        else:
            tokenizer = AutoTokenizer.from_pretrained(path)
        alone = AutoModelForCausalLM.from_pretrained(path)
        if arguments.at_load:
            model = AutoModelForCausalLM.from_pretrained(path, **at_load())
        else:
            model = moe_a2a.convert(AutoModelForCausalLM.from_pretrained(path))
        dist.barrier()  # the first rank's folder goes away

    ids = torch.tensor([tokenizer.encode(PROMPTS[rank % len(PROMPTS)])])
    length = arguments.tokens + 5 * rank
    options = {"do_sample": False, "max_new_tokens": length, "attention_mask": torch.ones_like(ids)}
    # Ranks whose text has ended go on taking part until all have: synced_gpus.
    found = model.generate(ids, synced_gpus=True, **options)
    expected = alone.generate(ids, **options)
    texts: list[Any] = [None] * ranks
    dist.all_gather_object(texts, tokenizer.decode(found[0].tolist()))
    if rank == 0:
        moe_a2a.explain(model)
        for number, text in enumerate(texts):
            print(f"rank {number}: {text!r}")
    if not torch.equal(found, expected):
        raise ValueError(
            f"got {texts[rank]!r}; the whole model gives {tokenizer.decode(expected[0].tolist())!r}"
        )
    dist.barrier()
    return f"{ranks} ranks, the text of the whole model on each, transformers {transformers.__version__}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or name of a checkpoint; default: a tiny one, made up")
    parser.add_argument(
        "--tokens", type=int, default=20, help="to generate, on rank 0; 5 more on each next rank"
    )
    parser.add_argument("--at-load", action="store_true")
    given = parser.parse_args()
    run(lambda: main(given), ranks=2)
