"""The implementation of expert parallelism "moe_a2a" of transformers 5.23 and newer; registered when imported.

Shape symbols: T tokens of a rank, H hidden, K top-k.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from .experts import AT_LOAD, LAYER, ExpertLayer, read_recipe, shared_windows


class MoeA2AExperts(EPImplementation):  # type: ignore[misc]  # without transformers' types it is Any
    """What ``ep_implementation="moe_a2a"`` puts in front of each layer's experts: one exchange, the experts in its middle."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        num_experts = self.num_local_experts * ep_mesh.size()
        windows = shared_windows(experts.config, ep_mesh.get_group(), num_experts)
        self.layer = ExpertLayer(read_recipe(experts), windows, windows.tag(), tp_mesh, AT_LOAD)
        setattr(experts, LAYER, self.layer)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] for this rank's tokens [T, H], global expert ids [T, K] and weights [T, K]. Collective."""
        return self.layer(self.experts, self.experts_forward, hidden_states, top_k_index, top_k_weights)


EPImplementationInterface.register("moe_a2a", MoeA2AExperts)
