"""Everyday mistakes in job files, and the hints that say how to correct them: a field, its value, and the hint."""

from __future__ import annotations

from typing import Any

import pytest

from each_case import each_case
from finetune_operator.spec.checks.notices import notices, null_evaluation
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from mending import job_document, mend

CHAT = {"task": "text-generation", "model": {"uri": "hf://a/b"}}
SPOT = {"enabled": True}
HINTS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("mixed", {"training": {"precision": "mixed"}}, "training.precision",
     "write auto (bf16 on GPUs that have it, such as L4 and A100, and fp16 on older ones; to fix one, write bf16 or "
     "fp16)"),
    ("amp", {"training": {"amp": True}}, "training.amp", "set spec.training.precision to auto"),
    ("never two", {"concurrencyPolicy": "Forbid"}, "concurrencyPolicy",
     "leave it out: concurrencyPolicy belongs to a CronJob that creates the job and runs `finetune wait` until it "
     "ends"),
    ("Forbid", {"runPolicy": "Forbid"}, "runPolicy",
     "leave it out: concurrencyPolicy belongs to a CronJob that creates the job and runs `finetune wait` until it "
     "ends"),
    ("no evaluation", {"training": {"eval_strategy": "no"}}, "training.eval_strategy",
     "leave it out: validation is measured after each epoch"),
    ("off", {"evaluation": {"enabled": False}}, "evaluation.enabled", "leave spec.evaluation out"),
    ("server", {"endpoint": {"memory": "3Gi"}}, "endpoint.memory", "move it below spec.endpoint.resources"),
    ("minimum of nodes", {"resources": {"minNodes": 1}}, "resources.minNodes",
     "leave it out: spec.resources.nodes is one number, which is fixed in this version"),
    ("smoothed answers", {"task": "preference-tuning", "training": {"arguments": {"label_smoothing_factor": 0.1}}},
     "training.arguments.label_smoothing_factor",
     "leave it out: spec.training.labelSmoothing applies to text-classification, token-classification, "
     "text-generation, summarization, translation, masked-lm only"),
    ("steps", {"training": {"epochs": 2, "arguments": {"max_steps": 100}}}, "training.arguments.max_steps",
     "leave it out: spec.training.maxSteps cannot be combined with spec.training.epochs, which it replaces"),
    ("CSV", {"predict": {"format": "csv"}}, "predict.format", "write jsonl (predictions are JSON Lines or Parquet)"),
    ("TPU", {"resources": {"tpu": "v4-8"}}, "resources.tpu", "leave it out: TPUs are not supported"),
    ("AMD", {"resources": {"gpusPerNode": 1, "accelerator": "amd"}}, "resources.accelerator",
     "write {resource: amd.com/gpu}"),
    ("Secret", {"secrets": {"hf_token": {"name": "hf", "key": "t"}}}, "secrets.hf_token", "did you mean hubToken?"),
    ("drive", {"dataset": {"uri": "C:/data/rows.csv"}}, "dataset.uri",
     "write file:///mnt/c/data/rows.csv (for WSL, or another path of this machine)"),
    ("gates", {"evaluation": {"gate": [{"metric": "f1", "minimum": 0.8}, {"metric": "accuracy", "minimum": 0.8}]}},
     "evaluation.gate", "write one of its items, without the list: only one is supported"),
    ("rows", {"evaluation": {"dataset": {"split": "test"}}}, "evaluation.dataset",
     "leave it out: rows of spec.dataset.splits.test are evaluated, or of validation"),
    ("bits", {**CHAT, "model": {"uri": "hf://a/b", "quantize": "nf4"}}, "model.quantize",
     "set spec.model.adapter.method to qlora"),
    ("trained", {**CHAT, "model": {"uri": "hf://a/b", "adapter": "hf://a/lora"}}, "model.adapter",
     "leave it out: training cannot continue from an adapter; spec.model.uri is a whole model"),
    ("switch", {"parallelism": {"activationCheckpointing": "enabled"}}, "parallelism.activationCheckpointing",
     "write full"),
    ("stage", {"parallelism": "zero3"}, "parallelism", "write {strategy: deepspeed, zeroStage: 3}"),
    ("DeepSpeed", {"parallelism": {"deepspeed": "zero2"}}, "parallelism.deepspeed",
     "set spec.parallelism.strategy to deepspeed and spec.parallelism.zeroStage to 2"),
    ("ranks", {"parallelism": {"data": 4}}, "parallelism.data",
     "leave it out: all processes that tensor, pipeline and sequence leave are data-parallel ranks"),
    ("sampling", {**CHAT, "generation": {"do_sample": True, "temperature": 0.7}}, "generation.do_sample",
     "leave it out: tokens are sampled if spec.generation.temperature is above 0"),
    ("serving", {"serving": {"replicas": 2}}, "serving", "did you mean endpoint?"),
    ("engine", {"endpoint": {"runtime": "vllm"}}, "endpoint.runtime",
     "set spec.endpoint.runtime to auto and spec.endpoint.optimization to vllm"),
    ("GPU", {"endpoint": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "endpoint.resources.limits",
     "set spec.resources.gpusPerNode to 1"),
    ("workbook", {"dataset": {"uri": "file://a.xlsx"}}, "dataset.uri",
     "save the rows as .csv (UTF-8), .jsonl or .parquet, and name that file; in Python: import pandas; "
     'pandas.read_excel("a.xlsx").to_csv("a.csv", index=False)'),
    ("archive", {"dataset": {"uri": "file://in/rows.tar.gz"}}, "dataset.uri",
     'unpack it in Python: import shutil; shutil.unpack_archive("rows.tar.gz", "data"), and name what it holds'),
    ("taken", {"training": {"num_train_epochs": 3, "epochs": 5}}, "training.num_train_epochs",
     "leave it out: spec.training.epochs is already 5; or replace that value"),
    ("last", {"checkpoints": {"keep": "last 3"}}, "checkpoints.keep", "write 3"),
    ("false", {"checkpoints": False}, "checkpoints", "leave it out"),
    ("column", {"dataset": {"uri": "hf://c/d", "columns": {"image": "image"}}}, "dataset.columns.image",
     "leave it out: text-classification reads text, textPair, label"),
    # Hints that once led to another job than was meant: other rows, other settings of the same name.
    ("claim of data", {"dataset": {"persistentVolumeClaim": {"claimName": "tickets", "subPath": "latest"}}},
     "dataset.persistentVolumeClaim", "set spec.dataset.uri to pvc://tickets/latest"),
    ("servers", {"serve": {"replicas": 2, "engine": "vllm"}}, "serve",
     "set spec.endpoint.replicas to 2 (not translated: engine)"),
    ("elastic", {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4}}, "elasticPolicy",
     "leave it out: elastic training is not supported in this version, and spec.resources.nodes is one number"),
    ("names of classes", {"model": {"uri": "hf://a/b", "id2label": {"0": "no", "1": "yes"}}}, "model.id2label",
     'set spec.dataset.labels to {"0": "no", "1": "yes"}'),
    ("prompts", {"task": "preference-tuning", "training": {"max_prompt_length": 512}}, "training.max_prompt_length",
     "leave it out: spec.preparation.maxLength limits prompt and answer together"),
    ("rows of evaluation", {"evaluation": {"split": "test"}}, "evaluation.split",
     "set spec.dataset.splits.test to test"),
    ("rows to predict", {"predict": {"dataset": {"uri": "hf://c/d", "split": "unseen"}}}, "predict.dataset.split",
     "set spec.predict.dataset.splits.test to unseen"),
    ("address", {"dataset": {"uri": "file://rows", "data_files": {"train": "a.csv", "test": "b.csv"}}},
     "dataset.data_files", "set spec.dataset.splits.train to a and spec.dataset.splits.test to b"),
    ("tokens of servers", {"model": {"uri": "hf://a/b", "token": {"secretKeyRef": {"name": "hf", "key": "t"}}}},
     "model.token", "set spec.secrets.hubToken.name (the name of a Secret that holds the token; on your machine set "
     "HF_TOKEN)"),
    ("memory of a GPU", {"resources": {"gpu": {"type": "L4", "memory": "24Gi"}}}, "resources.gpu",
     "set spec.resources.accelerator.product to L4 and spec.resources.accelerator.memory to 24Gi"),
    ("4 bits beside lora", {**CHAT, "model": {"uri": "hf://a/b", "adapter": {"method": "lora"}, "load_in_4bit": True}},
     "model.load_in_4bit", "set spec.model.adapter.method to qlora"),
    ("modules in words", {**CHAT, "model": {"uri": "hf://a/b", "adapter": {"method": "lora",
     "targetModules": "q_proj v_proj"}}}, "model.adapter.targetModules", "write [q_proj, v_proj]"),
    ("size without a unit", {"resources": {"ram": 16}}, "resources.ram", "set spec.resources.memory to 16Gi"),
)  # fmt: skip
"""Name of the case, fields of the spec, field of the message, and its hint."""


