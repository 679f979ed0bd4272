"""Values of other tools that a field does not accept, with their equivalents."""

from __future__ import annotations

from finetune_operator.api.foreign_rows import (
    ALWAYS_EVALUATED,
    AXOLOTL,
    DEEPSPEED,
    EVERYBODY,
    FACTORY,
    HF,
    KUBERNETES,
    ONE_AT_A_TIME,
    ForeignValue,
)
from finetune_operator.launchers.launcher_rows import SUPPORTED

_TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "text-generation",
        (
            "causal-lm", "clm", "lm", "language-modeling", "causal-language-modeling", "sft", "pt", "pretraining",
            "instruction-tuning", "instruct", "instruction", "instructions", "instruction-finetune", "chat",
            "conversational", "completion", "generation",
            "supervised-fine-tuning", "sft-trainer", "llm", "text-completion", "chat-completion",
        ),
    ),
    (
        "text-classification",
        (
            "sentiment", "sentiment-analysis", "classification", "sequence-classification", "seq-cls", "classify",
            "binary-classification", "multi-class-classification", "nli", "natural-language-inference",
            "text-classifier", "single-label-classification", "multi-label-classification",
        ),
    ),
    ("token-classification", ("ner", "token-cls", "pos", "tagging", "sequence-tagging", "named-entity-recognition")),
    ("question-answering", ("qa", "question-ans", "squad", "extractive-qa", "extractive-question-answering")),
    ("preference-tuning", ("dpo", "preference", "preferences", "preference-optimization", "rlhf")),
    ("masked-lm", ("mlm", "masked-language-modeling", "fill-mask", "masked-language-model")),
    ("summarization", ("summarisation", "summarize", "summary", "summaries")),
    ("translation", ("translate", "mt", "machine-translation")),
)  # fmt: skip
_ZERO = "spec.parallelism.zeroStage"
_STRATEGY = "spec.parallelism.strategy"
_PRECISION = "spec.training.precision"
_METHOD = "spec.model.adapter.method"

