"""Evaluation and prediction run processes with a whole model each: one that does not fit a GPU in fp32 computes in
bf16, one that does not fit so has its layers on several GPUs, and one that no pod holds is left out or refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from finetune_contract.choices import InferencePrecision, Stage, Task
from finetune_contract.facts import DataFacts, HardwareFacts, ModelFacts, SplitFacts
from finetune_contract.plans import JUDGED_LOGITS, REQUESTED_LOGITS
from finetune_operator.cli.cluster.jobview import plan_lines
from finetune_operator.jobs.render.sizes import stage_threads
from finetune_operator.jobs.state.planned import plan_status
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.inference.inference import devices_of_model
from finetune_operator.plan.memory.process_memory import inference_bytes
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.summary import summarise
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.launcher_rows import BUILT_IN, ENGINES
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from planning_support.cases import BERT, job

NODE = parse_hardware("gpu=H100,gpus=8,cpu=96,hostMemory=2Ti")


def planned(model: str, hardware: HardwareFacts = NODE, **spec: Any) -> JobPlan:
    """Plan a model that has not been read, on nodes of eight GPUs."""
    whole = {
        "task": "text-generation",
        "model": {"uri": f"hf://org/{model}"},
        "dataset": {"uri": "hf://org/texts", "columns": {"text": "text"}},
        "training": {"globalBatchSize": 64, "maxSteps": 10},
        "parallelism": {"tensor": 8, "activationCheckpointing": "full"},
        "resources": {"nodes": 1, "gpusPerNode": 8},
    }
    return plan(job({**whole, **spec}), Facts(hardware=hardware), CLUSTER_SETTINGS)


def llama(h: int, layers: int, heads: int, key_value: int, inner: int, vocabulary: int) -> ModelFacts:
    config = {
        "model_type": "llama",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131_072,
    }
    return model_facts(config, "text-generation")


LLAMA_8B = llama(4096, 32, 32, 8, 14_336, 128_256)
"""The shape of Llama 3.1 8B: 29.9 GiB in fp32."""
LLAMA_3B = llama(3072, 28, 24, 8, 8192, 128_256)
"""The shape of Llama 3.2 3B, with an output layer of its own: 13.4 GiB in fp32."""
LLAMA_70B = llama(8192, 80, 64, 8, 28_672, 128_256)
QLORA = {"uri": "hf://org/llama", "adapter": {"method": "qlora"}}
WRITES = {
    "task": "text-generation",
    "model": QLORA,
    "dataset": {"uri": "hf://org/texts", "columns": {"text": "text"}},
    "training": {"globalBatchSize": 16, "microBatchSize": 1, "maxSteps": 10},
    "parallelism": {"activationCheckpointing": "full"},
    "resources": {"gpusPerNode": 1},
}


PREDICTS: dict[str, Any] = {"training": None, "parallelism": None, "model": {"uri": "hf://org/llama"}, "predict": {}}
LONG = {"preparation": {"maxLength": 16_384}}
CLASSIFIES: dict[str, Any] = {
    "task": "text-classification",
    "dataset": {"uri": "hf://org/reviews"},
    "parallelism": None,
}
BEGUN = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=1000, tokens=64_000, longest=64)}, max_length=512)


def precisions(made: JobPlan) -> tuple[str | None, str | None]:
    """Return the precisions of evaluation and prediction; None for a stage that is not planned."""
    evaluation, prediction = made.trainer.evaluation, made.trainer.predict
    return evaluation and evaluation.precision, prediction and prediction.precision


def on(gpu: str, shape: ModelFacts | None = LLAMA_8B, data: DataFacts | None = None, **spec: Any) -> JobPlan:
    """Plan for one GPU of a node; `shape`: facts of the model, once read."""
    hardware = parse_hardware(f"gpu={gpu},gpus=1,cpu=16,hostMemory=512Gi")
    return plan(job({**WRITES, **spec}), Facts(hardware=hardware, model=shape, data=data), CLUSTER_SETTINGS)


CHOSEN: dict[str, tuple[dict[str, Any], tuple[str | None, str | None]]] = {
    "8B in 24 GB": ({"gpu": "A10G"}, ("bf16", None)),
    "8B in 40 GB": ({"gpu": "A100-40GB"}, ("fp32", None)),
    "8B in 40 GB, with rows of 16,384 tokens": ({"gpu": "A100-40GB", **LONG}, ("bf16", None)),
    "8B in 24 GB, with rows of 16,384 tokens, whose logits would take 4 GB": ({"gpu": "A10G", **LONG}, ("bf16", None)),
    "8B in 32 GB, which has room for its weights alone, without units for bf16": ({"gpu": "V100-32GB"}, (None, None)),
    "3B in 32 GB without units for bf16": ({"gpu": "V100-32GB", "shape": LLAMA_3B}, ("fp32", None)),
    "a small encoder": ({"gpu": "T4", "shape": BERT, **CLASSIFIES, "model": {"uri": "hf://org/bert"}}, ("fp32", None)),
    "prediction alone": ({"gpu": "A10G", **PREDICTS}, (None, "bf16")),
    "prediction alone, with many beams": (
        {"gpu": "A10G", **PREDICTS, "generation": {"numBeams": 64, "maxNewTokens": 512}},
        (None, None),
    ),
    "both": ({"gpu": "A10G", "evaluation": {}, "predict": {}}, ("bf16", "bf16")),
    "on the CPU": ({"gpu": "A10G", **PREDICTS, "resources": {"gpusPerNode": 0}}, (None, "fp32")),
    "by a name that says 8B": (
        {"gpu": "A10G", **PREDICTS, "shape": None, "model": {"uri": "hf://o/m-8B"}},
        (None, "bf16"),
    ),
    "a job that has begun and hardly fits": (
        {"gpu": "A10G", "shape": LLAMA_70B, "data": BEGUN, **PREDICTS},
        (None, "bf16"),
    ),
    "the same without units for bf16": ({"gpu": "V100-32GB", "data": BEGUN}, ("fp32", None)),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_inference_uses_fp32_if_it_fits_and_bf16_where_supported(case: str):
    given, expected = CHOSEN[case]
    if expected == (None, None) and "predict" in given:
        with pytest.raises(PlanRefused):
            on(**given)
        return
    made = on(**given)
    assert precisions(made) == expected
    assert any("in bf16: in fp32 one process" in reason for reason in made.reasons) == ("bf16" in expected)
    # Images that do not know the field compute in fp32, and refuse the field.
    assert ('"precision"' in made.trainer.model_copy(update={"training": None}).to_json()) == ("bf16" in expected)


def test_plan_gives_the_reason_for_bf16():
    assert (
        "evaluation and prediction compute in bf16: in fp32 one process with the whole model takes 33.3 GiB of 22.5 "
        "GiB (29.9 GiB for its weights), in bf16 17.3 GiB"
    ) in on("A10G", predict={}).reasons


def test_model_that_fits_one_gpu_is_evaluated_after_any_training():
    made = planned("gpt2-medium")
    assert made.stages[-1] is Stage.EVALUATE
    assert precisions(made) == ("fp32", None)


def test_default_evaluation_is_omitted_if_no_pod_holds_the_model():
    pipelined = {"parallelism": {"tensor": 8, "pipeline": {"degree": 16}, "activationCheckpointing": "full"}}
    smaller = parse_hardware("gpu=A100-40GB,gpus=8,cpu=96,hostMemory=2Ti")
    made = planned("gpt2-175b", smaller, resources={"nodes": 16, "gpusPerNode": 8}, **pipelined)
    assert made.stages == (Stage.PREPARE, Stage.TRAIN)
    assert precisions(made) == (None, None)
    (left_out,) = [reason for reason in made.reasons if reason.startswith("no evaluation at the end")]
    assert left_out == (
        "no evaluation at the end: one process on all 8 GPUs of a pod takes 101.6 GiB of 40.0 GiB of each in fp32 and "
        "51.3 GiB in bf16; the training measures its loss"
    )


# ------------------------------------------------------------------------------------------------ processes of a pod


@pytest.mark.parametrize(
    ("least", "devices", "chosen"), [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (8, 8, 8), (9, 8, None), (2, 6, 2)]
)
def test_model_gets_the_fewest_devices_that_hold_it(least: int, devices: int, chosen: int | None):
    assert devices_of_model(lambda count: count >= least, devices) == chosen


def on_eight(gpu: str, shape: ModelFacts, data: DataFacts | None = None, local: bool = False, **spec: Any) -> JobPlan:
    """Plan to evaluate and to predict on nodes of eight GPUs."""
    whole = {**WRITES, "training": None, "parallelism": None, "model": {"uri": "hf://org/llama"}, "predict": {}}
    whole |= {"evaluation": {}, "resources": {"gpusPerNode": 8}}
    facts = Facts(hardware=parse_hardware(f"gpu={gpu},gpus=8,cpu=96,hostMemory=2Ti"), model=shape, data=data)
    return plan(job({**whole, **spec}), replace(facts, local=local), CLUSTER_SETTINGS)


def pods(made: JobPlan) -> list[tuple[int, int]]:
    """Return models and devices of each for the pods that evaluate and predict."""
    found = [made.trainer.inference(stage) for stage in (Stage.EVALUATE, Stage.PREDICT)]
    return [(each.models, each.devices_per_model) for each in found]


SPREAD: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "8B in 80 GB": ({"gpu": "H100", "shape": LLAMA_8B}, (8, 1), (8, 1)),
    "70B in 80 GB": ({"gpu": "H100", "shape": LLAMA_70B}, (4, 2), (4, 2)),
    "70B in 40 GB": ({"gpu": "A100-40GB", "shape": LLAMA_70B}, (2, 4), (2, 4)),
    "8B in 16 GB without units for bf16": ({"gpu": "T4", "shape": LLAMA_8B}, (2, 4), (2, 4)),
    "8B, by 3 pods": ({"gpu": "H100", "shape": LLAMA_8B, "predict": {"workers": 3}}, (8, 1), (1, 1)),
    "70B, by 3 pods": ({"gpu": "H100", "shape": LLAMA_70B, "predict": {"workers": 3}}, (4, 2), (1, 2)),
    "on this machine": ({"gpu": "H100", "shape": LLAMA_8B, "local": True}, (8, 1), (8, 1)),
    "on the CPU": ({"gpu": "H100", "shape": LLAMA_3B, "resources": {"gpusPerNode": 0}}, (1, 1), (1, 1)),
    "on one GPU": ({"gpu": "H100", "shape": LLAMA_8B, "resources": {"gpusPerNode": 1}}, (1, 1), (1, 1)),
}


@pytest.mark.parametrize("case", SPREAD)
def test_pod_runs_as_many_processes_as_its_gpus_hold_models(case: str):
    given, evaluates, predicts = SPREAD[case]
    assert pods(on_eight(**given)) == [evaluates, predicts]


def test_plan_names_processes_and_gpus_of_a_large_model():
    made = on_eight("H100", LLAMA_70B)
    assert precisions(made) == ("bf16", "bf16")
    together = "evaluation by 4 groups of 2 processes, one for each group of 2 GPUs of a pod: they share the rows"
    assert together in made.reasons
    (several,) = [reason for reason in made.reasons if reason.startswith("the model of an evaluation")]
    assert re.fullmatch(
        r"the model of an evaluation or prediction is on 2 GPUs: on one it takes [\d.]+ GiB of 79.6 GiB, on 2 at most "
        r"[\d.]+ GiB of each",
        several,
    )
    shown = {row.label: row.value for section in summarise(made) for row in section.rows}
    assert (shown["evaluate"], shown["predict"]) == ("8 processes x 1 GPU, 2 for each model",) * 2
    *_, evaluate, predict = plan_lines(plan_status(made))
    assert evaluate == "evaluate: 8 processes x 1 GPU, 2 for each model"
    assert predict == "predict: 8 processes x 1 GPU, 2 for each model"


FALCON = LLAMA_70B.model_copy(update={"model_type": "falcon"})
SEVEN_HEADS = llama(8192, 80, 63, 63, 28_672, 128_256)
DIVIDED: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "70B": ({"shape": LLAMA_70B}, (2, 2), "splits each layer of the model over 2 processes"),
    "a family without a plan": ({"shape": FALCON}, (1, 1), "no tensor-parallel plan for models of type falcon"),
    "heads that two cannot share": (
        {"shape": SEVEN_HEADS},
        (1, 1),
        "processes cannot share its 63 attention heads equally",
    ),
    "3 pods that predict": ({"shape": LLAMA_70B, "predict": {"workers": 3}}, (2, 1), "of several pods each has one"),
    "texts by a server": (
        {"shape": LLAMA_70B, "predict": {"optimization": "vllm", "server": "http://vllm:8000"}},
        (2, 1),
        "texts of spec.predict.server",
    ),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_layers_are_split_where_possible_and_else_placed_with_a_reason(case: str):
    given, tensors, reason = DIVIDED[case]
    made = on_eight("H100", **given)
    found = [made.trainer.inference(stage) for stage in (Stage.EVALUATE, Stage.PREDICT)]
    assert tuple(each.tensor for each in found) == tensors
    assert len({each.devices_per_model for each in found}) == 1
    assert len([each for each in made.reasons if reason in each]) >= 1, made.reasons


def test_processes_that_split_layers_share_all_but_the_embeddings():
    def takes(devices: int, *, tensor: bool) -> int:
        return inference_bytes(
            LLAMA_70B, "text-generation", "bf16", tokens=4096, length=512, cached=0, devices=devices, tensor=tensor
        )

    shared = LLAMA_70B.parameters - LLAMA_70B.embedding_parameters
    assert takes(1, tensor=False) - takes(4, tensor=True) == pytest.approx(2 * shared * 3 / 4, rel=1e-6)
    assert takes(4, tensor=True) < takes(4, tensor=False), "no GPU has a whole unit more than its share"


def test_layers_split_over_two_gpus_need_half_the_processes_for_few_rows():
    rows = BEGUN.model_copy(update={"splits": {"test": SplitFacts(rows=9_000, tokens=450_000, longest=512)}})

    def models(shape: ModelFacts) -> int:
        return pods(on_eight("H100", shape, rows, task="text-classification", dataset={"uri": "hf://org/x"}))[0][0]

    assert (models(FALCON), models(LLAMA_70B)) == (4, 2)


def test_workers_by_themselves_are_as_many_as_groups_of_gpus():
    made = on_eight("H100", LLAMA_70B, predict={"workers": "auto"}, resources={"nodes": 2, "gpusPerNode": 8})
    assert made.predict_workers == 8
    assert any("one for each group of 2 GPUs that spec.resources asks for" in reason for reason in made.reasons)


def test_few_rows_are_left_to_fewer_processes():
    few = BEGUN.model_copy(update={"splits": {"test": SplitFacts(rows=100, tokens=50_000, longest=512)}})
    assert pods(on_eight("H100", LLAMA_8B, few))[0] == (1, 1)
    many = BEGUN.model_copy(update={"splits": {"test": SplitFacts(rows=2_000_000, tokens=1_000_000_000, longest=512)}})
    assert pods(on_eight("H100", LLAMA_8B, many))[0] == (8, 1)


@pytest.mark.parametrize(("memory", "processes"), [("64Gi", 1), ("200Gi", 3), ("1Ti", 8)])
def test_pod_runs_no_more_processes_than_its_host_memory_holds(memory: str, processes: int):
    made = on_eight("H100", LLAMA_8B, resources={"gpusPerNode": 8, "memory": memory})
    assert pods(made) == [(processes, 1)] * 2
    held = [reason for reason in made.reasons if reason.startswith("the host memory holds ")]
    assert len(held) == (processes < 8)


def serving(server: str | None, others: str | None) -> JobPlan:
    """Plan to serve a model of 8 billion parameters, 31.9 GiB in fp32, on CPUs."""
    resources = {"gpusPerNode": 0, **({} if others is None else {"memory": others})}
    endpoint = {} if server is None else {"resources": {"memory": server}}
    return on_eight("H100", LLAMA_8B, resources=resources, endpoint=endpoint, evaluation=None, predict=None)


@pytest.mark.parametrize(("server", "others"), [(None, "1Gi"), ("64Gi", "1Gi"), ("64Gi", None), (None, None)])
def test_server_on_cpus_is_measured_against_its_own_memory(server: str | None, others: str | None):
    assert serving(server, others).servers is not None


@pytest.mark.parametrize("others", ["256Gi", None])
def test_too_small_memory_of_a_server_is_refused_with_enough(others: str | None):
    with pytest.raises(PlanRefused) as refused:
        serving("16Gi", others)
    (problem,) = refused.value.problems
    assert problem.path == "spec.endpoint.resources.memory"
    enough = re.search(r"write (\d+Mi), or leave it out", problem.hint)
    assert enough is not None, problem.hint
    assert serving(enough[1], others).servers is not None


TINY = BERT.model_copy(update={"parameters": 100_000, "hidden_size": 32, "layers": 2, "vocabulary_size": 30})
ON_L4 = "gpu=L4,gpus=1,cpu=8,hostMemory=64Gi"


def limited(hardware: str, shape: ModelFacts | None, **spec: Any) -> tuple[str, str, str]:
    """Return path, rule and hint of the one refusal of a classifier's memory limit."""
    whole = {**CLASSIFIES, "training": None, "model": {"uri": "pvc://models/tiny"}, **spec}
    with pytest.raises(PlanRefused) as refused:
        plan(job(whole), Facts(hardware=parse_hardware(hardware), model=shape), CLUSTER_SETTINGS)
    (problem,) = refused.value.problems
    return problem.path, problem.rule, problem.hint or ""