@each_case(("spec", "field", "hint"), [row[1:] for row in HINTS], ids=[row[0] for row in HINTS])
def test_everyday_mistake_gets_its_hint(spec: dict[str, Any], field: str, hint: str) -> None:
    _, problems = validate_job(job_document(spec), LOCAL_SETTINGS)
    assert hint in [problem.hint for problem in problems if problem.path == f"spec.{field}"]


def test_fields_beside_kind_are_not_reported_as_missing_in_spec() -> None:
    document = job_document({"evaluation": {}})
    document |= {name: document["spec"].pop(name) for name in ("task", "model", "dataset")}
    _, problems = validate_job(document, LOCAL_SETTINGS)
    assert [problem.hint for problem in problems] == ["move it below spec"] * 3
    mended, _ = mend(document, problems, {})
    assert validate_job(mended, LOCAL_SETTINGS)[1] == []


def test_path_in_a_mounted_claim_is_answered_with_its_uri() -> None:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "team-data"}}]
    mounts = [{"name": "data", "mountPath": "/mnt/data"}]
    spec = {"dataset": {"uri": "/mnt/data/reviews"}, "template": {"volumes": volumes, "volumeMounts": mounts}}
    _, (problem,) = validate_job(job_document(spec), LOCAL_SETTINGS)
    assert problem.hint.startswith("write pvc://team-data/reviews (")


