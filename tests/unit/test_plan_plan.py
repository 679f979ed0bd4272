"""The planner's decisions: one row a decision, whole values compared; and properties of every job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune_contract.choices import Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts, HardwareFacts, ModelFacts, SplitFacts
from finetune_contract.plans import loss_tokens
from finetune_contract.trainer_job import Batch, CheckpointSchedule, Strategy, World
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.summary import Row, summarise
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.launcher_rows import BUILT_IN, ENGINES
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.rules.parallelism_rules import HPZ
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Price, Settings
from finetune_operator.spec.types import FineTuneJob
from planning_support.cases import BERT, encoder, job
from suite_plugins.fuzz import examples

GIB = 1 << 30
TWO_CORES = HardwareFacts(cpu_cores=2, memory_bytes=16 * GIB)
DATASET = {"uri": "hf://org/reviews"}


def model(model_type: str, task: Any = "text-classification", **config: Any) -> ModelFacts:
    return model_facts({"model_type": model_type, **config}, task)


MINILM = encoder(384, 6)
ROBERTA_LARGE = model(
    "roberta",
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    vocab_size=50265,
    max_position_embeddings=514,
    type_vocab_size=1,
    pad_token_id=1,
)


def gpt(h: int, layers: int, heads: int) -> ModelFacts:
    return model("gpt2", "text-generation", n_embd=h, n_layer=layers, n_head=heads)


LLAMA = model(
    "llama",
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=8192,
    vocab_size=128256,
    max_position_embeddings=4096,
)
"""The shape of Llama 3.2 1B."""


def rows(train: int, longest: int = 64, mean: int = 27) -> DataFacts:
    split = SplitFacts(rows=train, tokens=train * mean, longest=longest)
    return DataFacts(fingerprint="f", splits={"train": split}, max_length=128)


def planned(spec: Mapping[str, Any] | None = None, settings: Settings = CLUSTER_SETTINGS, **facts: Any) -> JobPlan:
    known = {"model": MINILM, "hardware": TWO_CORES, "data": rows(8530)} | facts
    return plan(job(spec), Facts(**known), settings)


def refused(spec: Mapping[str, Any] | None = None, settings: Settings = CLUSTER_SETTINGS, **facts: Any) -> list[Any]:
    with pytest.raises(PlanRefused) as caught:
        planned(spec, settings, **facts)
    return [(problem.path, problem.value, problem.rule, problem.hint) for problem in caught.value.problems]


def training(result: JobPlan) -> Any:
    assert result.trainer.training is not None
    return result.trainer.training


BERT_BASE = {"model": {"uri": "hf://google-bert/bert-base-uncased"}}
TIGHT = {"resources": {"memory": "2Gi"}}
PROVISIONAL: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "an unknown model may be smaller than it is taken to be": ({"model": {"uri": "pvc://in/m"}}, {"model": None}, True),
    "a known model fits with shorter rows than the longest": (
        BERT_BASE | {"resources": {"memory": "2700Mi"}}, {"model": None}, True
    ),
    "a known model does not fit with rows of one token": (
        {"model": {"uri": "hf://openai-community/gpt2-xl"}}, {"model": None}, False
    ),
    "nothing is left to be measured": ({"model": {"uri": "pvc://in/m"}}, {"model": None, "data": rows(8530)}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", PROVISIONAL)
def test_provisional_lack_of_memory_is_refused_only_without_remedy(case: str) -> None:
    spec, facts, provisional = PROVISIONAL[case]
    given = {**TIGHT, **spec}
    if not provisional:
        assert refused(given, **{"data": None, **facts})[0][0] == "spec.resources"
        return
    result = planned(given, **{"data": None, **facts})
    assert any(
        reason.startswith("strategy single+activation-checkpointing, provisionally") for reason in result.reasons
    )
    assert "prepare measures first" in result.assumptions[-1]


# --------------------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        pytest.param({}, "prepare train evaluate", id="what is trained is evaluated"),
        pytest.param({"predict": {}}, "prepare train evaluate predict", id="predict follows"),
        pytest.param({"endpoint": {}}, "prepare train evaluate serve", id="serve comes last"),
        pytest.param({"training": None, "evaluation": {}}, "prepare evaluate", id="evaluation of a model as it is"),
        pytest.param(
            {"training": None, "dataset": None, "predict": {"dataset": DATASET}},
            "prepare predict",
            id="predict with rows of its own needs no data set",
        ),
        pytest.param({"training": None, "dataset": None, "endpoint": {}}, "serve", id="serving needs no rows"),
    ],
)
def test_stages_are_the_requested_ones_and_their_prerequisites(spec, stages):
    assert " ".join(stage.value for stage in planned(spec).stages) == stages


def test_without_training_the_plan_has_no_training_numbers():
    result = planned({"training": None, "evaluation": {"gate": {"metric": "accuracy", "minimum": 0.8}}})
    assert (result.strategy, result.memory, result.trainer.training) == ("none", None, None)
    assert result.estimate.model_dump() == {
        "seconds": None,
        "cost": None,
        "currency": None,
        "basis": "nothing is trained",
        "step_seconds": None,
        "step_parts": {},
        "time_factor": None,
        "pauses": {},
    }
    assert result.trainer.evaluation is not None
    assert result.trainer.evaluation.model_dump() == {
        "metrics": None,
        "gate": {"metric": "accuracy", "minimum": 0.8},
        "device": "cpu",
        "batch_tokens": 2048,
    }


# ------------------------------------------------------------------------------------------------- launcher and world


@pytest.mark.parametrize(
    ("served", "launcher"),
    [
        (("job",), "job"),
        (("job", "mpijob", "jobset", "trainjob", "pytorchjob"), "pytorchjob"),
        (("job", "jobset", "trainjob"), "job"),
        (("job", "mpijob"), "mpijob"),
    ],
)
def test_auto_takes_the_first_launcher_that_is_served(served, launcher):
    assert planned({}, served=served).launcher == launcher


def test_a_launcher_that_is_not_served_is_refused():
    assert refused({"launcher": "mpijob"}) == [
        (
            "spec.launcher",
            '"mpijob"',
            "the cluster has to serve it; it serves job",
            "install the MPI Operator, which serves MPIJob (kubeflow.org/v2beta1), or set launcher to auto or job",
        )
    ]


def test_a_launcher_that_cannot_be_rendered_is_refused_though_it_is_served():
    assert refused({"launcher": "trainjob"}, served=("job", "trainjob")) == [
        (
            "spec.launcher",
            '"trainjob"',
            "it cannot be rendered yet",
            "set launcher to auto or job",
        )
    ]


EIGHT_H100 = parse_hardware("gpu=H100,gpus=8,cpu=96,hostMemory=1Ti")
WRITES = {"task": "text-generation", "model": {"uri": "hf://openai-community/gpt2"}}


@pytest.mark.parametrize(
    ("spec", "packing", "columns"),
    [
        pytest.param({}, False, {"text": "text", "label": "label"}, id="not where rows are classified"),
        pytest.param(WRITES, True, {"text": "text"}, id="plain text"),
        pytest.param({**WRITES, "preparation": {"packing": "never"}}, False, {"text": "text"}, id="never, as asked"),
        pytest.param(
            {**WRITES, "dataset": {**DATASET, "columns": {"source": "question"}}},
            False,
            {"source": "question", "target": "target"},
            id="prompts are not",
        ),
        pytest.param(
            {**WRITES, "dataset": {**DATASET, "columns": {"messages": "chat"}}, "preparation": {"packing": "always"}},
            True,
            {"messages": "chat"},
            id="conversations when asked for",
        ),
    ],
)
def test_packing_follows_the_task_and_the_columns(spec, packing, columns):
    result = planned(spec)
    assert result.trainer.preparation.packing == packing
    assert any("packed into sequences" in reason for reason in result.reasons) == packing
    assert result.trainer.dataset is not None
    assert result.trainer.dataset.columns == Columns(**columns)


def test_rows_with_a_shape_are_packed_only_as_asked():
    data = rows(8530).model_copy(update={"shape": "Alpaca", "columns": {"messages": "messages"}})
    result = planned(WRITES, data=data)
    assert not result.trainer.preparation.packing
    assert "rows are not packed: they are no plain text, but have the shape Alpaca" in result.reasons
    asked = planned({**WRITES, "preparation": {"packing": "always"}}, data=data).trainer.preparation
    assert (asked.packing, asked.packing_asked) == (True, True)
    tokens = data.model_copy(update={"shape": "a form of text", "columns": {"text": "text"}})
    assert planned(WRITES, data=tokens).trainer.preparation.packing


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        pytest.param("gpt2", {}, "", id="each row by itself"),
        pytest.param("bloom", {}, "models of type bloom are not known to work without one", id="a family with masks"),
        pytest.param("gpt2", {"torch_compile": True}, "torch.compile would compile again", id="compiled"),
    ],
)
def test_reasons_name_the_attention_over_packed_rows(family, changes, why):
    spec = {**WRITES, "training": {"globalBatchSize": 16, "arguments": changes}, "resources": {"gpusPerNode": 1}}
    shape = model("gpt2", "text-generation").model_copy(update={"model_type": family})
    reasons = planned(spec, model=shape, hardware=EIGHT_H100).reasons
    (found,) = (reason for reason in reasons if reason.startswith("packed rows: "))
    expected = f"with a mask of tokens x tokens, as {why}" if why else "of each row by itself, without a mask"
    assert found.startswith(f"packed rows: attention {expected}")


def test_packs_without_masks_take_less_memory_and_time_than_with():
    packs = SplitFacts(rows=1000, packs_of=10_000, tokens=8_000_000, longest=8192)
    data = DataFacts(fingerprint="f", splits={"train": packs}, max_length=8192)
    spec = {**WRITES, "training": {"globalBatchSize": 16, "microBatchSize": 1}, "resources": {"gpusPerNode": 1}}
    shape = model("gpt2", "text-generation").model_copy(update={"max_positions": 8192})
    apart, masked = (
        planned(spec, model=shape.model_copy(update={"model_type": family}), data=data, hardware=EIGHT_H100)
        for family in ("gpt2", "gpt_bigcode")
    )
    assert apart.memory is not None
    assert masked.memory is not None
    assert apart.memory.total_bytes < masked.memory.total_bytes - 12 * 8192 * 8192
    assert apart.estimate.step_seconds is not None
    assert masked.estimate.step_seconds is not None
    assert apart.estimate.step_seconds < masked.estimate.step_seconds


PREFERS = {"task": "preference-tuning", "model": {"uri": "hf://openai-community/gpt2"}}


def test_rows_with_two_answers_count_as_two_sequences_each():
    gpt2, hardware = model("gpt2", "preference-tuning"), {"hardware": EIGHT_H100}
    spec = {**PREFERS, "resources": {"gpusPerNode": 1}, "training": {"epochs": 2, "globalBatchSize": 16}}
    spec["preference"] = {"beta": 0.3}
    result = planned(spec, model=gpt2, data=rows(3200, longest=200, mean=100), **hardware)
    assert result.trainer.preference.beta == 0.3
    assert result.trainer.dataset is not None
    assert result.trainer.dataset.columns == Columns(prompt="prompt", chosen="chosen", rejected="rejected")
    assert result.memory is not None
    (activations,) = (term.formula for term in result.memory.terms if term.name == "activations")
    assert activations.startswith("16 rows x 2 sequences x 128 tokens x ")
    tokens = 2 * 3200 * 100
    scored = gpt2.parameters - gpt2.embedding_parameters + gpt2.vocabulary_size * 768
    forward = 2 * scored + 4 * 12 * 768 * 50
    assert result.estimate.basis.startswith(
        f"{tokens * 3 * forward + tokens / 2 * forward:.3g} operations for {tokens:,}"
    )
    before = planned(spec, model=gpt2, data=None, **hardware)
    taken = "the 2 sequences of every row are taken to have 512 tokens, the most they can have"
    assert f"lengths: nothing is prepared yet; {taken}" in before.assumptions


def test_preference_tuning_computes_its_loss_in_chunks_of_logits():
    hardware, training = {"hardware": EIGHT_H100}, {"globalBatchSize": 16, "microBatchSize": 16}
    spec = {**PREFERS, "resources": {"gpusPerNode": 1}, "training": training}
    shape = model("gpt2", "preference-tuning")
    chunked, whole = (
        planned(
            {**spec, "training": {**training, "arguments": arguments}},
            model=shape, data=rows(3200, longest=200, mean=100), **hardware,
        )
        for arguments in ({}, {"use_liger_kernel": True})
    )  # fmt: skip

    def logits(result: JobPlan) -> str:
        assert result.memory is not None
        (activations,) = (term.formula for term in result.memory.terms if term.name == "activations")
        return activations.partition(" + ends ")[2].partition(" + ")[2].partition(" logits")[0]

    assert logits(chunked) == f"{loss_tokens(shape.vocabulary_size):,} x {shape.vocabulary_size:,}"
    assert logits(whole) == f"{16 * 2 * 128:,} x {shape.vocabulary_size:,}"


def test_rows_to_answer_need_no_answers():
    predict = {"dataset": {"uri": "hf://org/asked"}}
    result = planned({**PREFERS, "predict": predict}, model=model("gpt2", "preference-tuning"))
    assert result.trainer.predict is not None
    assert result.trainer.predict.dataset is not None
    assert result.trainer.predict.dataset.columns == Columns(prompt="prompt")


def test_rows_that_cannot_share_a_sequence_are_not_packed():
    assert refused({"preparation": {"packing": "always"}}) == [
        (
            "spec.preparation.packing",
            '"always"',
            "always needs task text-generation: rows of other tasks cannot share a sequence",
            "set it to auto or never",
        )
    ]


def test_batches_of_a_large_vocabulary_are_small():
    gpt2 = {"model": model("gpt2", "text-generation"), "hardware": EIGHT_H100}
    evaluation = planned({**WRITES, "resources": {"gpusPerNode": 1}}, **gpt2).trainer.evaluation
    assert evaluation is not None
    assert evaluation.batch_tokens == (1 << 30) // (4 * 50257)


def test_launcher_without_a_cluster_is_local_in_spite_of_the_file():
    result = planned({"launcher": "pytorchjob"}, LOCAL_SETTINGS, local=True)
    assert result.launcher == "local"
    assert "launcher local: there is no cluster here; in one, pytorchjob would run the training" in result.reasons


@pytest.mark.parametrize(
    ("spec", "hardware", "world"),
    [
        pytest.param(
            {},
            TWO_CORES,
            World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=2),
            id="CPU: one process",
        ),
        pytest.param(
            {"parallelism": {"strategy": "ddp"}},
            TWO_CORES,
            World(nodes=1, processes_per_node=2, device="cpu", threads_per_process=1),
            id="CPU with a strategy that spreads: two processes",
        ),
        pytest.param(
            {"parallelism": {"strategy": "ddp"}},
            HardwareFacts(cpu_cores=1, memory_bytes=16 * GIB),
            World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=1),
            id="one core: one process",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": 8}},
            EIGHT_H100,
            World(nodes=1, processes_per_node=8, device="cuda", threads_per_process=12),
            id="one process a GPU",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": "auto"}, "training": {"globalBatchSize": 64}},
            EIGHT_H100,
            World(nodes=1, processes_per_node=8, device="cuda", threads_per_process=12),
            id="auto takes the GPUs that are there",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": "auto"}, "parallelism": {"strategy": "single"}},
            EIGHT_H100,
            World(nodes=1, processes_per_node=1, device="cuda", threads_per_process=96),
            id="auto takes one GPU for a single process",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": "auto"}},
            TWO_CORES,
            World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=2),
            id="auto without GPUs is CPU",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": 0}},
            EIGHT_H100,
            World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=96),
            id="the CPU of a node with GPUs, as asked",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": 8, "nodes": 4, "processesPerNode": 4}},
            EIGHT_H100,
            World(nodes=4, processes_per_node=4, device="cuda", threads_per_process=24),
            id="fewer processes than GPUs, as asked",
        ),
        pytest.param(
            {"resources": {"cpu": "1500m"}, "parallelism": {"strategy": "ddp"}},
            HardwareFacts(cpu_cores=64, memory_bytes=64 * GIB),
            World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=1),
            id="a pod gets the cores that it asks for",
        ),
    ],
)
def test_the_world(spec, hardware, world):
    result = planned(spec, hardware=hardware)
    assert training(result).world == world
    assert result.trainer.evaluation is not None
    assert result.trainer.evaluation.device == world.device


@pytest.mark.parametrize(
    ("spec", "facts", "problem"),
    [
        pytest.param(
            {"resources": {"gpusPerNode": 2}},
            {},
            (
                "spec.resources.gpusPerNode",
                "2",
                "a node has to have as many GPUs as asked for, and it has none",
                "set gpusPerNode to 0, or plan for other hardware",
            ),
            id="GPUs that are not there",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": 2, "processesPerNode": 3}, "training": {"globalBatchSize": 36}},
            {"hardware": EIGHT_H100},
            (
                "spec.resources.processesPerNode",
                "3",
                "must not exceed spec.resources.gpusPerNode: each GPU runs one process",
                "set it to auto or to the number of GPUs",
            ),
            id="more processes than GPUs",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": 2}, "parallelism": {"strategy": "single"}},
            {"hardware": EIGHT_H100},
            (
                "spec.parallelism.strategy",
                '"single"',
                "single runs one process, and spec.resources requests more",
                "use ddp, fsdp, deepspeed or auto, or set spec.resources.nodes and spec.resources.processesPerNode "
                "to 1",
            ),
            id="single over two processes",
        ),
        pytest.param(
            {"resources": {"nodes": 2}},
            {"local": True},
            ("spec.resources.nodes", "2", "without a cluster there is one node", "set nodes to 1"),
            id="two nodes without a cluster",
        ),
    ],
)
def test_a_world_that_cannot_be_is_refused(spec, facts, problem):
    assert refused(spec, **facts) == [problem]


# ------------------------------------------------------------------------------------------------------------ precision

T4 = parse_hardware("gpu=T4")
NO_GPU = "needs a GPU, and spec.resources.gpusPerNode requests none"


@pytest.mark.parametrize(
    ("requested", "gpus", "hardware", "precision"),
    [
        ("auto", 1, EIGHT_H100, "bf16"),
        ("auto", 1, T4, "fp16"),
        ("auto", 0, TWO_CORES, "fp32"),
        ("auto", 0, TWO_CORES.model_copy(update={"cpu_bf16": True}), "bf16"),
        ("bf16", 0, TWO_CORES, "bf16"),
        ("fp16", 1, T4, "fp16"),
        ("fp32", 1, EIGHT_H100, "fp32"),
        ("fp8", 1, EIGHT_H100, "fp8"),
        ("fp8", 1, parse_hardware("gpu=L4"), "fp8"),
    ],
)
def test_precision_is_bf16_where_supported_or_the_requested_one(requested, gpus, hardware, precision):
    spec = {"training": {"precision": requested}, "resources": {"gpusPerNode": gpus}}
    assert training(planned(spec, hardware=hardware)).precision == precision


@pytest.mark.parametrize(
    ("requested", "gpus", "hardware", "rule"),
    [
        ("bf16", 1, T4, "T4 does not compute in bf16"),
        ("fp16", 0, TWO_CORES, NO_GPU),
        ("fp8", 1, T4, "T4 has no units for it, as GPUs have from compute capability 8.9 on"),
        ("fp8", 0, TWO_CORES, NO_GPU),
    ],
)
def test_a_precision_that_the_device_has_not_is_refused(requested, gpus, hardware, rule):
    spec = {"training": {"precision": requested}, "resources": {"gpusPerNode": gpus}}
    assert [problem[:3] for problem in refused(spec, hardware=hardware)] == [
        ("spec.training.precision", f'"{requested}"', rule)
    ]


LLAMA_7B = model(
    "llama",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=11008,
    vocab_size=32000,
    max_position_embeddings=4096,
)
SLOWER = "; without training.arguments.torch_compile that is slower than bf16"


def in_fp8(**spec: Any) -> dict[str, Any]:
    changes = {"precision": "fp8", **spec.pop("training", {})}
    return {"training": changes, "resources": {"gpusPerNode": 4}, **spec}


@pytest.mark.parametrize(("arguments", "slower"), [({}, SLOWER), ({"torch_compile": True}, "")])
def test_fp8_is_explained_with_the_conditions_of_its_speed(arguments, slower):
    made = planned(in_fp8(training={"arguments": arguments}), hardware=EIGHT_H100)
    assert (
        "precision fp8: as asked; H100 has units for it, and linear layers of the blocks multiply in it, with all else "
        f"in bf16{slower}"
    ) in made.reasons


@pytest.mark.parametrize(
    ("parallelism", "facts", "label"),
    [
        pytest.param({}, {}, "ddp", id="whole copies where they fit"),
        pytest.param({"strategy": "fsdp"}, {}, "fsdp", id="fsdp as asked"),
        pytest.param({}, {"model": LLAMA_7B}, "fsdp", id="fsdp where whole copies do not fit"),
    ],
)
def test_fp8_is_trained_with_copies_or_shards_of_ordinary_weights(parallelism, facts, label):
    made = planned(in_fp8(parallelism=parallelism), hardware=EIGHT_H100, **facts)
    assert training(made).strategy.label == label


def test_hints_for_fp8_do_not_lead_to_an_adapter():
    facts = {"hardware": parse_hardware("gpu=L4,memory=64Gi"), "model": LLAMA_7B}
    ways = "; ".join(problem[3] for problem in refused(in_fp8(resources={"gpusPerNode": 1}), **facts))
    assert "adapter" not in ways
    assert "deepspeed" not in ways


@pytest.mark.parametrize(
    ("parallelism", "gpus", "way"),
    [
        ({}, 1, "set model.adapter.method to lora, which trains"),
        ({"strategy": "fsdp"}, 1, "set model.adapter.method to lora, which trains"),
        ({"tensor": 2}, 2, "set model.adapter.method to lora and leave parallelism out, which trains"),
    ],
    ids=["a free strategy", "a strategy that divides", "split layers"],
)
def test_adapter_is_offered_where_it_fits_and_the_model_does_not(parallelism, gpus, way):
    hardware = parse_hardware(f"gpus={gpus},gpu=L4,memory=24Gi,hostMemory=64Gi")
    spec = {"task": "text-generation", "resources": {"gpusPerNode": gpus}, "parallelism": parallelism}
    (problem,) = refused(spec, hardware=hardware, model=LLAMA_7B)
    assert way in problem[3]
    model = {"uri": "hf://a/b", "adapter": {"method": "lora"}}
    followed = {**spec, "model": model, "parallelism": {}}
    assert planned(followed, hardware=hardware, model=LLAMA_7B).memory.total_bytes <= 24 * 2**30


def test_fp8_is_estimated_faster_than_bf16_only_when_compiled():
    def seconds(precision: str, **arguments: Any) -> float:
        spec = in_fp8(training={"precision": precision, "arguments": arguments, "globalBatchSize": 64}) | SEQUENCE
        spec["parallelism"] = {"strategy": "fsdp", "activationCheckpointing": "full"}
        made = planned(spec, hardware=EIGHT_H100, model=gpt(4096, 32, 32), data=None).estimate.step_seconds
        assert made is not None
        return made

    compiled = {"torch_compile": True}
    assert 0.8 < seconds("fp8", **compiled) / seconds("bf16", **compiled) < 1.0
    plain = {"torch_compile": False}
    assert 1.3 < seconds("fp8", **plain) / seconds("bf16", **plain) < 1.6


FSDP_FULL = {"strategy": "fsdp", "activationCheckpointing": "full"}


def decoder_plan(**changes: Any) -> JobPlan:
    """Return the plan of a decoder's training on 4 GPUs, with these changes of the spec."""
    training = {"precision": "bf16", "globalBatchSize": 64, "maxSteps": 5000, **changes.pop("training", {})}
    spec = {**SEQUENCE, "training": training, "parallelism": FSDP_FULL, "resources": {"gpusPerNode": 4}, **changes}
    return planned(spec, hardware=EIGHT_H100, model=gpt(4096, 32, 32), data=None)


