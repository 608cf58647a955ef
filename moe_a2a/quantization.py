"""Rows in one byte a value: quantise and dequantise on this rank, without communication."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from . import _ops  # noqa: F401  registers the operators
from .errors import BadType, BadValue
from .op_host import native
from .op_host.quant import QUANT_BLOCK, QUANT_DTYPES, scales_shape

_quantize_rows = torch.ops.moe_a2a.quantize_rows.default


def quantize_rows(x: Tensor, quantize: str) -> tuple[Tensor, Tensor]:
    """Rows as int8 with one scale a row, or as fp8 (e4m3fn) with one scale per 128 columns. Local: no communication.

    The scale is ``max |x| / 127`` (int8) or ``max |x| / 448`` (fp8_e4m3), q the nearest value to ``x / scale``, ties to even.
    All arithmetic is float32, and float64 is rounded to float32 first. The same bits on every CPU.

    * NaN or Inf: the scale is NaN and q is 0, so the row (int8) or the 128 columns (fp8_e4m3) dequantise to NaN everywhere.
      A float64 value beyond float32 counts as Inf.
    * Zeros, or values so small that the scale rounds to 0: scale and q are 0.
    * A scale below 2**-126 (``max |x|`` below 1.5e-36 or 5.3e-36) is subnormal. With ``torch.set_flush_denormal(True)`` it
      counts as zero, and so does a subnormal float32 in x; everything else has the same bits as without.

    Accuracy of ``dequantize_rows(q, scales)`` against x, for float32, bfloat16 and float16 alike, and float64 after its
    rounding to float32 (relative 2**-24):

    * int8: ``|error| <= scale / 2``, plus float32 rounding of the scale, the quotient and the product: ``2**-22 * |x|``.
    * fp8_e4m3: ``|error| <= 2**-4 * |x|`` where ``|x| >= 2**-6 * scale`` (normal), ``scale * 2**-10`` below (subnormal), plus
      ``2**-22 * |x|`` as above.
    * Where the scale or the result is subnormal, or 0: another 127 (int8) or 448 (fp8_e4m3) times 2**-150, at most 3.2e-43.
    * A float32 row whose ``max |x|`` is the largest float32 itself: in int8 the scale rounds up, and that value dequantises to
      Inf.
    * A result in bfloat16 or float16 is rounded once more: relative 2**-8 or 2**-11, half of the distance of its values.

    Args:
        x: [T, H] float32, bfloat16, float16 or float64, H >= 1, any strides; copied once if its columns don't lie side by side.
        quantize: "int8" or "fp8_e4m3".

    Returns:
        q: [T, H] torch.int8, in -127..127, or torch.float8_e4m3fn.
        scales: float32, [T] for int8, [T, ceil(H / 128)] for fp8_e4m3.

    Raises:
        BadType: x isn't a float tensor on the CPU, or quantize isn't a string. BadValue: wrong shape, or a format that
        doesn't exist. RuntimeError: a gradient is asked for, in the backward pass.

    >>> q, scales = quantize_rows(torch.tensor([[2.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]), "int8")
    >>> q.tolist(), (scales * 127).tolist()
    ([[127, -64, 32, 0], [0, 0, 0, 0]], [2.0, 0.0])
    >>> q, scales = quantize_rows(torch.ones(3, 300), "fp8_e4m3")
    >>> q.dtype, q[2, 299].item(), scales.shape
    (torch.float8_e4m3fn, 448.0, torch.Size([3, 3]))
    """
    try:
        return _quantize_rows(x, quantize)  # type: ignore[no-any-return]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        kind = str(error)
        if not isinstance(x, Tensor):
            kind = f"x is a {type(x).__name__}"
        elif not isinstance(quantize, str):
            kind = f"quantize is a {type(quantize).__name__}"
        native.raise_failure(
            error,
            f"moe_a2a.quantize_rows: {kind}; expected a float torch.Tensor [T, H] on cpu and "
            'quantize = "int8" or "fp8_e4m3"',
        )


def dequantize_rows(q: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``float32(q) * scale``, rounded to ``dtype``; the inverse of :func:`quantize_rows`. Plain torch, any device.

    Args:
        q: [T, H] torch.int8 or torch.float8_e4m3fn.
        scales: float32, [T] for int8, [T, ceil(H / 128)] for fp8_e4m3.
        dtype: of the result; a float dtype.

    Returns:
        [T, H] in ``dtype``; NaN where the scale is NaN.

    Raises:
        BadType: q, scales or dtype of another type. BadValue: shapes that don't go together.

    >>> dequantize_rows(torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([0.5]))
    tensor([[ 63.5000, -32.0000]])
    """
    where = "moe_a2a.dequantize_rows"
    for name, value in (("q", q), ("scales", scales)):
        if not isinstance(value, Tensor):
            raise BadType(f"{where}: {name} is a {type(value).__name__}; expected a torch.Tensor")
    quantize = next((name for name, kind in QUANT_DTYPES.items() if kind == q.dtype), None)
    if quantize is None:
        raise BadType(f"{where}: q has dtype {q.dtype}; expected torch.int8 or torch.float8_e4m3fn")
    if scales.dtype != torch.float32:
        raise BadType(f"{where}: scales has dtype {scales.dtype}; expected torch.float32")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BadType(f"{where}: dtype = {dtype}; expected a float dtype such as torch.float32")
    if q.dim() != 2:
        raise BadValue(f"{where}: q has shape {list(q.shape)}; expected [T, H]")
    expected = scales_shape(quantize, *q.shape)
    if tuple(scales.shape) != expected:
        raise BadValue(
            f"{where}: scales has shape {list(scales.shape)}; expected {list(expected)} for {quantize} rows "
            f"{list(q.shape)}"
        )
    if quantize == "int8":
        scales_TH = rearrange(scales, "t -> t 1")
    else:
        scales_TH = repeat(scales, "t b -> t (b n)", n=QUANT_BLOCK)[:, : q.shape[1]]
    return (q.float() * scales_TH).to(dtype)
