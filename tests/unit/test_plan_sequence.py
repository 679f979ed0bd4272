"""Plans whose rows are divided among processes: the arithmetic, decisions and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_contract.facts import DataFacts, ModelFacts, SplitFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.cli.cluster.jobview import plan_lines
from finetune_operator.jobs.render.deepspeed_config import deepspeed_config
from finetune_operator.jobs.state.planned import plan_status
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.hardware.devices import link_bytes
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.strategy import ladder
from finetune_operator.plan.time import cost
from finetune_operator.plan.time.step_time import exchanged_bytes
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import job, llama_1b

LLAMA = llama_1b("text-generation", max_position_embeddings=131072)
EIGHT = parse_hardware("gpu=H100,gpus=8,cpu=64,hostMemory=1Ti")
TWO_CORES = parse_hardware("cpu=2,hostMemory=256Gi")
LONG = DataFacts(
    fingerprint="f", splits={"train": SplitFacts(rows=10_000, tokens=80_000_000, longest=16_383)}, max_length=16_384
)


SIXTEEN_ROWS = {"globalBatchSize": 16}


@pytest.fixture(autouse=True)
def whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all logits of a row computed at once, so that rows of usual lengths do not fit whole."""
    for module in (ladder, cost):
        monkeypatch.setattr(module, "needs_whole_logits", lambda arguments: True)


def planned(spec: Mapping[str, Any], hardware: Any = EIGHT, model: Any = LLAMA) -> JobPlan:
    usual = {
        "task": "text-generation",
        "training": {**SIXTEEN_ROWS, "microBatchSize": 1},
        "resources": {"gpusPerNode": hardware.gpus_per_node},
    }
    return plan(job({**usual, **spec}), Facts(model=model, hardware=hardware, data=LONG), CLUSTER_SETTINGS)


FSDP = {"strategy": "fsdp", "activationCheckpointing": "none"}


def activations(result: JobPlan) -> Any:
    assert result.memory is not None
    return next(term for term in result.memory.terms if term.name == "activations")


def test_groups_read_the_same_rows_with_a_part_of_the_activations_each():
    whole, divided = (planned({"parallelism": FSDP | {"sequence": degree}}) for degree in (1, 4))
    training = divided.trainer.training
    assert training is not None
    assert (training.strategy.sequence, training.strategy.label) == (4, divided.strategy)
    assert divided.strategy.startswith("fsdp+sequence4")
    batch = training.batch
    assert (batch.data_parallel, batch.micro_batch_size, batch.gradient_accumulation) == (2, 1, 8)
    # The last process has one token less of an odd row.
    assert activations(divided).formula.startswith("1 rows x 4096 of 16383 tokens x (")
    assert activations(whole).bytes > 3.9 * activations(divided).bytes
    assert (
        "rows are divided among 4 neighbouring processes on one node, 2 groups of them: of 16383 tokens each has "
        "4096 and, in attention, 8 of 32 heads"
    ) in divided.reasons
    assert "16 = 1 micro x 8 accumulation x 2 ranks" in " ".join(divided.reasons)


def test_plain_text_is_packed_only_on_request():
    def packs(spec: Mapping[str, Any]) -> bool:
        return planned(spec).trainer.preparation.packing

    assert packs({})
    assert not packs({"parallelism": {"sequence": 2}})
    assert packs({"parallelism": {"sequence": 2}, "preparation": {"packing": "always"}})


def test_status_and_command_show_the_number_of_groups():
    result = planned({"parallelism": {"sequence": 8}})
    status = plan_status(result)
    assert (status.world_size, status.data_parallel) == (8, 1)
    assert "sequence8" in status.strategy
    lines = plan_lines(status)
    assert lines[0] == "ddp+sequence8 by job, 8 processes, batch 16 = 1 x 16 x 1"


def test_auto_uses_the_quickest_strategy_that_fits_beside_slices():
    labels = {degree: planned({"parallelism": {"sequence": degree}}).strategy for degree in (1, 2, 8)}
    assert labels == {1: "fsdp", 2: "fsdp+sequence2", 8: "ddp+sequence8"}


def test_deepspeed_batch_counts_all_processes_as_replicas():
    config = deepspeed_config(planned({"parallelism": {"strategy": "deepspeed", "zeroStage": 2, "sequence": 4}}))
    assert config is not None
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in sizes] == [16 * 4, 1, 8]


