"""Published training runs, each as the step that its own recipe computes, with the published speed.

Rows are those of `shared/reference/published-runs.md`. Rows for calibration may set constants of `step_time`; held rows
only judge them. Not here: the 175B run on 120 p4d, whose degrees and batch were not published; and GPT-2 30B with
tensor parallelism, which names a number of nodes and no speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune_contract.choices import Precision
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Pipeline, Strategy
from finetune_operator.plan.hardware.devices import find_gpu
from finetune_operator.plan.memory.adapter_sizes import adapted_sizes, trained_parameters
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.models.known_models import known_config
from finetune_operator.plan.time.step_time import time_of_step
from finetune_operator.plan.time.step_work import Machine, StepWork, kernel_shares
from planning_support import published_memory


@dataclass(frozen=True)
class Run:
    """Published run."""

    name: str
    use: Literal["cal", "held"]
    work: StepWork
    machine: Machine
    rows: int
    """Rows of an optimizer step of all processes."""
    seconds: float
    """Published seconds of a step."""
    bound: float = 0.2
    """Allowed difference of the planned speed from the published one."""
    why: str = ""
    """Reason for a bound that is wider than a fifth."""

    @property
    def ratio(self) -> float:
        """Return the planned speed as a share of the published one."""
        return self.seconds / time_of_step(self.work, self.machine).total


def machine(product: str, nodes: int, gpus: int = 8, **changes: float) -> Machine:
    """Return nodes with a product of the table; `changes` replace its figures."""
    gpu = find_gpu(product)
    assert gpu is not None
    figures: dict[str, Any] = {
        "half_flops": gpu.half_tflops * 1e12,
        "fp32_flops": gpu.fp32_tflops * 1e12,
        "memory": gpu.bandwidth * 1e9,
        "link": gpu.link_gigabytes * 1e9,
        "network": gpu.network * 1e9,
        "host": gpu.host * 1e9,
        "units": gpu.units,
        **kernel_shares(gpu.capability),
    }
    return Machine(nodes=nodes, gpus_per_node=gpus, cores_per_node=96, **{**figures, **changes})


def titan_nodes(nodes: int) -> Machine:
    """Return nodes of torchtitan's measurements: H100 with HBM2e at 2.4 TB/s."""
    return machine("H100", nodes, memory=2.4e12)


def work(
    model: ModelFacts, strategy: Strategy, precision: Precision, rows: tuple[int, int, int], **more: Any
) -> StepWork:
    """Return the step of a decoder; `rows`: of a micro-batch, micro-batches, tokens of a row."""
    micro, accumulation, length = rows
    defaults: dict[str, Any] = {"scores_vocabulary": True, "causal": True, "optimizer": "adamw"}
    defaults["trained"] = model.parameters
    if model.tied_embeddings and more.get("scores_vocabulary", True):
        defaults["tied_head"] = model.vocabulary_size * model.hidden_size
    return StepWork(
        model=model,
        strategy=strategy,
        precision=precision,
        micro_rows=micro,
        accumulation=accumulation,
        row_tokens=length,
        length=length,
        **{**defaults, **more},
    )


def llama(size: str) -> ModelFacts:
    """Return the facts of Llama 3.1."""
    return model_facts(known_config(f"llama-3.1-{size}"), "text-generation")


def titan(
    name: str,
    size: str,
    nodes: int,
    rows: tuple[int, int, int],
    speed: float,
    use: Literal["cal", "held"] = "held",
    **of: Any,
) -> Run:
    """Return a run of torchtitan, whose `speed` is in tokens a second and GPU."""
    mode, precision = of.pop("mode", "full"), of.pop("precision", "fp8")
    degrees: Mapping[str, Any] = of.pop("degrees", {})
    bound, why = of.pop("bound", 0.2), of.pop("why", "")
    strategy = Strategy(name="fsdp", activation_checkpointing=mode, **degrees)
    # torchtitan's selective checkpointing repeats every second product.
    again = 0.5 if mode == "selective" else 0.0
    of = {"compiled": True, "split_norms": True, "recomputed_products": again, **of}
    step = work(llama(size), strategy, precision, rows, world=8 * nodes, **of)
    whole = rows[0] * rows[1] * step.world // strategy.replica_ranks
    tokens = whole * rows[2]
    return Run(f"torchtitan {name}", use, step, titan_nodes(nodes), whole, tokens / (speed * step.world), bound, why)


