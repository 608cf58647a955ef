"""Registers "moe_a2a" with transformers, as an implementation of expert parallelism, when imported.

Then ``from_pretrained(..., distributed_config=DistributedConfig(ep_size=R, ..., ep_implementation="moe_a2a"))`` loads a
model whose experts are this package's (transformers 5.23 or newer). With any other 5.x use :func:`moe_a2a.convert`.

Shape symbols: T tokens of a rank, H hidden, K top-k.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .experts import LAYER, ExpertLayer, Windows, read_recipe

NAME = "moe_a2a"
_HOW = "pip install 'moe_a2a[transformers]'"

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"moe_a2a.integrations.transformers: needs transformers 5, which isn't installed; run: {_HOW}"
    ) from error
if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"moe_a2a.integrations.transformers: needs transformers 5; this is {transformers.__version__}. Run: {_HOW}"
    )
try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ModuleNotFoundError as error:
    raise ImportError(
        f"moe_a2a.integrations.transformers: ep_implementation came with 5.23; this is {transformers.__version__}. "
        "Load the model and call moe_a2a.convert(model, process_group)"
    ) from error

# Windows of layers that have one configuration, ranks and number of experts, which are those of a model.
_shared: WeakValueDictionary[tuple[int, str, int], Windows] = WeakValueDictionary()


class MoeA2AExperts(EPImplementation):  # type: ignore[misc]  # without transformers' types it is Any
    """What ``ep_implementation="moe_a2a"`` puts in front of each layer's experts: one exchange, the experts in its middle."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        num_experts = self.num_local_experts * ep_mesh.size()
        key = (id(experts.config), ep_mesh.get_group().group_name, num_experts)
        windows = _shared.get(key)
        if windows is None:
            windows = _shared[key] = Windows(ep_mesh.get_group(), num_experts)
        self.layer = ExpertLayer(read_recipe(experts), windows, windows.tag(), tp_mesh, "at load")
        setattr(experts, LAYER, self.layer)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] for this rank's tokens [T, H], global expert ids [T, K] and weights [T, K]. Collective."""
        return self.layer(self.experts, self.experts_forward, hidden_states, top_k_index, top_k_weights)


EPImplementationInterface.register(NAME, MoeA2AExperts)
