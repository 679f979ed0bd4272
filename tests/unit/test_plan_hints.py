"""Every refusal of the planner is reached, and following its message clears it."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import finetune_operator.plan as planning
from each_case import each_case
from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.time import cost
from finetune_operator.plan.types.plan_types import Adaptation, Facts, NodesFacts, NodesNetwork, PlanRefused
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.types import FineTuneJob
from mending import Edit, alternatives, apply, created_at, job_document, missed_calls, without_gone
from planning_support.cases import BERT, llama_1b

PLANNING = Path(planning.__path__[0])
GPUS = parse_hardware("gpu=H100,memory=80Gi,gpus=8,cpu=64,hostMemory=2Ti")
CORES = parse_hardware("cpu=8,hostMemory=64Gi")
LLAMA = llama_1b("text-generation", max_position_embeddings=4096)
LLAMA_70B = llama_1b(
    "text-generation", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28_672,
    max_position_embeddings=4096,
)  # fmt: skip
ROWS = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=700, tokens=20_000, longest=64)}, max_length=128)
ON_GPUS: dict[str, Any] = {"resources": {"gpusPerNode": 8}}
ON_ONE: dict[str, Any] = {"resources": {"gpusPerNode": 1}}
WRITES: dict[str, Any] = {"task": "text-generation"}
DEEPSPEED: dict[str, Any] = {"strategy": "deepspeed"}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
BY_VLLM: dict[str, Any] = {
    "task": "text-generation",
    "model": {"uri": "pvc://models/llama"},
    "training": None,
    "endpoint": {"optimization": "vllm"},
    "resources": {"gpusPerNode": 8},
}
KEPT = "-activation-checkpointing"


def priced(most: float) -> Settings:
    """Return settings with a price of nodes without GPUs, and this bound on the cost of a job."""
    settings, _ = check_settings(
        {"allow": {"maxCost": most}, "prices": [{"product": "cpu", "gpus": 0, "perHour": 1.0}]}
    )
    assert settings is not None
    return settings


def with_gpus(most: int) -> Settings:
    """Return settings with this bound on the GPUs of a job."""
    settings, _ = check_settings({"allow": {"maxGpus": most}})
    assert settings is not None
    return settings


Case = tuple[dict[str, Any], dict[str, Any]]
"""Fields of the job, and the known facts: fields of Facts, `settings`, `adaptation`, `as_known`."""

CASES: dict[str, Case] = {
    "pods prepare for a program": (
        {
            "training": {"script": {"git": {"url": "https://github.com/a/b", "ref": "main"}, "entryPoint": "a.py"}},
            "evaluation": {},
            "preparation": {"engine": "job"},
        },
        {},
    ),
    "pods predict for a program": (
        {
            "training": {"script": {"git": {"url": "https://github.com/a/b", "ref": "main"}, "entryPoint": "a.py"}},
            "predict": {"workers": 3},
        },
        {},
    ),
    "Spark predicts for a program": (
        {
            "training": {"script": {"git": {"url": "https://github.com/a/b", "ref": "main"}, "entryPoint": "a.py"}},
            "predict": {"workers": "auto", "engine": "spark"},
        },
        {},
    ),
    "Spark predicts, and is not served and not granted": ({"predict": {"workers": 3, "engine": "spark"}}, {}),
    "a way to compute predictions that is for CPUs": (
        {"predict": {"optimization": "onnx"}, "resources": {"gpusPerNode": "auto"}},
        {"hardware": GPUS},
    ),
    "a way to compute predictions that is for one GPU": (
        {
            "training": None,
            "predict": {"optimization": "fp8"},
            "model": {"uri": "hf://a/Model-70B"},
            "resources": {"gpusPerNode": 8},
        },
        {"hardware": GPUS, "model": None},
    ),
    "a way to compute answers that is for CPUs": (
        {"endpoint": {"optimization": "onnx"}, "resources": {"gpusPerNode": "auto"}},
        {"hardware": GPUS},
    ),
    "servers without a cluster": ({"training": None, "endpoint": {}}, {"local": True}),
    "HTTPRoutes are not served": ({"endpoint": {"traffic": {"gateway": "infra/public", "canaryPercent": 50}}}, {}),
    "HTTPScaledObjects are not served": ({"endpoint": {"idle": {"scaleToZeroAfterSeconds": 600}}}, {}),
    "vLLM without GPUs": ({**BY_VLLM, "resources": {"gpusPerNode": "auto"}}, {"model": LLAMA}),
    "vLLM on a GPU without bf16": (BY_VLLM, {"hardware": parse_hardware("gpu=T4"), "model": LLAMA}),
    "vLLM takes the job's own variable": (
        {**BY_VLLM, "template": {"env": [{"name": "VLLM_API_KEY", "value": "mine"}]}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "vLLM does not fit": (
        {**BY_VLLM, **ON_ONE},
        {"hardware": parse_hardware("gpu=L4,gpus=8,hostMemory=1Ti"), "model": LLAMA_70B},
    ),
    "more GPUs for vLLM than are allowed": (
        {**BY_VLLM, "endpoint": {**BY_VLLM["endpoint"], "replicas": 3}},
        {"hardware": parse_hardware("gpu=H100,gpus=8,hostMemory=1Ti"), "model": LLAMA_70B, "settings": with_gpus(4)},
    ),
    "KServe is not served": ({"endpoint": {"runtime": "kserve"}}, {}),
    "a runtime of KServe is not served": (
        {
            **BY_VLLM,
            "model": {"uri": "pvc://models/m"},
            "endpoint": {"optimization": "vllm", "runtime": "kserve", "kserveRuntime": "kserve-huggingfaceserver"},
        },
        {"hardware": GPUS, "model": LLAMA},
    ),
    "KServe takes the job's own variable": (
        {"endpoint": {"runtime": "kserve"}, "template": {"env": [{"name": "PYTHONPATH", "value": "/mine"}]}},
        {"kserve": True},
    ),
    "Spark is not served and not granted": ({"preparation": {"engine": "spark"}}, {}),
    "rows longer than positions": ({"preparation": {"maxLength": 1024}}, {}),
    "fp8 on a T4": (
        {"training": {"precision": "fp8"}, **ON_ONE},
        {"hardware": parse_hardware("gpu=T4")},
    ),
    "bf16 on a T4": (
        {"training": {"precision": "bf16"}, **ON_ONE},
        {"hardware": parse_hardware("gpu=T4")},
    ),
    "GPUs of nobody knows what node": ({"resources": {"gpusPerNode": "auto"}}, {"hardware": None}),
    "a claim without a cluster": ({"model": {"uri": "pvc://claim/model"}}, {"local": True}),
    "suspended without a cluster": ({"runPolicy": {"suspend": True}}, {"local": True}),
    "a launcher that is not rendered": ({"launcher": "jobset"}, {}),
    "a launcher that is not served": ({"launcher": "mpijob"}, {}),
    "no launcher is served": ({}, {"served": ()}),
    "two nodes without a cluster": ({"resources": {"nodes": 2}}, {"local": True}),
    "more GPUs than a node has": ({"resources": {"gpusPerNode": 16}}, {"hardware": GPUS}),
    "network devices that no node has": (
        {"resources": {"nodes": 2, "gpusPerNode": 8, "network": "rdma"}},
        {"hardware": GPUS, "nodes": NodesFacts(words="", network=NodesNetwork(nodes=2, node_gpus=8))},
    ),
    "fewer rows than a step": ({"training": {"globalBatchSize": 100_000}}, {"data": ROWS}),
    "layers of another model": (
        {**WRITES, "model": {"uri": "hf://a/b", "adapter": {"method": "lora", "targetModules": ["Wqkv"]}}, **ON_ONE},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "parameters in files on a CPU": (
        {"parallelism": {**DEEPSPEED, "zeroStage": 3, "offload": {"parameters": "nvme"}}},
        {},
    ),
    "all strategies have run out of memory": (
        {**ON_ONE, "parallelism": {"strategy": "single"}},
        {
            "hardware": GPUS,
            "adaptation": Adaptation(1, tuple(f"single{tail}" for tail in ("", "+selective" + KEPT, "+" + KEPT[1:]))),
        },
    ),
    "it does not fit": (
        {**WRITES, **ON_ONE, "parallelism": {"strategy": "single"}, "training": {"globalBatchSize": 64}},
        {"hardware": parse_hardware("gpu=T4,hostMemory=256Gi"), "model": LLAMA},
    ),
    "an adapter with the job's name": (
        {
            "training": None,
            "model": {"uri": "hf://org/m"},
            "endpoint": {"optimization": "none", "adapters": [{"name": "a", "uri": "pvc://tuned/adapter"}]},
        },
        {},
    ),
    "answers longer than the model": (
        {**WRITES, "predict": {"dataset": {"uri": "hf://a/b"}}, "generation": {"maxNewTokens": 5000}},
        {"hardware": GPUS, "model": LLAMA},
    ),
    "a server does not fit into its memory": (
        {"training": None, "endpoint": {"resources": {"memory": "64Mi"}}, "resources": {"gpusPerNode": 0}},
        {},
    ),
    "no server works with its memory": (
        {"training": None, "endpoint": {"resources": {"memory": "1Gi"}}, "resources": {"gpusPerNode": 0}},
        {"model": None},
    ),
    "a prediction on CPUs does not fit into its memory": (
        {"training": None, "predict": {}, "resources": {"gpusPerNode": 0, "memory": "1Gi"}},
        {},
    ),
    "a prediction on a GPU does not fit into the host's memory": (
        {"training": None, "predict": {}, "resources": {"gpusPerNode": 1, "memory": "1Gi"}},
        {"hardware": parse_hardware("gpu=L4,gpus=1,cpu=8,hostMemory=64Gi")},
    ),
    "evaluation does not fit": (
        {"training": None, "evaluation": {}, **WRITES, **ON_ONE, "model": {"uri": "hf://a/Model-70B"}},
        {"hardware": parse_hardware("gpu=T4"), "model": None, "as_known": True},
    ),
    "no tensor-parallel plan": (
        {**ON_GPUS, "parallelism": {"tensor": 2}},
        {"hardware": GPUS, "model": BERT.model_copy(update={"model_type": "unheard-of"})},
    ),
    "heads that ranks do not divide": (
        {**WRITES, **ON_GPUS, "parallelism": {"tensor": 8}},
        {"hardware": GPUS, "model": llama_1b("text-generation", num_attention_heads=28, num_key_value_heads=4)},
    ),
    "more stages than layers": (
        {**WRITES, **ON_GPUS, "parallelism": {"pipeline": {"degree": 8}}},
        {"hardware": GPUS, "model": llama_1b("text-generation", num_hidden_layers=4)},
    ),
    "slices that heads do not divide": (
        {**WRITES, **ON_GPUS, "parallelism": {"sequence": 8}},
        {"hardware": GPUS, "model": llama_1b("text-generation", num_attention_heads=28, num_key_value_heads=4)},
    ),
    "a job that costs too much": ({"training": {"epochs": 3000}}, {"settings": priced(1)}),
    "nodes without a price": (ON_GPUS, {"hardware": GPUS, "settings": priced(100)}),
    "a batch that the node's GPUs do not divide": (
        {"training": {"globalBatchSize": 100}, "resources": {"gpusPerNode": "auto"}},
        {"hardware": GPUS},
    ),
}  # fmt: skip


def document(spec: Mapping[str, Any]) -> dict[str, Any]:
    return job_document({"model": {"uri": "hf://org/model"}, "dataset": {"uri": "hf://org/reviews"}, **spec})


def problems_of(written: dict[str, Any], known: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Return the planner's problems with a job; none if it plans."""
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
    "GPUs of nobody knows what node": ({"spec.resources.gpusPerNode": 1}, "any number"),
    "a claim without a cluster": ({"spec.model.uri": "file:///models/m"}, "the user's own folder"),
    "servers without a cluster": ({"spec.evaluation": {}}, "which of the two is wanted"),
    "a job that costs too much": ({"spec.training.epochs": 0.01}, "how much training is enough"),
    "nodes without a price": ({"spec.resources.gpusPerNode": 0}, "which nodes the cluster has"),
    "an adapter with the job's name": (
        {"spec.endpoint.adapters": [{"name": "other", "uri": "pvc://tuned/adapter"}]},
        "any other name",
    ),
    "vLLM does not fit": ({"spec.resources.gpusPerNode": 8}, "which GPUs the cluster has"),
    "no launcher is served": ({}, "a right of the operator's, granted outside of the job"),
}
"""Hints that no program can follow: edits by hand, and the knowledge that they take."""
OUTSIDE = ("no launcher is served",)
"""Refusals that no change of the job clears."""


