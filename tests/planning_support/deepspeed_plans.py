"""Plans of a small encoder with DeepSpeed."""

from __future__ import annotations

import json
from typing import Any

from finetune_contract.facts import DataFacts, HardwareFacts, SplitFacts
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJob

MODEL = model_facts(
    {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    }
)
DATA = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=640, tokens=640 * 20, longest=32)}, max_length=64)
CPU = HardwareFacts(cpu_cores=2, memory_bytes=16 << 30)


def planned(parallelism: dict[str, Any], hardware: HardwareFacts = CPU, **training: Any) -> JobPlan:
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "reviews"},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "hf://org/model"},
            "dataset": {"uri": "hf://org/data"},
            "training": {"globalBatchSize": 64, "maxGradNorm": 0.5, **training},
            "parallelism": parallelism,
            "resources": {"gpusPerNode": hardware.gpus_per_node},
        },
    }
    job = FineTuneJob.model_validate_json(json.dumps(document))
    return plan(job, Facts(model=MODEL, data=DATA, hardware=hardware), CLUSTER_SETTINGS)
