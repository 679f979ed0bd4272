"""Inputs of plans in tests: the facts of an encoder, and a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from finetune_contract.choices import Task
from finetune_contract.facts import ModelFacts
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.spec.types import FineTuneJob


def encoder(h: int, layers: int, vocabulary: int = 30522) -> ModelFacts:
    """Return the facts of a BERT with hidden size `h`, for text classification."""
    config = {
        "model_type": "bert",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": h // 64 or 1,
        "intermediate_size": 4 * h,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }
    return model_facts(config, "text-classification")


BERT = encoder(768, 12)
"""BERT of base size."""


def llama_1b(task: Task, **config: Any) -> ModelFacts:
    """Return the facts of Llama 3.2 1B; `config`: further fields of its config."""
    shape = {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    }
    return model_facts({**shape, **config}, task)


def job(spec: Mapping[str, Any] | None = None, name: str = "job") -> FineTuneJob:
    """Return a text classification with nothing set; `spec`: its fields, where None removes one."""
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://org/model"},
        "dataset": {"uri": "hf://org/reviews"},
        "training": {},
        **(spec or {}),
    }
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {key: value for key, value in whole.items() if value is not None},
    }
    return FineTuneJob.model_validate_json(json.dumps(document))
