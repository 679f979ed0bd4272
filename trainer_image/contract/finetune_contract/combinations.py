"""Choices of a job that go together: one table for validation, the API server, the planner, the trainer and the docs.

A constraint is data: if all of `when` is chosen, all of `needs` must hold. Validation evaluates it with the spec's open
choices, the planner with each strategy that it tries, the trainer with everything decided; the API server gets it as
CEL. To add a constraint, add a row.
"""

from __future__ import annotations

from finetune_contract.choices import FOUR_BIT_STRATEGIES, FP8_STRATEGIES, WHOLE_STRATEGIES
from finetune_contract.constraints import Choices, Constraint, chosen, none_of, one_of


def broken(choices: Choices) -> tuple[Constraint, ...]:
    """Return the constraints that `choices` break, in the table's order."""
    return tuple(constraint for constraint in CONSTRAINTS if not constraint.holds(choices))


CONSTRAINTS: tuple[Constraint, ...] = (
    # Strategies and their own settings.
    Constraint(
        "zero-stage-needs-deepspeed",
        "parallelism.zeroStage",
        when=(none_of("zero_stage"), one_of("model_ranks", 1)),
        needs=(one_of("strategy", "deepspeed"),),
        rule="is a DeepSpeed setting and needs spec.parallelism.strategy deepspeed or auto",
        hint="leave it out, or set spec.parallelism.strategy to deepspeed",
    ),
    Constraint(
        "deepspeed-config-needs-deepspeed",
        "parallelism.deepspeedConfig",
        when=(one_of("deepspeed_config", True),),
        needs=(chosen("strategy", "deepspeed"),),
        rule="needs spec.parallelism.strategy deepspeed",
        hint="set spec.parallelism.strategy to deepspeed, or leave it out",
    ),
    Constraint(
        "sharding-needs-fsdp",
        "parallelism.sharding",
        when=(none_of("sharding", "full"),),
        needs=(chosen("strategy", "fsdp"),),
        rule="sets what strategy fsdp shards, and spec.parallelism.strategy is another",
        hint="leave it out, or set spec.parallelism.strategy to fsdp",
    ),
    Constraint(
        "hybrid-sharding-needs-nodes",
        "parallelism.sharding",
        when=(one_of("sharding", "hybrid"),),
        needs=(none_of("nodes", 1), none_of("processes_per_node", 1)),
        rule="hybrid shards inside a node and replicates between nodes, which needs several nodes with several "
        "processes each",
        hint="set it to full, or use several nodes of several GPUs",
    ),
    Constraint(
        "single-is-one-process",
        "parallelism.strategy",
        when=(one_of("strategy", "single"),),
        needs=(one_of("nodes", 1), one_of("processes_per_node", 1)),
        rule="single runs one process, and spec.resources requests more",
        hint="use ddp, fsdp, deepspeed or auto, or set spec.resources.nodes and spec.resources.processesPerNode to 1",
    ),
    Constraint(
        "single-has-whole-rows",
        "parallelism.strategy",
        when=(one_of("strategy", "single"),),
        needs=(one_of("sequence", 1),),
        rule="single runs one process, and spec.parallelism.sequence splits rows among several",
        hint="use ddp, or leave spec.parallelism.sequence out",
    ),
    # Offload.
    Constraint(
        "offload-needs-a-strategy",
        "parallelism.offload",
        when=(none_of("offload", "none+none"),),
        needs=(chosen("strategy", "deepspeed", "fsdp"),),
        rule="offloads optimizer state or parameters, which needs spec.parallelism.strategy deepspeed or fsdp",
        hint="set spec.parallelism.strategy to deepspeed or fsdp, or leave the offload out",
    ),
    Constraint(
        "fsdp-offloads-together",
        "parallelism.offload.parameters",
        when=(one_of("strategy", "fsdp"),),
        needs=(one_of("offload", "none+none", "none+cpu", "cpu+cpu"),),
        rule="must be cpu or none with spec.parallelism.strategy fsdp, which offloads optimizer state and parameters "
        "together",
        hint="set spec.parallelism.offload.parameters and spec.parallelism.offload.optimizer to cpu, "
        "or spec.parallelism.strategy to deepspeed",
    ),
    Constraint(
        "optimizer-offload-needs-zero",
        "parallelism.offload.optimizer",
        when=(none_of("offload_optimizer", "none"),),
        needs=(none_of("zero_stage", 0),),
        rule="needs a ZeRO stage from 1 to 3",
        hint="set spec.parallelism.zeroStage to 1, 2, 3 or auto",
    ),
    Constraint(
        "nvme-offload-needs-stage-3",
        "parallelism.offload.optimizer",
        when=(one_of("offload_optimizer", "nvme"),),
        needs=(one_of("zero_stage", 3),),
        rule="nvme needs ZeRO stage 3, the only one that swaps to files",
        hint="set spec.parallelism.zeroStage to 3 or auto, or offload to cpu",
    ),
    Constraint(
        "parameter-offload-needs-stage-3",
        "parallelism.offload.parameters",
        when=(none_of("offload_parameters", "none"),),
        needs=(one_of("zero_stage", 3),),
        rule="needs ZeRO stage 3, the only one that shards parameters",
        hint="set spec.parallelism.zeroStage to 3 or auto",
    ),
    Constraint(
        "offloaded-optimizer-is-adamw",
        "parallelism.offload.optimizer",
        when=(one_of("strategy", "deepspeed"), none_of("offload_optimizer", "none")),
        needs=(one_of("optimizer", "adamw"),),
        rule="supports only adamw with DeepSpeed, and spec.training.optimizer is another",
        hint="leave it out, or set spec.training.optimizer to adamw",
    ),
    Constraint(
        "cpu-swaps-bf16-parameters",
        "parallelism.offload.parameters",
        when=(one_of("offload_parameters", "nvme"), one_of("precision", "fp32")),
        needs=(one_of("device", "cuda"),),
        rule="nvme without a GPU keeps parameters in bf16 only, and spec.training.precision is fp32",
        hint="set it to cpu, or spec.training.precision to bf16",
    ),
    # Tensor, pipeline and sequence parallelism.
    Constraint(
        "model-parallel-has-replicas",
        "parallelism.strategy",
        when=(none_of("model_ranks", 1),),
        needs=(one_of("strategy", "ddp", "fsdp"),),
        rule="must be ddp, fsdp or auto with spec.parallelism.tensor or pipeline.degree above 1",
        hint="set it to ddp or auto, or set tensor and pipeline.degree to 1",
    ),
    Constraint(
        "replicas-divide-optimizer-state",
        "parallelism.zeroStage",
        when=(none_of("model_ranks", 1),),
        needs=(one_of("zero_stage", 1),),
        rule="must be 1 or auto with spec.parallelism.tensor or pipeline.degree above 1: stage 1 divides the optimizer "
        "state over the replicas",
        hint="leave it out, or set it to 1",
    ),
    Constraint(
        "divided-optimizer-is-beside-ddp",
        "parallelism.zeroStage",
        when=(none_of("model_ranks", 1), none_of("zero_stage"), one_of("strategy", "fsdp")),
        needs=(one_of("zero_stage"),),
        rule="cannot be combined with spec.parallelism.strategy fsdp, which divides all state over the replicas",
        hint="leave it out, or set spec.parallelism.strategy to ddp",
    ),
    Constraint(
        "spread-models-shard-over-all-replicas",
        "parallelism.sharding",
        when=(none_of("model_ranks", 1),),
        needs=(none_of("sharding", "hybrid"),),
        rule="must be full or grad-op with spec.parallelism.tensor or pipeline.degree above 1",
        hint="set it to full or grad-op",
    ),
    Constraint(
        "spread-models-keep-state-on-devices",
        "parallelism.offload",
        when=(none_of("model_ranks", 1),),
        needs=(one_of("offload", "none+none"),),
        rule="of optimizer state or parameters cannot be combined with spec.parallelism.tensor or pipeline.degree "
        "above 1",
        hint="leave it out",
    ),
    Constraint(
        "model-parallel-trains-all-weights",
        "model.adapter.method",
        when=(none_of("model_ranks", 1),),
        needs=(one_of("adapter", "none"),),
        rule="cannot be combined with spec.parallelism.tensor or pipeline.degree above 1",
        hint="set spec.parallelism.tensor and spec.parallelism.pipeline.degree to 1 and spec.parallelism.strategy to "
        "fsdp, which shards the model and keeps the adapter; or leave the adapter out, which trains all weights",
    ),
    Constraint(
        "spread-models-keep-activations",
        "parallelism.activationCheckpointing",
        when=(none_of("model_ranks", 1),),
        needs=(none_of("checkpointing", "selective"),),
        rule="must be auto, none or full with spec.parallelism.tensor or pipeline.degree above 1",
        hint="set it to auto",
    ),
    Constraint(
        "spread-models-offload-no-activations",
        "parallelism.offload.activations",
        when=(none_of("model_ranks", 1),),
        needs=(one_of("offload_activations", "none"),),
        rule="cannot be combined with spec.parallelism.tensor or pipeline.degree above 1",
        hint="leave it out",
    ),
    Constraint(
        "pairs-need-whole-rows",
        "parallelism.pipeline.degree",
        when=(one_of("task", "preference-tuning"),),
        needs=(one_of("pipeline", 1),),
        rule="must be 1 for preference-tuning, whose loss compares whole rows",
        hint="leave it out, and shard the model with spec.parallelism.strategy fsdp or deepspeed",
    ),
    Constraint(
        "sequence-divides-rows-of-text",
        "parallelism.sequence",
        when=(none_of("sequence", 1),),
        needs=(one_of("task", "text-generation"),),
        rule="splits rows of text-generation only",
        hint="leave it out, and lower spec.preparation.maxLength if memory is short",
    ),
    Constraint(
        "sequence-has-whole-models",
        "parallelism.sequence",
        when=(none_of("sequence", 1),),
        needs=(one_of("model_ranks", 1),),
        rule="cannot be combined with spec.parallelism.tensor or pipeline.degree above 1",
        hint="set tensor and pipeline.degree to 1, and strategy to fsdp or deepspeed to shard the model",
    ),
    # Adapters and packs.
    Constraint(
        "qlora-keeps-packed-weights",
        "parallelism.strategy",
        when=(one_of("adapter", "qlora"),),
        needs=(one_of("strategy", *FOUR_BIT_STRATEGIES), one_of("zero_stage")),
        rule=f"must be {', '.join(FOUR_BIT_STRATEGIES)} or auto, without zeroStage, with spec.model.adapter.method "
        "qlora, whose packed weights DeepSpeed would convert",
        hint="set it to auto or fsdp and leave zeroStage out, or set spec.model.adapter.method to lora",
    ),
    Constraint(
        "packing-is-of-text-generation",
        "preparation.packing",
        when=(one_of("packing", "always"),),
        needs=(one_of("task", "text-generation"),),
        rule="always needs task text-generation: rows of other tasks cannot share a sequence",
        hint="set it to auto or never",
    ),
    # Precision, optimizer and kernels.
    Constraint(
        "precision-has-hardware",
        "training.precision",
        when=(one_of("precision", "fp16", "fp8"),),
        needs=(one_of("device", "cuda"),),
        rule="needs a GPU, and spec.resources.gpusPerNode requests none",
        hint="set it to auto, fp32 or bf16, or set spec.resources.gpusPerNode",
    ),
    Constraint(
        "fp8-has-a-strategy",
        "training.precision",
        when=(one_of("precision", "fp8"),),
        needs=(one_of("strategy", *FP8_STRATEGIES), one_of("zero_stage")),
        rule=f"fp8 needs spec.parallelism.strategy {', '.join(FP8_STRATEGIES)} or auto, without zeroStage",
        hint="set it to bf16, or spec.parallelism.strategy to fsdp or auto and leave spec.parallelism.zeroStage out",
    ),
    Constraint(
        "spread-models-have-a-precision",
        "training.precision",
        when=(one_of("precision", "fp16", "fp8"),),
        needs=(one_of("model_ranks", 1),),
        rule="must be fp32 or bf16 with spec.parallelism.tensor or pipeline.degree above 1",
        hint="set it to bf16",
    ),
    Constraint(
        "slices-do-not-multiply-in-fp8",
        "training.precision",
        when=(one_of("precision", "fp8"),),
        needs=(one_of("sequence", 1),),
        rule="fp8 cannot be combined with spec.parallelism.sequence above 1",
        hint="set it to bf16",
    ),
    Constraint(
        "adapters-do-not-multiply-in-fp8",
        "training.precision",
        when=(one_of("precision", "fp8"),),
        needs=(one_of("adapter", "none"),),
        rule="fp8 cannot be combined with spec.model.adapter",
        hint="set it to bf16, or leave spec.model.adapter out: an adapter saves memory, fp8 saves time",
    ),
    Constraint(
        "adafactor-has-whole-matrices",
        "training.optimizer",
        when=(one_of("optimizer", "adafactor"),),
        needs=(one_of("strategy", *WHOLE_STRATEGIES), one_of("zero_stage"), one_of("tensor", 1)),
        rule="adafactor works on whole matrices, which spec.parallelism shards or flattens",
        hint="set it to adamw or sgd, or spec.parallelism.strategy to ddp without zeroStage and tensor",
    ),
    Constraint(
        "compiled-models-are-whole",
        "training.arguments",
        when=(one_of("torch_compile", True),),
        needs=(
            one_of("model_ranks", 1),
            one_of("sequence", 1),
            one_of("offload_activations", "none"),
            none_of("adapter", "qlora"),
        ),
        rule="torch_compile cannot be combined with spec.parallelism.tensor, pipeline, sequence and "
        "offload.activations, nor with qlora",
        hint="leave torch_compile out",
    ),
    Constraint(
        "liger-has-gpus-and-whole-rows",
        "training.arguments",
        when=(one_of("liger", True),),
        needs=(one_of("device", "cuda"), one_of("sequence", 1)),
        rule="use_liger_kernel needs GPUs, and rows that spec.parallelism.sequence does not split",
        hint="leave use_liger_kernel out",
    ),
)
"""In the order of reporting."""
