"""What planner and trainer agree on without asking each other: a number of the trainer that the planner counts with,
and which models can be split, found by looking at the installed transformers and our own plans (`make generate`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

AVERAGED_ELEMENTS = 25_000_000
"""Gradients that replicas of a spread model average in one message: few messages, and 100 MB of fp32 beside the
gradients.
"""

JUDGED_LOGITS = 1 << 25
"""Logits that are converted to float32 at a time when answers are judged, 128 MiB of them: some hundred tokens of a
large vocabulary, which keep a GPU busy.
"""

ASKED_LOGITS = 1 << 28
"""Logits that an evaluation asks a decoder for at a time, 512 MiB of them in bf16: those of a batch, but of a row that
has more those of some thousand tokens.
"""

PIPELINE_FAMILIES = ("bert", "gemma", "gpt2", "llama", "mistral", "qwen2", "roberta", "xlm-roberta")
"""Values of a config's `model_type` that are known to be cut into stages, whatever the task's head: `auto` takes a
pipeline for these alone. Others are looked at when they are to be cut.
"""


SEQUENCE_FAMILIES = ("gemma", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Values of a config's `model_type` whose rows are known to be cut into slices of tokens. Others are looked at when
theirs are to be cut.
"""


@cache
def tensor_families() -> tuple[str, ...]:
    """Values of a config's `model_type` whose models have a tensor-parallel plan and a class for one of the tasks."""
    text = (resources.files("finetune_contract") / "tensor_families.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))
