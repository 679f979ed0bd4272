"""The model server: each protocol and each task, compared with the answers of the stage predict."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient

from finetune_contract.layout import INFERENCE_PATHS
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Served
from trainer_support.served_models import ROWS, served_and_predicted


class Bench:
    """A server, and the predictions of the same rows."""

    def __init__(self, server: Served, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
        self.server, self.rows, self.expected = server, rows, expected


@pytest.fixture(scope="module", params=sorted(ROWS))
def bench(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Bench]:
    task = request.param
    with served_and_predicted(tmp_path_factory.mktemp(task), task, tiny_bert) as (server, expected):
        answers = [{name: value for name, value in row.items() if name in columns(task)} for row in expected]
        yield Bench(server, ROWS[task], answers)


def columns(task: str) -> set[str]:
    """Return the columns of the predictions that the model answers."""
    known = {
        "text-classification": {"label", "score", "scores"},
        "token-classification": {"tags", "scores", "entities"},
        "question-answering": {"answer", "score", "start", "end", "candidates"},
        "masked-lm": {"masks"},
    }
    return known.get(task, {"generated_text"})


def close(found: Any, wanted: Any) -> bool:
    """Return whether both are equal, numbers to within 1e-5."""
    if isinstance(wanted, dict):
        return set(found) == set(wanted) and all(close(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    return found == wanted if not isinstance(wanted, float) else abs(found - wanted) <= 1e-5


def test_open_inference_answers_equal_predict(bench: Bench) -> None:
    inputs = {
        role: [row[role] if isinstance(row[role], str) else json.dumps(row[role]) for row in bench.rows]
        for role in bench.rows[0]
    }

    reply = bench.server.infer(**inputs)

    assert reply.code == 200, reply.content
    outputs = {each["name"]: each for each in reply.json["outputs"]}
    for name in bench.expected[0]:
        values = outputs[name]["data"]
        for value, row in zip(values, bench.expected, strict=True):
            wanted = row[name]
            assert close(value if isinstance(wanted, (str, float)) else json.loads(value), wanted), name


@pytest.mark.parametrize("bench", ["text-classification"], indirect=True)
def test_open_inference_sends_the_requested_outputs_only(bench: Bench) -> None:
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["the cat"]}]

    def replied(outputs: Any) -> Any:
        return bench.server.request("/v2/models/tiny/infer", {"inputs": inputs, "outputs": outputs})

    assert [each["name"] for each in replied([{"name": "label"}]).json["outputs"]] == ["label"]
    assert len(replied([]).json["outputs"]) == len(bench.expected[0])
    assert [replied(wrong).code for wrong in ([{"name": "other"}], ["label"], "label", [{"name": 3}])] == [400] * 4


def test_hugging_face_client_gets_the_answers_of_predict(bench: Bench) -> None:
    client = InferenceClient(model=bench.server.url)
    row, wanted = bench.rows[-1], bench.expected[-1]

    match bench.server.state.engine.job.task:
        case "text-classification":
            found = client.text_classification(row["text"])
            assert found[0].label == wanted["label"]
            assert close({each.label: each.score for each in found}, wanted["scores"])
        case "token-classification":
            text = " ".join(row["tokens"])
            entities = client.token_classification(text)
            assert [each.entity_group for each in entities] == [each["type"] for each in wanted["entities"]]
            assert [text[each.start : each.end] for each in entities] == [each["text"] for each in wanted["entities"]]
            assert entities
        case "question-answering":
            answer = client.question_answering(question=row["question"], context=row["context"])
            assert (answer.answer, answer.start, answer.end) == (wanted["answer"], wanted["start"], wanted["end"])
        case "masked-lm":
            assert [each.token_str for each in client.fill_mask(row["text"])] == [
                each["token"] for each in wanted["masks"][0]
            ]
        case "summarization":
            assert client.summarization(row["source"]).summary_text == wanted["generated_text"]
        case "translation":
            assert client.translation(row["source"]).translation_text == wanted["generated_text"]
        case "text-generation":
            assert client.text_generation(row["text"]) == wanted["generated_text"]


def test_metadata_names_task_and_labels(bench: Bench) -> None:
    properties = bench.server.request("/v2/models/tiny").json

    assert properties["properties"]["task"] == bench.server.state.engine.job.task
    assert properties["properties"]["labels"] == list(bench.server.state.engine.answerer.labels.names)
    assert bench.server.request("/v2/models/other").code == 404
    assert bench.server.request("/v2/models/tiny/ready").json == {"name": "tiny", "ready": True}


def events(content: bytes) -> list[Any]:
    """Return the data of server-sent events; the last is [DONE]."""
    parts = content.decode().strip().split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def test_paths_of_requests_to_the_model_are_those_of_the_contract(bench: Bench) -> None:
    paths = bench.server.request("/openapi.json").json["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods}
    assert posted
    assert posted <= set(INFERENCE_PATHS)


@pytest.mark.parametrize("bench", ["text-generation"], indirect=True)
def test_openai_completions_equal_predict_streamed_or_not(bench: Bench) -> None:
    row, wanted = bench.rows[0], bench.expected[0]
    request = {"model": "tiny", "prompt": row["text"], "max_tokens": 5}

    whole = bench.server.request("/v1/completions", request)
    stream = bench.server.request("/v1/completions", {**request, "stream": True})

    assert whole.json["choices"][0]["text"] == wanted["generated_text"]
    pieces = events(stream.content)
    assert "".join(each["choices"][0]["text"] for each in pieces) == wanted["generated_text"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert bench.server.request("/v1/models").json["data"][0]["id"] == "tiny"
    unknown = bench.server.request("/v1/completions", {**request, "model": "x"})
    assert (unknown.code, unknown.json["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("bench", ["question-answering"], indirect=True)
def test_wrong_row_is_refused_alone_when_requests_are_tokenised_together(bench: Bench) -> None:
    hold, entered = threading.Event(), threading.Event()
    engine, answer = bench.server.state.engine, bench.server.state.engine.answer

    def held(*given: Any) -> Any:
        entered.set()
        hold.wait(patient(30))
        return answer(*given)

    engine.answer = held  # type: ignore[method-assign]  # to keep rows waiting
    codes: dict[str, int] = {}

    def send(context: str) -> None:
        request = {"inputs": {"question": "the cat saw it", "context": context}}
        codes[context] = bench.server.request("/", request).code

    senders = [threading.Thread(target=send, args=(context,)) for context in ("a mat", "  ", "the dog", "a cat")]
    try:
        senders[0].start()
        wait_until(entered.is_set, "the first is computed")
        for each in senders[1:]:
            each.start()
        wait_until(lambda: bench.server.state.batcher.queued == 4, "three wait")
    finally:
        hold.set()
        for each in senders:
            each.join(patient(30))
        engine.answer = answer  # type: ignore[method-assign]

    assert codes == {"a mat": 200, "  ": 422, "the dog": 200, "a cat": 200}
