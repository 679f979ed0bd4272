"""Choice of a form by time: against exhaustive search, and with its margins."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import finetune_operator.plan.strategy.choice as choice
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.models.assumed_models import assumed_model
from finetune_operator.plan.models.known_models import known_config
from finetune_operator.plan.plan import formed_draft, other_forms, plan
from finetune_operator.plan.strategy.batch import batch_of, less_padded, micro_batches
from finetune_operator.plan.strategy.choice import SIMPLER_MARGIN, Candidate, best_fit, seconds_of_form
from finetune_operator.plan.strategy.degrees import slices, spreads
from finetune_operator.plan.strategy.ladder import Fit, estimate, fits, rungs, with_passes
from finetune_operator.plan.time.asynchronous_saving import choose_saving, saves_beside
from finetune_operator.plan.time.cost import estimate_training
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import Facts, PlanRefused
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Planning, Settings
from planning_support.cases import job

MODELS = (
    "bert-base-uncased",
    "roberta-large",
    "gpt2-xl",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "qwen2.5-32b",
    "llama-3.1-70b",
)
NODES = (
    "gpu=T4,cpu=8,hostMemory=28Gi",
    "gpu=V100-32GB,gpus=8,cpu=64,hostMemory=768Gi",
    "gpu=A10G,gpus=4,cpu=48,hostMemory=192Gi",
    "gpu=L4,gpus=2,cpu=24,hostMemory=96Gi",
    "gpu=A100-40GB,gpus=8,cpu=96,hostMemory=1152Gi",
    "gpu=A100-80GB,cpu=24,hostMemory=220Gi",
    "gpu=H100,gpus=8,cpu=192,hostMemory=2Ti",
    "gpu=H200,gpus=8,cpu=192,hostMemory=2Ti",
)


def facts_of(name: str, task: Any) -> ModelFacts:
    """Return the facts of a known model."""
    return model_facts(known_config(name), task)


def blocks(most: int) -> list[Any]:
    """Return blocks of 10 random jobs, of which all but `most` run with --everything: a job has thousands of forms."""
    return [pytest.param(block, marks=[pytest.mark.everything] if block >= most else []) for block in range(20)]


def case(seed: int) -> tuple[Any, Facts]:
    """Return a random job and the facts about its model and nodes."""
    draw = random.Random(seed)
    name, node = draw.choice(MODELS), draw.choice(NODES)
    task = "text-classification" if name.startswith(("bert", "roberta")) else "text-generation"
    hardware, nodes = parse_hardware(node), draw.choice((1, 1, 2, 4, 16))
    world = hardware.gpus_per_node * nodes
    parallelism: dict[str, Any] = draw.choice(
        ({}, {}, {}, {"strategy": "fsdp"}, {"strategy": "deepspeed"}, {"activationCheckpointing": "full"})
    )
    spec: dict[str, Any] = {
        "task": task,
        "preparation": {"maxLength": draw.choice((128, 512)), "packing": "never"},
        "training": {"globalBatchSize": world * draw.choice((1, 4, 12, 32))},
        "resources": {"nodes": nodes, "gpusPerNode": hardware.gpus_per_node},
        "parallelism": parallelism,
    }
    if task == "text-generation":
        spec["preparation"] = {"maxLength": draw.choice((512, 2048, 8192)), "packing": "never"}
    spec["training"]["maxSteps"] = draw.choice((10, 5000))
    return job(spec), Facts(model=facts_of(name, task), hardware=hardware)


def all_forms(draft: Draft) -> Iterator[tuple[Draft, Strategy, int]]:
    """Yield every form of a job: each rung at each micro-batch with each degree."""
    drafts = [draft]
    fixed = draft.spec.parallelism
    if fixed.strategy == "auto":
        drafts += [*spreads(draft), *(each for group in slices(draft) for each in group)]
    for each in drafts:
        for rung in () if each.problems else rungs(each, each.spec.parallelism):
            for micro in less_padded(each, rung, micro_batches(each)):
                yield each, with_passes(each, rung, micro), micro


def training_seconds(draft: Draft, fit: Fit) -> float:
    """Return the time of the whole training as the plan of a form shows it."""
    formed = replace(draft, strategy=fit.strategy, batch=batch_of(draft, fit.micro_batch), memory=fit.memory)
    return decided(estimate_training(choose_saving(formed)).seconds)


def searched(draft: Draft) -> float | None:
    """Return the least time of all forms that fit, by estimating the memory of each; None if none fits."""
    forms = [(each, Fit(form, micro, estimate(each, form, micro))) for each, form, micro in all_forms(draft)]
    for margin in (draft.settings.planning.memory_margin, 0.0):
        found = [training_seconds(each, fit) for each, fit in forms if fits(each, fit.memory, margin)]
        if found:
            return min(found)
    return None


@pytest.mark.parametrize("block", blocks(3))
def test_choice_is_within_2_percent_of_exhaustive_search_for_random_jobs(block: int):
    fitting = 0
    for seed in range(10 * block, 10 * block + 10):
        drawn, facts = case(seed)
        draft = formed_draft(drawn, facts, CLUSTER_SETTINGS)
        least, chosen = searched(draft), best_fit(draft)
        assert (least is None) is (chosen is None), seed
        if least is None or chosen is None:
            continue
        changed, found = chosen
        taken = training_seconds(changed, found)
        assert least <= taken <= least * (1 + SIMPLER_MARGIN), (seed, found.strategy.label, taken, least)
        fitting += 1
    assert fitting >= 3, "most random jobs fit, or the test shows nothing"


def in_precision(drawn: Any, precision: str) -> Any:
    training = drawn.spec.training.model_copy(update={"precision": precision})
    return drawn.model_copy(update={"spec": drawn.spec.model_copy(update={"training": training})})


def least_in_precision(drawn: Any, facts: Facts, precision: str) -> float:
    """Return the time of the training by the best form in a precision; infinite if it is refused or nothing fits."""
    try:
        draft = formed_draft(in_precision(drawn, precision), facts, CLUSTER_SETTINGS)
    except PlanRefused:
        return math.inf
    found = best_fit(draft)
    if found is None:
        return math.inf
    return training_seconds(*found)


@pytest.mark.parametrize("block", blocks(1))
def test_no_precision_is_quicker_than_the_automatic_one(block: int):
    compared = 0
    for seed in range(10 * block, 10 * block + 10):
        drawn, facts = case(seed)
        # Where the GPU computes in bf16, fp16 has its rate and its memory.
        names = ("fp32",) if decided(decided(facts.hardware).gpu).bf16 else ("fp16", "fp32")
        others = {name: least_in_precision(drawn, facts, name) for name in names}
        try:
            made = plan(drawn, facts, CLUSTER_SETTINGS)
        except PlanRefused:
            for name in names:
                with pytest.raises(PlanRefused):
                    plan(in_precision(drawn, name), facts, CLUSTER_SETTINGS)
            continue
        if min(others.values()) == math.inf:
            continue  # Nothing fits by the facts; prepare measures before it is refused.
        assert decided(made.estimate.seconds) <= min(others.values()) * (1 + 2 * SIMPLER_MARGIN), (seed, others)
        compared += 1
    assert compared >= 3


def test_fp32_with_stages_is_taken_where_it_is_quicker_than_fp16():
    drawn, facts = case(15)
    made = plan(drawn, facts, CLUSTER_SETTINGS).trainer.training
    assert made is not None
    assert (made.precision, made.strategy.label) == ("fp32", "ddp+pipeline16-1f1b+activation-checkpointing")


def test_choice_for_a_thousand_gpus_estimates_the_memory_of_few_candidates(monkeypatch: pytest.MonkeyPatch):
    counted = {"times": 0, "memories": 0}
    time, memory = choice.time_of_step, choice.estimate

    def timed(*given: Any) -> Any:
        counted["times"] += 1
        return time(*given)

    def estimated(*given: Any) -> Any:
        counted["memories"] += 1
        return memory(*given)

    monkeypatch.setattr(choice, "time_of_step", timed)
    monkeypatch.setattr(choice, "estimate", estimated)
    spec = {
        "task": "text-generation",
        "preparation": {"maxLength": 4096, "packing": "never"},
        "training": {"globalBatchSize": 4000},
        "resources": {"nodes": 125, "gpusPerNode": 8},
    }
    facts = Facts(model=facts_of("llama-3.1-70b", "text-generation"), hardware=parse_hardware(NODES[6]))
    assert plan(job(spec), facts, CLUSTER_SETTINGS).trainer.training is not None
    # 30 us for a time and 150 us for an estimate on one core: below half a second.
    assert 100 < counted["times"] < 4000
    assert counted["memories"] < 2000


# -------------------------------------------------------------------------------------------------------------- margins

ONE = "gpu=H100,gpus=8,cpu=192,hostMemory=2Ti"


def drafted(spec: dict[str, Any], settings: Settings = CLUSTER_SETTINGS, node: str = ONE) -> Draft:
    """Return the draft of a decoder's training before its strategy is chosen."""
    usual = {
        "task": "text-generation",
        "preparation": {"maxLength": 4096, "packing": "never"},
        "training": {"globalBatchSize": 64},
        "resources": {"gpusPerNode": 8},
    }
    facts = Facts(model=facts_of("llama-3.1-8b", "text-generation"), hardware=parse_hardware(node))
    return formed_draft(job({**usual, **spec}), facts, settings)