def test_decoder_is_compiled_where_the_plan_expects_a_gain_and_may_fail():
    made = decoder_plan()
    training = made.trainer.training
    assert training.compiles_by_plan
    assert training.arguments == {"torch_compile": True}
    (reason,) = (each for each in made.reasons if each.startswith("torch.compile"))
    assert re.search(r"is on: by the estimate a step takes [\d.]+ m?s instead of [\d.]+ m?s, .* less in all", reason)
    declined = decoder_plan(training={"arguments": {"torch_compile": False}})
    assert made.estimate.step_seconds < 0.95 * declined.estimate.step_seconds
    assert made.memory.total_bytes <= made.memory.capacity_bytes


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"training": {"arguments": {"torch_compile": True}}}, id="requested"),
        pytest.param({"training": {"arguments": {"torch_compile": False}}}, id="declined"),
        pytest.param({"training": {"precision": "fp32"}}, id="fp32"),
        pytest.param({"training": {"maxSteps": 10}}, id="too few steps to win its time back"),
        pytest.param({"parallelism": {"strategy": "ddp", "tensor": 4}}, id="split layers"),
        pytest.param({"parallelism": {"strategy": "deepspeed", "zeroStage": 3}}, id="weights gathered in blocks"),
        pytest.param({"model": {"uri": "hf://a/b", "adapter": {"method": "qlora"}}}, id="weights in 4 bits"),
    ],
)
def test_plan_adds_no_compilation_where_it_is_decided_or_wins_nothing(changes):
    training = decoder_plan(**changes).trainer.training
    assert not training.compiles_by_plan
    assert training.arguments == changes.get("training", {}).get("arguments", {})


