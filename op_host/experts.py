"""What the experts of a fused call are, as one number that operators carry."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "clamped",
)  # enum Activation of op_kernel/cpu/activation.h


@dataclass(frozen=True)
class Spec:
    """How experts compute, and how their parameters are laid out.

    >>> Spec("silu").code, Spec("relu2", gated=False, transposed=True).code
    (256, 516)
    """

    activation: str = "silu"
    gated: bool = True  # the first product has a gate and an up for each inner column
    transposed: bool = False  # parameters are [E_local, in, out], not [E_local, out, in]
    interleaved: bool = False  # gate and up alternate, instead of standing side by side

    @property
    def code(self) -> int:
        """For operators: the activation's number, and a bit for each of the others."""
        number = ACTIVATIONS.index(self.activation)
        return number | self.gated << 8 | self.transposed << 9 | self.interleaved << 10

    @classmethod
    def of(cls, code: int) -> Spec:
        return cls(ACTIVATIONS[code & 255], bool(code & 256), bool(code & 512), bool(code & 1024))
