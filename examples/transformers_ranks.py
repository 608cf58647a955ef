"""What the two examples with transformers share: their processes, and a tiny model of bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

HOW_TO_INSTALL = "run `pip install 'moe_a2a[transformers]'`"


def run(main: Callable[[], str], ranks: int) -> None:
    """Runs ``main`` on each of the ranks, which torchrun starts unless it did already; prints the verdict and exits.

    Args:
        main: gives the sentence behind "verified: "; raises where something isn't as it should be.
        ranks: how many to start.
    """
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["TORCHELASTIC_ERROR_FILE"] = os.devnull
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        verdict = main()
    except Exception as error:
        # In one write, so that ranks don't mix theirs.
        sys.stdout.write(f"NOT verified: rank {dist.get_rank()}: {type(error).__name__}: {error}\n")
        sys.stdout.flush()
        # Peers that wait for this rank hear of it by its end.
        os._exit(1)
    if dist.get_rank() == 0:
        print(f"verified: {verdict}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def tiny_config(**changes: Any) -> Any:
    """A Mixtral of bytes, 256 of them and an end: 2 layers, 8 experts, 2 for each token, hidden size 64."""
    from transformers import MixtralConfig

    return MixtralConfig(
        **{
            "vocab_size": 257,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 256,
            "pad_token_id": 256,
            **changes,
        }
    )