def test_packs_of_a_compiled_training_have_masks_in_the_plan():
    packed = {"preparation": {"packing": "always"}}
    (found,) = (each for each in decoder_plan(**packed).reasons if each.startswith("packed rows"))
    assert "with a mask" in found
    declined = decoder_plan(**packed, training={"arguments": {"torch_compile": False}})
    (found,) = (each for each in declined.reasons if each.startswith("packed rows"))
    assert "without a mask" in found


# ---------------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize(
    ("spec", "batch"),
    [
        pytest.param({}, (32, 32, 1, 1), id="the whole batch at once when it fits"),
        pytest.param({"parallelism": {"strategy": "ddp"}}, (32, 16, 1, 2), id="divided over the ranks"),
        pytest.param(
            {"training": {"globalBatchSize": 256}}, (256, 64, 4, 1), id="CPU: up to 2,048 tokens (75 rows of 27)"
        ),
        pytest.param({"training": {"globalBatchSize": 78}}, (78, 39, 2, 1), id="the largest divisor below the bound"),
        pytest.param({"training": {"globalBatchSize": 32, "microBatchSize": 4}}, (32, 4, 8, 1), id="as asked"),
        pytest.param({"training": {"globalBatchSize": 97}}, (97, 1, 97, 1), id="a prime above the bound: row by row"),
        pytest.param({"training": {"globalBatchSize": 1}}, (1, 1, 1, 1), id="one row"),
    ],
)
def test_the_global_batch_is_kept_exactly(spec, batch):
    total, micro, accumulation, ranks = batch
    assert training(planned(spec)).batch == Batch(
        global_batch_size=total, micro_batch_size=micro, gradient_accumulation=accumulation, data_parallel=ranks
    )


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        pytest.param({"globalBatchSize": 33}, "use 32 or 34, multiples of 2 = 2 ranks", id="ranks do not divide it"),
        pytest.param({"globalBatchSize": 1}, "use 2, multiples of 2 = 2 ranks", id="fewer rows than ranks"),
        pytest.param(
            {"globalBatchSize": 32, "microBatchSize": 5},
            "use 30 or 40, multiples of 10 = 2 ranks x 5 rows per micro-batch; or set spec.training.microBatchSize "
            "to 1",
            id="the micro-batch does not divide it",
        ),
    ],
)
def test_indivisible_global_batch_is_refused_with_the_nearest_valid(spec, hint):
    rule = "must be a multiple of data-parallel ranks x spec.training.microBatchSize"
    value = str(spec["globalBatchSize"])
    assert refused({"training": spec, "parallelism": {"strategy": "ddp"}}) == [
        ("spec.training.globalBatchSize", value, rule, hint)
    ]


