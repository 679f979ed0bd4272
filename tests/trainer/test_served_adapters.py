"""Several LoRA adapters on one base model in one server, compared with peft's own answers of each by itself."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.serving.serving_engine import ServingEngine
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Served, served
from trainer_support.tasks import write_decoder

VOCABULARY = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "small", "grey", "dog", "run", "by", "it"]
TEXTS = [" ".join((VOCABULARY * 3)[at : at + 3 + 5 * at % 17]) for at in range(9)]
LABELS = ("bad", "so-so", "good")
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 32, "target_modules": ["query", "value"], "init_lora_weights": False}
KINDS: dict[str, dict[str, Any]] = {
    "same-labels": {"labels": 3},
    "more-labels": {"labels": 5, "target_modules": ["query", "key", "dense"]},
    "dora": {"labels": 3, "use_dora": True, "r": 2},
    "no-head": {"labels": 3, "task_type": None, "use_rslora": True},
}


def write_adapter(base: Path, folder: Path, seed: int = 1, labels: int = 3, **config: Any) -> Path:
    """Write a random adapter of a classifier, with its head unless it has no task type, by peft alone."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, ignore_mismatched_sizes=True)
    adapted = get_peft_model(model, LoraConfig(**{"task_type": "SEQ_CLS", **LORA, **config}))
    adapted.save_pretrained(str(folder))
    return folder


def job_of(model: Path, adapters: dict[str, Path], task: str = "text-classification", **changes: Any) -> TrainerJob:
    named = [{"name": name, "uri": f"file://{folder}"} for name, folder in adapters.items()]
    serving = {"model_name": "base", "device": "cpu", "max_batch_tokens": 512, "adapters": named, **changes}
    body = {"name": "job", "task": task, "model": {"uri": f"file://{model}"}, "serving": serving}
    return TrainerJob.model_validate({**body, "generation": {"max_new_tokens": 24}})