@pytest.mark.parametrize("shape", [TINY, None])
@pytest.mark.parametrize("gpus", [0, 1])
def test_server_with_a_gibibyte_is_refused_for_any_model(shape: ModelFacts | None, gpus: int):
    resources = {"gpusPerNode": gpus}
    path, _, hint = limited(ON_L4, shape, endpoint={"resources": {"memory": "1Gi"}}, resources=resources)
    assert path == "spec.endpoint.resources.memory"
    enough = re.search(r"write (\d+)Mi, or leave it out", hint)
    assert enough is not None, hint
    assert int(enough[1]) > 1024


@pytest.mark.parametrize("stage", ["evaluation", "predict"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_memory_limit_of_a_stage_under_its_need_is_refused(stage: str, gpus: int):
    large = BERT.model_copy(update={"parameters": 560_000_000})
    resources = {"gpusPerNode": gpus, "memory": "2Gi"}
    path, rule, hint = limited(ON_L4, large, **{stage: {}}, resources=resources)
    assert path == "spec.resources.memory"
    assert rule.startswith(f"does not fit: one process of spec.{stage} takes ")
    enough = re.search(r"write (\d+Mi), or leave it out", hint)
    assert enough is not None, hint
    whole = {**CLASSIFIES, "training": None, "model": {"uri": "pvc://models/tiny"}, stage: {}}
    facts = Facts(hardware=parse_hardware(ON_L4), model=large)
    assert plan(job({**whole, "resources": {**resources, "memory": enough[1]}}), facts, CLUSTER_SETTINGS)


def test_low_host_memory_of_a_vllm_server_is_advised_against():
    endpoint = {"optimization": "vllm", "resources": {"memory": "8Gi"}}
    serves: dict[str, Any] = {"training": None, "dataset": None, "parallelism": None, "model": {"uri": "pvc://m/l"}}
    made = on("L4", LLAMA_3B, **serves, endpoint=endpoint)
    (advice,) = [reason for reason in made.reasons if "endpoint.resources.memory" in reason]
    assert "is assumed to take 12.0 GiB of the host's memory: write 12288Mi" in advice


def test_program_model_is_evaluated_by_one_process():
    script = {"git": {"url": "https://github.com/org/x", "ref": "main"}, "entryPoint": "train.py"}
    made = on_eight("H100", LLAMA_8B, training={"script": script})
    assert pods(made) == [(1, 1), (1, 1)]


def test_model_that_no_pod_holds_is_refused_with_its_size():
    with pytest.raises(PlanRefused) as refused:
        on_eight("T4", LLAMA_70B)
    rules = {each.path: each.rule for each in refused.value.problems}
    assert set(rules) == {"spec.evaluation", "spec.predict"}
    assert re.fullmatch(
        r"does not fit: one process on all 8 GPUs of a pod takes [\d.]+ GiB of 1\d.\d GiB of each in fp32, and T4 does "
        r"not compute in bf16",
        rules["spec.evaluation"],
    )


def test_layers_on_several_gpus_take_their_share_and_one_unit_more():
    def takes(devices: int, cached: int = 0) -> int:
        return inference_bytes(
            LLAMA_70B, "text-generation", "bf16", tokens=4096, length=512, cached=cached, devices=devices
        )

    weights = 2 * LLAMA_70B.parameters
    unit = 2 * 5 * max(LLAMA_70B.embedding_parameters, LLAMA_70B.block_parameters) // 4
    assert takes(1) - takes(4) == pytest.approx(weights - weights / 4 - unit, rel=1e-6)
    assert takes(1, 10**6) - takes(4, 10**6) > takes(1) - takes(4), "keys and values are with their layers"


REFUSED: dict[str, tuple[str, ModelFacts, str, str]] = {
    "bf16 is not enough": (
        "A10G",
        LLAMA_70B,
        "which takes 267.0 GiB of 22.5 GiB in fp32 and 134.2 GiB in bf16",
        "leave it out, or use devices of more than 134.2 GiB, or set spec.resources.gpusPerNode to 8: the GPUs of one "
        "node hold the model",
    ),
    "bf16 would do": (
        "V100-16GB",
        LLAMA_3B,
        "which takes 16.5 GiB of 15.8 GiB in fp32, and V100-16GB does not compute in bf16",
        "leave it out, or use devices of more than 16.5 GiB, or of 8.9 GiB that compute in bf16, or set "
        "spec.resources.gpusPerNode to 2: the GPUs of one node hold the model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("field", ["evaluation", "predict"])
def test_requested_evaluation_or_prediction_that_does_not_fit_is_refused(case: str, field: str):
    gpu, shape, rule, hint = REFUSED[case]
    with pytest.raises(PlanRefused) as refused:
        on(gpu, shape, **{field: {}})
    (problem,) = [each for each in refused.value.problems if each.path == f"spec.{field}"]
    assert problem.reason == "NotSupported"
    assert problem.rule == f"does not fit: one process with the whole model does it, {rule}"
    assert problem.hint == hint


def test_gpus_of_the_hint_hold_the_model() -> None:
    assert [devices for _, devices in pods(on_eight("A10G", LLAMA_70B))] == [8, 8]


def test_inference_memory_is_weights_and_the_tensors_of_a_batch():
    def takes(task: Task, precision: InferencePrecision = "bf16", cached: int = 0, tokens: int = 4096) -> int:
        return inference_bytes(LLAMA_8B, task, precision, tokens=tokens, length=512, cached=cached)

    beside = 1.1  # the allocator's overhead
    weights = 2 * LLAMA_8B.parameters
    layer = takes("text-classification") - weights - (1 << 30)
    # Queries, keys, values and results of attention, and the feed-forward layer's three: the least possible.
    assert layer > beside * 4096 * 2 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
    assert layer < 2 * beside * 4096 * 2 * (8 * 4096 + 3 * 14_336)
    logits = 4096 * 128_256
    pieces = 2 * JUDGED_LOGITS + 2 * 4 * JUDGED_LOGITS
    more = takes("text-generation") - takes("text-classification")
    assert more == pytest.approx(beside * (2 * logits + pieces), rel=1e-6)
    more = takes("summarization") - takes("text-generation")
    assert more == pytest.approx(beside * 2 * logits, rel=1e-6)
    for task in ("text-generation", "preference-tuning"):
        # A decoder computes the logits of a long row in parts, one of which is still there when the next one comes.
        more = takes(task, tokens=131_072) - takes("text-classification", tokens=131_072)
        assert more == pytest.approx(beside * (2 * 2 * REQUESTED_LOGITS + pieces), rel=1e-6)
    more = takes("masked-lm", tokens=131_072) - takes("text-classification", tokens=131_072)
    assert more == pytest.approx(beside * (2 * 131_072 * 128_256 + pieces), rel=1e-6)
    keys_and_values = 100_000 * 32 * 2 * 1024 * 2
    written = takes("text-generation", cached=100_000) - takes("text-classification")
    assert written == pytest.approx(beside * keys_and_values, rel=1e-6)
    assert takes("text-classification", "fp32") - takes("text-classification") > 2 * LLAMA_8B.parameters


# -------------------------------------------------------------------------------------------------------------- workers


def shared(workers: object, *, rows: int | None = None, local: bool = False, **spec: Any) -> JobPlan:
    """Plan a prediction over 2 nodes of 8 GPUs, of a test split of `rows` rows with 128 tokens each."""
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "dataset": {"uri": "hf://org/texts"},
        "training": None,
        "predict": {"workers": workers},
        "resources": {"nodes": 1 if local else 2, "gpusPerNode": 8},
    }
    split = None if rows is None else SplitFacts(rows=rows, tokens=128 * rows, longest=128)
    data = None if split is None else DataFacts(fingerprint="f", splits={"test": split}, max_length=128)
    return plan(job({**whole, **spec}), Facts(hardware=NODE, data=data, local=local), CLUSTER_SETTINGS)


@pytest.mark.parametrize(
    ("workers", "options", "count", "why"),
    [
        (1, {}, 1, None),
        (5, {}, 5, "prediction by 5 pods, as asked"),
        (5, {"rows": 10}, 5, "prediction by 5 pods, as asked"),
        ("auto", {}, 16, "one for each GPU that spec.resources asks for"),
        ("auto", {"resources": {"nodes": 3, "gpusPerNode": 0}}, 3, "one for each node that spec.resources asks for"),
        ("auto", {"rows": 1_000}, 1, "all rows take one pod less than a second"),
        ("auto", {"rows": 1_000_000_000}, 16, "one for each GPU that spec.resources asks for"),
        ("auto", {"local": True}, 1, "without a cluster spec.predict.workers is the number of processes"),
        (4, {"local": True}, 1, "without a cluster spec.predict.workers is the number of processes"),
    ],
)  # fmt: skip
def test_workers_are_as_many_as_have_work_and_nodes(
    workers: object, options: dict[str, Any], count: int, why: str | None
) -> None:
    made = shared(workers, **options)
    assert made.predict_workers == count
    pattern = r"prediction (by \d+ pods?|without pods)\b"
    workers_reasons = [reason for reason in made.reasons if re.match(pattern, reason)]
    assert len(workers_reasons) == (why is not None)
    assert why is None or why in workers_reasons[0]


@pytest.mark.parametrize(
    ("workers", "machine", "count", "why"),
    [
        (1, {"cpu_cores": 1}, None, None),
        ("auto", {"memory_bytes": 3 << 30}, None, None),
        (3, {}, 3, "prediction by 3 processes on this machine, as asked: they share the rows and the cores"),
        (5, {}, 4, "prediction by 4 processes on this machine, and not 5: one for each core"),
        (4, {"memory_bytes": 5 << 30}, 2, "prediction by 2 processes on this machine, and not 4: each takes up to"),
        (2, {"memory_bytes": 3 << 30}, 1, "prediction by 1 process on this machine, and not 2: each takes up to"),
    ],
)  # fmt: skip
def test_workers_are_processes_on_a_machine_without_a_cluster(
    workers: object, machine: dict[str, Any], count: int | None, why: str | None
) -> None:
    spec = {
        "task": "text-classification",
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "predict": {"workers": workers, "dataset": {"uri": "hf://org/texts"}},
        "resources": {"gpusPerNode": 0},
    }
    hardware = HardwareFacts(**{"cpu_cores": 4, "memory_bytes": 64 << 30, **machine})
    made = plan(
        job({"training": None, "dataset": None, **spec}), Facts(hardware=hardware, local=True), CLUSTER_SETTINGS
    )
    assert (made.predict_workers, made.trainer.inference(Stage.PREDICT).processes) == (1, count or 1)
    reasons = [reason for reason in made.reasons if "on this machine, " in reason]
    assert len(reasons) == (why is not None)
    assert why is None or reasons[0].startswith(why)
    rows = [row.value for row in summarise(made)[0].rows if row.label == "predict"]
    assert rows == ([f"{count} processes"] if count and count > 1 else [])


def on_cores(data: DataFacts | None = None, facts: dict[str, Any] | None = None, **spec: Any) -> JobPlan:
    """Plan a prediction of a classification on CPUs of a node with 16 cores."""
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "dataset": None,
        "training": None,
        "predict": {"dataset": {"uri": "hf://org/texts"}},
        "resources": {"gpusPerNode": 0, "cpu": "16", "memory": "16Gi"},
    }
    return plan(job({**whole, **spec}), Facts(data=data, **facts or {}), CLUSTER_SETTINGS)


TEST_ROWS: dict[str, Any] = {"predict": {}, "dataset": {"uri": "hf://org/texts"}}


def counted(rows: int) -> DataFacts:
    split = SplitFacts(rows=rows, tokens=128 * rows, longest=128)
    return DataFacts(fingerprint="f", splits={"test": split}, max_length=128)


UNKNOWN: dict[str, Any] = {"dataset": {"uri": "hf://org/texts"}}
ON_CORES: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "unknown rows": ({}, 4, "one for each 4 of 16 cores"),
    "little memory": ({"resources": {"gpusPerNode": 0, "cpu": "16", "memory": "5Gi"}}, 2, "and not 4: each takes"),
    "memory for 3": ({"resources": {"gpusPerNode": 0, "cpu": "16", "memory": "8Gi"}}, 2, "and not 4: each takes"),
    "many rows": ({"data": counted(100_000), **TEST_ROWS}, 4, "one for each 4 of 16 cores"),
    "few rows": ({"data": counted(10), **TEST_ROWS}, 1, None),
    "rows that prepare counts": (TEST_ROWS, 1, None),
    "large file": ({"facts": {"predict_bytes": 1 << 30, "local": True}}, 4, "one for each 4 of 16 cores"),
    "small file": ({"facts": {"predict_bytes": 1 << 10, "local": True}}, 1, None),
    "few cores": ({"resources": {"gpusPerNode": 0, "cpu": "7", "memory": "16Gi"}}, 1, None),
    "no request for cores": ({"resources": {"gpusPerNode": 0}}, 1, None),
    "no optimization": ({"predict": {**UNKNOWN, "optimization": "none"}}, 1, None),
    "several pods": ({"predict": {**UNKNOWN, "workers": 3}}, 1, None),
    "generated texts": ({"task": "text-generation"}, 1, None),
}
"""Changes of `on_cores`, processes, and a part of their reason."""


@pytest.mark.parametrize("case", ON_CORES)
def test_auto_predicts_by_one_process_for_some_cores(case: str) -> None:
    given, count, why = ON_CORES[case]
    made = on_cores(**given)
    assert made.trainer.inference(Stage.PREDICT).processes == count
    reasons = [reason for reason in made.reasons if "processes that share the rows" in reason]
    assert len(reasons) == (why is not None)
    assert why is None or why in reasons[0]


def test_processes_on_cores_share_the_threads_of_a_pod() -> None:
    made = on_cores()
    assert (stage_threads(made, Stage.PREDICT), stage_threads(made, Stage.PREPARE)) == (4, 16)


def test_workers_on_a_machine_with_gpus_are_at_most_one_for_each() -> None:
    for requested, there in {4: 4, 12: 8}.items():
        predict = shared(requested, local=True).trainer.predict
        assert predict is not None
        assert (predict.workers, predict.processes) == (1, there)


def test_workers_chosen_by_the_plan_stay_within_the_settings() -> None:
    settings = CLUSTER_SETTINGS.model_copy(
        update={"allow": CLUSTER_SETTINGS.allow.model_copy(update={"max_workers": 2})}
    )
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "predict": {"workers": "auto", "dataset": {"uri": "hf://org/texts"}},
        "resources": {"nodes": 4},
    }
    made = plan(job({"training": None, "dataset": None, **whole}), Facts(), settings)
    assert made.predict_workers == 2
    assert any("allow.maxWorkers" in reason for reason in made.reasons)