# ------------------------------------------------------------------------------------------------------------- strategy

P4D = parse_hardware("gpu=A100-40GB,gpus=8,cpu=96,hostMemory=1152Gi")
SEQUENCE = {"preparation": {"maxLength": 512}, "task": "text-generation"}


@pytest.mark.parametrize(
    ("spec", "facts", "strategy"),
    [
        pytest.param(
            {"resources": {"gpusPerNode": 1}},
            {"model": ROBERTA_LARGE, "hardware": parse_hardware("gpu=V100-32GB"), "data": rows(8530, 512, 200)},
            "single",
            id="roberta-large fits one V100 32 GB: nothing is divided",
        ),
        pytest.param(
            {"resources": {"gpusPerNode": 8}},
            {"model": ROBERTA_LARGE, "hardware": parse_hardware("gpu=V100-32GB,gpus=8"), "data": rows(8530, 128)},
            "ddp",
            id="over the eight of a p3dn as well; it was published with four pipeline stages",
        ),
        pytest.param(
            {
                **SEQUENCE,
                "resources": {"gpusPerNode": 8, "nodes": 16, "network": "efa"},
                "training": {"globalBatchSize": 640},
            },
            {"model": gpt(7168, 48, 64), "hardware": P4D, "data": None},
            "fsdp+selective-activation-checkpointing",
            id="GPT-2 30B over 16 p4d has to be divided whole",
        ),
        pytest.param(
            {**SEQUENCE, "resources": {"gpusPerNode": 8}},
            {"model": gpt(2048, 48, 16), "hardware": P4D, "data": None},
            "fsdp",
            id="2.5B over 8 A100 40 GB: its state is divided",
        ),
        pytest.param(
            {**SEQUENCE, "resources": {"gpusPerNode": 1}},
            {
                "model": gpt(4096, 32, 32),
                "hardware": parse_hardware("gpu=A100-80GB,cpu=32,hostMemory=512Gi"),
                "data": None,
            },
            "deepspeed-zero3+selective-activation-checkpointing+optimizer-offload+parameter-offload",
            id="6.6B on one A100 80 GB: the optimizer moves to the host, and the weights for more rows at once",
        ),
        pytest.param(
            {**SEQUENCE, "resources": {"gpusPerNode": 1}},
            {
                "model": gpt(8192, 48, 64),
                "hardware": parse_hardware("gpu=A100-80GB,cpu=32,hostMemory=1Ti"),
                "data": None,
            },
            "deepspeed-zero3+activation-checkpointing+optimizer-offload+parameter-offload",
            id="39B on one A100 80 GB: the parameters move as well",
        ),
        pytest.param(
            {
                "parallelism": {"strategy": "fsdp", "sharding": "hybrid", "offload": {"parameters": "cpu"}},
                "resources": {"nodes": 2, "gpusPerNode": 8},
            },
            {"hardware": P4D},
            "fsdp-hybrid+optimizer-offload+parameter-offload",
            id="fsdp in nodes, and all of its state on the host",
        ),
        pytest.param(
            {
                "parallelism": {
                    "strategy": "ddp",
                    "activationCheckpointing": "selective",
                    "offload": {"activations": "cpu"},
                }
            },
            {},
            "ddp+selective-activation-checkpointing+activation-offload",
            id="activations as asked",
        ),
        pytest.param(
            {"training": {"optimizer": "adafactor"}, "resources": {"processesPerNode": 2}},
            {},
            "ddp",
            id="adafactor stays with whole matrices",
        ),
        pytest.param({"parallelism": {"strategy": "ddp"}}, {}, "ddp", id="ddp as asked"),
        pytest.param({"parallelism": {"strategy": "fsdp"}}, {}, "fsdp", id="fsdp as asked"),
        pytest.param(
            {"parallelism": {"strategy": "deepspeed"}},
            {},
            "deepspeed-zero1",
            id="deepspeed: the lowest stage that fits",
        ),
        pytest.param({"parallelism": {"zeroStage": 0}}, {}, "deepspeed-zero0", id="a stage alone asks for deepspeed"),
        pytest.param(
            {"parallelism": {"strategy": "deepspeed", "zeroStage": 3, "activationCheckpointing": "full"}},
            {},
            "deepspeed-zero3+activation-checkpointing",
            id="stage and checkpointing as asked",
        ),
        pytest.param(
            {"parallelism": {"strategy": "deepspeed", "offload": {"optimizer": "cpu"}}},
            {},
            "deepspeed-zero1+optimizer-offload",
            id="offload as asked: the lowest stage that fits",
        ),
        pytest.param(
            {**SEQUENCE, "parallelism": {"strategy": "deepspeed", "zeroStage": 0}, "resources": {"gpusPerNode": 1}},
            {"model": gpt(1600, 48, 25), "hardware": parse_hardware("gpu=A100-40GB"), "data": None},
            "deepspeed-zero0",
            id="stage 0 as asked",
        ),
    ],
)
def test_strategy_is_the_quickest_that_fits_or_the_requested_one(spec, facts, strategy):
    assert planned(spec, **facts).strategy == strategy


