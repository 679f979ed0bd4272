"""Inference of a model whose layers are on several GPUs, dry: no operation mixes tensors of two devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tracing_support import stub_cuda
from tracing_support.placed_run import CASES, USUAL
from trainer_support.forking import ForkServer


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Return a function from a case's name to the devices of its weights and outputs."""
    if (reason := stub_cuda.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("stub-cuda")
    stub_cuda.build(folder)
    server = ForkServer(environment=stub_cuda.environment(folder))

    def run(name: str) -> dict[str, Any]:
        result = folder / f"{name}.json"
        arguments = {"name": name, "result": str(result)}
        case = {"processes": 1, "call": "tracing_support.placed_run:run", "arguments": arguments, "environment": {}}
        codes, printed = server.run({**case, "log": str(folder / f"{name}.log")})
        assert codes == [0], printed
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found

    yield run
    server.stop()


@pytest.mark.parametrize("name", USUAL)
def test_model_answers_with_its_layers_on_two_gpus(name: str, placed):
    assert placed(name) == ON_TWO_GPUS


@pytest.mark.everything
@pytest.mark.parametrize("name", sorted(set(CASES) - set(USUAL)))
def test_other_models_answer_with_their_layers_on_two_gpus(name: str, placed):
    assert placed(name) == ON_TWO_GPUS


ON_TWO_GPUS = {"visible": "2,3", "placed": True, "weights": ["cuda:0", "cuda:1"], "outputs": ["cuda:0"]}
"""Devices by the numbers that CUDA gives those that a process sees."""