def test_fixed_fields_stay_fixed():
    fixed = {"parallelism": {"strategy": "deepspeed", "zeroStage": 3, "activationCheckpointing": "full"}}
    found = best_fit(drafted(fixed))
    assert found is not None
    assert found[1].strategy.label == "deepspeed-zero3+activation-checkpointing"


def test_form_without_room_for_a_copy_is_compared_with_its_waits():
    """Each checkpoint of fsdp waits, too, where a node's memory has no room for a copy of the state."""
    nodes = "gpu=H100,gpus=8,cpu=192,hostMemory={}"
    roomy, full = (
        drafted({"training": {"globalBatchSize": 64, "maxSteps": 4000}}, node=nodes.format(size))
        for size in ("2Ti", "64Gi")
    )
    found, waiting = best_fit(roomy), best_fit(full)
    assert found is not None
    assert waiting is not None
    assert saves_beside(roomy, found[1].strategy, found[1].memory.host_bytes)
    assert not saves_beside(full, waiting[1].strategy, waiting[1].memory.host_bytes)
    assert decided(seconds_of_form(*found)) < decided(seconds_of_form(*waiting))


@pytest.mark.parametrize("margin", [0.0, 0.06, 0.2])
def test_the_share_of_memory_that_the_settings_keep_free_stays_free(margin: float):
    settings = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(memoryMargin=margin)})
    found = best_fit(drafted({}, settings))
    assert found is not None
    memory = found[1].memory
    assert memory.total_bytes <= (1 - margin) * memory.capacity_bytes