def test_micro_batches_shrink_before_layers_are_recomputed():
    spec = {"resources": {"gpusPerNode": 1}, "training": {"globalBatchSize": 256}}
    facts = {"model": BERT, "data": rows(8530, 512, 200), "hardware": parse_hardware("gpu=T4,hostMemory=32Gi")}
    result = planned(spec, **facts)
    assert (result.strategy, training(result).batch.micro_batch_size) == ("single", 32)
    assert result.memory is not None
    assert result.memory.total_bytes <= result.memory.capacity_bytes < 2 * result.memory.total_bytes


def test_a_long_row_makes_layers_recomputed_when_not_even_one_fits():
    spec = {"parallelism": {"strategy": "single"}, "resources": {"gpusPerNode": 1}, "training": {"globalBatchSize": 2}}
    long = model(
        "longformer",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=50265,
        max_position_embeddings=4098,
    )
    facts = {"model": long, "data": rows(100, 3072, 2000), "hardware": parse_hardware("gpu=T4")}
    assert planned(spec, **facts).strategy == "single+selective-activation-checkpointing"


def test_model_that_fits_nowhere_is_refused_with_arithmetic_and_hints():
    spec = {**SEQUENCE, "resources": {"gpusPerNode": 8}, "training": {"globalBatchSize": 64}}
    problems = refused(spec, model=gpt(12288, 96, 96), hardware=P4D, data=None)
    assert problems == [
        (
            "spec.resources",
            None,
            "does not fit: needs 2.6 TiB of host memory a node, and there are 1.1 TiB "
            "(fsdp+selective-activation-checkpointing+optimizer-offload+parameter-offload); rows of 512 tokens are "
            "assumed; fsdp+tensor4+activation-checkpointing with micro-batch 1 needs 341.0 GiB a GPU, and there are "
            "40.0 GiB; ddp+tensor4+pipeline2-1f1b+activation-checkpointing with micro-batch 1 needs 384.6 GiB a GPU, "
            "and there are 40.0 GiB; fsdp+sequence8+optimizer-offload+parameter-offload needs 2.6 TiB of host memory a "
            "node, and there are 1.1 TiB",
            "set parallelism.strategy to deepspeed and parallelism.offload.optimizer to nvme and "
            "parallelism.offload.parameters to nvme (22.9 GiB of 40.0 GiB a GPU, and 2.9 TiB of disk a node); or set "
            "model.adapter.method to lora, which trains a small part of the weights (deepspeed-zero3+"
            "activation-checkpointing+optimizer-offload+parameter-offload, 23.7 GiB of 40.0 GiB a GPU); or "
            "use 4 nodes (32 GPUs in all), or nodes with at least 2.6 TiB of memory, or a smaller "
            "preparation.maxLength or model",
        )
    ]


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        pytest.param(
            {"training": {"globalBatchSize": 248, "microBatchSize": 248}},
            "set training.microBatchSize to 31 or to auto (13.1 GiB of 15.0 GiB a GPU; the global batch stays); or set "
            "parallelism.strategy to auto and leave parallelism.activationCheckpointing out, and the plan takes "
            "deepspeed-zero2+activation-checkpointing+optimizer-offload (14.7 GiB of 15.0 GiB a GPU)",
            id="a smaller micro-batch would fit",
        ),
        pytest.param(
            {
                "training": {"globalBatchSize": 64, "microBatchSize": 64},
                "parallelism": {"strategy": "single", "activationCheckpointing": "none"},
            },
            "set training.microBatchSize to 32 or to auto (13.4 GiB of 15.0 GiB a GPU; the global batch stays); or set "
            "parallelism.activationCheckpointing to full or auto (5.5 GiB of 15.0 GiB a GPU)",
            id="each change that fits, the smallest first",
        ),
    ],
)
def test_explicit_choice_that_does_not_fit_gets_each_fitting_change(spec, hint):
    whole = spec | {
        "resources": {"gpusPerNode": 1},
        "parallelism": {"strategy": "single", "activationCheckpointing": "none"},
    }
    facts = {"model": BERT, "data": rows(8530, 512, 200), "hardware": parse_hardware("gpu=T4,hostMemory=32Gi")}
    assert [problem[3] for problem in refused(whole, **facts)] == [hint]


def test_stage_0_never_moves_the_optimizer_to_the_host_by_itself():
    spec = {**SEQUENCE, "parallelism": {"strategy": "deepspeed", "zeroStage": 0}, "resources": {"gpusPerNode": 1}}
    (problem,) = refused(spec, model=gpt(1600, 48, 25), hardware=parse_hardware("gpu=L4"), data=None)
    assert "(deepspeed-zero0 with micro-batch 1, " in problem[2]


def test_a_model_too_big_for_the_cpu_is_pointed_to_gpus_that_stay_idle():
    hardware = parse_hardware("gpu=H100,gpus=8,hostMemory=64Gi")
    (problem,) = refused({"task": "text-generation"}, model=gpt(7168, 48, 64), hardware=hardware, data=None)
    assert problem[3].startswith("use the node's GPUs (set resources.gpusPerNode to auto), ")
    assert "fewer processes" not in problem[3]


def test_hint_for_a_free_choice_removes_the_fields_that_forbid_it():
    spec = {
        "resources": {"gpusPerNode": 1},
        "parallelism": {"strategy": "deepspeed", "zeroStage": 0, "deepspeedConfig": {"wall_clock_breakdown": True}},
    }
    facts = {"model": ROBERTA_LARGE, "data": rows(8530), "hardware": parse_hardware("gpu=T4,memory=5Gi")}
    assert [problem[3] for problem in refused(spec, **facts)] == [
        "set parallelism.strategy to auto and leave parallelism.zeroStage and parallelism.deepspeedConfig out, and "
        "the plan takes deepspeed-zero3+selective-activation-checkpointing+optimizer-offload+parameter-offload "
        "(4.4 GiB of 5.0 GiB a GPU)"
    ]


DEEPSPEED_3 = {"strategy": "deepspeed", "zeroStage": 3}
AS_ON_THE_NODE = {"gpusPerNode": "auto"}


@pytest.mark.parametrize(
    ("spec", "hardware", "rule"),
    [
        pytest.param(
            {"parallelism": {**DEEPSPEED_3, "offload": {"parameters": "nvme"}}},
            TWO_CORES,
            "cpu-swaps-bf16-parameters",
            id="fp32, as the CPU has no units for bf16",
        ),
        pytest.param(
            {"parallelism": {**DEEPSPEED_3, "deepspeedConfig": {"zero_optimization": {HPZ: 3}}}},
            TWO_CORES,
            "zero-plus-plus-is-obeyed",
            id="secondary shards that are not on one node",
        ),
        pytest.param(
            {"parallelism": {"strategy": "fsdp", "sharding": "hybrid"}, "resources": AS_ON_THE_NODE},
            EIGHT_H100,
            "hybrid-sharding-needs-nodes",
            id="hybrid sharding on one node",
        ),
        pytest.param(
            {"training": {"arguments": {"use_liger_kernel": True}}, "resources": AS_ON_THE_NODE},
            TWO_CORES,
            "liger-has-gpus-and-whole-rows",
            id="kernels for GPUs that the node has not",
        ),
        pytest.param(
            {"training": {"precision": "fp16"}, "resources": AS_ON_THE_NODE},
            TWO_CORES,
            "precision-has-hardware",
            id="a precision for GPUs that the node has not",
        ),
        pytest.param(
            {"resources": {**AS_ON_THE_NODE, "processesPerNode": 9}, "training": {"globalBatchSize": 36}},
            EIGHT_H100,
            "one-process-per-gpu",
            id="more processes than the node has GPUs",
        ),
        pytest.param(
            {"parallelism": {"tensor": 3}, "resources": AS_ON_THE_NODE},
            EIGHT_H100,
            "model-parallel-divides-world",
            id="degrees that the node's GPUs are no multiple of",
        ),
    ],
)
def test_violation_that_depends_on_the_node_reads_as_in_validation(spec, hardware, rule):
    broken = next(each for each in RULES if each.name == rule)
    problems = refused(spec, hardware=hardware)
    assert [problem[::2] for problem in problems] == [(f"spec.{broken.path}", broken.text)]


def test_problems_of_one_group_are_reported_together():
    spec = {
        "training": {"precision": "fp16", "warmupSteps": 2.5},
        "parallelism": {"strategy": "single", "zeroStage": 2},
        "resources": {"processesPerNode": 2},
    }
    assert sorted(problem[0] for problem in refused(spec)) == [
        "spec.parallelism.strategy",
        "spec.parallelism.zeroStage",
        "spec.training.precision",
        "spec.training.warmupSteps",
    ]


