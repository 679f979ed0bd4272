"""Published memory of training runs, each with the plan of its own recipe as far as the planner can express it.

Rows are those of `shared/reference/published-runs.md`. No constant of the planner is fitted to a held row. A row that
is further off than `BOUND` has its reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune_contract.choices import Precision
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Adapter, Pipeline, Strategy, World
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.process_memory import estimate
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.models.known_models import known_config

GIB = 1 << 30
BOUND = 0.15
"""Difference of the planned memory from the published one that needs no reason."""
QWEN: dict[str, dict[str, Any]] = {
    "1.8B": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "14B": {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40},
    "72B": {"hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Shapes of Qwen 1, whose blocks are Llama's with biases of queries, keys and values."""


@dataclass(frozen=True)
class MemoryRun:
    """Published memory of one GPU."""

    name: str
    use: Literal["cal", "held"]
    work: Workload
    gib: float
    """Published GiB."""
    bound: float = BOUND
    """Allowed difference of the planned memory from the published one."""
    why: str = ""
    """Reason for a wider bound."""

    @property
    def planned(self) -> float:
        """Return the planned GiB."""
        return estimate(self.work, 96 * GIB).total_bytes / GIB

    @property
    def ratio(self) -> float:
        """Return the planned memory as a share of the published one."""
        return self.planned / self.gib