def test_on_a_cpu_there_are_as_many_processes_as_slices():
    result = planned({"parallelism": {"strategy": "ddp", "sequence": 4}, "resources": {"nodes": 2}}, TWO_CORES)
    assert result.trainer.world is not None
    assert (result.trainer.world.nodes, result.trainer.world.processes_per_node) == (2, 2)
    assert "2 processes a node: as few as the slices of a row take" in result.reasons
    assert any("4 neighbouring processes of several nodes, 1 group of them" in reason for reason in result.reasons)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "heads that it does not divide": (
        {"parallelism": {"sequence": 3}, "resources": {"gpusPerNode": 6}, "training": {"globalBatchSize": 64}},
        "spec.parallelism.sequence",
        "it has to divide the model's 32 attention heads",
    ),
    "key-value heads that it does not divide": (
        {"parallelism": {"sequence": 16}, "resources": {"nodes": 2, "gpusPerNode": 8}},
        "spec.parallelism.sequence",
        "it has to divide the model's 8 key-value heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incompatible_choices_are_refused_with_field_rule_and_hint(case: str):
    spec, path, rule = REFUSED[case]
    with pytest.raises(PlanRefused) as caught:
        planned(spec)
    problem = next(each for each in caught.value.problems if each.path == path)
    assert rule in problem.rule
    assert problem.hint


def test_degrees_of_tensor_parallelism_are_not_chosen_beside_slices():
    narrow = parse_hardware("gpu=H100,memory=8Gi,gpus=8,cpu=64,hostMemory=32Gi")
    with pytest.raises(PlanRefused, match=r"cannot be combined with spec\.parallelism\.tensor"):
        planned({"parallelism": {"sequence": 2}}, narrow)


# --------------------------------------------------------------------------------------------------- chosen by `auto`

EIGHT_BILLION = llama_1b(
    "text-generation",
    hidden_size=4096,
    num_hidden_layers=32,
    intermediate_size=14336,
    max_position_embeddings=131072,
)
"""The shape of Llama 3.1 8B."""
HALF_A_BILLION = model_facts(
    {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "text-generation",
)
"""The shape of Qwen2.5 0.5B."""
PROMPTS = {"uri": "hf://org/answers", "columns": {"source": "question", "target": "answer"}}
QLORA = {"uri": "hf://org/model", "adapter": {"method": "qlora"}}
EIGHT_H100, EIGHT_L4 = "gpu=H100,gpus=8,cpu=128,hostMemory=1Ti", "gpu=L4,gpus=8,cpu=96,hostMemory=384Gi"
TWO_SMALL = "gpu=A10G,memory=12Gi,gpus=2,cpu=16,hostMemory=64Gi"


@dataclass(frozen=True)
class Long:
    """A job whose rows all have `length` tokens."""

    model: ModelFacts
    hardware: str
    length: int
    spec: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, parallelism: Mapping[str, Any] | None = None) -> JobPlan:
        hardware = parse_hardware(self.hardware)
        split = SplitFacts(rows=10_000, tokens=10_000 * self.length, longest=self.length)
        data = DataFacts(fingerprint="f", splits={"train": split}, max_length=self.length)
        usual = {
            "task": "text-generation",
            "dataset": PROMPTS,
            "training": SIXTEEN_ROWS,
            "resources": {"gpusPerNode": hardware.gpus_per_node},
        }
        changes = {} if parallelism is None else {"parallelism": parallelism}
        facts = Facts(model=self.model, hardware=hardware, data=data)
        return plan(job({**usual, **self.spec, **changes}), facts, CLUSTER_SETTINGS)

    def refusal(self) -> Problem:
        with pytest.raises(PlanRefused) as caught:
            self.plan()
        (problem,) = caught.value.problems
        return problem


def compiled(**arguments: bool) -> dict[str, Any]:
    return {"training": {**SIXTEEN_ROWS, "arguments": arguments}}


CHOSEN: dict[str, tuple[Long, str]] = {
    "8 billion parameters on rows of 32k tokens are quicker in slices than with offload": (
        Long(EIGHT_BILLION, EIGHT_H100, 32768),
        "fsdp+sequence4+selective-activation-checkpointing",
    ),
    "on rows of 128k tokens, in as many slices as leave the optimizer on the GPUs": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072),
        "fsdp+sequence8+activation-checkpointing",
    ),
    "in as few as fit on a GPU whose speed nobody knows": (
        Long(EIGHT_BILLION, "gpu=X9,memory=80Gi,gpus=8,cpu=128,hostMemory=1Ti", 131072),
        "deepspeed-zero3+sequence4+activation-checkpointing",
    ),
    "packs have no mask of all their tokens": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072, {"dataset": {"uri": "hf://org/books"}}),
        "fsdp+sequence8+activation-checkpointing",
    ),
    "packs of 128k tokens on GPUs that a mask would fill": (
        Long(EIGHT_BILLION, "gpu=A100-40GB,gpus=8,cpu=128,hostMemory=1Ti", 131072, {"dataset": {"uri": "hf://o/d"}}),
        "deepspeed-zero3+sequence8+activation-checkpointing+optimizer-offload",
    ),
    "a small model on two small GPUs": (
        Long(HALF_A_BILLION, TWO_SMALL, 8192),
        "deepspeed-zero1+sequence2+activation-checkpointing+optimizer-offload",
    ),
    "over several nodes where a node has one process": (
        Long(
            HALF_A_BILLION, TWO_SMALL.replace("gpus=2", "gpus=1"), 8192, {"resources": {"nodes": 2, "gpusPerNode": 1}}
        ),
        "deepspeed-zero1+sequence2+activation-checkpointing+optimizer-offload",
    ),
    "weights in 4 bits": (
        Long(EIGHT_BILLION, EIGHT_L4, 32768, {"model": QLORA}),
        "fsdp+sequence4+activation-checkpointing",
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_auto_divides_rows_where_nothing_else_fits(case: str):
    long, label = CHOSEN[case]
    made = long.plan()
    assert made.strategy == label
    assert made.memory is not None
    assert made.memory.total_bytes <= made.memory.capacity_bytes
    training = made.trainer.training
    assert training is not None
    assert training.batch.global_batch_size == 16
    assert training.batch.data_parallel * training.strategy.sequence == training.world.size
    # The chosen degree can be requested as well; only packs then need a request of their own.
    if made.trainer.preparation.packing:
        long = Long(long.model, long.hardware, long.length, {**long.spec, "preparation": {"packing": "always"}})
    again = long.plan({"sequence": training.strategy.sequence})
    asked = made.trainer.preparation.model_copy(update={"packing_asked": again.trainer.preparation.packing_asked})
    assert (again.trainer, again.memory) == (made.trainer.model_copy(update={"preparation": asked}), made.memory)


def test_plan_gives_reason_and_cost_of_divided_rows():
    (sentence,) = (each for each in CHOSEN["weights in 4 bits"][0].plan().reasons if each.startswith("strategy "))
    assert sentence == (
        "strategy fsdp+sequence4+activation-checkpointing: rows in 4 slices fit (18.5 GiB of 22.5 GiB); with whole "
        "rows on each GPU nothing does: fsdp+activation-checkpointing+optimizer-offload+parameter-offload with "
        "micro-batch 1 needs 63.6 GiB a GPU, and there are 22.5 GiB; to exchange heads for tokens takes 4% of the time "
        "(90.0 GiB a process and step)"
    )


NOT_CHOSEN: dict[str, tuple[Long, str, str]] = {
    "a task whose rows stay whole": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072, {"task": "summarization"}),
        "",
        "use devices of at least ",
    ),
    "a compiled model": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072, compiled(torch_compile=True)),
        "parallelism.sequence is not chosen: torch_compile cannot be combined with spec.parallelism.tensor, "
        "pipeline, sequence and offload.activations",
        "leave training.arguments.torch_compile out and set parallelism.sequence to 8 (48.5 GiB of 79.6 GiB a GPU)",
    ),
    "Liger's kernels and fp8": (
        Long(
            EIGHT_BILLION,
            EIGHT_H100,
            131072,
            {"training": {**compiled(use_liger_kernel=True)["training"], "precision": "fp8"}},
        ),
        "fp8 cannot be combined with spec.parallelism.sequence above 1, and use_liger_kernel needs GPUs, and rows "
        "that spec.parallelism.sequence does not split",
        "leave training.arguments.use_liger_kernel out and set training.precision to bf16 and set parallelism.sequence "
        "to 8 (48.5 GiB of 79.6 GiB a GPU)",
    ),
    "another strategy": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072, {"parallelism": {"zeroStage": 3}}),
        "",
        "leave parallelism.zeroStage out, and the plan takes fsdp+sequence8+activation-checkpointing "
        "(48.5 GiB of 79.6 GiB a GPU); or set parallelism.sequence to 8 (49.2 GiB of 79.6 GiB a GPU)",
    ),
    "a degree that is too small": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072, {"parallelism": {"sequence": 2}}),
        "",
        "set parallelism.sequence to 8 (48.5 GiB of 79.6 GiB a GPU)",
    ),
    "a degree of tensor parallelism": (
        Long(EIGHT_BILLION, EIGHT_H100, 131072, {"parallelism": {"tensor": 8}}),
        "",
        "leave parallelism out, and the plan takes fsdp+sequence8+activation-checkpointing (48.5 GiB of "
        "79.6 GiB a GPU)",
    ),
    "too few GPUs for slices that are short enough": (
        Long(EIGHT_BILLION, EIGHT_L4.replace("gpus=8", "gpus=2"), 32768, {"model": QLORA}),
        "fsdp+sequence2+activation-checkpointing+optimizer-offload+parameter-offload with micro-batch 1 "
        "needs 32.9 GiB a GPU, and there are 22.5 GiB",
        "use devices of at least 63.6 GiB, or a smaller preparation.maxLength or model",
    ),
    "a family that nobody has seen in slices": (
        Long(
            EIGHT_BILLION.model_copy(update={"model_type": "olmo2"}),
            EIGHT_H100,
            131072,
        ),
        "parallelism.sequence is not chosen: rows of models of type olmo2 are not known to be cut into slices",
        "use devices of at least ",
    ),
}


