"""Tensor parallelism for GPT-2, for which transformers has no plan: its layers are Conv1D, not Linear.

A Conv1D keeps its weight as (inputs, outputs), and one of them computes queries, keys and values in one product. The
division follows Shoeybi et al., "Megatron-LM" (2019), section 3: heads and the width of the feed-forward layer are
split, so that a layer does two all-reduces forward and two backward. The styles are registered with transformers, which
applies them as its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from finetune_trainer.core.library_patches import conv1d_styles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_QUERY_KEY_VALUE = 3
"""Matrices side by side in the weight of `c_attn`."""
_LAYER_PLAN = {
    "attn": "conv1d_heads",
    "attn.c_attn": "packed_colwise_conv1d",
    "attn.c_proj": "rowwise_conv1d",
    "mlp.c_fc": "colwise_conv1d",
    "mlp.c_proj": "rowwise_conv1d",
}
FAMILIES = ("gpt2",)
"""Values of a config's `model_type` that have a plan here."""


def conv1d_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the module of `model` (layers as `*`) -> style, for a family of `FAMILIES`; empty for others."""
    if model.config.model_type not in FAMILIES:
        return {}
    conv1d_styles.until_end(_styles())
    body = model.base_model_prefix
    plan = {f"{body}.h.*.{name}": style for name, style in _LAYER_PLAN.items()}
    plan[f"{body}.wte"] = "embedding_rowwise"
    if model.get_output_embeddings() is not None:  # type: ignore[no-untyped-call]
        plan["lm_head"] = "colwise_gather_output"
    return plan


def widths(model: PreTrainedModel) -> dict[str, int]:
    """Return the widths that the degree has to divide beside the heads: field of the config -> value."""
    inner = getattr(model.config, "n_inner", None)
    return {"n_inner": inner} if model.config.model_type in FAMILIES and inner is not None else {}


@cache
def _styles() -> Mapping[str, object]:
    """Return the styles by name."""
    from finetune_trainer.strategies.parallel.conv1d_styles import Columns, Heads, Rows

    return {
        "conv1d_heads": Heads(),
        "packed_colwise_conv1d": Columns(packed=_QUERY_KEY_VALUE),
        "colwise_conv1d": Columns(),
        "rowwise_conv1d": Rows(),
    }
