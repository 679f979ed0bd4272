"""Clients and a load generator of other projects: tritonclient and locust, against the answers of the stage predict."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from suite_plugins.patience import patient
from trainer_support.served import Served
from trainer_support.served_models import ROWS, served_and_predicted

NAME = "tiny"
LENGTH = "Inference-Header-Content-Length"
LOCUST_FILE = Path(__file__).parents[1] / "trainer_support" / "locust_users.py"
LOAD_REQUESTS = 300


@dataclass(frozen=True)
class Answering:
    """A server, the inputs of its task, and the predictions of these rows."""

    server: Served
    inputs: dict[str, list[str]]
    expected: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["text-classification", "token-classification", "text-generation"])
def answering(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Any]:
    task = request.param
    rows = ROWS[task]
    inputs = {
        role: [row[role] if isinstance(row[role], str) else json.dumps(row[role]) for row in rows] for role in rows[0]
    }
    with served_and_predicted(tmp_path_factory.mktemp(task), task, tiny_bert) as (server, expected):
        yield Answering(server, inputs, expected)


@pytest.fixture
def client(answering: Answering) -> Iterator[triton.InferenceServerClient]:
    seconds = patient(60)
    address = f"127.0.0.1:{answering.server.port}"
    with triton.InferenceServerClient(address, connection_timeout=seconds, network_timeout=seconds) as connected:
        yield connected


classifier = pytest.mark.parametrize("answering", ["text-classification"], indirect=True)


def tensors(inputs: dict[str, list[str]], *, binary: bool) -> list[triton.InferInput]:
    """Return the inputs of a request."""
    found = []
    for name, texts in inputs.items():
        tensor = triton.InferInput(name, [len(texts)], "BYTES")
        tensor.set_data_from_numpy(np.array(texts, dtype=object), binary_data=binary)
        found.append(tensor)
    return found


def close(found: Any, wanted: Any) -> bool:
    """Return whether both are equal, numbers to within 1e-5."""
    if isinstance(wanted, dict):
        return set(found) == set(wanted) and all(close(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    return bool(found == wanted) if not isinstance(wanted, float) else abs(found - wanted) <= 1e-5


def parsed(value: Any, like: Any) -> Any:
    """Return an element of an output as a value of the type in the predictions."""
    if isinstance(like, float):
        return float(value)
    text = value.decode() if isinstance(value, bytes) else str(value)
    return text if isinstance(like, str) else json.loads(text)


@classifier
def test_triton_client_reads_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    about = client.get_model_metadata(NAME)
    assert about["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert {each["name"] for each in about["outputs"]} >= {"label", "score"}


@pytest.mark.parametrize("binary", [False, True])
def test_triton_client_gets_the_answers_of_predict(
    answering: Answering, client: triton.InferenceServerClient, binary: bool
) -> None:
    names = [each["name"] for each in client.get_model_metadata(NAME)["outputs"]]
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]

    result = client.infer(NAME, tensors(answering.inputs, binary=binary), outputs=outputs, request_id="7")

    assert result.get_response()["id"] == "7"
    assert ("parameters" in result.get_output(names[0])) is binary
    for name in names:
        values = result.as_numpy(name)
        assert values.shape == (len(answering.expected),)
        for value, row in zip(values, answering.expected, strict=True):
            wanted = row[name]
            assert close(parsed(value, wanted), wanted), name


@classifier
def test_triton_client_with_its_defaults_gets_binary_outputs(
    answering: Answering, client: triton.InferenceServerClient
) -> None:
    result = client.infer(NAME, tensors(answering.inputs, binary=True))

    labels = [label.decode() for label in result.as_numpy("label")]
    assert labels == [row["label"] for row in answering.expected]
    assert result.get_output("score")["parameters"] == {"binary_data_size": 8 * len(labels)}


@classifier
def test_triton_client_may_mix_json_and_binary(answering: Answering, client: triton.InferenceServerClient) -> None:
    outputs = [triton.InferRequestedOutput("label", binary_data=False), triton.InferRequestedOutput("score")]

    result = client.infer(NAME, tensors(answering.inputs, binary=True), outputs=outputs)

    assert list(result.as_numpy("label")) == [row["label"] for row in answering.expected]
    assert "data" not in result.get_output("score")


@classifier
def test_triton_client_reports_the_rule_of_a_refused_request(
    answering: Answering, client: triton.InferenceServerClient
) -> None:
    numbers = triton.InferInput("text", [1], "FP32")
    numbers.set_data_from_numpy(np.zeros(1, np.float32), binary_data=False)
    with pytest.raises(InferenceServerException, match="datatype BYTES"):
        client.infer(NAME, [numbers])
    with pytest.raises(InferenceServerException, match="without compression"):
        client.infer(NAME, tensors(answering.inputs, binary=True), request_compression_algorithm="gzip")
    with pytest.raises(InferenceServerException, match="256 rows"):
        client.infer(NAME, tensors({"text": ["a"] * 257}, binary=True))


def message(size: Any, binary: bytes, **tensor: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request with one binary input, and its header."""
    described = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}, **tensor}
    content = json.dumps({"inputs": [described]}).encode()
    return content + binary, {LENGTH: str(len(content))}


