"""Values that are rounded or quantised, bit for bit as the CPU kernels do it (op_kernel/cpu/quantize.h has the definition).

Example, int8: the row {2, -1, 0.5, 0} has amax 2 and scale 2 / 127 = 0.015748; divided by it {127, -63.5, 31.75, 0}, so q
= {127, -64, 32, 0} (63.5 is a tie and goes to even). fp8_e4m3: scale 2 / 448 = 0.0044643, divided {448, -224, 112, 0}, so
the bytes {0x7e, 0xf6, 0x6e, 0x00}.
"""

import triton
import triton.language as tl


@triton.jit
def narrow(value, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """``value`` rounded to DTYPE once, to nearest even.

    ROUND: True where a cast from float32 to bfloat16 truncates (the interpreter); then it is made of the bits.
    """
    if ROUND and DTYPE == tl.bfloat16:
        value = value.to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # The carry could run over a NaN's bits.
        return tl.where(value == value, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def widen(value, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """``value`` in a wider type, exactly. ROUND: by its bits, where a cast from bfloat16 loses subnormals (the interpreter)."""
    if ROUND and value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return value.to(DTYPE)


@triton.jit
def quotient(a, b, GPU: tl.constexpr):
    """a / b, rounded to nearest: on GPUs ``/`` is an approximation."""
    if GPU:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def magnitude(value):
    """The bits of |value| of float32; they order like magnitudes, and anything from 0x7f800000 on is infinite or NaN."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def divisor_of(amax_bits, LARGEST: tl.constexpr, GPU: tl.constexpr):
    """The scale of parts whose largest magnitude has these bits, 0 where q is 0; and the bits of the scale that travels."""
    broken = amax_bits >= 0x7F800000
    amax = tl.where(broken, 0, amax_bits).to(tl.float32, bitcast=True)
    divisor = quotient(amax, amax * 0 + LARGEST, GPU)
    scale_bits = tl.where(broken, 0x7FC00000, divisor.to(tl.int32, bitcast=True))
    return divisor, scale_bits


@triton.jit
def encode_int8(value, divisor, GPU: tl.constexpr):
    """q in -127..127: nearest, ties to even. 0 where the divisor is 0."""
    ratio = quotient(value, tl.where(divisor == 0, 1.0, divisor), GPU)
    ratio = tl.minimum(tl.maximum(ratio, -127.0), 127.0)
    # Floats around 1.5 * 2^23 are the integers, so the addition rounds, and the sum's low byte is q in two's complement.
    q = ((ratio + 12582912.0).to(tl.int32, bitcast=True) << 24) >> 24
    return tl.where(divisor == 0, 0, q).to(tl.int8)


@triton.jit
def encode_fp8(value, divisor, GPU: tl.constexpr):
    """The bits of the nearest e4m3fn value, ties to even, as int8. 0 where the divisor is 0."""
    ratio = quotient(value, tl.where(divisor == 0, 1.0, divisor), GPU)
    signs = (ratio.to(tl.int32, bitcast=True) >> 24) & 0x80
    bits = tl.minimum(magnitude(ratio), 0x43E00000)
    # From 2^-6 on 20 of the mantissa's 23 bits go, ties to even, and the exponent's bias goes from 127 to 7.
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # Below are multiples of 2^-9, which is the distance of floats from 2^14 on, so the addition rounds.
    subnormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, normal) | signs
    return tl.where(divisor == 0, 0, code).to(tl.int8)
