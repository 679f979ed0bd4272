"""Values of the wrong form as beginners write them, each with its hint."""

from __future__ import annotations

from typing import Any

import pytest

from each_case import each_case
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.hints.mounted_claims import on_claim
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from mending import job_document

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a share in per cent": ({"training": {"warmupSteps": "10%"}}, "training.warmupSteps", "write 0.1"),
    "an adapter without a URI, which is not of the Hub": (
        {"training": None, "endpoint": {"adapters": [{"name": "a"}]}}, "endpoint.adapters[0].uri",
        "set it to a URI that begins with file:// or pvc://, e.g. pvc://claim/path",
    ),
    "thousands": ({"training": {"maxSteps": "2k"}}, "training.maxSteps", "write 2000"),
    "a minus sign of a word processor": (
        {"training": {"learningRate": "2e\u22125"}}, "training.learningRate", "write 2e-05",
    ),
    "quotes": ({"training": {"epochs": "3"}}, "training.epochs",
        "write 3 (without quotes)",
    ),
    "auto, where leaving out is the default": (
        {"training": {"epochs": "auto"}}, "training.epochs",
        "leave it out: the default applies",
    ),
    "hours for seconds": (
        {"spot": {"enabled": True, "maxRunSeconds": "8h"}}, "spot.maxRunSeconds", "write 28800",
    ),
    "an interval": ({"checkpoints": {"every": "30m"}}, "checkpoints.every", "write {minutes: 30}"),
    "less than there can be": ({"checkpoints": {"keep": 0}}, "checkpoints.keep",
        "write 1",
    ),
    "all": ({"checkpoints": {"keep": "all"}}, "checkpoints.keep", "write 1000"),
    "a block switched on": ({"spot": True}, "spot", "write {enabled: true}"),
    "a truth value in other words": (
        {"checkpoints": {"onPreemption": "always"}}, "checkpoints.onPreemption", "write true",
    ),
    "names in one text": (
        {"evaluation": {"metrics": "accuracy, f1"}}, "evaluation.metrics",
        "write [accuracy, f1]",
    ),
    "names by role": (
        {"predict": {"columns": {"id": "id", "text": "tweet"}}}, "predict.columns",
        "write [id, tweet]",
    ),
    "a metric for the block": ({"evaluation": "accuracy"}, "evaluation", "write {metrics: [accuracy]}"),
    "a word as a switch": ({"training": {"precision": {"bf16": True}}}, "training.precision",
        "write bf16",
    ),
    "a word with its settings": (
        {"training": {"scheduler": {"type": "cosine", "warmup": 0.03}}}, "training.scheduler",
        "set spec.training.warmupSteps to 0.03 and spec.training.scheduler to cosine",
    ),
    "a network by its wires": ({"resources": {"network": "infiniband"}}, "resources.network", "write rdma"),
    "several of what there is one": (
        {"dataset": [{"uri": "hf://a/b"}, {"uri": "hf://c/d"}]}, "dataset",
        "only one dataset is supported: write all rows, with the same column names, to one folder, and set "
        "spec.dataset.uri to file://FOLDER",
    ),
    "a share for a split": (
        {"dataset": {"uri": "hf://a/b", "splits": {"validation": 0.1}}}, "dataset.splits.validation",
        'set spec.dataset.splits.train to "train[:90%]" and spec.dataset.splits.validation to "train[90%:]"',
    ),
    "a number with its unit": ({"preparation": {"maxLength": "512 tokens"}}, "preparation.maxLength", "write 512"),
    "quotes of a word processor": ({"training": {"epochs": "\u201c3\u201d"}}, "training.epochs", "write 3"),
    "a comma behind a number": ({"training": {"epochs": "3,"}}, "training.epochs", "write 3"),
    "no number": ({"runPolicy": {"maxRestarts": "never"}}, "runPolicy.maxRestarts", "write 0"),
    "minus one for none": (
        {"training": {"epochs": 3, "maxSteps": -1}}, "training.maxSteps",
        "leave it out: the default applies",
    ),
    "a list of fields": (
        {"training": [{"epochs": 3}, {"seed": 1}]}, "training", "write its fields below it, without the dashes",
    ),
    "variables by name": (
        {"template": {"env": {"DEBUG": True}}}, "template.env",
        'write [{name: DEBUG, value: "true"}]',
    ),
    "modules with blanks": (
        {"model": {"uri": "hf://a/b", "adapter": {"method": "lora", "targetModules": "q_proj v_proj"}}},
        "model.adapter.targetModules",
        "write [q_proj, v_proj]",
    ),
    "a word for an object": ({"parallelism": "FSDP"}, "parallelism", "write {strategy: fsdp}"),
    "true for an object": ({"parallelism": {"strategy": "fsdp", "offload": True}}, "parallelism.offload",
        "write {optimizer: cpu}"),
    "a path of Windows": (
        {"dataset": {"uri": "C:\\rows\\a.csv"}}, "dataset.uri",
        "write file:///mnt/c/rows/a.csv (for WSL, or another path of this machine)",
    ),
    "a claim with one colon": ({"dataset": {"uri": "pvc:inputs/rows"}}, "dataset.uri", "write pvc://inputs/rows"),
    "a share of files for a split": (
        {"dataset": {"uri": "file://rows", "splits": {"validation": 0.1}}}, "dataset.splits.validation",
        "leave it out: 5 % of train are held out; for another fraction, write the rows to train.csv, validation.csv "
        "and test.csv of a folder that spec.dataset.uri names",
    ),
    "a period for an interval": ({"checkpoints": {"every": "every 2 hours"}}, "checkpoints.every",
        "write {minutes: 120}"),
    "a store of another cloud": ({"dataset": {"uri": "wasbs://raw/x/*.csv"}}, "dataset.uri",
        "copy the data, and write hf://ORG/NAME, file://PATH or pvc://CLAIM/PATH: wasbs:// is not supported in this "
        "version",
    ),
    "a claim without its scheme": (
        {"storage": {"workspace": "results"}}, "storage.workspace", "write pvc://results",
    ),
    "a misspelt scheme": ({"dataset": {"uri": "hf:/org/data"}}, "dataset.uri", "write hf://org/data"),
    "a store that is not read": (
        {"dataset": {"uri": "gcs://bucket/data"}}, "dataset.uri",
        "copy the data, and write hf://ORG/NAME, file://PATH or pvc://CLAIM/PATH: gcs:// is not supported in this "
        "version",
    ),
    "a store of this version's plans": (
        {"dataset": {"uri": "s3://bucket/rows"}}, "dataset.uri",
        "copy the data, and write hf://ORG/NAME, file://PATH or pvc://CLAIM/PATH",
    ),
    "a model in a store": (
        {"model": {"uri": "gs://bucket/model"}}, "model.uri",
        "copy the model, and write hf://ORG/NAME, file://PATH or pvc://CLAIM/PATH",
    ),
    "a registered model": (
        {"model": {"uri": "models:/reviews/1"}}, "model.uri",
        "copy the model, and write hf://ORG/NAME, file://PATH or pvc://CLAIM/PATH: models:// is not supported in this "
        "version",
    ),
    "a workspace of one machine": ({"storage": {"workspace": "./runs"}}, "storage.workspace",
        "write pvc://CLAIM/PATH: it is a path of one machine, which pods cannot write to"),
    "a folder in the home folder": ({"model": {"uri": "~/model"}}, "model.uri", "write file://~/model"),
    "two slashes": ({"model": {"uri": "hf://a//b"}}, "model.uri", "write hf://a/b"),
    "a slash at the begin": ({"dataset": {"uri": "hf:///a/b"}}, "dataset.uri", "write hf://a/b"),
    "the kind of a repository": ({"model": {"uri": "hf://models/a/b"}}, "model.uri", "write hf://a/b"),
    "a git address": ({"model": {"uri": "hf://a/b.git"}}, "model.uri", "write hf://a/b"),
    "a query": ({"model": {"uri": "hf://a/b?library=x"}}, "model.uri", "write hf://a/b"),
    "a number to learn": ({"task": "regression"}, "task",
        "write text-classification (fractions in the label column are numbers to learn)"),
    "precision of DeepSpeed": (
        {"parallelism": {"strategy": "deepspeed", "deepspeedConfig": {"bf16": {"enabled": True}}}},
        "parallelism.deepspeedConfig.bf16.enabled",
        "set spec.training.precision to bf16 (instead)",
    ),
    "no precision of DeepSpeed": (
        {"parallelism": {"strategy": "deepspeed", "deepspeedConfig": {"fp16": {"enabled": False}}}},
        "parallelism.deepspeedConfig.fp16.enabled",
        "leave it out: spec.training.precision auto decides it",
    ),
    "a configuration in the name": (
        {"dataset": {"uri": "hf://nyu-mll/glue/mnli"}}, "dataset.uri",
        "set spec.dataset.uri to hf://nyu-mll/glue and spec.dataset.config to mnli",
    ),
    "a revision in the name": (
        {"model": {"uri": "hf://org/model@93efa2f"}}, "model.uri",
        "set spec.model.uri to hf://org/model and spec.model.revision to 93efa2f",
    ),
    "a file of predictions that is no format": (
        {"predict": {"output": "file://out/predictions.csv"}}, "predict.output",
        "write file://out/predictions.jsonl, or the same with .parquet, or with / for a folder",
    ),
    "a short name of a metric": (
        {"evaluation": {"gate": {"metric": "acc", "minimum": 85}}}, "evaluation.gate.metric",
        "did you mean accuracy? text-classification has accuracy, f1, precision, recall, pearson, spearmanr, r2, mse, "
        "mae, loss",
    ),
    "a column by the name of another task": (
        {"dataset": {"uri": "hf://a/b", "columns": {"input": "message", "label": "kind"}}}, "dataset.columns.input",
        "did you mean text?",
    ),
    "parts of a foreign block": (
        {"parallelism": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
        "parallelism.zero_optimization",
        "set spec.parallelism.zeroStage to 2 and spec.parallelism.offload.optimizer to cpu",
    ),
}  # fmt: skip


