"""Attention over packed rows: whether each row of a pack is computed by itself, or all of them with a mask.

A mask has tokens x tokens elements, which each layer keeps for its backward pass, and with it attention computes the
scores that it hides. The planner counts by the same rule that the trainer follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_contract.arguments import compiles

PACKED_ROWS_FAMILIES = (
    "cohere",
    "gemma",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Values of a config's `model_type` whose attention transformers lets other code replace, and needs nothing of a mask
but which tokens a token sees: those before it in its row, or in a sliding window. A test compares each of them with a
mask (`tests/trainer/test_packed_attention.py`).
"""


def why_packs_have_masks(model_type: str, arguments: Mapping[str, object], *, pipeline: bool) -> str:
    """Return the reason why attention over packs needs a mask of tokens x tokens; empty: each row is computed by
    itself. `arguments`: `training.arguments`.
    """
    if model_type not in PACKED_ROWS_FAMILIES:
        return f"models of type {model_type} are not known to work without one"
    if compiles(arguments):
        return "torch.compile would compile again for each number of rows"
    if pipeline:
        return "the stages of a pipeline get masks"
    return ""
