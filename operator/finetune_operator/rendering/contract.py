"""What a plan hands to the trainer: the texts of job.json and deepspeed.json, as files or as a ConfigMap.

Equal plans give equal bytes, so that the hash of the texts tells whether a running attempt still obeys the current
plan.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import JsonValue

from finetune_operator.planning.names import JobNames
from finetune_operator.planning.types import JobPlan
from finetune_operator.rendering.deepspeed import deepspeed_config

JOB_FILE = "job.json"
DEEPSPEED_FILE = "deepspeed.json"


def files(plan: JobPlan) -> dict[str, str]:
    """File name -> text; `deepspeed.json` only when the plan trains with DeepSpeed."""
    texts = {JOB_FILE: plan.trainer.to_json()}
    config = deepspeed_config(plan)
    if config is not None:
        texts[DEEPSPEED_FILE] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return texts


def fingerprint(texts: dict[str, str]) -> str:
    """sha256 over names and texts in the order of the names, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}\0{len(texts[name].encode())}\0{texts[name]}".encode())
    return digest.hexdigest()


def config_map(plan: JobPlan, namespace: str) -> dict[str, JsonValue]:
    """The ConfigMap that the training's pods mount."""
    data: dict[str, JsonValue] = {**files(plan)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": JobNames.of(plan.name).config_map,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "finetune-operator", "finetune.dev/job": plan.name},
        },
        "data": data,
    }