def problems_of(spec: dict[str, Any]) -> dict[str, str]:
    document = job_document(spec)
    return {problem.path: problem.hint for problem in validate_job(document, LOCAL_SETTINGS)[1]}


@each_case("name", CASES)
def test_hint_names_the_intended_value(name: str) -> None:
    spec, path, hint = CASES[name]
    assert problems_of(spec).get(f"spec.{path}") == hint


def test_problems_behind_a_misspelt_field_are_reported_at_once() -> None:
    found = problems_of({"generation": {"top_p": 0.9}, "task": "text-generation"})
    assert found["spec.generation.top_p"] == "did you mean topP?"
    assert "spec.generation.topP" in found, "it has no effect without a temperature"


def test_problems_behind_a_quoted_number_are_reported_at_once() -> None:
    found = problems_of({"resources": {"gpusPerNode": "none", "accelerator": {"memory": "80Gi"}}})
    assert found["spec.resources.gpusPerNode"] == "write 0"
    assert "spec.resources.accelerator" in found, "there is no accelerator without GPUs"


BEHIND: dict[str, tuple[dict[str, Any], str]] = {
    "a duration": (
        {"spot": {"enabled": True, "maxRunSeconds": "8h", "maxWaitSeconds": 3600}}, "spec.spot.maxWaitSeconds",
    ),
    "a truth value": (
        {"spot": {"enabled": "yes"}, "checkpoints": {"resume": "never"}}, "spec.checkpoints.resume",
    ),
    "a block switched on": ({"spot": True, "checkpoints": {"resume": "never"}}, "spec.checkpoints.resume"),
    "a misspelt word": (
        {"parallelism": {"strategy": "FSPD"}, "training": {"precision": "fp16"}}, "spec.training.precision",
    ),
    "a misspelt task": (
        {"task": "Token_Classification", "dataset": {"uri": "hf://a/b", "columns": {"text": "t"}}},
        "spec.dataset.columns.text",
    ),
    "a list as text": ({"evaluation": {"metrics": "accuracy, bananas"}}, "spec.evaluation.metrics"),
    "an interval": (
        {
            "checkpoints": {"every": "30 min"},
            "training": {"script": {"git": {"url": "https://github.com/a/b"}, "entryPoint": "t.py"}},
        },
        "spec.checkpoints.every",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEHIND)
def test_problem_behind_a_value_of_wrong_form_is_reported_at_once(case: str) -> None:
    """Following the first message of the value uncovers no unreported problem."""
    spec, path = BEHIND[case]
    found = problems_of(spec)
    assert len(found) > 1 or "; it then " in found[path]
    assert path in found


def test_value_that_looks_like_a_credential_is_not_repeated() -> None:
    token = "hf_" + "a" * 34
    modules = problems_of({"model": {"uri": "hf://a/b", "lora_target_modules": [token]}})
    assert not any(token in hint for hint in modules.values())
    for metrics in (token, [token]):
        assert not any(token in hint for hint in problems_of({"evaluation": {"metrics": metrics}}).values())


@pytest.mark.parametrize("name", [[1], {"a": 1}, 3, None])
def test_volume_mount_with_an_odd_name_leads_to_no_claim(name: object) -> None:
    spec = {
        "volumes": [{"name": name}, 3, {"name": "d", "persistentVolumeClaim": 5}],
        "volumeMounts": [{"name": name, "mountPath": "/data"}, 3, {"name": "d", "mountPath": "/d", "subPath": {}}],
    }
    assert on_claim("file:///data/rows", spec) is None
    assert on_claim("file:///d/rows", spec) == "pvc://CLAIM/rows"