def probabilities(base: Path, folder: Path | None, labels: int) -> list[list[float]]:
    """Return the probabilities of each text by peft's own loading of one adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, ignore_mismatched_sizes=True)
    whole = model if folder is None else PeftModel.from_pretrained(model, str(folder))
    whole.eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        return [whole(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0].tolist() for text in TEXTS]


class Classifiers:
    """A base model with adapters, and the server of all of them."""

    def __init__(self, base: Path, folders: dict[str, Path], server: Served) -> None:
        self.base, self.folders, self.server = base, folders, server

    def scores(self, name: str, texts: list[str]) -> list[dict[str, float]]:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        reply = self.server.request(f"/v2/models/{name}/infer", {"inputs": [tensor]})
        assert reply.code == 200, reply.content
        assert reply.json["model_name"] == name
        outputs = {each["name"]: each["data"] for each in reply.json["outputs"]}
        return [dict(json.loads(each)) for each in outputs["scores"]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("base") / "m", words=VOCABULARY, labels=LABELS, initializer_range=0.5)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(base, place / name, seed=at, **kind) for at, (name, kind) in enumerate(KINDS.items(), 1)
    }


@pytest.fixture(scope="module")
def classifiers(
    base: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Classifiers]:
    with served(job_of(base, folders), JobPaths(tmp_path_factory.mktemp("w") / "job")) as server:
        yield Classifiers(base, folders, server)


def test_each_adapter_answers_as_peft_alone_under_mixed_load(classifiers: Classifiers) -> None:
    names = ["base", *KINDS]
    found: dict[tuple[str, int], list[float]] = {}

    def send(name: str, at: int) -> None:
        found[name, at] = list(classifiers.scores(name, TEXTS[at : at + 1])[0].values())

    senders = [threading.Thread(target=send, args=(name, at)) for at in range(len(TEXTS)) for name in names]
    for each in senders:
        each.start()
    for each in senders:
        each.join(patient(60))

    wanted = {name: probabilities(classifiers.base, classifiers.folders.get(name), labels_of(name)) for name in names}
    for (name, at), scores in found.items():
        assert scores == pytest.approx(wanted[name][at], abs=1e-5), (name, at)
    assert len(found) == len(names) * len(TEXTS)
    assert len({tuple(map(tuple, rows)) for rows in wanted.values()}) == len(names)


def labels_of(name: str) -> int:
    return int(KINDS.get(name, {"labels": 3})["labels"])


def test_batches_hold_rows_of_one_adapter(classifiers: Classifiers) -> None:
    engine, seen = classifiers.server.state.engine, []
    answer = engine.answer
    engine.answer = lambda form, rows, *given: (seen.append(form.model), answer(form, rows, *given))[1]  # type: ignore[method-assign]
    try:
        together = [classifiers.scores(name, TEXTS) for name in ("dora", "more-labels")]
    finally:
        engine.answer = answer  # type: ignore[method-assign]

    assert set(seen) == {"dora", "more-labels"}
    assert [len(rows) for rows in together] == [len(TEXTS)] * 2


def test_base_is_held_once(classifiers: Classifiers, base: Path) -> None:
    models = {id(each.answerer.model) for each in classifiers.server.state.engine.models.values()}
    model = classifiers.server.state.engine.answerer.model
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name or "modules_to_save" in name)
    plain = ServingEngine.load(job_of(base, {}), JobPaths(base / "job")).answerer.model

    assert len(models) == 1
    assert sum(p.numel() for p in model.parameters()) - adapters == sum(p.numel() for p in plain.parameters())


def test_metadata_names_labels_and_revision_of_each_model(classifiers: Classifiers) -> None:
    server = classifiers.server
    described = {name: server.request(f"/v2/models/{name}").json for name in ("base", *KINDS)}

    assert server.request("/v2/models").json == {"models": ["base", *KINDS]}
    assert described["same-labels"]["properties"]["labels"] == list(LABELS)
    assert described["more-labels"]["properties"]["labels"] == [f"LABEL_{at}" for at in range(5)]
    assert described["base"]["versions"] == ["r1"]
    assert len({each["versions"][0] for each in described.values()}) == len(described)
    html = server.request("/").content.decode()
    (of_page,) = re.findall(r'data-models="([^"]*)"', html)
    models = {each["name"]: each["labels"] for each in json.loads(unescape(of_page))}
    assert list(models) == ["base", *KINDS], "the page offers all models"
    assert models["same-labels"] == list(LABELS)


def test_unknown_model_is_answered_404_and_no_name_means_the_base(classifiers: Classifiers) -> None:
    server, body = classifiers.server, {"inputs": TEXTS[3]}

    refused = server.request("/models/other", body)

    assert (refused.code, "'base', 'same-labels'" in refused.json["error"]) == (404, True)
    assert server.request("/", body).json == server.request("/models/base", body).json
    assert server.request("/", body).json != server.request("/models/dora", body).json


def test_metrics_and_log_carry_the_model(classifiers: Classifiers, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    def logged() -> list[str | None]:
        """Return the models of the access log, whose line can follow the answer; other libraries log as well."""
        lines = [each.getMessage() for each in caplog.records if each.name == "finetune_trainer.access"]
        return [json.loads(line).get("model") for line in lines]

    with caplog.at_level(logging.INFO, logger="finetune_trainer.access"):
        assert classifiers.server.request("/models/dora", {"inputs": "a"}).code == 200
        wait_until(lambda: "dora" in logged(), "the request is in the log")

    text = classifiers.server.request("/metrics").content.decode()
    assert 'finetune_serving_requests_total{code="200",model="dora",path="/models/{name}"}' in text
    assert 'finetune_serving_tokens_total{model="dora"}' in text
    infos = [line for line in text.splitlines() if line.startswith("finetune_serving_model_info")]
    assert [line.split('model="')[1].split('"')[0] for line in infos] == ["base", *KINDS]


# ------------------------------------------------------------------------------------------------------------ refusals


def refusal(job: TrainerJob, tmp_path: Path) -> str:
    with pytest.raises(StageError) as error:
        ServingEngine.load(job, JobPaths(tmp_path / "job"))
    assert error.value.reason == "AdapterRefused"
    return error.value.message


def changed(folder: Path, place: Path, **settings: Any) -> Path:
    """Copy an adapter with other settings."""
    import shutil

    shutil.copytree(folder, place)
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return place


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"peft_type": "IA3"}, "its type is IA3"),
        ({"task_type": "CAUSAL_LM"}, "its task_type is CAUSAL_LM, and the server is for text-classification"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"r": 5}, "does not fit the base"),
        ({"target_modules": ["query", "value", "key"]}, "it lacks the weights base_model.model.bert.encoder.layer.0"),
        ({"modules_to_save": None}, "no place for its weights"),
    ],
)
def test_adapter_that_could_answer_wrongly_is_refused(
    settings: dict[str, Any], why: str, base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    spoiled = changed(folders["same-labels"], tmp_path / "a", **settings)

    assert why in refusal(job_of(base, {"fine": folders["dora"], "odd": spoiled}), tmp_path)


def test_adapter_without_head_is_refused_if_the_base_has_none(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    bare = tmp_path / "bare"
    AutoModel.from_pretrained(base).save_pretrained(bare)
    AutoTokenizer.from_pretrained(base).save_pretrained(bare)

    assert "classifier.bias, classifier.weight" in refusal(job_of(bare, {"a": folders["no-head"]}), tmp_path)
    engine = ServingEngine.load(job_of(bare, {"a": folders["more-labels"]}), JobPaths(tmp_path / "job"))
    assert (engine.names, len(engine.answerer.labels.names)) == (("a",), 5)


def test_adapter_of_another_task_or_base_is_refused(
    base: Path, folders: dict[str, Path], tmp_path: Path, tiny_bert: Callable[..., Path]
) -> None:
    from finetune_trainer.models.adapter_card import AdapterCard
    from finetune_trainer.models.adapters import head_modules
    from finetune_trainer.models.loading import weights_digest

    model = ServingEngine.load(job_of(base, {}), JobPaths(tmp_path / "plain")).answerer.model
    digest = weights_digest(model, without=head_modules(model))
    mine = changed(folders["same-labels"], tmp_path / "a")

    AdapterCard.of("token-classification", model, digest, rounded=False).write(mine)
    assert "trained for token-classification" in refusal(job_of(base, {"a": mine}), tmp_path)
    AdapterCard.of("text-classification", model, digest, rounded=False).write(mine)
    assert ServingEngine.load(job_of(base, {"a": mine}), JobPaths(tmp_path / "w")).names == ("base", "a")
    other = tiny_bert(tmp_path / "other", words=VOCABULARY, labels=LABELS, initializer_range=0.4)
    assert "other weights than the base has" in refusal(job_of(other, {"a": mine}), tmp_path)


def test_missing_files_are_named(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    mine = changed(folders["same-labels"], tmp_path / "a")
    (mine / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "cannot be read" in refusal(job_of(base, {"a": mine}), tmp_path)
    (mine / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refusal(job_of(base, {"a": mine}), tmp_path)


# ------------------------------------------------------------------------------------------------------- written texts


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classifiers]:
    """Two adapters of a decoder, and the server of them and their base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("writers")
    base = write_decoder(place / "base", words=VOCABULARY, initializer_range=0.3)
    folders = {}
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = LoraConfig(**{**LORA, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "up_proj"]})
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(place / name))
        folders[name] = place / name
    with served(job_of(base, folders, "text-generation"), JobPaths(place / "job")) as server:
        yield Classifiers(base, folders, server)