def gpt2_30b() -> Run:
    """Return the 30B run on 16 p4d: 141 TFLOP/s a GPU by Megatron's formula, which counts full recomputation."""
    h, layers, length, micro = 7168, 48, 2048, 4
    config = {
        "model_type": "gpt2",
        "n_embd": h,
        "n_layer": layers,
        "n_head": 64,
        "vocab_size": 50257,
        "n_positions": 2048,
    }
    # Published on 2022-10-31; the library has FlashAttention since 1.13 of 2022-12-15 (its change log).
    model = model_facts(config, "text-generation").model_copy(update={"fused_attention": False})
    strategy = Strategy(name="fsdp", activation_checkpointing="full")
    step = work(model, strategy, "bf16", (micro, 1, length), world=128, causal=False)
    operations = 96 * micro * length * layers * h**2 * (1 + length / (6 * h) + 50257 / (16 * layers * h))
    return Run("GPT-2 30B, 16 p4d", "held", step, machine("A100-40GB", 16), micro * 128, operations / 141e12)


def encoder_work(model_type: str, h: int, layers: int, vocabulary: int, strategy: Strategy, **of: Any) -> StepWork:
    """Return the step of an encoder that classifies."""
    config = {
        "model_type": model_type,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": h // 64,
        "intermediate_size": 4 * h,
        "vocab_size": vocabulary,
        "max_position_embeddings": 514,
    }
    model = model_facts(config, "text-classification")
    return work(model, strategy, of.pop("precision"), of.pop("rows"), scores_vocabulary=False, causal=False, **of)


def roberta(name: str, strategy: Strategy, precision: Precision, micro: int, seconds: float, **of: Any) -> Run:
    """Return a run of roberta-base on 8 nodes with one T4, whose size has 8 Gbit/s by Azure's tables."""
    step = encoder_work(
        "roberta", 768, 12, 50265, strategy, precision=precision, rows=(micro, 1, 128), world=8, reduced_bytes=2
    )
    return Run(name, "held", step, machine("T4", 8, 1, network=1e9), micro * 8, seconds, **of)


def deberta(micro: int, speed: float) -> Run:
    """Return a run of deberta-v2-xxlarge on 2 nodes of 8 V100, at the length of its model card's recipe (256)."""
    strategy = Strategy(name="deepspeed", zero_stage=1)
    step = encoder_work("deberta-v2", 1536, 48, 128100, strategy, precision="fp16", rows=(micro, 1, 256), world=16)
    return Run(
        f"deberta-v2-xxlarge, micro-batch {micro}",
        "held",
        step,
        machine("V100-32GB", 2),
        16 * micro,
        16 * micro / speed,
    )


_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_QWEN_SECONDS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("1.8B", (1.0, 1.0, 1.1, 1.7, 3.3, 6.8)),
    ("7B", (1.2, 1.5, 2.8, 5.2, 10.1, 21.3)),
    ("14B", (1.6, 2.4, 4.4, 8.4, 17.0, 36.0)),
    ("72B", (17.6, 20.5, 29.4, 45.7, 83.4, 161.5)),
)
"""README of QwenLM/Qwen, "Profiling of Memory and Speed": seconds of a step of LoRA on A100-SXM4-80G at `_LENGTHS`; 72B
by ZeRO-3 on 4 of them. QLoRA is not here: GPTQ's weights are unpacked by several kernels of torch, and the trainer's by
one.
"""
_BOTH = "launches and computation take about as long, and each delays the other"
_QWEN_OFF: Mapping[tuple[str, int], tuple[float, str]] = {
    ("1.8B", 1024): (0.25, _BOTH),
    ("72B", 1024): (0.4, _BOTH),
}
QWEN_ADAPTER_BYTES = 9.5
"""Bytes of an adapter whose weights are in 16 bits, as peft had them before 0.12: dropout, product, scale and sum."""