def test_workers_for_the_model_of_a_program_are_refused() -> None:
    script = {"git": {"url": "https://github.com/org/x", "ref": "main"}, "entryPoint": "train.py"}
    with pytest.raises(PlanRefused) as refused:
        shared(3, training={"script": script})
    assert [(one.path, one.reason) for one in refused.value.problems] == [("spec.predict.workers", "NotSupported")]
    assert shared("auto", training={"script": script}).predict_workers == 1


def by_spark(workers: object, *, granted: bool = True, **facts: Any) -> JobPlan:
    spark = {"spark": {"image": "spark:1", "serviceAccountName": "spark-driver"}}
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://google-bert/bert-base-uncased"},
        "dataset": {"uri": "hf://org/texts"},
        "training": None,
        "predict": {"workers": workers, "engine": "spark"},
    }
    return plan(job(whole), Facts(**facts), Settings.model_validate(spark) if granted else CLUSTER_SETTINGS)


def test_sparks_driver_is_one_of_the_workers_that_predict() -> None:
    made = by_spark(4, served=(*BUILT_IN, *ENGINES))
    predict = made.trainer.predict
    assert predict is not None
    assert (predict.engine, predict.workers) == ("spark", 4)
    assert "the pods that predict are Spark's driver and 3 executors, as asked" in made.reasons
    alone = by_spark("auto", served=(*BUILT_IN, *ENGINES))
    assert alone.predict_workers == 2
    assert "prediction by 2 pods after all: Spark needs an executor" in alone.reasons