@classifier
@pytest.mark.parametrize(
    ("size", "binary", "rule"),
    [
        (5, b"\1\0\0\0a", None),
        (6, b"\1\0\0\0a", "more bytes"),
        (4, b"\1\0\0\0a", "ends within an element"),
        (2, b"\1\0", "ends within an element"),
        (5, b"\1\0\0\0a.", "that no input describes"),
        (5, b"\1\0\0\0\xff", "not UTF-8"),
        (8, struct.pack("<II", 0, 0xFFFFFFFF), "ends within an element"),
        (-1, b"", "binary_data_size"),
        (True, b"", "binary_data_size"),
        ("5", b"", "binary_data_size"),
    ],
)
def test_malformed_binary_input_is_refused_with_400(
    answering: Answering, size: Any, binary: bytes, rule: str | None
) -> None:
    reply = answering.server.request(f"/v2/models/{NAME}/infer", *message(size, binary))

    assert reply.code == (200 if rule is None else 400)
    assert rule is None or rule in reply.json["error"]


@classifier
@pytest.mark.parametrize("length", ["", "-1", "9999", "1e2", "\u00b2", "9" * 400])
def test_malformed_length_of_the_json_is_refused_with_400(answering: Answering, length: str) -> None:
    body, _ = message(5, b"\1\0\0\0a")
    reply = answering.server.request(f"/v2/models/{NAME}/infer", body, {LENGTH: length})
    assert (reply.code, LENGTH in reply.json["error"]) == (400, True)


@classifier
def test_binary_input_without_the_length_of_the_json_is_refused(answering: Answering) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    both = {**tensor, "data": ["a"]}
    path = f"/v2/models/{NAME}/infer"

    found = [answering.server.request(path, {"inputs": [each]}) for each in (tensor, both)]
    flag = answering.server.request(
        path, {"inputs": [{**tensor, "parameters": {}, "data": ["a"]}], "parameters": {"binary_data_output": 1}}
    )

    assert [reply.code for reply in (*found, flag)] == [400] * 3
    assert LENGTH in found[0].json["error"]
    assert "either" in found[1].json["error"]
    assert "binary_data_output" in flag.json["error"]


def answered(server: Served) -> float:
    """Return the POST requests that the server counts as answered with 200."""
    posted = ("/", "/v2/models/{name}/infer")
    families = text_string_to_metric_families(server.request("/metrics").content.decode())
    samples = [one for family in families for one in family.samples if one.name == "finetune_serving_requests_total"]
    return sum(one.value for one in samples if one.labels["path"] in posted and one.labels["code"] == "200")


@classifier
def test_locust_gets_right_answers_to_each_of_its_requests(answering: Answering, tmp_path: Path) -> None:
    labels = [row["label"] for row in answering.expected]
    load = {"texts": answering.inputs["text"], "labels": labels, "model": NAME, "requests": LOAD_REQUESTS}
    environment = {**os.environ, "LOCUST_LOAD": json.dumps(load)}
    before = answered(answering.server)
    options = ["--headless", "--users", "8", "--spawn-rate", "8", "--host", answering.server.url, "--json"]
    command = [sys.executable, "-m", "locust", "--locustfile", str(LOCUST_FILE), *options, "--loglevel", "WARNING"]

    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patient(120), check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert set(found) == {"infer", "hugging-face"}
    assert sum(each["num_failures"] for each in found.values()) == 0
    assert sum(each["num_requests"] for each in found.values()) >= LOAD_REQUESTS
    assert answered(answering.server) - before >= LOAD_REQUESTS
