"""The quantised wire formats, by the name a caller gives; op_kernel/cpu/quantize.h says what they are.

Shape symbols: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from .layout import Quant

QUANT_CODES: dict[str, int] = {"int8": Quant.INT8, "fp8_e4m3": Quant.FP8_E4M3}
QUANT_NAMES: dict[int, str] = {code: name for name, code in QUANT_CODES.items()}
QUANT_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
QUANT_BLOCK = 128  # columns that share a scale in fp8_e4m3


def scales_shape(quantize: str, tokens: Any, hidden: Any) -> tuple[Any, ...]:
    """Shape of the scales of [T, H] rows; sizes may be symbols.

    >>> scales_shape("int8", 7, 300), scales_shape("fp8_e4m3", 7, 300)
    ((7,), (7, 3))
    """
    return (tokens,) if quantize == "int8" else (tokens, (hidden + QUANT_BLOCK - 1) // QUANT_BLOCK)