def hints_of(case: str, problem: Problem) -> list[list[Edit]]:
    if case in BY_HAND:
        edits, _ = BY_HAND[case]
        return [[Edit(field, value) for field, value in edits.items()]]
    return alternatives(problem)


def still(problem: Problem, after: tuple[Problem, ...]) -> list[str]:
    return [f"{each.path}: {each.rule}" for each in after if (each.path, each.rule) == (problem.path, problem.rule)]


@each_case("case", [case for case in CASES if case not in OUTSIDE])
def test_each_hint_of_a_refusal_clears_it_and_one_leads_to_a_plan(case: str) -> None:
    spec, known = CASES[case]
    written = document(spec)
    problems = problems_of(written, known)
    assert problems, "nothing is refused"
    for problem in problems:
        ways = hints_of(case, problem)
        assert ways, f"nobody can tell what to do: {problem.path}: {problem.hint}"
        for edits in ways:
            after = problems_of(without_gone(apply(written, edits)), known)
            assert still(problem, after) == [], (edits, problem.hint)
    firsts = [edits for problem in problems for edits in hints_of(case, problem)[:1]]
    whole = without_gone(apply(written, [edit for edits in firsts for edit in edits]))
    assert [each.path for each in problems_of(whole, known)] in ([], ["spec.training"])  # nothing is left to do


def test_manual_hints_belong_to_cases_with_unparsable_messages() -> None:
    assert set(BY_HAND) <= set(CASES)
    for case in BY_HAND:
        spec, known = CASES[case]
        assert not any(alternatives(problem) for problem in problems_of(document(spec), known)), case


# ------------------------------------------------------------------------------------------------------------- coverage

EXEMPT = ("degrees.py",)
"""Modules whose refusals are of degrees that the planner tries: they explain why a model was not split, and ask for no
edit.
"""


def refusals() -> Iterator[tuple[str, range]]:
    """Yield the module and the lines of each call that refuses something."""
    for module in sorted(PLANNING.rglob("*.py")):
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
    wanted = [(name, lines) for name, lines in refusals() if name not in EXEMPT]
    assert len(wanted) > 20
    assert [
        f"{name}:{lines.start}" for name, lines in wanted if not any((name, line) in reached for line in lines)
    ] == []


def test_the_cases_reach_every_message_about_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    with created_at(monkeypatch) as reached:
        for spec, known in CASES.values():
            problems_of(document(spec), known)
    assert missed_calls(cost, reached) == []