def test_plan_without_the_margin_is_used_when_nothing_else_fits():
    fixed: dict[str, Any] = {
        "parallelism": {"strategy": "deepspeed", "zeroStage": 2, "activationCheckpointing": "none"}
    }
    wide = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(memoryMargin=0.5)})
    draft = drafted(fixed, wide)
    made = plan(draft.job, Facts(model=draft.model, hardware=draft.hardware), wide)
    assert made.memory is not None
    assert made.memory.total_bytes > made.memory.capacity_bytes / 2
    assert any("as nothing fits that leaves 50% free" in reason for reason in made.reasons)


def test_a_simpler_form_is_kept_unless_another_is_quicker_by_the_margin():
    draft = drafted({})
    forms = tuple(choice.all_forms(draft))
    small = {each.strategy.label: each for each in forms if each.micro_batch == 1}

    def chosen(gain: float) -> str:
        pair: tuple[Candidate, ...] = (
            replace(small["deepspeed-zero2"], seconds=1.0),
            replace(small["deepspeed-zero3"], seconds=1 / gain),
        )
        found = choice.quickest(pair, (0.0,))
        assert found is not None
        return found[1].strategy.label

    assert chosen(1 + SIMPLER_MARGIN / 2) == "deepspeed-zero2"
    assert chosen(1 + 2 * SIMPLER_MARGIN) == "deepspeed-zero3"