VALUES: tuple[ForeignValue, ...] = (
    *(ForeignValue("spec.task", names, EVERYBODY, {"spec.task": task}) for task, names in _TASKS),
    ForeignValue(
        "spec.task", ("seq2seq", "seq2seq-lm", "seq-2-seq-lm", "text2text-generation"), HF, {},
        "write summarization or translation, with spec.dataset.columns.source and target",
    ),
    ForeignValue(
        "spec.task", ("orpo", "kto", "ppo", "grpo", "rm", "reward-modeling", "reward"), f"{HF}, {FACTORY}, {AXOLOTL}",
        {}, "write preference-tuning, which trains on pairs of answers with DPO",
    ),
    ForeignValue(
        "spec.task", ("regression", "text-regression", "sts", "stsb", "score", "rating"), HF,
        {"spec.task": "text-classification"}, "fractions in the label column are numbers to learn",
    ),
    ForeignValue(
        "spec.task", ("embedding", "embeddings", "feature-extraction", "sentence-similarity", "reranking", "reranker",
                      "image-classification", "automatic-speech-recognition", "multiple-choice"),
        HF, {}, "there is no such task; run your own program with spec.training.script",
    ),
    *(
        ForeignValue(
            _STRATEGY,
            (
                f"zero{stage}", f"zero-stage-{stage}", f"deepspeed-zero{stage}", f"ds-zero{stage}", f"stage{stage}",
                f"deepspeed-stage-{stage}", f"deepspeed-{stage}", f"deepspeed-zero-stage-{stage}",
            ),
            f"{EVERYBODY}, {DEEPSPEED}", {_STRATEGY: "deepspeed", _ZERO: stage},
        )
        for stage in (0, 1, 2, 3)
    ),
    ForeignValue(_STRATEGY, ("zero",), DEEPSPEED, {_STRATEGY: "deepspeed"}),
    ForeignValue(
        _STRATEGY, ("fsdp2", "fully-sharded", "full-shard", "fsdp-full-shard", "full-shard-auto-wrap",
                    "fully-sharded-data-parallel", "fsdp-full-shard-auto-wrap"),
        HF, {_STRATEGY: "fsdp"},
    ),
    ForeignValue(
        _STRATEGY, ("shard-grad-op", "shard-grad-op-auto-wrap"), HF,
        {_STRATEGY: "fsdp", "spec.parallelism.sharding": "grad-op"},
    ),
    ForeignValue(
        _STRATEGY, ("hybrid-shard", "hybrid-shard-auto-wrap"), HF,
        {_STRATEGY: "fsdp", "spec.parallelism.sharding": "hybrid"},
    ),
    ForeignValue(
        _STRATEGY, ("dp", "data-parallel", "distributed", "multi-gpu", "distributed-data-parallel", "nccl"), HF,
        {_STRATEGY: "ddp"},
    ),
    ForeignValue(_STRATEGY, ("none", "no", "single-gpu", "single-process", False), HF, {_STRATEGY: "single"}),
    ForeignValue(_STRATEGY, ("tensor-parallel", "tp"), HF, {}, "leave it out, and set spec.parallelism.tensor"),
    ForeignValue(
        _STRATEGY, ("pipeline-parallel", "pp"), HF, {}, "leave it out, and set spec.parallelism.pipeline.degree"
    ),
    ForeignValue(
        _STRATEGY, ("horovod", "mpi", "megatron", "gloo"), HF, {},
        "write auto, ddp, fsdp or deepspeed; spec.launcher mpijob starts the processes by MPI",
    ),
    *(
        ForeignValue(_ZERO, (f"zero{stage}", f"zero-{stage}", f"stage{stage}", f"stage-{stage}"), DEEPSPEED,
            {_ZERO: stage})
        for stage in (0, 1, 2, 3)
    ),
    ForeignValue(
        _PRECISION,
        ("float16", "16-mixed", "fp16-mixed", "mixed-fp16", "mixed-float16", "16-true", "fp16-true"),
        EVERYBODY, {_PRECISION: "fp16"}, "auto is bf16 on GPUs that have it",
    ),
    ForeignValue(
        _PRECISION,
        ("mixed", "amp", "mixed-precision", "automatic", "automatic-mixed-precision", "autocast", "half",
         "half-precision", "16", "16bit", "low", "reduced", True),
        EVERYBODY, {_PRECISION: "auto"},
        "bf16 on GPUs that have it, such as L4 and A100, and fp16 on older ones; to fix one, write bf16 or fp16",
    ),
    ForeignValue(
        _PRECISION,
        ("bfloat16", "bf16-mixed", "bfloat", "mixed-bf16", "mixed-bfloat16", "bf16-true", "brain-float"), EVERYBODY,
        {_PRECISION: "bf16"},
    ),
    ForeignValue(_PRECISION, ("float32", "full", "32", "32-true", "tf32", "no", False), EVERYBODY,
        {_PRECISION: "fp32"}),
    ForeignValue(_PRECISION, ("float8", "8", "te"), EVERYBODY, {_PRECISION: "fp8"}),
    ForeignValue(
        _PRECISION, ("int4", "4bit", "nf4"), EVERYBODY, {},
        "leave it out, and set spec.model.adapter.method to qlora, which holds the weights in 4 bits",
    ),
    ForeignValue(
        _PRECISION, ("int8", "8bit"), EVERYBODY, {_PRECISION: "auto"}, "training has no 8-bit integers",
    ),
    ForeignValue(
        "spec.training.optimizer",
        ("adamw-torch", "adamw-torch-fused", "adamw-hf", "adam", "fused-adam", "adamw-apex-fused"),
        EVERYBODY, {"spec.training.optimizer": "adamw"},
    ),
    ForeignValue(
        "spec.training.optimizer",
        ("adamw-8bit", "adamw-bnb-8bit", "paged-adamw-8bit", "paged-adamw-32bit", "paged-adamw", "lion", "adamw-4bit"),
        EVERYBODY, {"spec.training.optimizer": "adamw"},
        "its state has 32 bits; spec.parallelism.offload.optimizer or an adapter saves memory",
    ),
    ForeignValue("spec.training.optimizer", ("momentum", "sgd-momentum"), HF, {"spec.training.optimizer": "sgd"}),
    ForeignValue(
        "spec.training.scheduler", ("cosine-annealing", "cosine-decay", "cosine-with-warmup", "cosine-with-min-lr"),
        EVERYBODY, {"spec.training.scheduler": "cosine"},
    ),
    ForeignValue(
        "spec.training.scheduler", ("linear-with-warmup", "linear-decay", "warmupdecaylr"),
        f"{HF}, {DEEPSPEED}",
        {"spec.training.scheduler": "linear"}, "set the warm-up in spec.training.warmupSteps",
    ),
    ForeignValue(
        "spec.training.scheduler", ("warmuplr",), DEEPSPEED, {"spec.training.scheduler": "constant_with_warmup"},
        "set the warm-up in spec.training.warmupSteps",
    ),
    ForeignValue("spec.training.scheduler", ("none", "no", False), HF, {"spec.training.scheduler": "constant"}),
    ForeignValue(
        "spec.training.scheduler", ("reduce-lr-on-plateau", "warmup-stable-decay", "wsd", "one-cycle"), HF, {},
        "write linear, cosine or constant_with_warmup",
    ),
    ForeignValue(
        _METHOD, ("full", "freeze", "full-finetuning", "full-fine-tuning", False), f"{FACTORY}, {AXOLOTL}",
        {_METHOD: "none"},
    ),
    ForeignValue(_METHOD, ("peft", "rslora", "lora-plus", True), HF, {_METHOD: "lora"}),
    ForeignValue(
        _METHOD, ("lora-4bit", "4bit-lora", "lora-int4", "qlora-4bit", "4bit", "int4", "nf4"), EVERYBODY,
        {_METHOD: "qlora"},
    ),
    ForeignValue(
        _METHOD, ("adalora", "ia3", "prefix-tuning", "prompt-tuning", "p-tuning", "llama-adapter", "oft", "loha"),
        HF, {}, "write lora, dora or qlora",
    ),
    ForeignValue("spec.model.adapter.targetModules", ("all", "all-linear"), f"{HF}, {FACTORY}",
                 {"spec.model.adapter.targetModules": "auto"}),
    ForeignValue("spec.parallelism.activationCheckpointing", (True, "true", "unsloth"), EVERYBODY,
                 {"spec.parallelism.activationCheckpointing": "full"}),
    ForeignValue("spec.parallelism.activationCheckpointing", (False, "false"), EVERYBODY,
                 {"spec.parallelism.activationCheckpointing": "none"}),
    ForeignValue("spec.parallelism.offload.optimizer", (True, "true"), EVERYBODY,
                 {"spec.parallelism.offload.optimizer": "cpu"}),
    ForeignValue("spec.parallelism.offload.parameters", (True, "true"), EVERYBODY,
                 {"spec.parallelism.offload.parameters": "cpu"}),
    ForeignValue("spec.preparation.packing", (True, "true"), EVERYBODY, {"spec.preparation.packing": "always"}),
    ForeignValue("spec.preparation.packing", (False, "false"), EVERYBODY, {"spec.preparation.packing": "never"}),
    ForeignValue("spec.checkpoints.every",
                 ("epoch", "steps", "every-epoch", "each-epoch", "per-epoch", "once-per-epoch", "end", "epoch-end",
                  "end-of-epoch"),
                 EVERYBODY, {"spec.checkpoints.every": "auto"},
                 "an interval that the plan chooses; {steps: 500} is every 500 steps"),
    ForeignValue(
        "spec.runPolicy", ("forbid", "replace", "allow"), KUBERNETES, {},
        ONE_AT_A_TIME,
    ),
    ForeignValue(
        "spec.runPolicy", ("never", "always", "on-failure", "restart"), KUBERNETES, {},
        "leave it out: spec.runPolicy.maxRestarts is the number of restarts after a failure",
    ),
    ForeignValue("spec.evaluation", (False, "none", "no", "skip"), EVERYBODY, {}, ALWAYS_EVALUATED),
    ForeignValue("spec.checkpoints.keep", ("all", "unlimited"), EVERYBODY, {"spec.checkpoints.keep": 1000}),
    ForeignValue("spec.resources.network", ("infiniband", "ib", "roce", "gpudirect"), KUBERNETES,
                 {"spec.resources.network": "rdma"}),
    ForeignValue("spec.resources.network", ("nccl", "any"), KUBERNETES, {"spec.resources.network": "auto"}),
    ForeignValue("spec.predict.format", ("csv", "json", "ndjson", "jsonlines", "json-lines", "tsv"), HF,
                 {"spec.predict.format": "jsonl"}, "predictions are JSON Lines or Parquet"),
    ForeignValue("spec.endpoint.runtime", ("vllm",), KUBERNETES,
                 {"spec.endpoint.runtime": "auto", "spec.endpoint.optimization": "vllm"}),
    ForeignValue(
        "spec.endpoint.runtime",
        ("tgi", "triton", "torchserve", "sglang", "ollama", "text-generation-inference"),
        KUBERNETES, {"spec.endpoint.runtime": "auto"}, "the operator's own server answers requests",
    ),
    ForeignValue("spec.endpoint.runtime", ("kubernetes", "k8s", "pods"), KUBERNETES,
                 {"spec.endpoint.runtime": "deployment"}),
    ForeignValue("spec.endpoint.runtime", ("inferenceservice", "knative"), KUBERNETES,
                 {"spec.endpoint.runtime": "kserve"}),
    ForeignValue("spec.resources.network", ("ethernet", "eth", "eth0", "default"), KUBERNETES,
                 {"spec.resources.network": "tcp"}),
    ForeignValue("spec.parallelism.sharding", ("full-shard", "1", True), HF, {"spec.parallelism.sharding": "full"}),
    ForeignValue("spec.parallelism.sharding", ("shard-grad-op", "2"), HF, {"spec.parallelism.sharding": "grad-op"}),
    ForeignValue(
        "spec.parallelism.sharding", ("hybrid-shard", "4"), HF, {"spec.parallelism.sharding": "hybrid"}
    ),
    ForeignValue(
        "spec.parallelism.sharding", ("no-shard", "3"), HF, {}, "leave it out, and set spec.parallelism.strategy to ddp"
    ),
    ForeignValue("spec.checkpoints.resume", (True, "true", "always"), EVERYBODY, {"spec.checkpoints.resume": "auto"}),
    ForeignValue("spec.checkpoints.resume", (False, "false", "no"), EVERYBODY, {"spec.checkpoints.resume": "never"}),
    ForeignValue("spec.resources.gpusPerNode", ("all", "max"), HF, {"spec.resources.gpusPerNode": "auto"}),
    ForeignValue("spec.resources.gpusPerNode", (True, "true", "yes"), HF, {"spec.resources.gpusPerNode": 1}),
    ForeignValue("spec.resources.gpusPerNode", ("none", "cpu", False), HF, {"spec.resources.gpusPerNode": 0}),
    ForeignValue("spec.resources.processesPerNode", ("gpu", "all"), HF, {"spec.resources.processesPerNode": "auto"}),
    *(
        ForeignValue("spec.launcher", each.foreign_names, each.foreign_tools, {"spec.launcher": each.name})
        for each in SUPPORTED
        if each.foreign_names
    ),
    ForeignValue(
        "spec.launcher", ("torchrun", "accelerate", "deepspeed", "local", "none", "python", "kubernetes"),
        f"{HF}, {DEEPSPEED}", {"spec.launcher": "auto"},
    ),
    ForeignValue("spec.launcher", ("slurm", "ray", "rayjob", "sagemaker"), HF, {},
        "leave it out: Kubernetes runs the pods"),
)  # fmt: skip