@pytest.mark.parametrize("case", NOT_CHOSEN)
def test_undivided_rows_are_refused_with_reason_and_fitting_degree(case: str):
    long, why, hint = NOT_CHOSEN[case]
    problem = long.refusal()
    assert why in problem.rule
    assert ("sequence" in problem.rule) is (bool(why) or "sequence" in long.spec.get("parallelism", {}))
    assert problem.hint.startswith(hint)


def test_slices_named_in_a_hint_fit_as_calculated():
    written = {
        "another strategy": ({"zeroStage": 3, "sequence": 8}, {}),
        "a compiled model": ({"sequence": 8}, {"training": SIXTEEN_ROWS}),
    }
    for case, (parallelism, spec) in written.items():
        long, _, hint = NOT_CHOSEN[case]
        made = Long(long.model, long.hardware, long.length, {**long.spec, **spec}).plan(parallelism)
        assert made.memory is not None
        assert f"set parallelism.sequence to 8 ({made.memory.total_bytes / 2**30:.1f} GiB of " in hint


def test_exchange_is_4_n_h_elements_less_the_part_of_a_process():
    own_heads = EIGHT_BILLION.model_copy(update={"key_value_heads": None})
    sliced, recomputed = (Strategy(name="ddp", sequence=4, activation_checkpointing=mode) for mode in ("none", "full"))
    tokens, layers = 1000, 32
    # DeepSpeed-Ulysses: 4 N h / P for a layer and pass, of which 3 of 4 parts are sent; forward and backward.
    assert exchanged_bytes(own_heads, sliced, tokens, 2) == 2 * layers * 2 * (4 * tokens * 4096 / 4) * 3 / 4
    # 8 of 32 heads have keys and values, which leaves 2.5 of the 4.
    assert exchanged_bytes(EIGHT_BILLION, sliced, tokens, 2) == 2 * layers * 2 * (2.5 * tokens * 4096 / 4) * 3 / 4
    assert exchanged_bytes(EIGHT_BILLION, recomputed, tokens, 2) == 1.5 * exchanged_bytes(
        EIGHT_BILLION, sliced, tokens, 2
    )
    assert exchanged_bytes(EIGHT_BILLION, Strategy(name="ddp"), tokens, 2) == 0


@pytest.mark.parametrize(
    ("product", "gigabytes"),
    [
        ("NVIDIA-H100-80GB-HBM3", 450),
        ("NVIDIA-H100-PCIe", 64),
        ("Tesla-V100-SXM2-32GB", 150),
        ("NVIDIA-L4", 32),
        ("MI300X", 448),
        ("RX9", None),
    ],
)
def test_a_gpu_sends_by_nvlink_where_it_has_it(product: str, gigabytes: float | None):
    assert link_bytes(product) == (None if gigabytes is None else gigabytes * 1e9)