def test_spark_predicts_where_served_and_granted() -> None:
    with pytest.raises(PlanRefused) as refused:
        by_spark(4, granted=False)
    assert [(each.path, each.rule, each.hint) for each in refused.value.problems] == [
        (
            "spec.predict.engine",
            "the cluster has to serve SparkApplication (sparkoperator.k8s.io/v1beta2)",
            "install the Kubeflow Spark Operator, or leave it out",
        ),
        (
            "spec.predict.engine",
            "the operator's settings have to name an image with Spark, and an account for its driver",
            "have an administrator set spark.image and spark.serviceAccountName (docs/data.md), or leave it out",
        ),
    ]
    assert by_spark(4, granted=False, predicted=True).predict_workers == 4


def test_processes_predict_without_a_cluster_even_with_spark() -> None:
    predict = by_spark(4, granted=False, local=True).trainer.predict
    assert predict is not None
    assert (predict.engine, predict.workers, predict.processes) == ("job", 1, 4)


# --------------------------------------------------------------------------------------------------------- optimization


def computed(predict: dict[str, Any], gpus: object = 0, **spec: Any) -> JobPlan:
    return shared(1, predict=predict, resources={"gpusPerNode": gpus}, **spec)


def optimization(made: JobPlan) -> tuple[str, float | None]:
    assert made.trainer.predict is not None
    return made.trainer.predict.optimization, made.trainer.predict.tolerance


