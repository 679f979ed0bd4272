"""Other tools' names of settings of the training and its parallelism."""

from __future__ import annotations

from finetune_operator.api.foreign_conversions import (
    betas,
    gate_limit,
    measured_metric,
    predictions_uri,
    results_claim,
    tracked,
    tracker_settings,
)
from finetune_operator.api.foreign_rows import (
    ALWAYS_EVALUATED,
    AXOLOTL,
    DEEPSPEED,
    DEFAULT_EVALUATION,
    EVERYBODY,
    FACTORY,
    HF,
    KUBERNETES,
    NO_COUNTERPART,
    RESULTS_PLACE,
    STEPS_REPORTED,
    ForeignName,
)

TRAINING_NAMES: tuple[ForeignName, ...] = (
    ForeignName(("num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "epoch"), EVERYBODY,
        "spec.training.epochs"),
    ForeignName(
        ("max_train_steps", "num_steps", "total_steps", "num_training_steps", "train_steps", "steps"), EVERYBODY,
        "spec.training.maxSteps",
    ),
    ForeignName(
        ("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "device_batch_size",
         "train_micro_batch_size_per_gpu", "per_device_batch_size"),
        f"{EVERYBODY}, {DEEPSPEED}", "spec.training.microBatchSize",
        "rows per process and micro-batch; spec.training.globalBatchSize is rows per step",
    ),
    ForeignName(
        ("train_batch_size", "batch_size", "batch", "total_batch_size", "effective_batch_size"), f"{HF}, {DEEPSPEED}",
        "spec.training.globalBatchSize", "rows per step of all processes",
    ),
    ForeignName(
        ("gradient_accumulation_steps", "grad_accumulation_steps", "gradient_accumulation", "grad_accum",
         "accumulate_grad_batches"),
        f"{EVERYBODY}, {DEEPSPEED}", "spec.training.globalBatchSize",
        "which is micro-batch x accumulation x processes and determines the accumulation", same=False,
    ),
    ForeignName(
        ("per_device_eval_batch_size", "eval_batch_size", "per_gpu_eval_batch_size"), EVERYBODY, None,
        "leave it out: evaluate and predict use the largest batch that fits the memory",
    ),
    ForeignName(("lr", "base_lr", "peak_lr", "max_lr"), EVERYBODY, "spec.training.learningRate"),
    ForeignName(
        ("lr_scheduler_type", "lr_scheduler", "scheduler_type", "lr_schedule", "learning_rate_schedule"), EVERYBODY,
        "spec.training.scheduler",
    ),
    ForeignName(
        ("warmup_ratio", "warmup_proportion", "lr_warmup_ratio"), EVERYBODY, "spec.training.warmupSteps",
        "a fraction of all steps below 1, and a number of steps from 1 on",
    ),
    ForeignName(
        ("lr_warmup_steps", "num_warmup_steps", "warmup_num_steps", "warmup"), f"{EVERYBODY}, {DEEPSPEED}",
        "spec.training.warmupSteps",
    ),
    ForeignName(
        ("min_lr", "lr_end", "end_lr", "final_lr", "min_learning_rate", "min_lr_ratio"), EVERYBODY, None,
        "leave it out: the learning rate decays to 0, and with scheduler polynomial to the lr_end of "
        "spec.training.arguments.lr_scheduler_kwargs",
    ),
    ForeignName(("warmup_max_lr",), DEEPSPEED, "spec.training.learningRate"),
    ForeignName(
        ("gradient_clip_val", "gradient_clipping", "clip_grad_norm", "grad_clip", "max_norm"), f"{HF}, {DEEPSPEED}",
        "spec.training.maxGradNorm",
    ),
    ForeignName(("optim", "optimizer_type", "optimizer_name"), EVERYBODY, "spec.training.optimizer"),
    ForeignName(("random_seed", "random_state", "data_seed"), EVERYBODY, "spec.training.seed"),
    ForeignName(("label_smoothing_factor",), HF, "spec.training.labelSmoothing"),
    ForeignName(
        ("monitor", "watch", "metric_name"), f"{HF}, {AXOLOTL}", "spec.training.earlyStopping.metric",
        under=("earlyStopping", "early_stopping"),
    ),
    ForeignName(
        ("mode", "direction"), HF, None, "leave it out: the metric determines it",
        under=("earlyStopping", "early_stopping"),
    ),
    ForeignName(
        ("early_stopping_patience",), f"{HF}, {AXOLOTL}", "spec.training.earlyStopping.patience",
        "by the loss, unless spec.training.earlyStopping.metric names another metric",
    ),
    ForeignName(("metric_for_best_model",), EVERYBODY, "spec.training.earlyStopping.metric"),
    ForeignName(
        ("greater_is_better",), EVERYBODY, None, "leave it out: the metric determines it"
    ),
    ForeignName(
        ("early_stopping_threshold", "early_stopping_min_delta", "min_delta"), EVERYBODY, None,
        "leave it out: any improvement counts",
    ),
    ForeignName(
        ("load_best_model_at_end", "save_best", "save_best_only", "save_best_model", "keep_best"), EVERYBODY, None,
        "leave it out: spec.training.earlyStopping with a patience keeps the weights of the best evaluation",
    ),
    ForeignName(("fp16",), EVERYBODY, "spec.training.precision", value="fp16"),
    ForeignName(("bf16", "bfloat16"), EVERYBODY, "spec.training.precision", value="bf16"),
    ForeignName(("fp8",), AXOLOTL, "spec.training.precision", value="fp8"),
    ForeignName(
        ("mixed_precision", "dtype", "torch_dtype", "compute_dtype", "amp", "half_precision"), EVERYBODY,
        "spec.training.precision", writes=lambda given: {"spec.training.precision": "auto"} if given is True else {},
    ),
    ForeignName(
        ("gradient_checkpointing", "activation_checkpoint", "use_gradient_checkpointing", "recompute"), EVERYBODY,
        "spec.parallelism.activationCheckpointing",
    ),
    ForeignName(
        ("group_by_length", "length_grouped"), EVERYBODY, "spec.training.arguments.train_sampling_strategy",
        value="group_by_length",
    ),
    ForeignName(
        ("wandb", "use_wandb"), AXOLOTL,
        "spec.training.arguments.report_to", "set WANDB_PROJECT in spec.template.env",
        ["wandb"], writes=tracker_settings("wandb"),
    ),
    *(
        ForeignName(
            names, AXOLOTL, "spec.training.arguments.report_to",
            f"set {variable} in spec.template.env", [tracker], writes=tracked(tracker, variable),
        )
        for names, tracker, variable in (
            (("wandb_project",), "wandb", "WANDB_PROJECT"),
            (("wandb_entity",), "wandb", "WANDB_ENTITY"),
            (("mlflow_tracking_uri",), "mlflow", "MLFLOW_TRACKING_URI"),
            (("mlflow_experiment_name",), "mlflow", "MLFLOW_EXPERIMENT_NAME"),
        )
    ),
    ForeignName(("tensorboard", "use_tensorboard"), HF, "spec.training.arguments.report_to", value=["tensorboard"]),
    ForeignName(
        ("mlflow", "use_mlflow"), HF, "spec.training.arguments.report_to", value=["mlflow"],
        writes=tracker_settings("mlflow"),
    ),
    ForeignName(
        ("hub", "upload", "publish", "hub_upload", "push"), HF, None,
        "leave it out: model/ of the results has the Hub's layout; upload it with the Hub's own command",
        under=("", "spec", "training", "model"),
    ),
    ForeignName(
        ("notifications", "notify", "email", "slack", "webhook", "alerts", "callbacks"), EVERYBODY, None,
        "leave it out: a job sends no notifications; `finetune wait` ends when the job does",
        under=("", "spec", "training", "runPolicy"),
    ),
    ForeignName(
        ("betas", "adam_betas"), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_beta1",
        "the second beta is adam_beta2", same=False, writes=betas,
    ),
    ForeignName(("beta1",), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_beta1"),
    ForeignName(("beta2",), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_beta2"),
    ForeignName(
        ("eps", "epsilon"), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_epsilon",
        under=("params", "optimizer", "training"),
    ),
    ForeignName(
        ("logging_steps", "logging_strategy", "logging_dir", "log_level", "log_interval", "plot_loss", "disable_tqdm",
         "logging_first_step", "verbose", "logging"),
        EVERYBODY, None, STEPS_REPORTED,
    ),
    ForeignName(
        ("ddp_timeout", "ddp_backend", "ddp_find_unused_parameters", "local_rank", "clean_pod_policy", "access_mode",
         "access_modes", "pull_secrets_policy"),
        f"{HF}, {KUBERNETES}", None, NO_COUNTERPART,
        under=("", "spec", "training", "parallelism", "runPolicy", "storage"),
    ),
    ForeignName(
        ("no_eval", "skip_eval", "skip_evaluation", "no_evaluation", "disable_eval", "disable_evaluation",
         "without_evaluation", "run_evaluation", "run_eval"),
        EVERYBODY, None, ALWAYS_EVALUATED,
    ),
    ForeignName(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch", "eval_interval", "do_eval"),
        EVERYBODY, None, DEFAULT_EVALUATION,
    ),
    ForeignName(("do_train",), f"{HF}, {FACTORY}", "spec.training", "{} takes the defaults", {}),
    ForeignName(("do_predict", "inference", "prediction"), f"{HF}, {FACTORY}", "spec.predict",
        "{} takes the defaults", {}),
    ForeignName(
        ("eval", "evaluate", "validate", "testing", "do_test"), f"{HF}, {AXOLOTL}", "spec.evaluation",
        "{} takes the defaults", {}, under=("spec", ""),
    ),
    ForeignName(("save_steps", "save_interval", "checkpoint_interval"), EVERYBODY, "spec.checkpoints.every.steps"),
    ForeignName(
        ("interval", "frequency", "save_every", "period", "save_interval", "checkpoint_every", "schedule"), EVERYBODY,
        "spec.checkpoints.every", under=("checkpoints",),
    ),
    ForeignName(
        ("save_strategy", "saves_per_epoch"), EVERYBODY, None,
        "leave it out: spec.checkpoints.every sets the interval, as auto, {steps: N} or {minutes: N}",
    ),
    ForeignName(
        ("save_total_limit", "keep_last_n_checkpoints", "max_checkpoints", "max_to_keep", "keep_last_n",
         "keep_checkpoints"),
        EVERYBODY, "spec.checkpoints.keep",
    ),
    ForeignName(
        ("path", "dir", "directory", "folder", "location", "output", "storage"), EVERYBODY, None,
        "leave it out: checkpoints are kept in spec.storage.workspace", under=("checkpoints",),
    ),
    ForeignName(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints", "resume"), EVERYBODY, "spec.checkpoints.resume",
        "which resumes from the newest checkpoint of the workspace", "auto",
    ),
    ForeignName(
        ("output_dir", "overwrite_output_dir", "save_dir", "logdir", "checkpoint_dir", "results_dir"), EVERYBODY, None,
        RESULTS_PLACE,
    ),
    ForeignName(
        ("output", "results", "output_uri", "output_path", "model_output", "results_path"), EVERYBODY, None,
        f"{RESULTS_PLACE}; nothing is pushed to the Hub, whose own command uploads model/",
        under=("", "spec", "training", "model", "storage"), writes=results_claim,
    ),
    ForeignName(("run_name", "experiment_name", "job_name", "wandb_name"), EVERYBODY, "metadata.name"),
    ForeignName(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"), EVERYBODY, None,
        "leave it out: model/ of the results has the Hub's layout; upload it with the Hub's own command",
    ),
    ForeignName(
        ("hub_token", "hf_token", "token", "use_auth_token", "hf_hub_token", "huggingface_token"), EVERYBODY,
        "spec.secrets.hubToken.name", "the name of a Secret that holds the token; on your machine set HF_TOKEN",
        same=False,
    ),
    ForeignName(
        ("stage", "rl", "task_type", "task_name", "problem_type", "training_type"), EVERYBODY, "spec.task",
        under=("", "spec", "model", "training", "metadata"),
    ),
    ForeignName(
        ("dpo_beta", "pref_beta", "rl_beta", "kl_beta"), EVERYBODY, "spec.preference.beta",
    ),
    ForeignName(
        ("compute_metrics", "eval_metric", "eval_metrics", "metric_name"), HF, "spec.evaluation.metrics",
        "a list", same=False,
    ),
    ForeignName(
        ("metric",), HF, "spec.evaluation.metrics", "a list", under=("evaluation",), same=False,
        writes_beside=measured_metric,
    ),
    ForeignName(
        ("threshold", "value", "target", "goal"), EVERYBODY, "spec.evaluation.gate.minimum",
        under=("gate", "evaluation"), writes_beside=gate_limit,
    ),
    ForeignName(
        ("min", "at_least", "lower_bound", "min_value"), EVERYBODY, "spec.evaluation.gate.minimum",
        under=("gate", "evaluation"),
    ),
    ForeignName(
        ("max", "at_most", "upper_bound", "max_value"), EVERYBODY, "spec.evaluation.gate.maximum",
        under=("gate", "evaluation"),
    ),
    ForeignName(
        ("operator", "op", "comparison", "direction", "mode", "condition"), EVERYBODY, None,
        "leave it out: minimum is a lower limit, maximum an upper one", under=("gate", "evaluation"),
    ),
    ForeignName(
        ("name", "metric_name"), EVERYBODY, "spec.evaluation.gate.metric", under=("gate",),
    ),
    ForeignName(
        ("every", "frequency", "interval", "strategy", "steps"), EVERYBODY, None, DEFAULT_EVALUATION,
        under=("evaluation",),
    ),
    ForeignName(
        ("batch_size", "batch", "per_device_batch_size", "max_batch_size"), EVERYBODY, None,
        "leave it out: evaluate, predict and endpoints use the largest batch that fits the memory",
        under=("predict", "evaluation", "endpoint"),
    ),
    ForeignName(("max_target_length", "max_gen_length", "max_tokens"), HF, "spec.generation.maxNewTokens"),
    ForeignName(("do_sample",), HF, "spec.generation.temperature", "above 0 tokens are sampled", same=False),
    ForeignName(("top_k", "repetition_penalty"), HF, None,
        f"{NO_COUNTERPART}; spec.generation.topP narrows the choice"),
    ForeignName(("temp",), HF, "spec.generation.temperature"),
    ForeignName(
        ("output_file", "predictions_file", "output_path", "output_uri", "output_dir", "save_to"), HF,
        "spec.predict.output", "a .jsonl or .parquet file, or a folder, which ends in /", same=False,
        under=("predict",), writes=predictions_uri,
    ),
    ForeignName(
        ("output_file", "predictions_file"), HF, "spec.predict.output",
        "a .jsonl or .parquet file, or a folder, which ends in /", same=False, writes=predictions_uri,
    ),
    # ---- parallelism
    ForeignName(
        ("deepspeed", "ds_config", "deepspeed_config_file", "deepspeed_plugin"), f"{EVERYBODY}, {DEEPSPEED}",
        "spec.parallelism.strategy",
        "the stage is spec.parallelism.zeroStage, and other keys of its file go below spec.parallelism.deepspeedConfig",
        "deepspeed",
    ),
    ForeignName(
        ("zero_stage", "zero", "zero_optimization_stage"), DEEPSPEED, "spec.parallelism.zeroStage"
    ),
    ForeignName(("stage",), DEEPSPEED, "spec.parallelism.zeroStage", under=("parallelism", "zero_optimization")),
    ForeignName(
        ("zero_optimization",), DEEPSPEED, "spec.parallelism.zeroStage",
        "other keys of it go below spec.parallelism.deepspeedConfig.zero_optimization", same=False,
    ),
    ForeignName(
        ("deepspeed_config",), HF, "spec.parallelism.strategy",
        "keys of DeepSpeed's own file go below spec.parallelism.deepspeedConfig", "deepspeed", under=("", "spec"),
    ),
    ForeignName(("fsdp", "fsdp_config", "fsdp_version", "fsdp2"), EVERYBODY, "spec.parallelism.strategy", value="fsdp"),
    ForeignName(
        ("fsdp_sharding_strategy", "sharding_strategy"), f"{HF}, {AXOLOTL}", "spec.parallelism.sharding"
    ),
    ForeignName(("fsdp_offload_params",), f"{HF}, {AXOLOTL}", "spec.parallelism.offload.parameters", value="cpu"),
    ForeignName(
        ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch",
         "fsdp_use_orig_params", "fsdp_state_dict_type", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states",
         "fsdp_limit_all_gathers"),
        f"{HF}, {AXOLOTL}", None, "leave it out: each of the model's repeated blocks is wrapped",
    ),
    ForeignName(
        ("compute_environment", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
         "downcast_bf16", "use_cpu", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo",
         "debug", "dynamo_config"),
        HF, None, "leave it out: the launcher starts and connects the processes", under=("", "spec"),
    ),
    ForeignName(("ddp", "data_parallel"), EVERYBODY, "spec.parallelism.strategy", value="ddp"),
    ForeignName(
        ("data", "dp", "dp_size", "data_parallel_size", "data_parallel_degree", "data_parallelism"), HF, None,
        "leave it out: all processes that tensor, pipeline and sequence leave are data-parallel ranks",
        under=("parallelism",),
    ),
    ForeignName(
        ("distributed", "distributed_type", "distributed_strategy", "distribution", "backend"), HF,
        "spec.parallelism.strategy",
    ),
    ForeignName(
        ("tensor_parallel_size", "tensor_parallel", "tp", "tp_size", "tensor_model_parallel_size"), HF,
        "spec.parallelism.tensor",
    ),
    ForeignName(
        ("pipeline_parallel_size", "pipeline_parallel", "pp", "pp_size", "pipeline_model_parallel_size"), HF,
        "spec.parallelism.pipeline.degree",
    ),
    ForeignName(
        ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size", "cp_size", "sp_size"),
        f"{HF}, {AXOLOTL}", "spec.parallelism.sequence",
    ),
    ForeignName(
        ("sequence_parallel",), HF, None,
        "leave it out: spec.parallelism.tensor does not shard the other layers; spec.parallelism.sequence shards rows",
    ),
    ForeignName(
        ("offload_optimizer_device",), HF, "spec.parallelism.offload.optimizer"
    ),
    ForeignName(("offload_param_device",), HF, "spec.parallelism.offload.parameters"),
    ForeignName(
        ("offload_optimizer", "cpu_offload", "optimizer_offload"), f"{HF}, {DEEPSPEED}",
        "spec.parallelism.offload.optimizer", value="cpu",
    ),
    ForeignName(
        ("offload_param", "offload_params", "cpu_offload_param"), f"{HF}, {DEEPSPEED}",
        "spec.parallelism.offload.parameters", value="cpu",
    ),
)  # fmt: skip
