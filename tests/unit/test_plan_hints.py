"""Every refusal of the planner is reached, and what its message says is done to the job: the refusal is gone."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import finetune_operator.planning as planning
from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.api.problems import Problem
from finetune_operator.api.settings import CLUSTER_SETTINGS
from finetune_operator.api.types import FineTuneJob
from finetune_operator.planning.facts import parse_hardware
from finetune_operator.planning.plan import plan
from finetune_operator.planning.types import Adaptation, Facts, PlanRefused
from mending import Edit, alternatives, apply, job_document, without_gone
from planning_support.cases import BERT, llama_1b

PLANNING = Path(planning.__path__[0])
GPUS = parse_hardware("gpu=H100,memory=80Gi,gpus=8,cpu=64,hostMemory=2Ti")
CORES = parse_hardware("cpu=8,hostMemory=64Gi")
LLAMA = llama_1b("text-generation", max_position_embeddings=4096)
ROWS = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=700, tokens=20_000, longest=64)}, max_length=128)
ON_GPUS: dict[str, Any] = {"resources": {"gpusPerNode": 8}}
ON_ONE: dict[str, Any] = {"resources": {"gpusPerNode": 1}}
WRITES: dict[str, Any] = {"task": "text-generation"}
DEEPSPEED: dict[str, Any] = {"strategy": "deepspeed"}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
Case = tuple[dict[str, Any], dict[str, Any]]
"""Fields of the job, and what is known: fields of Facts, `settings`, `adaptation`, `as_known`."""

CASES: dict[str, Case] = {
    "nothing to do": ({"training": None}, {}),
    "no rows": ({"dataset": None}, {}),
    "pods prepare for a program": (
        {
            "training": {"script": {"git": {"url": "https://github.com/a/b", "ref": "main"}, "entryPoint": "a.py"}},
            "evaluation": {},
            "preparation": {"engine": "job"},
        },
        {},
    ),
    "Spark is not served and not granted": ({"preparation": {"engine": "spark"}}, {}),
    "rows longer than positions": ({"preparation": {"maxLength": 1024}}, {}),
    "packs of a classification": ({"preparation": {"packing": "always"}}, {}),
    "fp8 on a CPU": ({"training": {"precision": "fp8"}}, {}),
    "fp16 on a CPU": ({"training": {"precision": "fp16"}}, {}),
    "fp16 with fsdp": ({"training": {"precision": "fp16"}, "parallelism": FSDP, **ON_GPUS}, {"hardware": GPUS}),
    "fp8 with deepspeed": ({"training": {"precision": "fp8"}, "parallelism": DEEPSPEED, **ON_GPUS}, {"hardware": GPUS}),
    "bf16 on a T4": (
        {"training": {"precision": "bf16"}, **ON_ONE},
        {"hardware": parse_hardware("gpu=T4")},
    ),
    "Liger on a CPU": ({"training": {"arguments": {"use_liger_kernel": True}}}, {}),
    "GPUs of nobody knows what node": ({"resources": {"gpusPerNode": "auto"}}, {"hardware": None}),
    "a claim without a cluster": ({"model": {"uri": "pvc://claim/model"}}, {"local": True}),
    "suspended without a cluster": ({"runPolicy": {"suspend": True}}, {"local": True}),
    "a launcher that is not rendered": ({"launcher": "jobset"}, {}),
    "a launcher that is not served": ({"launcher": "mpijob"}, {}),
    "no launcher is served": ({}, {"served": ()}),
    "two nodes without a cluster": ({"resources": {"nodes": 2}}, {"local": True}),
    "more GPUs than a node has": ({"resources": {"gpusPerNode": 16}}, {"hardware": GPUS}),
    "single with two processes": (
        {"parallelism": {"strategy": "single"}, "resources": {"processesPerNode": 2}},
        {},
    ),
    "processes that the degrees do not divide": (
        {**WRITES, "parallelism": {"tensor": 2}, "resources": {"gpusPerNode": 3}, "training": {"globalBatchSize": 33}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "more processes than GPUs": ({"resources": {"gpusPerNode": 2, "processesPerNode": 4}}, {"hardware": GPUS}),
    "fewer rows than a step": ({"training": {"globalBatchSize": 100_000}}, {"data": ROWS}),
    "half a warm-up step": ({"training": {"warmupSteps": 10.5}}, {}),
    "no interval, or two": ({"checkpoints": {"every": {}}}, {}),
    "a batch that ranks do not divide": ({"training": {"globalBatchSize": 100}, **ON_GPUS}, {"hardware": GPUS}),
    "a batch that micro-batches do not divide": (
        {"training": {"globalBatchSize": 96, "microBatchSize": 5}, **ON_GPUS},
        {"hardware": GPUS},
    ),
    "4 bits, compiled": (
        {
            **WRITES, **ON_ONE,
            "model": {"uri": "hf://a/b", "adapter": {"method": "qlora"}},
            "training": {"arguments": {"torch_compile": True}},
        },
        {"hardware": GPUS, "model": LLAMA},
    ),
    "an adapter in fp8": (
        {
            **WRITES, **ON_ONE,
            "model": {"uri": "hf://a/b", "adapter": {"method": "lora"}}, "training": {"precision": "fp8"},
        },
        {"hardware": GPUS, "model": LLAMA},
    ),
    "layers of another model": (
        {**WRITES, "model": {"uri": "hf://a/b", "adapter": {"method": "lora", "targetModules": ["Wqkv"]}}, **ON_ONE},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "ZeRO without deepspeed": ({"parallelism": {"strategy": "ddp", "zeroStage": 2}}, {}),
    "keys of DeepSpeed without deepspeed": (
        {"parallelism": {"strategy": "ddp", "deepspeedConfig": {"zero_optimization": {"overlap_comm": True}}}},
        {},
    ),
    "adafactor over shards": ({"training": {"optimizer": "adafactor"}, "parallelism": FSDP}, {}),
    "an offload that says how and not where": (
        {
            "parallelism": {
                **DEEPSPEED, "deepspeedConfig": {"zero_optimization": {"offload_param": {"pin_memory": True}}}
            }
        },
        {},
    ),
    "ddp does not offload": ({"parallelism": {"strategy": "ddp", "offload": {"optimizer": "cpu"}}}, {}),
    "stage 0 does not offload": (
        {"parallelism": {**DEEPSPEED, "zeroStage": 0, "offload": {"optimizer": "cpu"}}, **ON_GPUS},
        {"hardware": GPUS},
    ),
    "stage 2 does not offload parameters": (
        {"parallelism": {**DEEPSPEED, "zeroStage": 2, "offload": {"parameters": "cpu"}}, **ON_GPUS},
        {"hardware": GPUS},
    ),
    "parameters in files on a CPU": (
        {"parallelism": {**DEEPSPEED, "zeroStage": 3, "offload": {"parameters": "nvme"}}},
        {},
    ),
    "activations of a compiled model": (
        {
            "parallelism": {"strategy": "ddp", "offload": {"activations": "cpu"}},
            "training": {"arguments": {"torch_compile": True}}, **ON_GPUS,
        },
        {"hardware": GPUS},
    ),
    "fsdp moves all together": (
        {"parallelism": {**FSDP, "offload": {"optimizer": "cpu"}}, **ON_GPUS},
        {"hardware": GPUS},
    ),
    "sgd on the host": (
        {"parallelism": {**DEEPSPEED, "offload": {"optimizer": "cpu"}}, "training": {"optimizer": "sgd"}, **ON_GPUS},
        {"hardware": GPUS},
    ),
    "ZeRO++ below stage 3": (
        {
            "parallelism": {
                **DEEPSPEED, "zeroStage": 2, "deepspeedConfig": {"zero_optimization": {"zero_quantized_weights": True}}
            },
            **ON_GPUS,
        },
        {"hardware": GPUS},
    ),
    "ZeRO++ on a CPU": (
        {
            "parallelism": {
                **DEEPSPEED, "zeroStage": 3, "deepspeedConfig": {"zero_optimization": {"zero_quantized_weights": True}}
            }
        },
        {},
    ),
    "second shards across nodes": (
        {
            "parallelism": {
                **DEEPSPEED, "zeroStage": 3, "deepspeedConfig": {"zero_optimization": {"zero_hpz_partition_size": 4}}
            },
            **ON_GPUS,
        },
        {"hardware": GPUS},
    ),
    "sharding without fsdp": (
        {"parallelism": {"strategy": "ddp", "sharding": "hybrid"}, **ON_GPUS},
        {"hardware": GPUS},
    ),
    "hybrid on one node": ({"parallelism": {**FSDP, "sharding": "hybrid"}, **ON_GPUS}, {"hardware": GPUS}),
    "all strategies have run out of memory": (
        {**ON_ONE, "parallelism": {"strategy": "single"}},
        {"hardware": GPUS, "adaptation": Adaptation(1, ("single", "single+activation-checkpointing"))},
    ),
    "it does not fit": (
        {**WRITES, **ON_ONE, "parallelism": {"strategy": "single"}, "training": {"globalBatchSize": 64}},
        {"hardware": parse_hardware("gpu=T4,hostMemory=256Gi"), "model": LLAMA},
    ),
    "evaluation does not fit": (
        {"training": None, "evaluation": {}, **WRITES, **ON_ONE, "model": {"uri": "hf://a/Model-70B"}},
        {"hardware": parse_hardware("gpu=T4"), "model": None, "as_known": True},
    ),
    "a compiled model in parts": (
        {**WRITES, **ON_GPUS, "parallelism": {"tensor": 2}, "training": {"arguments": {"torch_compile": True}}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "selective recomputation of a model in parts": (
        {**WRITES, **ON_GPUS, "parallelism": {"tensor": 2, "activationCheckpointing": "selective"}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "fp16 of a model in parts": (
        {**WRITES, **ON_GPUS, "parallelism": {"tensor": 2}, "training": {"precision": "fp16"}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "no tensor-parallel plan": (
        {**ON_GPUS, "parallelism": {"tensor": 2}},
        {"hardware": GPUS, "model": BERT.model_copy(update={"model_type": "unheard-of"})},
    ),
    "heads that ranks do not divide": (
        {**WRITES, **ON_GPUS, "parallelism": {"tensor": 8}},
        {"hardware": GPUS, "model": llama_1b("text-generation", num_attention_heads=28, num_key_value_heads=4)},
    ),
    "adafactor over parts of matrices": (
        {**WRITES, **ON_GPUS, "parallelism": {"tensor": 2}, "training": {"optimizer": "adafactor"}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "preferences through a pipeline": (
        {"task": "preference-tuning", **ON_GPUS, "parallelism": {"pipeline": {"degree": 2}}},
        {"hardware": GPUS, "model": llama_1b("preference-tuning")},
    ),
    "more stages than layers": (
        {**WRITES, **ON_GPUS, "parallelism": {"pipeline": {"degree": 8}}},
        {"hardware": GPUS, "model": llama_1b("text-generation", num_hidden_layers=4)},
    ),
    "passes that rows do not fill": (
        {**WRITES, **ON_GPUS, "parallelism": {"pipeline": {"degree": 2, "microBatches": 5}}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "slices of a compiled model": (
        {**WRITES, **ON_GPUS, "parallelism": {"sequence": 2}, "training": {"arguments": {"torch_compile": True}}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "slices in fp8": (
        {**WRITES, **ON_GPUS, "parallelism": {"sequence": 2}, "training": {"precision": "fp8"}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "slices that heads do not divide": (
        {**WRITES, **ON_GPUS, "parallelism": {"sequence": 8}},
        {"hardware": GPUS, "model": llama_1b("text-generation", num_attention_heads=28, num_key_value_heads=4)},
    ),
}  # fmt: skip


def document(spec: Mapping[str, Any]) -> dict[str, Any]:
    return job_document({"model": {"uri": "hf://org/model"}, "dataset": {"uri": "hf://org/reviews"}, **spec})


def problems_of(written: dict[str, Any], known: Mapping[str, Any]) -> tuple[Problem, ...]:
    """What the planner says to a job; nothing: it plans."""
    facts = {"model": BERT, "hardware": CORES, **known}
    settings = facts.pop("settings", CLUSTER_SETTINGS)
    adaptation, as_known = facts.pop("adaptation", Adaptation()), facts.pop("as_known", False)
    try:
        plan(
            FineTuneJob.model_validate_json(json.dumps(written)),
            Facts(**facts),
            settings,
            adaptation,
            as_known=as_known,
        )
    except PlanRefused as refused:
        return refused.problems
    return ()


BY_HAND: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to do": ({"spec.evaluation": {}}, "any of three blocks"),
    "no rows": ({"spec.dataset": {"uri": "hf://c/d"}}, "the user's own data"),
    "GPUs of nobody knows what node": ({"spec.resources.gpusPerNode": 1}, "any number"),
    "a claim without a cluster": ({"spec.model.uri": "file:///models/m"}, "the user's own folder"),
    "processes that the degrees do not divide": ({"spec.resources.gpusPerNode": 2}, "a multiple"),
    "no launcher is served": ({}, "a right of the operator's, granted outside of the job"),
}
"""Hints that no reader can follow by itself: the edits of somebody who can, and what it takes to know them."""
OUTSIDE = ("no launcher is served",)
"""Refusals that nothing in the job can change."""


def ways_out(case: str, problem: Problem) -> list[list[Edit]]:
    if case in BY_HAND:
        edits, _ = BY_HAND[case]
        return [[Edit(field, value) for field, value in edits.items()]]
    return alternatives(problem)


def still(problem: Problem, after: tuple[Problem, ...]) -> list[str]:
    return [f"{each.path}: {each.rule}" for each in after if (each.path, each.rule) == (problem.path, problem.rule)]


@pytest.mark.parametrize("case", [case for case in CASES if case not in OUTSIDE])
def test_each_way_out_of_a_refusal_clears_it_and_one_leads_to_a_plan(case: str) -> None:
    spec, known = CASES[case]
    written = document(spec)
    problems = problems_of(written, known)
    assert problems, "nothing is refused"
    for problem in problems:
        ways = ways_out(case, problem)
        assert ways, f"nobody can tell what to do: {problem.path}: {problem.way_out}"
        for edits in ways:
            after = problems_of(without_gone(apply(written, edits)), known)
            assert still(problem, after) == [], (edits, problem.way_out)
    firsts = [edits for problem in problems for edits in ways_out(case, problem)[:1]]
    whole = without_gone(apply(written, [edit for edits in firsts for edit in edits]))
    assert [each.rule for each in problems_of(whole, known)] in ([], ["a job has to do something"])


def test_hints_by_hand_belong_to_cases_whose_messages_cannot_be_read() -> None:
    assert set(BY_HAND) <= set(CASES)
    for case in BY_HAND:
        spec, known = CASES[case]
        assert not any(alternatives(problem) for problem in problems_of(document(spec), known)), case


# ------------------------------------------------------------------------------------------------------------- coverage

NOT_TOLD = ("degrees.py",)
"""Modules whose refusals are of degrees that the planner tries: they say why a model was not split, and nobody is asked
to do anything.
"""


def refusals() -> Iterator[tuple[str, range]]:
    """The module and the lines of each call that refuses something."""
    for module in sorted(PLANNING.glob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refusing":
                yield module.name, range(node.lineno, (node.end_lineno or node.lineno) + 1)


def test_the_cases_reach_every_place_where_the_planner_refuses() -> None:
    reached: set[tuple[str, int]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "refusing" and frame.f_back is not None:
            reached.add((Path(frame.f_back.f_code.co_filename).name, frame.f_back.f_lineno))

    sys.setprofile(profile)
    try:
        for spec, known in CASES.values():
            problems_of(document(spec), known)
    finally:
        sys.setprofile(None)
    wanted = [(name, lines) for name, lines in refusals() if name not in NOT_TOLD]
    assert len(wanted) > 40
    assert [
        f"{name}:{lines.start}" for name, lines in wanted if not any((name, line) in reached for line in lines)
    ] == []
