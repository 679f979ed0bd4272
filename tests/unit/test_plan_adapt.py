"""Adaptations after memory has run out, and their reasons in the plan."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_contract.facts import DataFacts, HardwareFacts, SplitFacts
from finetune_operator.jobs.state.planned import next_adaptation
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Adaptation, Facts, JobPlan, PlanRefused
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS
from planning_support.cases import BERT, job

DATA = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=6400, tokens=640_000, longest=128)}, max_length=128)
TWO_GPUS = parse_hardware("gpu=A100,memory=40Gi,gpus=2,cpu=32,hostMemory=256Gi")
FACTS = Facts(model=BERT, data=DATA, hardware=TWO_GPUS)
ON_TWO = {"training": {"globalBatchSize": 64}, "resources": {"gpusPerNode": 2}}


def planned(adaptation: Adaptation, facts: Facts = FACTS, **spec: Any) -> JobPlan:
    return plan(job(spec), facts, CLUSTER_SETTINGS, adaptation)


def steps(result: JobPlan) -> tuple[int, int, int]:
    assert result.trainer.training is not None
    batch = result.trainer.training.batch
    assert batch.global_batch_size == batch.micro_batch_size * batch.gradient_accumulation * batch.data_parallel
    return batch.micro_batch_size, batch.gradient_accumulation, batch.data_parallel


def sentence(result: JobPlan, begin: str) -> str:
    return next(reason for reason in result.reasons if reason.startswith(begin))


def refusal(adaptation: Adaptation, facts: Facts = FACTS, **spec: Any) -> tuple[Problem, ...]:
    with pytest.raises(PlanRefused) as caught:
        planned(adaptation, facts, **spec)
    return caught.value.problems


@pytest.mark.parametrize(
    ("micro", "total", "limit", "expected", "reason"),
    [
        pytest.param(
            "auto",
            64,
            None,
            (32, 1, 2),
            "micro-batch 32: each rank's whole share fits at once",
            id="a first attempt takes what fits",
        ),
        pytest.param(
            "auto",
            64,
            16,
            (16, 2, 2),
            "micro-batch 16: 32 ran out of memory",
            id="half the micro-batch, twice the accumulation",
        ),
        pytest.param("auto", 64, 1, (1, 32, 2), "micro-batch 1: 2 ran out of memory", id="down to one row"),
        pytest.param(
            8,
            64,
            4,
            (4, 8, 2),
            "micro-batch 4: 8 ran out of memory",
            id="a micro-batch that the user fixed is halved too",
        ),
        pytest.param(8, 64, 8, (8, 4, 2), "micro-batch 8: as asked", id="one that the limit allows stays"),
        pytest.param(
            "auto",
            60,
            7,
            (6, 5, 2),
            "micro-batch 6: 15 ran out of memory",
            id="the largest divisor of the rank's share up to the limit",
        ),
        pytest.param(
            "auto",
            60,
            1,
            (1, 30, 2),
            "micro-batch 1: more than 1 ran out of memory",
            id="2 and 3 have the same half: neither is named",
        ),
        pytest.param(
            "auto",
            64,
            1000,
            (32, 1, 2),
            "micro-batch 32: each rank's whole share fits at once",
            id="a limit above the share changes nothing",
        ),
    ],
)
def test_micro_batch_stays_within_the_limit_at_the_same_global_batch(micro, total, limit, expected, reason):
    training = {"globalBatchSize": total, "microBatchSize": micro}
    result = planned(Adaptation(limit), training=training, resources={"gpusPerNode": 2})
    assert steps(result) == expected
    micro, accumulation, ranks = expected
    arithmetic = f"{total} = {micro} micro x {accumulation} accumulation x {ranks} ranks"
    assert sentence(result, "micro-batch") == f"{reason}; {arithmetic}"


def test_strategy_out_of_memory_with_one_row_is_skipped():
    result = planned(Adaptation(None, ("ddp", "deepspeed-zero1")), **ON_TWO)
    following = "ddp+selective-activation-checkpointing"
    assert result.strategy == following
    assert sentence(result, "strategy").startswith(
        f"strategy {following}: ddp and deepspeed-zero1 ran out of memory with one row at a time; one process needs "
    )
    assert steps(result) == (32, 1, 2)


def test_named_strategy_out_of_memory_recomputes_and_is_then_refused():
    spec: dict[str, Any] = {**ON_TWO, "parallelism": {"strategy": "ddp"}}
    skipped = ["ddp"]
    for following in ("ddp+selective-activation-checkpointing", "ddp+activation-checkpointing"):
        assert planned(Adaptation(None, tuple(skipped)), **spec).strategy == following
        skipped.append(following)
    assert refusal(Adaptation(None, tuple(skipped)), **spec) == (
        Problem(
            "spec.parallelism.strategy",
            '"ddp"',
            "ddp and ddp+selective-activation-checkpointing and ddp+activation-checkpointing ran out of memory with "
            "one row at a time, and none is left",
            "set parallelism.strategy to auto; or use devices or nodes with more memory, or a smaller "
            "preparation.maxLength or model",
        ),
    )


def test_when_every_strategy_has_run_out_of_memory_the_job_is_refused():
    cpu = Facts(model=FACTS.model, data=DATA, hardware=HardwareFacts(cpu_cores=2, memory_bytes=16 << 30))
    (problem,) = refusal(Adaptation(None, ("single", "single+activation-checkpointing")), cpu)
    assert (problem.path, problem.value) == ("spec.parallelism.strategy", '"auto"')
    assert problem.rule == (
        "single and single+activation-checkpointing ran out of memory with one row at a time, and none is left"
    )
    assert problem.hint == "use devices or nodes with more memory, or a smaller preparation.maxLength or model"


@pytest.mark.parametrize(
    ("current", "following"),
    [
        pytest.param(Adaptation(), Adaptation(16), id="the first time: half of what ran"),
        pytest.param(Adaptation(16), Adaptation(8), id="again: half of that"),
        pytest.param(Adaptation(7), Adaptation(2), id="half of the divisor that ran, not of the limit"),
        pytest.param(
            Adaptation(1),
            Adaptation(None, ("ddp",)),
            id="with one row: the strategy goes, the limit is lifted",
        ),
        pytest.param(
            Adaptation(1, ("ddp",)),
            Adaptation(None, ("ddp", "ddp+selective-activation-checkpointing")),
            id="and the next one",
        ),
    ],
)
def test_the_next_adaptation_is_the_smallest_change(current, following):
    assert next_adaptation(planned(current, **ON_TWO), current) == following


def test_repeated_adaptation_ends_in_a_refusal_without_repeating_a_form():
    adaptation, tried = Adaptation(), []
    spec: dict[str, Any] = {**ON_TWO, "training": {"globalBatchSize": 4}}  # two micro-batches of each form
    while True:
        try:
            result = planned(adaptation, **spec)
        except PlanRefused:
            break
        tried.append((result.strategy, steps(result)[0]))
        adaptation = next_adaptation(result, adaptation)
    assert len(tried) == len(set(tried)) > 20
    assert tried[:2] == [("ddp", micro) for micro in (2, 1)]
    assert tried[2] == ("ddp+selective-activation-checkpointing", 2)


def test_a_plan_that_trains_nothing_has_nothing_to_adapt():
    result = planned(Adaptation(), training=None, evaluation={})
    with pytest.raises(ValueError, match="nothing is trained"):
        next_adaptation(result, Adaptation())


# ---------------------------------------------------------------------------------------- with and without a cluster


def test_local_plan_names_the_fields_without_effect():
    spec = {
        "template": {"labels": {"team": "a"}},
        "image": "example.com/trainer:1",
        "imagePullPolicy": "Always",
        "storage": {"size": "1Ti"},
        "secrets": {"hubToken": {"name": "hub"}, "storage": {"name": "keys"}},
        "checkpoints": {"signingKey": {"name": "checkpoint-key"}},
        "runPolicy": {"maxRestarts": 0, "activeDeadlineSeconds": 60},
        "resources": {"network": "rdma", "sharedMemory": "1Gi"},
    }
    result = plan(
        job(spec), Facts(hardware=HardwareFacts(cpu_cores=2, memory_bytes=1 << 34), local=True), LOCAL_SETTINGS
    )
    assert sentence(result, "without a cluster") == (
        "without a cluster these have no effect: resources.network, resources.sharedMemory, storage, secrets.storage, "
        "template, image, imagePullPolicy, runPolicy.activeDeadlineSeconds, runPolicy.maxRestarts"
    )
    assert sentence(result, "secrets.hubToken") == (
        "secrets.hubToken: without a cluster, HF_TOKEN of the environment is used in its place"
    )
    assert sentence(result, "checkpoints.signingKey") == (
        "checkpoints.signingKey: without a cluster, FINETUNE_CHECKPOINT_SECRET of the environment is used in its place"
    )
    assert not any(
        reason.startswith(("without a cluster", "secrets")) for reason in planned(Adaptation(), **spec).reasons
    )


def test_without_a_cluster_claims_and_suspension_are_refused():
    spec: dict[str, Any] = {
        "model": {"uri": "pvc://models/bert"},
        "dataset": {"uri": "pvc://data/rows.csv"},
        "predict": {"dataset": {"uri": "pvc://data/new.csv"}, "output": "pvc://out/p.jsonl"},
        "runPolicy": {"suspend": True},
    }
    with pytest.raises(PlanRefused) as caught:
        plan(job(spec), Facts(local=True), LOCAL_SETTINGS)
    rule = "a claim needs a cluster"
    assert [(problem.path, problem.rule, problem.reason) for problem in caught.value.problems] == [
        ("spec.model.uri", rule, "NotSupported"),
        ("spec.dataset.uri", rule, "NotSupported"),
        ("spec.predict.dataset.uri", rule, "NotSupported"),
        ("spec.predict.output", rule, "NotSupported"),
        (
            "spec.runPolicy.suspend",
            "a suspended job does not run, and without a cluster nothing would resume it",
            "NotSupported",
        ),
    ]
    assert planned(Adaptation(), **spec).trainer.model.uri == "pvc://models/bert"


def test_gpus_cannot_be_counted_by_themselves_where_no_node_is_known():
    spec: dict[str, Any] = {"resources": {"gpusPerNode": "auto"}}
    assert refusal(Adaptation(), Facts(), **spec) == (
        Problem(
            "spec.resources.gpusPerNode",
            '"auto"',
            "the GPUs of the node that the job will get are not known in a cluster",
            "set gpusPerNode to a number",
            reason="NotSupported",
        ),
    )
    assert steps(planned(Adaptation(), **spec))[2] == 2