def workload(
    model: ModelFacts,
    strategy: Strategy,
    processes: int,
    rows: tuple[int, int],
    precision: Precision = "bf16",
    **of: Any,
) -> Workload:
    """Return a decoder's training that computes its loss from all logits; `rows`: of a micro-batch, tokens of a row."""
    nodes = max(1, processes // 8)
    world = World(nodes=nodes, processes_per_node=processes // nodes, device="cuda", threads_per_process=1)
    return Workload(
        model=model,
        task="text-generation",
        strategy=strategy,
        precision=precision,
        optimizer="adamw",
        world=world,
        micro_batch=rows[0],
        length=rows[1],
        whole_logits=True,
        **of,
    )


def qwen(size: str, strategy: Strategy, processes: int, length: int, method: str | None) -> Workload:
    """Return a training of Qwen 1 on micro-batches of one row, by an adapter of rank 64 unless `method` is None."""
    config = {"model_type": "llama", "vocab_size": 151936, "max_position_embeddings": 8192, **QWEN[size]}
    adapter = None if method is None else Adapter(method=method, rank=64, alpha=16, dropout=0.05)  # type: ignore[arg-type]
    model = model_facts(config, "text-generation")
    # QLoRA was trained by DeepSpeed in fp16, without autocast, so that its loss has no logits in fp32 (README of
    # QwenLM/Qwen, "For single-GPU training, we have to use DeepSpeed"; `modeling_qwen.py` does not convert them).
    return workload(
        model, strategy, processes, (1, length), adapter=adapter, narrow_loss=method == "qlora" and processes == 1
    )


_SHORT = "hardly grows with the length, so it is probably the peak of loading weights that GPTQ rounded"
_OFF: Mapping[tuple[str, str, int], tuple[float, str]] = {
    ("1.8B", "qlora", 256): (0.2, _SHORT),
    ("1.8B", "qlora", 2048): (0.2, "lacks as much as its row of 256 tokens does, 1 GiB, and for the same reason"),
    ("14B", "qlora", 256): (0.2, _SHORT),
}
_LENGTHS = (256, 2048, 8192)
_QWEN_GIB: tuple[tuple[str, str, tuple[float, float, float]], ...] = (
    ("1.8B", "lora", (6.7, 11.0, 21.8)),
    ("7B", "lora", (20.1, 23.8, 36.6)),
    ("14B", "lora", (34.6, 37.4, 55.2)),
    ("1.8B", "qlora", (5.8, 7.8, 15.8)),
    ("7B", "qlora", (11.5, 13.9, 23.5)),
    ("14B", "qlora", (18.7, 19.9, 27.9)),
    ("72B", "qlora", (61.4, 64.1, 75.6)),
)
"""README of QwenLM/Qwen, "Profiling of Memory and Speed": A100-SXM4-80G, GiB a GPU at `_LENGTHS`."""


def qwen_runs() -> tuple[MemoryRun, ...]:
    """Return the runs of Qwen's README."""
    alone = Strategy(name="single", activation_checkpointing="full")
    runs = [
        MemoryRun(
            f"Qwen {size} {'QLoRA' if method == 'qlora' else 'LoRA'}, {length:,} tokens",
            "cal" if size == "7B" else "held",
            qwen(size, alone, 1, length, method),
            gib,
            *_OFF.get((size, method, length), ()),
        )
        for size, method, of_lengths in _QWEN_GIB
        for length, gib in zip(_LENGTHS, of_lengths, strict=True)
    ]
    divided = Strategy(name="deepspeed", zero_stage=3, activation_checkpointing="full")
    gathers = "its DeepSpeed settings are unknown; up to a billion gathered weights would be 1.9 GiB more"
    return (
        *runs,
        MemoryRun("Qwen 7B, ZeRO-3, 2 GPUs", "cal", qwen("7B", divided, 2, 512, None), 74.0),
        MemoryRun("Qwen 72B LoRA, ZeRO-3, 4 GPUs", "held", qwen("72B", divided, 4, 512, "lora"), 54.4, 0.2, gathers),
    )


def titan(
    name: str, size: str, nodes: int, rows: tuple[int, int], gib: float, bound: float = BOUND, why: str = "", **of: Any
) -> MemoryRun:
    """Return a run of torchtitan, whose memory is that which torch has reserved at most."""
    precision, mode = of.pop("precision", "bf16"), of.pop("mode", "selective")
    use = of.pop("use", "held")
    model = model_facts(known_config(f"llama-3.1-{size}"), "text-generation")
    strategy = Strategy(name="fsdp", activation_checkpointing=mode, **of)
    # Its loss is parallel over the tensor ranks ("Enable loss parallel by default" of torchtitan's parallelize_llama).
    work = workload(model, strategy, 8 * nodes, rows, precision, accumulates=False, divided_logits=True)
    return MemoryRun(f"torchtitan {name}", use, work, gib, bound, why)


_PRODUCTS = "torchtitan computes every second matrix product again, and `selective` keeps them all"
_COMPILED = f"{_PRODUCTS}; compiled kernels keep less between products"
_SEQUENCE = "torchtitan divides layer inputs among the tensor ranks of a stage, too; the trainer does so without stages"
_RESERVED = "the cause is unknown; the run was compiled, and published is what torch had reserved"
_EIGHT = (2, 8192)
_FP8: dict[str, Any] = {"precision": "fp8", "mode": "full"}


def titan_runs() -> tuple[MemoryRun, ...]:
    """Return the runs of torchtitan on H100 of 96 GB."""

    def stages(schedule: str) -> dict[str, Any]:
        pipeline = Pipeline(degree=8, micro_batches=32, schedule=schedule)  # type: ignore[arg-type]
        return {"tensor": 8, "pipeline": pipeline, "mode": "full"}

    return (
        titan("8B, 8 GPUs", "8b", 1, _EIGHT, 82.4, 0.2, _PRODUCTS, use="cal"),
        titan("8B, 8 GPUs, compiled", "8b", 1, _EIGHT, 77.0, 0.3, _COMPILED, use="cal"),
        titan("8B, 8 GPUs, compiled, fp8", "8b", 1, _EIGHT, 76.8, 0.3, _COMPILED, precision="fp8"),
        titan("8B, 8 GPUs, fp8, 32k", "8b", 1, (1, 32_768), 83.9, **_FP8),
        titan("8B, 8 GPUs, fp8, 131k", "8b", 1, (1, 131_072), 84.0, **_FP8, sequence=4),
        titan("8B, 128 GPUs", "8b", 16, _EIGHT, 67.0, 0.3, _PRODUCTS),
        titan("8B, 128 GPUs, compiled", "8b", 16, _EIGHT, 62.0, 0.4, _COMPILED),
        titan("70B, 256 GPUs, fp8", "70b", 32, (16, 8192), 71.9, 0.2, _RESERVED, **_FP8, tensor=8),
        titan("405B, 512 GPUs, fp8, 1F1B", "405b", 64, (1, 8192), 82.5, **stages("1f1b")),
        titan("405B, 512 GPUs, fp8, interleaved", "405b", 64, (1, 8192), 72.7, 0.5, _SEQUENCE, **stages("interleaved")),
    )


RUNS: tuple[MemoryRun, ...] = (*titan_runs(), *qwen_runs())


def table() -> str:
    """Return planned and published memory as a Markdown table, and a line for each reason."""
    lines = ["| run | use | published GiB | planned GiB | ratio |", "|---|---|---|---|---|"]
    lines += [f"| {run.name} | {run.use} | {run.gib:.1f} | {run.planned:.1f} | {run.ratio:.2f} |" for run in RUNS]
    reasons: dict[str, list[str]] = {}
    for run in RUNS:
        if run.why:
            reasons.setdefault(run.why, []).append(run.name)
    lines += ["", f"Further off than {BOUND:.0%} may be:", ""]
    for why, names in reasons.items():
        lines += textwrap.wrap(f"- {'; '.join(names)}: {why}.", 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