@pytest.mark.parametrize(
    ("steps", "rate", "chosen"),
    [(1000, 200.0, "fsdp+selective-activation-checkpointing"), (38, 1e5, "deepspeed-zero3")],
)
def test_form_that_saves_beside_the_training_is_taken_where_it_ends_sooner(steps: int, rate: float, chosen: str):
    """A step by ZeRO-3 is 3 % quicker here, and the training waits for each of its checkpoints."""
    model, _ = assumed_model("hf://org/llama-33b", "text-generation")
    spec = {
        "task": "text-generation",
        "preparation": {"maxLength": 2048, "packing": "never"},
        "training": {"globalBatchSize": 256, "maxSteps": steps, "arguments": {"torch_compile": False}},
        "resources": {"nodes": 2, "gpusPerNode": 8},
    }
    facts = Facts(model=model, hardware=parse_hardware(f"{NODES[6]},network=3200"))
    settings = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(saveMegabytesPerSecond=rate)})
    assert plan(job(spec), facts, settings).strategy == chosen
    rows = other_forms(job(spec), facts, settings)
    fit = [row for row in rows if row.memory_bytes <= 0.94 * row.capacity_bytes]
    assert decided(rows[0].seconds) <= min(decided(row.seconds) for row in fit) * (1 + SIMPLER_MARGIN)


def test_form_that_fits_in_no_way_is_estimated_twice(monkeypatch: pytest.MonkeyPatch):
    """Estimates are for one row and for all rows of a step at once, and for the sizes between and both margins none."""
    spec = {"model": {"uri": "hf://meta-llama/Llama-2-70b-hf"}, "training": {"globalBatchSize": 128}}
    small = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(memoryMargin=0.06)})
    draft = drafted({**spec, "resources": {"gpusPerNode": 1}}, small, node=NODES[0])
    asked: list[tuple[int, int]] = []

    def counted(draft: Draft, strategy: Strategy, micro: int) -> Any:
        asked.append((id(strategy), micro))
        return estimate(draft, strategy, micro)

    monkeypatch.setattr(choice, "estimate", counted)
    forms = tuple(choice.all_forms(draft))
    assert choice.quickest(forms, (0.06, 0.0)) is None
    assert len(forms) > 3 * len({id(form.rung) for form in forms})
    assert len(asked) == 2 * len({id(form.rung) for form in forms})
    assert {micro for _, micro in asked} == {1, 128}


def test_form_that_is_quicker_only_when_compiled_is_named():
    """ZeRO-3 is the quickest form here, is not compiled, and is slower than others that are."""
    model, _ = assumed_model("hf://org/llama-33b", "text-generation")
    spec = {
        "task": "text-generation",
        "preparation": {"maxLength": 2048, "packing": "never"},
        "training": {"globalBatchSize": 256, "maxSteps": 38},
        "resources": {"nodes": 2, "gpusPerNode": 8},
    }
    facts = Facts(model=model, hardware=parse_hardware(f"{NODES[6]},network=3200"))
    settings = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(saveMegabytesPerSecond=1e5)})
    rows = other_forms(job(spec), facts, settings)
    assert rows[0].strategy == "deepspeed-zero3"
    quicker = [row for row in rows if "quicker with torch.compile" in row.why]
    assert all(decided(row.seconds) < decided(rows[0].seconds) for row in quicker)
    assert any(row.strategy.startswith("fsdp") for row in quicker)


def test_selective_checkpointing_is_taken_where_it_is_quicker_than_full():
    found = best_fit(drafted({"resources": {"gpusPerNode": 8, "nodes": 1}}, node=NODES[4]))
    assert found is not None
    assert found[1].strategy.activation_checkpointing == "selective"


# --------------------------------------------------------------------------------------------------------- alternatives


def test_alternatives_name_one_chosen_form_and_a_reason_for_each_other():
    draft = drafted({})
    facts = Facts(model=draft.model, hardware=draft.hardware)
    rows = other_forms(draft.job, facts, CLUSTER_SETTINGS)
    made = plan(draft.job, facts, CLUSTER_SETTINGS)
    assert [row.strategy for row in rows if row.chosen] == [made.strategy]
    assert rows[0].chosen
    assert rows[0].seconds == made.estimate.seconds
    assert len({row.strategy for row in rows}) == len(rows) > 20
    whys = {row.strategy: row.why for row in rows}
    assert whys["ddp"].startswith("needs ")
    assert any(why.endswith(" longer") for why in whys.values())


def test_alternatives_of_a_job_that_does_not_fit_are_refused():
    draft = drafted({"parallelism": {"strategy": "ddp"}})
    with pytest.raises(PlanRefused):
        other_forms(draft.job, Facts(model=draft.model, hardware=draft.hardware), CLUSTER_SETTINGS)
