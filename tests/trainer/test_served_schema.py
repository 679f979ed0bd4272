"""Requests that schemathesis derives from a server's OpenAPI document: valid ones, and ones that break the schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from finetune_contract.inference_settings import Serving
from finetune_contract.layout import JobPaths
from suite_plugins.patience import patient
from trainer_support.served import Served, served
from trainer_support.served_models import ROWS, write_served_model
from trainer_support.tasks import task_job

EXAMPLES = 30
"""Requests of each path and mode."""
NAME = "tiny"
DOCUMENTED = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
TENSORS_BEYOND_SCHEMA = ("question-answering", "token-classification")
"""Tasks whose tensors are two of the same length, or JSON in text; no schema states that."""
DEADLINE = "X-Request-Timeout-Ms"


@pytest.fixture(scope="module", params=sorted(ROWS))
def server(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Served]:
    task, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = write_served_model(folder / "model", task, tiny_bert)
    job = task_job(task, model, folder / "data", list(ROWS[task][0]), evaluation=None, generation={"max_new_tokens": 5})
    serving = Serving(model_name=NAME, device="cpu", max_batch_tokens=512)
    with served(job.model_copy(update={"serving": serving}), JobPaths(folder / "job")) as running:
        yield running


def with_known_names(case: Any) -> Any:
    """Return the request with the name of the model, and with shapes that fit the data: a schema can state neither."""
    if "name" in (case.path_parameters or {}) and "/page/" not in case.path:
        case.path_parameters = {**case.path_parameters, "name": NAME}
    if case.path.endswith("/infer") and isinstance(case.body, dict):
        tensors = case.body.get("inputs")
        for tensor in tensors if isinstance(tensors, list) else []:
            if isinstance(tensor, dict) and isinstance(tensor.get("data"), list) and tensor["data"]:
                tensor["shape"] = [len(tensor["data"])]
    return case


def answered(server: Served, operation: Any, mode: GenerationMode) -> tuple[Counter[int], list[str]]:
    """Return the codes of the answers, and the answers that the document does not describe."""
    codes: Counter[int] = Counter()
    wrong: list[str] = []

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        case = with_known_names(case) if mode is GenerationMode.POSITIVE else case
        response = case.call(base_url=server.url, timeout=patient(60))
        codes[response.status_code] += 1
        late = response.status_code == 504 and DEADLINE in {str(name) for name in case.headers or {}}
        if response.status_code >= 500 and not late:
            wrong.append(f"{response.status_code} {response.content[:200]!r} to {case.as_curl_command()[:500]}")
        try:
            case.validate_response(response, checks=DOCUMENTED)
        except Exception as error:
            wrong.append(f"{error} to {case.as_curl_command()[:500]}")

    try:
        run()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "each path has valid requests"
    return codes, wrong


@pytest.mark.slow
def test_answers_to_generated_requests_are_those_of_the_document(server: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found: dict[str, Counter[int]] = {}
    wrong: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            codes, bad = answered(server, operation, mode)
            found[f"{operation.label} {mode.name}"] = codes
            wrong += [f"{operation.label} {mode.name}: {one}" for one in bad]
    assert wrong == []
    task = server.state.engine.job.task
    rare = ("/page/", *(["/infer"] if task in TENSORS_BEYOND_SCHEMA else []))
    valid = {
        name: codes for name, codes in found.items() if "POSITIVE" in name and not any(one in name for one in rare)
    }
    assert [name for name, codes in valid.items() if not codes[200]] == [], found
    assert sum(codes.total() for label, codes in found.items() if label.startswith("POST")) > 3 * EXAMPLES
    assert server.request("/v2/health/ready").code == 200
