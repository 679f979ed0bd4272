"""The training loop on GPUs, dry: each strategy takes its real path on fake CUDA tensors (docs/gpu.md).

Golden files beside this one record a step's costs: host waits, bytes sent, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tracing_support import stub_cuda
from tracing_support.figures import Figures
from tracing_support.traced_cases import BLOCK_WEIGHTS, CASES, LARGER_WORLDS, Case
from trainer_support.forking import ForkServer

NAMES = [case.name for case in CASES]
LARGER = [case.of_world(size) for size in LARGER_WORLDS for case in CASES if case.size > 1]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Figures]]:
    """Return a function from a case's name to its figures; the libraries are imported once."""
    if (reason := stub_cuda.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("stub-cuda")
    stub_cuda.build(folder)
    server = ForkServer(environment={**stub_cuda.environment(folder), "DS_ACCELERATOR": "cuda"})

    @cache
    def figures(name: str) -> Figures:
        result = folder / f"{name}.json"
        arguments = {"name": name, "result": str(result)}
        case = {"processes": 1, "call": "tracing_support.dry_run:run", "arguments": arguments, "environment": {}}
        codes, printed = server.run({**case, "log": str(folder / f"{name}.log")})
        assert codes == [0], printed
        return Figures.read(result)

    yield figures
    server.stop()


@pytest.mark.parametrize("name", NAMES)
def test_step_on_gpu_synchronizes_once_at_the_recorded_cost(name: str, traced, golden: Callable[[str, str], None]):
    figures = traced(name)
    assert figures.waits_of_the_loop == 1, figures.waits
    golden(f"golden/{name.replace(' ', '-')}.txt", str(figures))


def test_loss_scaling_waits_only_for_optimizers_that_are_not_fused(traced):
    scaling = "item: accelerate/optimizer.py AcceleratedOptimizer.step"
    assert [traced(name).waits.get(scaling, 0) for name in ("fp16", "fp16 with fsdp", "fp16 with SGD")] == [0, 0, 1]


def test_stages_of_a_pipeline_send_hidden_states_in_bf16(traced):
    sent = [entry for entry in traced("pipeline").sent if entry.startswith("send")]
    assert sent == ["send bfloat16"]


def test_weights_stay_on_the_device_when_activations_are_moved(traced):
    moving, keeping = traced("activations in host memory"), traced("single")
    linear = 2 * 2 * BLOCK_WEIGHTS
    # Both keep the 16-bit copies of the blocks' weights; the one that offloads keeps little else.
    assert linear <= moving.kept < 1.05 * linear < keeping.kept


def test_packs_of_rows_keep_as_much_as_a_row_without_a_mask(traced):
    assert traced("packs").kept <= traced("single").kept


@pytest.mark.everything
@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.name)
def test_step_in_a_larger_world_waits_as_often(case: Case, traced):
    assert traced(case.name).waits == traced(case.name.partition(",")[0]).waits


def test_golden_files_are_those_of_the_cases():
    there = {file.stem for file in (Path(__file__).parent / "golden").iterdir()}
    assert there == {name.replace(" ", "-") for name in NAMES}
