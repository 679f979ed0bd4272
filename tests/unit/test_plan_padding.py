"""The share of padding in a step, and the micro-batch that `auto` chooses for it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.strategy.padding_estimate import Slab, StepRows, quickest, step_rows
from finetune_operator.plan.types.plan_types import Adaptation, Facts, JobPlan
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import encoder, job, llama_1b
from suite_plugins.fuzz import examples

WNUT_2017 = {8: 66, 16: 356, 24: 638, 32: 753, 40: 767, 48: 544, 56: 203, 64: 56, 72: 9, 80: 2}
"""Lengths of the data set's sentences by MiniLM's tokenizer."""
TAGS = SplitFacts(rows=3394, tokens=106_296, length_histogram=WNUT_2017, longest=75)
HALVES = (256, 128, 64, 32, 16, 8, 4, 2, 1)

histograms = st.dictionaries(st.integers(1, 64).map(lambda edge: 8 * edge), st.integers(1, 500), min_size=1)


def split_of(histogram: dict[int, int], position: float) -> SplitFacts:
    """Return a split with rows on average at `position` of their buckets: 0 is the upper edge, 1 the lower one."""
    edges = sorted(histogram)
    tokens = sum(
        histogram[high] * max(1, round(high - position * (high - low)))
        for low, high in zip([0, *edges], edges, strict=False)
    )
    return SplitFacts(rows=sum(histogram.values()), tokens=tokens, length_histogram=histogram, longest=edges[-1])


# ----------------------------------------------------------------------------------------------------- expected padding


@pytest.mark.parametrize("micro", [8, 4, 2, 1])
def test_tokens_of_a_step_average_over_all_draws_by_probability(micro: int) -> None:
    """Draws have eight rows, each 100 tokens long with a probability of a quarter, else 10."""
    step = StepRows((Slab(10, 1.0), Slab(90, 0.25)), rows=8)
    expected = 0.0
    for drawn in itertools.product((100, 10), repeat=8):
        chance = math.prod(0.25 if length == 100 else 0.75 for length in drawn)
        ordered = sorted(drawn, reverse=True)
        expected += chance * sum(micro * ordered[at] for at in range(0, 8, micro))
    assert step.computed(micro) == pytest.approx(expected, rel=1e-9)
    assert step.useful == pytest.approx(8 * 32.5)


@pytest.mark.parametrize("micro", [512, 128, 32, 8, 1])
def test_the_tokens_of_a_large_step_are_those_of_the_binomial_distribution(micro: int) -> None:
    """Steps have 1,024 rows, a quarter of which is long on average."""
    weights = [math.comb(1024, longer) * 3 ** (1024 - longer) for longer in range(1025)]
    batches = sum(weight * math.ceil(longer / micro) for longer, weight in enumerate(weights))
    expected = 1024 * 10 + micro * 90 * (batches / 4**1024)
    step = StepRows((Slab(10, 1.0), Slab(90, 0.25)), rows=1024)
    assert step.computed(micro) == pytest.approx(expected, rel=0.005)


@given(histograms, st.floats(0, 0.5), st.sampled_from([16, 64, 256]))
@examples(40)
def test_rows_keep_the_measured_mean_and_less_padding_in_small_batches(
    histogram: dict[int, int], position: float, rows: int
) -> None:
    split = split_of(histogram, position)
    step = step_rows(split, rows)
    assert step.useful == pytest.approx(rows * split.tokens / split.rows, rel=1e-6)
    shares = [step.padding(micro) for micro in HALVES if micro <= rows]
    assert all(one >= other - 1e-9 for one, other in itertools.pairwise(shares))
    assert all(0 <= share < 1 for share in shares)
    assert shares[-1] == pytest.approx(0, abs=1e-6)


def test_rows_of_one_length_have_no_padding_however_wide_their_bucket_is() -> None:
    split = SplitFacts(rows=3000, tokens=3000 * 100, length_histogram={128: 3000}, longest=100)
    assert [step_rows(split, 32).padding(micro) for micro in (32, 8)] == pytest.approx([0, 0], abs=1e-9)


def test_coarser_histograms_give_nearly_the_same_padding() -> None:
    fine, coarse = step_rows(TAGS, 32), step_rows(TAGS.coarsened(8), 32)
    for micro in (32, 16, 8, 4):
        assert coarse.padding(micro) == pytest.approx(fine.padding(micro), abs=0.01)


def test_the_quickest_micro_batch_weighs_padding_against_passes() -> None:
    step = step_rows(TAGS, 256)
    found = [quickest(step, HALVES, tokens) for tokens in (0, 8, 64, 512, 1e6)]
    assert found == [1, 8, 16, 64, 256]


def test_a_step_is_not_cut_for_a_twentieth_of_its_time() -> None:
    step = StepRows((Slab(95, 1.0), Slab(5, 0.5)), rows=32)
    assert step.padding(32) == pytest.approx(0.025, abs=0.001)
    assert quickest(step, (32, 16, 8), 0) == 32


# ------------------------------------------------------------------------------------------------------- what is chosen

CPU = "cpu=2,hostMemory=16Gi"
ON_GPU = {"resources": {"gpusPerNode": 1}}
TAGGING: dict[str, Any] = {"task": "token-classification", "training": {}}


def data(split: SplitFacts) -> DataFacts:
    return DataFacts(fingerprint="f", splits={"train": split}, max_length=128)


def planned(
    spec: dict[str, Any], hardware: str = CPU, split: SplitFacts | None = TAGS, adaptation: Adaptation | None = None
) -> JobPlan:
    facts = Facts(model=encoder(384, 6), data=None if split is None else data(split), hardware=parse_hardware(hardware))
    return plan(job({**TAGGING, **spec}), facts, CLUSTER_SETTINGS, adaptation or Adaptation())


def chosen(result: JobPlan) -> tuple[int, int, int]:
    """Micro-batch, accumulation, ranks."""
    assert result.trainer.training is not None
    batch = result.trainer.training.batch
    return batch.micro_batch_size, batch.gradient_accumulation, batch.data_parallel


def training(**fields: Any) -> dict[str, Any]:
    return {"training": fields}


@pytest.mark.parametrize(
    ("spec", "hardware", "expected"),
    [
        pytest.param({}, CPU, (8, 4, 1), id="32 rows in fp32"),
        pytest.param({}, f"{CPU},cpuBf16=true", (16, 2, 1), id="bf16 computes faster, and a pass costs as much"),
        pytest.param({}, "cpu=8,hostMemory=16Gi", (16, 2, 1), id="and so do more threads"),
        pytest.param(training(globalBatchSize=256), CPU, (16, 16, 1), id="more rows differ more"),
        pytest.param({"parallelism": {"strategy": "ddp"}}, CPU, (8, 2, 2), id="ddp"),
        pytest.param(training(globalBatchSize=3072) | ON_GPU, "gpu=H100", (1024, 3, 1), id="a large step of a GPU"),
        pytest.param(
            training(globalBatchSize=1024) | ON_GPU, "gpu=H100", (1024, 1, 1), id="one that takes it little time"
        ),
    ],
)
def test_a_step_of_rows_of_any_length_is_cut_where_that_saves_time(
    spec: dict[str, Any], hardware: str, expected: tuple[int, int, int]
) -> None:
    assert chosen(planned(spec, hardware)) == expected


GROUPED = {"train_sampling_strategy": "group_by_length"}
PACKED = {"task": "text-generation", "preparation": {"packing": "always"}}


@pytest.mark.parametrize(
    ("spec", "split", "micro"),
    [
        pytest.param({"task": "text-classification"}, TAGS, 32, id="a task whose steps are of like rows"),
        pytest.param(training(arguments=GROUPED), TAGS, 32, id="such steps as asked for"),
        pytest.param(training(microBatchSize=32), TAGS, 32, id="a micro-batch as asked for"),
        pytest.param(PACKED, TAGS, 32, id="rows that share sequences"),
        pytest.param({}, TAGS.model_copy(update={"length_histogram": {}}), 32, id="lengths that nobody told"),
        pytest.param({}, None, 4, id="lengths that nobody has measured: 2,048 tokens, 512 a row"),
        *(
            pytest.param({"parallelism": parallelism}, TAGS, 16, id=name)
            for name, parallelism in {
                "ZeRO-2 reduces gradients in each pass": {"strategy": "deepspeed", "zeroStage": 2},
                "ZeRO-3 gathers weights": {"strategy": "deepspeed", "zeroStage": 3},
                "FSDP as well": {"strategy": "fsdp"},
            }.items()
        ),
    ],
)
def test_other_steps_are_not_cut(spec: dict[str, Any], split: SplitFacts | None, micro: int) -> None:
    assert chosen(planned(spec, split=split))[0] == micro


@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"sequence": 2}])
def test_steps_are_not_cut_where_processes_synchronize_in_each_pass(parallelism: dict[str, Any]) -> None:
    facts = Facts(model=llama_1b("text-generation"), data=data(TAGS), hardware=parse_hardware("cpu=2,hostMemory=256Gi"))
    spec = {"task": "text-generation", "training": {}, "preparation": {"packing": "never"}}
    strategy = {"strategy": "ddp"}
    alone = plan(job({**spec, "parallelism": strategy}), facts, CLUSTER_SETTINGS)
    together = plan(job({**spec, "parallelism": strategy | parallelism}), facts, CLUSTER_SETTINGS)
    assert (chosen(alone), chosen(together)) == ((8, 2, 2), (32, 1, 1))


def test_other_tasks_are_cut_for_random_sampling() -> None:
    arguments = {"train_sampling_strategy": "random"}
    spec = {"task": "text-classification", **training(arguments=arguments)}
    assert chosen(planned(spec)) == (8, 4, 1)


def test_plan_gives_the_remaining_padding() -> None:
    reason = next(reason for reason in planned({}).reasons if reason.startswith("micro-batch"))
    assert reason == (
        "micro-batch 8: of 45% padding that 32 rows at once would have, 16% remains, which saves more time than the "
        "further passes take; 32 = 8 micro x 4 accumulation x 1 rank"
    )


def test_a_micro_batch_that_ran_out_of_memory_is_halved_from_there() -> None:
    result = planned({}, adaptation=Adaptation(4))
    assert chosen(result) == (4, 8, 1)
    assert any(reason.startswith("micro-batch 4: 8 ran out of memory") for reason in result.reasons)


def test_a_micro_batch_that_fits_no_more_rows_is_the_largest_that_fits() -> None:
    """A small GPU holds fewer long rows than would be fastest."""
    split = SplitFacts(rows=50_000, tokens=50_000 * 256, length_histogram={32: 25_000, 512: 25_000}, longest=512)
    spec = training(globalBatchSize=4096) | ON_GPU
    large, small = (planned(spec, gpu, split) for gpu in ("gpu=H100", "gpu=T4"))
    assert chosen(large)[0] > chosen(small)[0]
    assert any("padding" in reason for reason in large.reasons if reason.startswith("micro-batch"))
    assert any("whose activations fit the memory" in reason for reason in small.reasons)