@pytest.mark.parametrize("settings", [LOCAL_SETTINGS, CLUSTER_SETTINGS], ids=["local", "cluster"])
def test_file_in_a_mounted_volume_is_answered_with_its_claim(settings: Settings) -> None:
    """In one round, wherever the volumes stand: pods read claims by their own URI, and mount them themselves."""
    volumes: Any = [{"name": "data", "persistentVolumeClaim": {"claimName": "team-data"}}]
    mounts: Any = [{"name": "data", "mountPath": "/data", "subPath": "2026"}]
    pods = {"volumes": volumes, "volumeMounts": mounts}
    data = {"dataset": {"uri": "file:///data/rows"}}
    found = {problem.path: problem.hint for problem in validate_job(job_document({**data, **pods}), settings)[1]}
    claim = "write pvc://team-data/2026/rows (the claim and the path in it: pods mount it themselves)"
    pod = "move it below spec.template"
    assert found == {"spec.dataset.uri": claim, "spec.volumes": pod, "spec.volumeMounts": pod}
    _, (problem,) = validate_job(job_document({**data, "template": pods}), settings)
    assert (problem.path, problem.hint) == ("spec.dataset.uri", claim)
    elsewhere = {"dataset": {"uri": "file:///rows"}, "template": pods}
    assert validate_job(job_document(elsewhere), LOCAL_SETTINGS)[1] == []


def test_evaluation_that_is_null_is_reported_as_its_default() -> None:
    document = job_document({"evaluation": {}})
    assert list(null_evaluation(document)) == []
    document["spec"]["evaluation"] = None
    (sentence,) = null_evaluation(document)
    assert sentence.startswith("spec.evaluation: null takes its defaults")
    document["spec"]["training"] = {"script": {"entryPoint": "a.py"}}
    assert list(null_evaluation(document)) == []


def test_memory_that_servers_do_not_take_is_reported() -> None:
    serves = {"training": None, "dataset": None, "endpoint": {}, "resources": {"cpu": 2, "memory": "3Gi"}}
    job, _ = validate_job(job_document(serves), CLUSTER_SETTINGS)
    assert job is not None
    assert [sentence.partition(" has no effect on servers")[0] for sentence in notices(job.spec)] == [
        "spec.resources.cpu", "spec.resources.memory",
    ]  # fmt: skip
    for size in ("512Mi", "1Gi"):
        job, _ = validate_job(job_document(serves | {"endpoint": {"resources": {"cpu": 2, "memory": size}}}))
        assert job is not None
        (sentence,) = notices(job.spec)
        assert sentence.startswith(f"spec.endpoint.resources.memory: {size} is less than a server takes")
