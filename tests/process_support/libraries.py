"""Changes of the trainer in libraries, read from the libraries themselves."""

from __future__ import annotations

import sys
from typing import Any


def libraries() -> dict[str, Any]:
    """Return the tables and attributes of libraries: thing -> value."""
    import deepspeed.ops
    import deepspeed.runtime.compiler
    import torch
    from huggingface_hub import constants
    from torch.distributed.tensor import DTensor
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    from transformers.loss.loss_utils import LOSS_MAPPING

    tables = {each.__name__: each._global_mapping for each in (AttentionInterface, AttentionMaskInterface)}
    tables |= {"styles": ALL_PARALLEL_STYLES._global_mapping, "losses": LOSS_MAPPING}
    tables |= {"operators": DTensor._op_dispatcher._custom_op_handlers}  # type: ignore[attr-defined]
    tables |= {"DeepSpeed's operators": deepspeed.ops.__compatible_ops__}
    owners: tuple[Any, ...] = (masking_utils, constants, deepspeed.runtime.compiler, PreTrainedModel)
    tables |= {each.__name__: vars(each) for each in owners}
    blocked = {name for name, module in sys.modules.items() if module is None}
    compiler = torch._dynamo.config.get_config_copy()
    return {**{name: dict(table) for name, table in tables.items()}, "blocked": blocked, "compiler": compiler}