def qwen_runs() -> tuple[Run, ...]:
    """Return the LoRA runs of Qwen's README."""
    alone = Strategy(name="single", activation_checkpointing="full")
    divided = Strategy(name="deepspeed", zero_stage=3, activation_checkpointing="full")
    return tuple(
        qwen(size, length, seconds, *((divided, 4) if size == "72B" else (alone, 1)))
        for size, of_lengths in _QWEN_SECONDS
        for length, seconds in zip(_LENGTHS, of_lengths, strict=True)
    )


def qwen(size: str, length: int, seconds: float, strategy: Strategy, gpus: int) -> Run:
    """Return a run of 8 micro-batches of one row, with an adapter of rank 64 on all linear layers of the blocks."""
    of = published_memory.qwen(size, strategy, gpus, length, "lora")
    parts, adapted = trained_parameters(of.model, of.adapter), adapted_sizes(of.model, of.adapter)
    layers = of.model.layers
    step = work(
        of.model,
        strategy,
        "bf16",
        (1, 8, length),
        world=gpus,
        trained=parts.trained,
        added=parts.added,
        # One layer computes queries, keys and values.
        adapted=adapted.number - 2 * layers,
        adapted_width=adapted.width - 2 * layers * of.model.hidden_size,
        adapter_bytes=QWEN_ADAPTER_BYTES,
    )
    name = f"Qwen {size} LoRA, {length:,} tokens" + (f", {gpus} GPUs" if gpus > 1 else "")
    use: Literal["cal", "held"] = "cal" if size == "7B" else "held"
    on = machine("A100-80GB", 1, gpus)
    return Run(name, use, step, on, 8 * gpus, seconds, *_QWEN_OFF.get((size, length), ()))


_EIGHT = (2, 1, 8192)
RUNS: tuple[Run, ...] = (
    titan("8B, 8 GPUs", "8b", 1, _EIGHT, 5762, "cal", mode="selective", precision="bf16", compiled=False),
    titan("8B, 8 GPUs, compiled", "8b", 1, _EIGHT, 6667, "cal", mode="selective", precision="bf16"),
    titan("8B, 8 GPUs, compiled, fp8", "8b", 1, _EIGHT, 8532, mode="selective"),
    titan("8B, 8 GPUs, fp8, 32k", "8b", 1, (1, 1, 32_768), 3890),
    titan(
        "8B, 8 GPUs, fp8, 131k", "8b", 1, (1, 1, 131_072), 1071, degrees={"sequence": 4}, bound=0.75,
        why="ring attention, whose pieces are short and unevenly masked; it is planned as slices by heads",
    ),
    titan("8B, 128 GPUs", "8b", 16, _EIGHT, 5605, mode="selective", precision="bf16", compiled=False),
    titan("8B, 128 GPUs, compiled", "8b", 16, _EIGHT, 6514, mode="selective", precision="bf16"),
    titan("70B, 256 GPUs, fp8", "70b", 32, (16, 1, 8192), 829, degrees={"tensor": 8}),
    titan("405B, 512 GPUs, fp8, 1F1B", "405b", 64, (1, 32, 8192), 100,
          degrees={"tensor": 8, "pipeline": Pipeline(degree=8, micro_batches=32, schedule="1f1b")}),
    titan("405B, 512 GPUs, fp8, interleaved", "405b", 64, (1, 32, 8192), 128,
          degrees={"tensor": 8, "pipeline": Pipeline(degree=8, micro_batches=32, schedule="interleaved")}),
    gpt2_30b(),
    roberta("roberta-base, 8 T4, fp32", Strategy(name="ddp"), "fp32", 48, 0.90, bound=0.4,
            why="875 MB of gradients a GPU in 0.9 s take more than the 8 Gbit/s that the nodes have by Azure's tables"),
    roberta("roberta-base, 8 T4, fp16", Strategy(name="fsdp", fsdp_sharding="grad-op"), "fp16", 96, 0.56),
    deberta(8, 140.6),
    deberta(11, 162.4),
    *qwen_runs(),
)  # fmt: skip


def table() -> str:
    """Return planned and published speeds, in rows a second, as a Markdown table."""
    lines = ["| run | use | published rows/s | planned rows/s | ratio |", "|---|---|---|---|---|"]
    for run in RUNS:
        published, planned = run.rows / run.seconds, run.rows / run.seconds * run.ratio
        lines.append(f"| {run.name} | {run.use} | {published:.3g} | {planned:.3g} | {run.ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