# ---------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        pytest.param({}, (798, 266, 0), id="three epochs; 8,530 = 266 x 32 + 18, the 18 are dropped"),
        pytest.param({"epochs": 0.5}, (133, 266, 0), id="half an epoch"),
        pytest.param({"epochs": 0.001}, (1, 266, 0), id="never less than one step"),
        pytest.param({"epochs": 1.1}, (293, 266, 0), id="parts are rounded up, as the Trainer does"),
        pytest.param({"maxSteps": 10}, (10, 266, 0), id="steps as asked"),
        pytest.param({"warmupSteps": 0.1}, (798, 266, 80), id="a share of all steps, rounded up"),
        pytest.param({"warmupSteps": 7}, (798, 266, 7), id="warm-up as asked"),
        pytest.param({"warmupSteps": 1}, (798, 266, 1), id="one is a step, not a share"),
    ],
)
def test_steps_follow_from_rows_epochs_and_batch(spec, steps):
    result = training(planned({"training": spec}))
    assert (result.max_steps, result.steps_per_epoch, result.warmup_steps) == steps


def test_fewer_rows_than_one_batch_are_refused():
    assert refused(data=rows(20)) == [
        (
            "spec.dataset",
            None,
            "the train split has 20 rows, and one step takes training.globalBatchSize = 32",
            "add rows, or set training.globalBatchSize to 20 or less",
        )
    ]


def test_packs_that_do_not_fill_a_step_are_refused_as_packs():
    packed = rows(3)
    packs = packed.splits["train"].model_copy(update={"packs_of": 40})
    data = packed.model_copy(update={"splits": {**packed.splits, "train": packs}})
    (refusal,) = refused({"task": "text-generation", "dataset": {"uri": "hf://org/texts"}}, data=data)
    assert refusal[2:] == (
        "the train split has 3 packs of its 40 rows, and one step takes training.globalBatchSize = 32",
        "add rows, or set training.globalBatchSize to 3 or less, or preparation.packing to never",
    )


WITHIN = {"within_minutes": 10}


@pytest.mark.parametrize(
    ("spec", "schedule"),
    [
        pytest.param({}, {"every_steps": 266, **WITHIN}, id="once an epoch"),
        pytest.param(
            {"training": {"globalBatchSize": 4}}, {"every_steps": 1000, **WITHIN}, id="at most 1,000 steps apart"
        ),
        pytest.param({"training": {"epochs": 100}}, {"every_steps": 1330, **WITHIN}, id="at most 20 in the run"),
        pytest.param({"training": {"maxSteps": 10}}, {"every_steps": 10, **WITHIN}, id="not beyond the end"),
        pytest.param({"checkpoints": {"every": {"steps": 7}, "keep": 1}}, {"every_steps": 7, "keep": 1}, id="as asked"),
        pytest.param(
            {"checkpoints": {"every": {"minutes": 2.5}, "resume": "never", "onPreemption": False}},
            {"every_steps": 266, "every_minutes": 2.5, "resume": False, "on_preemption": False},
            id="by the clock",
        ),
    ],
)
def test_checkpoints(spec, schedule):
    assert training(planned(spec)).checkpoints == CheckpointSchedule(**({"keep": 3} | schedule))


# ------------------------------------------------------------------------------------------------------ facts and texts


def test_unknown_facts_are_assumed_with_a_note():
    result = plan(job({"model": {"uri": "hf://FacebookAI/roberta-base"}}), Facts(), CLUSTER_SETTINGS)
    assert result.assumptions == (
        "model: hf://FacebookAI/roberta-base was not read; the published shape of roberta-base (125 million "
        "parameters) is taken",
        "hardware: no node was measured; 8 cores and 32 GiB of memory and no bf16 units are taken",
        "lengths: nothing is prepared yet; every row is taken to have 512 tokens, the most it can have",
        "data: nothing is prepared yet; 10,000 rows are taken, so steps and times are provisional",
    )
    assert result.hardware.assumed


def test_assumed_rows_suffice_for_a_large_batch_with_a_note():
    result = planned({"training": {"globalBatchSize": 100_000}}, data=None)
    assert (
        "data: nothing is prepared yet; 100,000 rows are taken, so steps and times are provisional, and with fewer "
        in (result.assumptions[-1])
    )
    (refusal,) = refused({"training": {"globalBatchSize": 100_000}}, data=rows(700))
    assert refusal[2:] == (
        "the train split has 700 rows, and one step takes training.globalBatchSize = 100000",
        "add rows, or set training.globalBatchSize to 700 or less",
    )


@pytest.mark.parametrize(("batch", "noted"), [(350, 1), (32, 0)])
def test_too_few_steps_to_learn_are_noted(batch, noted):
    result = planned({"training": {"globalBatchSize": batch}}, data=rows(700))
    sentences = [reason for reason in result.reasons if reason.startswith("only ")]
    assert len(sentences) == noted
    assert all("6 steps of 350 rows" in sentence for sentence in sentences)


def test_hardware_given_as_text_is_an_assumption_with_its_defaults():
    result = planned({"resources": {"gpusPerNode": "auto"}}, hardware=parse_hardware("gpu=H100,gpus=8"))
    assert result.assumptions == (
        "hardware: the node was not measured, or only in part; 8 x H100 with 79.6 GiB and bf16, 64 cores and 512 GiB "
        "of memory are taken",
    )


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        (8, "CPU: resources.gpusPerNode is 0, so the node's 8 GPUs stay idle; set it to auto to train on them"),
        (1, "CPU: resources.gpusPerNode is 0, so the node's 1 GPU stays idle; set it to auto to train on it"),
    ],
)
def test_unrequested_gpus_are_reported_as_idle(gpus, reason):
    assert reason in planned(hardware=parse_hardware(f"gpu=H100,gpus={gpus}")).reasons


def test_known_facts_are_not_assumed():
    assert planned().assumptions == ()


def test_every_decision_leaves_its_sentence():
    assert planned({"parallelism": {"strategy": "deepspeed", "zeroStage": 2}, "predict": {}}).reasons == (
        "stages prepare -> train -> evaluate -> predict: what the job asks for and what that needs",
        "predictions are computed in the way that is fastest on a sample of the rows, in a small job by the model "
        "as it is (spec.predict.optimization is auto)",
        "launcher job: the first of pytorchjob, mpijob, job that is served",
        "2 processes a node: deepspeed spreads over processes, and there are 2 cores",
        "1 thread a process: 2 cores / 2 processes",
        "precision fp32: the CPU has no units for bf16, and emulated it is 2 to 4 times slower",
        "798 steps: 3 epochs (the default) of 266 = 8,530 rows / 32; the last 18 rows of an epoch's order make "
        "no whole batch "
        "and are dropped",
        "a checkpoint every 266 steps: once an epoch; and after each 10 minutes of work without one, or later where "
        "saving would take more than 3% of the time",
        "strategy deepspeed-zero2: as asked; one process needs 1.8 GiB of 8.0 GiB",
        "micro-batch 16: each rank's whole share fits at once; 32 = 16 micro x 1 accumulation x 2 ranks",
        "inference batches of 2,048 padded tokens: rows of like length together, as many as fit in that",
    )


def test_the_trainer_gets_the_tasks_own_columns_where_the_job_names_none():
    spec = {
        "dataset": {"uri": "file:///data", "columns": {"textPair": "b", "label": "stars"}},
        "predict": {"dataset": {"uri": "file:///new"}, "columns": ["id"]},
    }
    trainer = planned(spec).trainer
    assert trainer.dataset is not None
    assert trainer.dataset.columns == Columns(text="text", text_pair="b", label="stars")
    assert trainer.predict is not None
    assert trainer.predict.dataset is not None
    assert trainer.predict.dataset.columns == Columns(text="text")
    assert trainer.predict.columns == ("id",)


def test_user_values_arrive_byte_for_byte():
    arguments = {"lr_scheduler_kwargs": {"a": [1, 2.5, None, "{{ x }} $(Y) \n ü"]}, "adam_beta2": 0.98}
    result = training(planned({"training": {"arguments": arguments, "seed": 7, "learningRate": 3e-4}}))
    assert (result.arguments, result.seed, result.learning_rate) == (arguments, 7, 3e-4)
    assert planned({"training": {"seed": 7}}).trainer.seed == 7