def plain_text(base: Path, folder: Path | None, prompt: str) -> str:
    """Return the text that peft writes by itself."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base)
    whole = model if folder is None else PeftModel.from_pretrained(model, str(folder))
    whole.eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = whole.generate(**given, max_new_tokens=24, do_sample=False)[0][given["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True))


def test_texts_of_concurrent_adapters_equal_those_of_each_alone(writers: Classifiers) -> None:
    names, prompt = ("base", "first", "second"), "the cat sat on"
    found: dict[str, str] = {}

    def send(name: str, stream: bool) -> None:
        body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": stream}
        reply = writers.server.request("/v1/completions", body)
        assert reply.code == 200, reply.content
        if not stream:
            found[name] = reply.json["choices"][0]["text"]
            return
        events = [json.loads(each[6:]) for each in reply.content.decode().split("\n\n") if each.startswith("data: {")]
        assert {each["model"] for each in events} == {name}
        found[f"{name} in pieces"] = "".join(each["choices"][0]["text"] for each in events)

    senders = [threading.Thread(target=send, args=(name, stream)) for name in names for stream in (False, True)]
    for each in senders:
        each.start()
    for each in senders:
        each.join(patient(60))

    wanted = {name: plain_text(writers.base, writers.folders.get(name), prompt).strip() for name in names}
    assert {name: text.strip() for name, text in found.items()} == {
        **wanted, **{f"{name} in pieces": text for name, text in wanted.items()}
    }  # fmt: skip
    assert len(set(wanted.values())) == 3


def test_openai_lists_all_models_and_refuses_others(writers: Classifiers) -> None:
    listed = writers.server.request("/v1/models").json["data"]
    refused = writers.server.request("/v1/completions", {"model": "third", "prompt": "a"})

    assert [each["id"] for each in listed] == ["base", "first", "second"]
    assert (refused.code, refused.json["error"]["param"], refused.json["error"]["code"]) == (404, "model", "not_found")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_name": "a"}, "must differ"),
        ({"optimization": "int8"}, "optimization is none with adapters"),
    ],
)
def test_contract_refuses_adapters_that_cannot_be_served(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        job_of(Path("/m"), {"a": Path("/a")}, **changes)
    with pytest.raises(ValueError, match="only with adapters"):
        job_of(Path("/m"), {}, serves_model=False)
