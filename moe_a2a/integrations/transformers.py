"""Registers "moe_a2a" with transformers when imported: one argument at load then spreads a model's experts over ranks.

* 5.23 and newer: ``from_pretrained(..., distributed_config=DistributedConfig(ep_size=R, ..., ep_implementation="moe_a2a"))``.
  Each rank loads its own experts only.
* 5.0 to 5.22: ``from_pretrained(..., experts_implementation="moe_a2a")``. Each rank loads all experts, and the first forward
  lets go of the others.

:func:`moe_a2a.convert` needs neither.
"""

from __future__ import annotations

import importlib.util

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
if importlib.util.find_spec("transformers.distributed.expert_parallel"):
    from . import ep_implementation as ep_implementation
else:
    from . import experts_function as experts_function