def test_spark_prepares_where_there_is_no_cluster():
    spark = {"preparation": {"engine": "spark", "workers": 3}}
    preparation = planned(spark, local=True).trainer.preparation
    assert (preparation.engine, preparation.workers) == ("spark", 3)
    assert planned({"preparation": {"workers": 3}}).trainer.preparation.engine == "local"


SPARK_SERVED = (*BUILT_IN, *ENGINES)
SPARK_SETTINGS = Settings.model_validate({"spark": {"image": "spark:1", "serviceAccountName": "spark-driver"}})


def test_spark_in_a_cluster_needs_its_operator_and_the_settings():
    spark = {"preparation": {"engine": "spark", "workers": 3}}
    not_served = (
        "spec.preparation.engine",
        '"spark"',
        "the cluster has to serve SparkApplication (sparkoperator.k8s.io/v1beta2)",
        "install the Kubeflow Spark Operator, or set it to job or auto",
    )
    not_granted = (
        "spec.preparation.engine",
        '"spark"',
        "the operator's settings have to name an image with Spark, and an account for its driver",
        "have an administrator set spark.image and spark.serviceAccountName (docs/data.md), or set it to job or auto",
    )
    assert refused(spark) == [not_served, not_granted]
    assert refused(spark, served=SPARK_SERVED) == [not_granted]
    assert refused(spark, SPARK_SETTINGS) == [not_served]
    # A prepared job goes on without Spark: no other stage needs it.
    assert planned(spark, prepared=True).trainer.preparation.engine == "spark"
    result = planned(spark, SPARK_SETTINGS, served=SPARK_SERVED)
    assert (result.trainer.preparation.engine, result.trainer.preparation.pods) == ("spark", 4)
    assert result.reasons[1] == (
        "preparation by Spark's driver and 3 executors, as asked; they write to one claim, which the nodes have to "
        "share"
    )


def test_preparation_uses_pods_in_a_cluster_and_processes_without_one():
    pods = {"preparation": {"engine": "job", "workers": 3}}
    result = planned(pods)
    preparation = result.trainer.preparation
    assert (preparation.engine, preparation.workers, preparation.pods) == ("job", 3, 3)
    assert (
        "preparation by 3 pods, as asked: one reads and checks the rows, all tokenise shards of them; they write to "
        "one claim, which the nodes have to share"
    ) in result.reasons
    here = planned(pods, local=True)
    assert (here.trainer.preparation.engine, here.trainer.preparation.workers) == ("local", 3)
    assert (
        "preparation by 3 processes of this machine: there is no cluster here; in one, pods would do it"
    ) in here.reasons
    alone = planned({"preparation": {"engine": "job"}})
    assert alone.trainer.preparation.pods == 1
    assert "preparation by 1 pod, as asked" in alone.reasons


@pytest.mark.parametrize("engine", ["job", "spark"])
def test_evaluation_of_a_program_model_prepares_in_one_pod(engine):
    script = {"script": {"git": {"url": "https://github.com/a/b"}}}
    wanted = {"training": script, "evaluation": {}, "preparation": {"engine": engine, "workers": 3}}
    assert refused(wanted, SPARK_SETTINGS, served=SPARK_SERVED) == [
        (
            "spec.preparation.engine",
            f'"{engine}"',
            "the rows on which a program's model is evaluated are prepared by the stage that evaluates, in one pod",
            "set it to auto",
        )
    ]


def test_a_length_beyond_the_models_positions_is_refused():
    assert refused({"preparation": {"maxLength": 1024}}) == [
        (
            "spec.preparation.maxLength",
            "1024",
            "the model holds at most 512 tokens",
            "set it to 512 or less, or leave it out",
        )
    ]
    # Of an unread model at most the size is known.
    assert planned({"preparation": {"maxLength": 32768}}, model=None, data=None).trainer.preparation.max_length == 32768


def test_longer_answers_than_the_models_positions_are_refused():
    writing = {"task": "summarization", "dataset": {"uri": "hf://c/d"}, "generation": {"maxNewTokens": 1024}}
    assert (
        "spec.generation.maxNewTokens",
        "1024",
        "the model holds at most 512 tokens",
        "set it to 511 or less",
    ) in (refused(writing))
    read = {"generation": {"maxNewTokens": 1024}, "task": "text-generation"}
    assert planned(read).trainer.generation.max_new_tokens == 1024


# --------------------------------------------------------------------------------------------------- estimate, summary

PRICES = Settings(prices=(Price(product="NVIDIA-H100-80GB-HBM3", gpus=8, perHour=98.32, spotPerHour=40.0),))


def test_time_and_cost_follow_from_operations_and_prices():
    resources = {"gpusPerNode": 8, "nodes": 2, "network": "rdma"}
    spec = {"resources": resources, "training": {"globalBatchSize": 64, "epochs": 1}}
    result = planned(spec, PRICES, model=BERT, hardware=EIGHT_H100, data=rows(64_000, 128, 128))
    tokens = 64_000 * 128
    flops = tokens * (6 * (BERT.parameters - BERT.embedding_parameters) + 12 * 12 * 768 * 128)
    seconds = result.estimate.seconds
    assert seconds is not None
    assert result.estimate.cost == pytest.approx(seconds / 3600 * 2 * 98.32)
    assert result.estimate.currency == "USD"
    found = re.fullmatch(
        rf"{re.escape(f'{flops:.3g}')} operations for 8,192,000 tokens on 16 processes at [0-9]+% of H100's 989 "
        r"TFLOP/s in bf16; a step takes ([0-9.]+) ms: computation [0-9]+%, communication [0-9]+%, optimizer [0-9]+%, "
        r"wait for data less than 1%; "
        r"with 1 checkpoint of [0-9]+ s; loading and the final evaluation are not counted; "
        r"2 nodes at 98.32 USD an hour",
        result.estimate.basis,
    )
    assert found is not None, result.estimate.basis
    estimate = result.estimate
    assert estimate.step_seconds is not None
    assert float(found[1]) == pytest.approx(1000 * estimate.step_seconds, rel=0.05)
    assert sum(estimate.step_parts.values()) == pytest.approx(estimate.step_seconds)
    assert seconds == pytest.approx(1000 * estimate.step_seconds + estimate.pauses["checkpoints"])
    spot = planned(
        spec | {"spot": {"enabled": True}}, PRICES, model=BERT, hardware=EIGHT_H100, data=rows(64_000, 128, 128)
    )
    assert spot.estimate.seconds == pytest.approx(
        1000 * estimate.step_seconds
    )  # too short for a checkpoint by the clock
    assert spot.estimate.cost == pytest.approx(spot.estimate.seconds / 3600 * 2 * 40.0)


def test_without_a_price_or_a_speed_there_is_no_number():
    assert planned().estimate.cost is None
    unknown = parse_hardware("gpu=RX9,memory=64Gi")
    estimated = planned({"resources": {"gpusPerNode": 1}}, hardware=unknown).estimate
    assert (estimated.seconds, estimated.cost) == (None, None)
    assert estimated.basis == "no estimate: the speed of RX9 is not in the table of GPUs"


def test_the_summary_prints_the_arithmetic():
    sections = {section.title: section.rows for section in summarise(planned({"parallelism": {"strategy": "ddp"}}))}
    assert list(sections) == ["What runs", "Training", "Memory of one process", "Estimate", "Reasons"]
    assert sections["Training"] == (
        Row("batch", "32 = 16 micro x 1 accumulation x 2 ranks"),
        Row("steps", "798", "266 an epoch"),
        Row("precision", "fp32"),
        Row("recipe", "loss full, not compiled, head whole"),
        Row("optimizer", "adamw", "learning rate 2e-05, linear"),
        Row("checkpoints", "every 266 steps", "3 kept"),
    )
    assert sections["What runs"] == (
        Row("job", "job"),
        Row("task", "text-classification"),
        Row("stages", "prepare -> train -> evaluate"),
        Row("model", "hf://org/model", "bert, 22.7 million parameters"),
        Row("data", "hf://org/reviews", "train 8,530 rows"),
        Row("launcher", "job"),
        Row("strategy", "ddp"),
        Row("processes", "2 = 1 node x 2", "cpu, 1 thread each"),
    )
    assert sections["Memory of one process"][0] == Row("parameters", "86.6 MiB", "4 x 22,713,986")


def test_the_summary_of_a_plan_that_trains_nothing_has_no_training():
    result = planned({"training": None, "dataset": None, "endpoint": {}}, data=None)
    assert [section.title for section in summarise(result)] == ["What runs", "Endpoint", "Estimate", "Reasons"]