@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [(0, "fastest on a sample of the rows, in"), (1, "fastest on a sample of the rows on the GPU, in")],
)
def test_auto_measures_on_the_device_of_the_job(gpus: int, sentence: str) -> None:
    made = computed({"tolerance": 0.99}, gpus=gpus)
    assert optimization(made) == ("measured", 0.99)
    assert any(sentence in reason for reason in made.reasons)
    assert not any("has no effect" in reason for reason in made.reasons)
    assert optimization(computed({"optimization": "none"}, gpus=gpus)) == ("none", None)


@pytest.mark.parametrize("gpus", [1, 8])
def test_each_process_with_a_gpu_takes_the_choice_of_one(gpus: int) -> None:
    made = computed({}, gpus=gpus)
    assert optimization(made) == ("measured", None)
    assert made.trainer.inference(Stage.PREDICT).processes == gpus


def classified_by_70b(predict: dict[str, Any]) -> JobPlan:
    spec = {**PREDICTS, **CLASSIFIES, "predict": predict, "resources": {"gpusPerNode": 8}}
    return plan(job(spec), Facts(hardware=NODE, model=LLAMA_70B), CLUSTER_SETTINGS)


WITHOUT_EFFECT = {
    "another task": (lambda predict: computed(predict, task="text-generation"), "only text-classification, token-"),
    "model on 2 GPUs": (classified_by_70b, "the layers of the model are on 2 GPUs"),
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_tolerance_without_effect_is_noted(case: str) -> None:
    planned_with, why = WITHOUT_EFFECT[case]
    made = planned_with({"tolerance": 0.99, "metricTolerance": 0.01})
    assert optimization(made) == ("none", None)
    for name in ("tolerance", "metricTolerance"):
        (note,) = [reason for reason in made.reasons if reason.startswith(f"spec.predict.{name} has no effect")]
        assert why in note


def test_server_generates_texts_by_name_or_within_a_tolerance() -> None:
    task, server = "text-generation", "http://vllm:8000"
    by_name = computed({"optimization": "vllm", "server": server}, gpus=1, task=task).trainer.predict
    assert by_name is not None
    assert (by_name.optimization, by_name.server) == ("vllm", server)
    made = computed({"server": server, "tolerance": 0.9}, gpus=1, task=task)
    assert optimization(made) == ("measured", 0.9)
    assert made.trainer.predict is not None
    assert made.trainer.predict.server == server
    assert any("texts are generated by spec.predict.server where it is faster" in reason for reason in made.reasons)
    for predict, why in (({}, "tolerance is not set"), ({"tolerance": 0.9}, "a server has no beam search")):
        beams = {"generation": {"numBeams": 2}} if predict else {}
        plain = computed({"server": server, **predict}, task=task, **beams)
        assert optimization(plain)[0] == ("none" if beams else "measured")
        assert any(why in reason for reason in plain.reasons)


@pytest.mark.parametrize("gpus", [0, 1])
def test_auto_measures_continuous_batching_of_greedy_texts(gpus: int) -> None:
    made = computed({}, gpus=gpus, task="text-generation")
    assert optimization(made) == ("measured", None)
    assert any("by continuous batching where it is faster" in reason for reason in made.reasons)
    for generation in ({"numBeams": 2}, {"temperature": 0.7}):
        assert optimization(computed({}, gpus=gpus, task="text-generation", generation=generation)) == ("none", None)
    by_name = computed({"optimization": "continuous-batching"}, gpus=gpus, task="preference-tuning")
    assert optimization(by_name) == ("continuous-batching", None)


def test_named_optimization_is_kept_where_it_can_compute() -> None:
    assert optimization(computed({"optimization": "onnx"})) == ("onnx", None)
    assert optimization(computed({"optimization": "fp8", "tolerance": 0.99}, gpus=1)) == ("fp8", 0.99)
    with pytest.raises(PlanRefused) as refused:
        computed({"optimization": "onnx"}, gpus="auto")
    assert [(one.path, one.reason) for one in refused.value.problems] == [("spec.predict.optimization", "NotSupported")]
