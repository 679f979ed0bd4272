"""Notices about jobs that are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_operator.spec.checks.notices import RETIRED as NOTICED
from finetune_operator.spec.checks.notices import notices
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJobSpec
from planning_support.cases import job


def notices_of(uri: str = "hf://org/small", task: str = "text-generation", **model: Any) -> str:
    spec = {"task": task, "model": {"uri": uri, **model}, "dataset": {"uri": "hf://a/b"}, "training": {}}
    return "\n".join(notices(FineTuneJobSpec.model_validate_json(json.dumps(spec))))


def test_adapter_without_a_method_gets_a_notice() -> None:
    assert "spec.model.adapter has no method, so all weights are trained" in notices_of(adapter={"rank": 16})


@pytest.mark.parametrize("adapter", [{}, {"method": "none"}, {"method": "lora", "rank": 16}])
def test_adapter_with_a_method_or_no_fields_gets_no_notice(adapter: dict[str, Any]) -> None:
    assert notices_of(adapter=adapter) == ""


@pytest.mark.parametrize(
    "name", ["google-bert/bert-base-uncased", "microsoft/deberta-v3-base", "FacebookAI/roberta-large"]
)
def test_encoder_for_text_generation_gets_a_notice(name: str) -> None:
    assert f"hf://{name} looks like a bert model, which cannot generate text" in notices_of(f"hf://{name}")
    assert notices_of(f"hf://{name}", task="text-classification") == ""


@pytest.mark.parametrize("name", ["openai-community/gpt2", "patrickvonplaten/bert2bert_cnn_daily_mail"])
def test_generative_model_gets_no_notice(name: str) -> None:
    assert notices_of(f"hf://{name}", task="summarization") == ""


def trained(evaluation: dict[str, Any] | None, template: dict[str, Any] | None = None, **training: Any) -> str:
    spec = {"training": training, "template": template or {}, "evaluation": evaluation}
    return "\n".join(notices(job({name: value for name, value in spec.items() if value is not None}).spec))


@pytest.mark.parametrize("evaluation", [{"metrics": ["f1"]}, {"gate": {"metric": "f1", "minimum": 0.5}}])
def test_stopping_by_the_loss_beside_another_metric_gets_a_notice(evaluation: dict[str, Any]) -> None:
    found = trained(evaluation, earlyStopping={"patience": 2})
    assert found.startswith("spec.training.earlyStopping has no metric, so training stops by the loss; to stop by f1")
    assert trained(evaluation, earlyStopping={"patience": 2, "metric": "loss"}) == ""


def test_stopping_by_the_only_named_metric_gets_no_notice() -> None:
    assert trained({}, earlyStopping={"patience": 2}) == ""
    assert trained({"metrics": "auto"}, earlyStopping={"patience": 2}) == ""
    assert trained({"metrics": ["loss", "f1"]}, earlyStopping={"patience": 2}) == ""


@pytest.mark.parametrize("trackers", ["wandb", ["tensorboard", "wandb"]])
def test_tracker_that_writes_offline_gets_a_notice(trackers: str | list[str]) -> None:
    arguments = {"report_to": trackers}
    assert "wandb writes offline, to project finetune" in trained({}, arguments=arguments)
    online = {"env": [{"name": "WANDB_MODE", "value": "online"}]}
    assert trained({}, online, arguments=arguments) == ""
    assert trained({}, arguments={"report_to": "tensorboard"}) == ""


MLFLOW = [{"name": "A"}, {"name": "MLFLOW_TRACKING_URI", "value": "http://me:secret@mlflow.tracking.svc:5000/x"}]
CLOSED = (
    "spec.template.env[1].value (MLFLOW_TRACKING_URI): port 5000 of mlflow.tracking.svc is closed to the job's pods, "
    "and its connections would time out (open: 443); an administrator can add the host to networkPolicy.urlHosts"
)


@pytest.mark.parametrize(
    ("network", "noticed"),
    [
        ({}, True),
        ({"urlHosts": ["*.other.svc"]}, True),
        ({"extraEgress": [{"ports": [{"port": 5001}]}]}, True),
        ({"urlHosts": ["*.tracking.svc"]}, False),
        ({"egressPorts": [443, 5000]}, False),
        ({"extraEgress": [{"to": [{"podSelector": {}}], "ports": [{"port": 4000, "endPort": 6000}]}]}, False),
        ({"extraEgress": [{"to": [{"podSelector": {}}]}]}, False),
        ({"enabled": False}, False),
    ],
    ids=str,
)
def test_tracker_behind_a_closed_port_gets_a_notice(network: dict[str, Any], noticed: bool) -> None:
    settings = Settings.model_validate_json(json.dumps({"networkPolicy": network}))
    assert notices(job({"template": {"env": MLFLOW}}).spec, settings.network_policy) == (CLOSED,) * noticed


@pytest.mark.parametrize(
    "value",
    [
        "databricks",
        "https://mlflow.example.com",
        "http://localhost:5000",
        "http://127.0.0.1:5000",
        "http://a:99999",
        "://",
    ],
)
def test_url_that_pods_reach_or_no_url_gets_no_notice(value: str) -> None:
    assert notices(job({"template": {"env": [{"name": "ANY", "value": value}]}}).spec) == ()


def test_server_of_predictions_behind_a_closed_port_gets_a_notice() -> None:
    spec = {"task": "text-generation", "model": {"uri": "hf://org/small"}, "dataset": {"uri": "hf://a/b"}}
    predict = {"optimization": "vllm", "server": "http://vllm.team.svc:8000"}
    (found,) = notices(FineTuneJobSpec.model_validate_json(json.dumps({**spec, "predict": predict})))
    assert found.startswith("spec.predict.server: port 8000 of vllm.team.svc is closed to the job's pods")


SCRIPT: dict[str, Any] = {"git": {"url": "https://github.com/a/b"}, "entryPoint": "train.py"}


def test_metric_that_only_the_own_program_measures_gets_a_notice() -> None:
    evaluation = {"metrics": ["accuracy", "f1_macro"], "gate": {"metric": "f1_macro", "minimum": 70}}
    assert trained(evaluation, script=SCRIPT) == (
        "spec.evaluation: f1_macro is not a metric of text-classification, so the program has to measure it, and write "
        "it with Trainer.save_metrics"
    )
    assert trained({"metrics": ["accuracy"]}, script=SCRIPT) == ""


UNUSUAL: dict[str, tuple[dict[str, Any], str]] = {
    "many epochs": ({"training": {"epochs": 1000}}, "spec.training.epochs: 1,000 epochs are unusually many"),
    "a large batch": ({"training": {"globalBatchSize": 5000}}, "spec.training.globalBatchSize: 5,000 rows per step"),
    "a low rate": ({"training": {"learningRate": 2e-9}}, "spec.training.learningRate: 2e-09 is so low"),
    "a high rate": ({"training": {"learningRate": 2}}, "spec.training.learningRate: 2 is very high for adamw"),
    "strong decay": ({"training": {"weightDecay": 1}}, "spec.training.weightDecay: 1 is unusually high"),
    "a long warm-up": (
        {"training": {"maxSteps": 10, "warmupSteps": 100}},
        "spec.training.warmupSteps: 100 is as long as the run of 10",
    ),
    "a test split that is learnt": (
        {"dataset": {"uri": "hf://a/b", "splits": {"test": "train"}}},
        "spec.dataset.splits.test: train is also the train",
    ),
    "a fraction of 100": (
        {"task": "translation", "evaluation": {"gate": {"metric": "bleu", "minimum": 0.3}}},
        "spec.evaluation.gate.minimum: 0.3 is met by nearly every model, as bleu is 0 to 100; write 30 for 30%",
    ),
    "many cores": ({"resources": {"cpu": "1000"}}, "spec.resources.cpu: 1,000 cores per pod"),
    "a large rank": (
        {"model": {"uri": "hf://a/b", "adapter": {"method": "lora", "rank": 2048}}},
        "spec.model.adapter.rank: 2,048 is unusually large for an adapter",
    ),
    "the trained rows": (
        {"dataset": {"uri": "hf://a/b", "splits": {"validation": "train"}}},
        "spec.dataset.splits.validation: train is also the training split",
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_value_gets_one_notice(case: str) -> None:
    patch, sentence = UNUSUAL[case]
    found = notices(job(patch).spec)
    assert len(found) == 1
    assert found[0].startswith(sentence)


@pytest.mark.parametrize(
    "patch",
    [
        {"training": {"epochs": 100, "globalBatchSize": 4096, "weightDecay": 0.1, "learningRate": 1e-7}},
        {"resources": {"cpu": "192000m"}},
        {"dataset": {"uri": "hf://a/b", "splits": {"train": "train[:90%]", "validation": "train[90%:]"}}},
        {"model": {"uri": "hf://a/b", "adapter": {"method": "lora", "rank": 256}}},
    ],
    ids=json.dumps,
)
def test_usual_values_get_no_notice(patch: dict[str, Any]) -> None:
    assert notices(job(patch).spec) == ()


RETIRED = {
    "endpoint.takesOver": {"name": "films", "takesOver": "films"},
    "endpoint.traffic.canarySeconds": {"traffic": {"gateway": "public", "canarySeconds": 300}},
    "endpoint.traffic.maxErrorPercent": {"traffic": {"gateway": "public", "maxErrorPercent": 1}},
    "endpoint.traffic.maxLatencyRatio": {"traffic": {"gateway": "public", "maxLatencyRatio": 1.5}},
}


@pytest.mark.parametrize("field", sorted(RETIRED))
def test_retired_field_is_accepted_with_a_notice(field: str) -> None:
    spec = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "endpoint": RETIRED[field]}
    assert NOTICED.keys() == RETIRED.keys()
    (notice,) = notices(FineTuneJobSpec.model_validate_json(json.dumps(spec)))
    assert notice.startswith(f"spec.{field} is retired and has no effect: ")


def test_share_of_requests_without_a_gateway_gets_a_notice() -> None:
    spec = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "endpoint": {"traffic": {"canaryPercent": 5}}}
    (notice,) = notices(FineTuneJobSpec.model_validate_json(json.dumps(spec)))
    assert notice.startswith("spec.endpoint.traffic has no effect without its gateway")