# ------------------------------------------------------------------------------------------------------ for every job

specs = st.fixed_dictionaries(
    {
        "training": st.fixed_dictionaries(
            {"globalBatchSize": st.integers(1, 4096)},
            optional={
                "microBatchSize": st.one_of(st.just("auto"), st.integers(1, 64)),
                "epochs": st.floats(0.01, 100),
                "warmupSteps": st.sampled_from([0, 0.1, 5, 2.5]),
                "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16", "fp8"]),
                "optimizer": st.sampled_from(["adamw", "adafactor", "sgd"]),
            },
        ),
        "parallelism": st.fixed_dictionaries(
            {},
            optional={
                "strategy": st.sampled_from(["auto", "single", "ddp", "fsdp", "deepspeed"]),
                "zeroStage": st.sampled_from(["auto", 0, 1, 2, 3]),
                "activationCheckpointing": st.sampled_from(["auto", "none", "full", "selective"]),
                "offload": st.sampled_from([{}, {"optimizer": "cpu"}, {"optimizer": "nvme"}, {"parameters": "cpu"}]),
                "sharding": st.sampled_from(["full", "grad-op", "hybrid"]),
                "tensor": st.sampled_from([1, 1, 1, 2]),
                "pipeline": st.sampled_from(
                    [
                        {},
                        {},
                        {"degree": 2},
                        {"degree": 2, "microBatches": 4, "schedule": "gpipe"},
                        {"degree": 3, "schedule": "interleaved"},
                    ]
                ),
                "placement": st.sampled_from(["cluster", "spread", "PTD"]),
            },
        ),
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "nodes": st.integers(1, 8),
                "gpusPerNode": st.sampled_from(["auto", 0, 1, 2, 8]),
                "processesPerNode": st.sampled_from(["auto", 1, 2, 3, 8]),
                "cpu": st.sampled_from(["500m", "4", "64"]),
                "memory": st.sampled_from(["512Mi", "16Gi", "1Ti"]),
            },
        ),
        "checkpoints": st.sampled_from([{}, {"every": {}}, {"every": {"steps": 5}}, {"every": {"minutes": 1.0}}]),
        "launcher": st.sampled_from(["auto", "job", "mpijob"]),
        "predict": st.sampled_from([None, {}]),
    }
)
known_facts = st.builds(
    Facts,
    model=st.sampled_from([None, MINILM, ROBERTA_LARGE, gpt(4096, 32, 32), LLAMA]),
    data=st.sampled_from([None, rows(10), rows(8530), rows(1_000_000, 512, 300)]),
    hardware=st.sampled_from(
        [None, TWO_CORES, T4, EIGHT_H100, HardwareFacts(cpu_cores=1, memory_bytes=1, gpus_per_node=2)]
    ),
    local=st.booleans(),
)


def autos(value: Any) -> list[Any]:
    """Return every value in a JSON document that is `auto`."""
    match value:
        case dict():
            return [found for each in value.values() for found in autos(each)]
        case list():
            return [found for each in value for found in autos(each)]
        case _:
            return [value] if value == "auto" else []


def plan_or_problems(wanted: FineTuneJob, facts: Facts, settings: Settings) -> JobPlan | tuple[Problem, ...]:
    try:
        return plan(wanted, facts, settings)
    except PlanRefused as refusal:
        return refusal.problems


LEFT_OPEN = {"training": {"globalBatchSize": 2}, "parallelism": {}, "resources": {"nodes": 2}, "checkpoints": {}}


@examples(50, everything=150)
@given(spec=specs, facts=known_facts)
@example(spec={**LEFT_OPEN, "launcher": "auto", "predict": None}, facts=Facts(model=LLAMA))
def test_every_job_gets_a_whole_plan_or_problems_with_paths(spec, facts):
    settings = LOCAL_SETTINGS if facts.local else CLUSTER_SETTINGS
    result = plan_or_problems(job(spec), facts, settings)
    if isinstance(result, tuple):
        assert result
        assert all(problem.path.startswith("spec") and problem.rule and problem.hint for problem in result)
        return
    batch, world = training(result).batch, training(result).world
    assert batch.global_batch_size == spec["training"]["globalBatchSize"]
    assert batch.global_batch_size == batch.micro_batch_size * batch.gradient_accumulation * batch.data_parallel
    assert batch.data_parallel * training(result).strategy.replica_ranks == world.size
    assert autos(json.loads(result.to_json())) == []
    assert result.memory is not None
    provisional = any("prepare measures first" in assumption for assumption in result.assumptions)
    assert provisional or result.memory.total_bytes <= result.memory.capacity_bytes
    assert result == plan(job(spec), facts, settings)
    for key, name in (("microBatchSize", batch.micro_batch_size), ("precision", training(result).precision)):
        assert spec["training"].get(key, "auto") in ("auto", name)
    strategy: Strategy = training(result).strategy
    for key, name in (
        ("strategy", strategy.name),
        ("zeroStage", strategy.zero_stage),
        ("activationCheckpointing", strategy.activation_checkpointing),
    ):
        assert spec["parallelism"].get(key, "auto") in ("auto", name)
    parallelism = job(spec).spec.parallelism
    found = strategy.tensor, 1 if strategy.pipeline is None else strategy.pipeline.degree
    # Where all is left open, and nothing fits with whole layers on each process, the plan chooses degrees.
    assert found == (parallelism.tensor, parallelism.pipeline.degree) or (
        parallelism.model_ranks == 1 and parallelism.strategy == "auto"
    )
    # These rows are for classification, not for generation, and stay whole.
    assert strategy.sequence == 1
    if strategy.pipeline is not None:
        assert batch.gradient_accumulation % strategy.pipeline.micro_batches == 0
        assert parallelism.pipeline.micro_batches in ("auto", strategy.pipeline.micro_batches)
    assert Stage.TRAIN in result.stages


def test_adapters_of_an_endpoint_reach_the_servers_and_take_memory():
    only = {"training": None, "dataset": None}
    adapters = [{"name": f"a{at}", "uri": f"pvc://tuned/a{at}"} for at in range(32)]
    alone, several = (
        planned({**only, "endpoint": endpoint}, model=ROBERTA_LARGE) for endpoint in ({}, {"adapters": adapters})
    )

    assert several.trainer.serving is not None
    assert [adapter.name for adapter in several.trainer.serving.adapters] == [f"a{at}" for at in range(32)]
    memory = [
        0 if each.servers is None else parse_quantity(each.servers.requests["memory"]) for each in (alone, several)
    ]
    assert 0.5e9 < memory[1] - memory[0] < 1.5e9
    assert any("32 adapters beside it: a0, a1" in reason for reason in several.reasons)


def test_adapter_must_not_have_the_name_of_the_job():
    named = {"adapters": [{"name": "job", "uri": "pvc://tuned/a"}]}

    [(path, _, rule, hint)] = refused({"training": None, "dataset": None, "endpoint": named})

    assert (path, hint) == ("spec.endpoint.adapters[0].name", "give the adapter another name")
    assert rule == "is the name of the job, by which requests choose the model itself"


@pytest.mark.parametrize("optimization", ["auto", "bf16"])
def test_gate_is_judged_with_the_optimization_of_the_servers(optimization: str):
    endpoint = {"optimization": optimization, "tolerance": 0.99}
    gated = {"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.8}}}
    judged = planned({**gated, "endpoint": endpoint})

    assert judged.trainer.evaluation is not None
    assert judged.trainer.serving is not None
    assert judged.trainer.evaluation.optimization == judged.trainer.serving.optimization
    assert judged.trainer.evaluation.optimization == ("measured" if optimization == "auto" else "bf16")
    assert judged.trainer.evaluation.tolerance == 0.99
    assert any(reason.startswith("the gate is judged with the optimization") for reason in judged.reasons)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"evaluation": {}, "endpoint": {"optimization": "bf16"}}, id="no gate"),
        pytest.param({"endpoint": None}, id="no endpoint"),
        pytest.param({"endpoint": {}}, id="servers compute the model as it is"),
    ],
)
def test_evaluation_computes_the_model_as_it_is_without_such_a_gate(changes: dict[str, Any]):
    gated = {"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.8}}}
    plain = planned({**gated, **changes}).trainer

    assert plain.evaluation is not None
    assert (plain.evaluation.optimization, plain.evaluation.tolerance) == ("none", None)
    assert "optimization" not in plain.evaluation.to_json()
