"""moe_a2a: Mixture-of-Experts dispatch and combine for PyTorch, over shared windows with payload and epoch flags.

Shape symbols, here and everywhere in the package: T tokens of a rank, H hidden size, E experts, K top-k, R ranks, N received
rows.
"""

from importlib.util import find_spec
from typing import NoReturn

if (
    find_spec("torch") is None
):  # then only what needs none works: moe_a2a.ascend_lint, in the environment of its compiler

    def __getattr__(name: str) -> NoReturn:
        if name in __all__:
            raise ImportError(f"moe_a2a.{name} needs torch, which isn't installed; see README.md")
        raise AttributeError(f"module 'moe_a2a' has no attribute {name!r}")  # then a submodule is imported

else:
    from . import errors
    from .exchange import Dispatched, Handle, combine, dispatch
    from .group import EPGroup, SizeHint
    from .layer import MoE, Router, load_balancing_loss
    from .moe import moe, moe_apply
    from .quantization import dequantize_rows, quantize_rows
    from .routing import send_counts

__version__ = "0.1.0"

__all__ = [
    "Dispatched",
    "EPGroup",
    "Handle",
    "MoE",
    "Router",
    "SizeHint",
    "__version__",
    "combine",
    "dequantize_rows",
    "dispatch",
    "errors",
    "load_balancing_loss",
    "moe",
    "moe_apply",
    "quantize_rows",
    "send_counts",
]
