"""Other tools' names of settings of resources, stages and Kubernetes objects."""

from __future__ import annotations

from finetune_operator.api.foreign_conversions import (
    GPUS_PER_NODE,
    claim_of,
    claim_size,
    deadline,
    gpus_in_total,
    key_variable,
    on_device,
    on_instances,
    pull_secrets,
    spot_capacity,
)
from finetune_operator.api.foreign_rows import (
    AXOLOTL,
    EVERYBODY,
    FACTORY,
    HF,
    KUBERNETES,
    NO_COUNTERPART,
    ONE_AT_A_TIME,
    ForeignName,
)
from finetune_operator.api.machine_types import TYPE_LABEL

CLUSTER_NAMES: tuple[ForeignName, ...] = (
    ForeignName(
        ("num_gpus", "n_gpus", "n_gpu", "gpus", "gpu", "gpu_count", "num_gpus_per_node", "gpus_per_worker",
         "nvidia.com/gpu", "amd.com/gpu", "devices"),
        f"{HF}, {KUBERNETES}", "spec.resources.gpusPerNode",
    ),
    ForeignName(
        ("num_nodes", "nnodes", "num_machines", "replicas", "num_workers", "worker_replicas", "hosts"),
        f"{HF}, {KUBERNETES}", "spec.resources.nodes", under=("", "spec", "training", "parallelism", "resources"),
    ),
    ForeignName(
        ("workers", "worker_count", "num_replicas", "machines"), KUBERNETES, "spec.resources.nodes",
        under=("resources", "parallelism"),
    ),
    ForeignName(
        ("nproc_per_node", "num_proc_per_node", "slots_per_worker"), f"{HF}, {KUBERNETES}",
        "spec.resources.processesPerNode",
    ),
    ForeignName(
        ("num_processes", "world_size"), HF, "spec.resources.gpusPerNode",
        "one process per GPU of a node; accelerate counts the processes of all nodes", same=False,
    ),
    ForeignName(
        ("limits", "requests"), KUBERNETES, None,
        "write cpu and memory directly below spec.resources, and nvidia.com/gpu as spec.resources.gpusPerNode",
        under=("resources", "spec"),
    ),
    ForeignName(
        ("gpu_type", "gpu_product", "gpu_model", "gpu_name", "accelerator_type"),
        KUBERNETES, "spec.resources.accelerator.product", "H100, or as in the node label nvidia.com/gpu.product",
    ),
    ForeignName(
        ("type", "name", "model", "kind", "gpu"), KUBERNETES, "spec.resources.accelerator.product",
        "H100, or as in the node label nvidia.com/gpu.product", under=("accelerator",),
    ),
    ForeignName(
        ("count", "number", "num", "gpus"), KUBERNETES, GPUS_PER_NODE, under=("accelerator",),
    ),
    ForeignName(
        ("type", "model"), KUBERNETES, "spec.resources.accelerator.product",
        "H100, or as in the node label nvidia.com/gpu.product", under=("resources",),
    ),
    ForeignName(
        ("device", "device_type", "device_map"), HF, None, f"leave it out, and set {GPUS_PER_NODE}",
        under=("", "spec", "training", "resources", "model"), writes=on_device,
    ),
    ForeignName(
        ("total_gpus", "gpus_total", "num_gpus_total", "gpu_total"), KUBERNETES, GPUS_PER_NODE,
        "GPUs of each of spec.resources.nodes", same=False, writes_beside=gpus_in_total,
    ),
    ForeignName(
        ("tpu", "tpus", "tpu_cores", "tpu_type"), KUBERNETES, None, "leave it out: TPUs are not supported"
    ),
    ForeignName(
        ("capacity_type", "capacity", "provisioning_model", "purchase_option"), KUBERNETES, "spec.spot.enabled",
        "true for spot nodes", same=False, writes=spot_capacity, under=("", "spec", "resources", "spot"),
    ),
    ForeignName(
        ("instance_type", "machine_type", "vm_size", "node_type", "node_type_id", "driver_node_type_id"), KUBERNETES,
        "spec.template.nodeSelector",
        f"as {{{TYPE_LABEL}: TYPE}}", same=False, writes_beside=on_instances,
    ),
    ForeignName(("gpu_memory", "vram", "gpu_mem"), KUBERNETES, "spec.resources.accelerator.memory"),
    ForeignName(("cpus", "num_cpus", "cores", "cpu_count"), KUBERNETES, "spec.resources.cpu"),
    ForeignName(("ram", "mem", "memory_limit"), KUBERNETES, "spec.resources.memory"),
    ForeignName(
        ("memory_gb", "memory_gib", "memory_mb"), KUBERNETES, "spec.resources.memory", "with its unit, e.g. 16Gi",
        same=False,
    ),
    ForeignName(
        ("node_name", "node_names", "hostname"), KUBERNETES, "spec.template.nodeSelector",
        "as {kubernetes.io/hostname: NAME}", same=False, under=("resources", "spec", "template"),
    ),
    ForeignName(
        ("instance_count", "num_instances", "node_count", "machine_count", "instances"), KUBERNETES,
        "spec.resources.nodes",
    ),
    ForeignName(("count",), KUBERNETES, "spec.resources.nodes", under=("resources", "resource")),
    ForeignName(
        ("min_nodes", "max_nodes", "min_workers", "max_workers", "min_num_nodes", "max_num_nodes", "elastic_nodes"),
        KUBERNETES, None,
        "leave it out, and write one number in spec.resources.nodes: it is fixed in this version",
        under=("", "spec", "training", "resources"),
    ),
    ForeignName(
        ("tuning",), KUBERNETES, None,
        "leave it out: its preset is spec.model.uri, its method spec.model.adapter.method, its input spec.dataset.uri",
        under=("spec", ""),
    ),
    ForeignName(
        ("hyperparameters",), HF, "spec.training.arguments", "for names of TrainingArguments", same=False,
        under=("spec", "training"),
    ),
    ForeignName(
        ("training_duration", "max_duration", "max_time"), HF, "spec.training.epochs",
        "3 for 3ep; a number of batches is spec.training.maxSteps, and seconds are "
        "spec.runPolicy.activeDeadlineSeconds", same=False, writes=deadline,
    ),
    ForeignName(("train_data_path", "training_data_path"), HF, "spec.dataset.uri"),
    ForeignName(
        ("loss_type", "pref_loss", "rl"), f"{HF}, {FACTORY}, {AXOLOTL}", None,
        "leave it out: preference-tuning uses the sigmoid loss of DPO",
    ),
    ForeignName(("mlm_probability", "mlm_prob", "mask_probability"), HF, None,
        "leave it out: 15 % of the tokens are masked"),
    ForeignName(
        ("class_weights", "class_weight", "loss_weights"), HF, None,
        "leave it out: all rows have the same weight; run a loss of your own with spec.training.script",
    ),
    ForeignName(
        ("repo", "repository", "url", "git_url", "git_repo", "repo_url", "uri", "source"), EVERYBODY,
        "spec.training.script.git.url", under=("script",),
    ),
    ForeignName(
        ("branch", "ref", "tag", "commit", "revision", "git_ref"), EVERYBODY, "spec.training.script.git.ref",
        under=("script",),
    ),
    ForeignName(
        ("image", "docker_image", "container_image", "base_image", "container"), KUBERNETES, None,
        "leave it out: the program runs in the trainer image; for more libraries build an image on that one, and name "
        "it in spec.image",
        under=("script",),
    ),
    ForeignName(
        ("file", "main", "entry", "script", "program", "command", "filename", "script_file"), EVERYBODY,
        "spec.training.script.entryPoint", under=("script",),
    ),
    ForeignName(
        ("args", "arguments", "params", "parameters", "hparams", "flags"), EVERYBODY,
        "spec.training.script.hyperparameters", under=("script",),
    ),
    ForeignName(
        ("requirements", "requirements_file", "requirements_txt", "packages", "dependencies", "pip", "pip_packages",
         "conda", "install"),
        EVERYBODY, None, "leave it out: a program runs in the trainer image; packages that it lacks belong in an image "
        "of your own, spec.image", under=("script", "training", "", "spec", "git", "template"),
    ),
    ForeignName(
        ("branch", "revision", "tag", "commit", "version"), EVERYBODY, "spec.training.script.git.ref", under=("git",)
    ),
    ForeignName(("repo", "repository", "uri"), EVERYBODY, "spec.training.script.git.url", under=("git",)),
    ForeignName(("shm", "shm_size"), KUBERNETES, "spec.resources.sharedMemory"),
    ForeignName(
        ("container_image", "trainer_image", "docker_image", "image"), KUBERNETES, "spec.image"
    ),
    ForeignName(
        ("image", "command", "args"), KUBERNETES, None,
        "leave it out: the operator's image trains; an image built on it is spec.image, a program of your own "
        "spec.training.script",
        under=("containers", "trainer", "init_containers"),
    ),
    ForeignName(
        ("command", "args", "entrypoint", "script"), KUBERNETES, "spec.training.script",
        "a program in a git repository, with git.url, entryPoint and hyperparameters below it", same=False,
        under=("", "spec", "template"),
    ),
    ForeignName(
        ("containers", "init_containers", "pod_template", "pod_spec", "spec"), KUBERNETES, None,
        "leave it out: the operator writes the containers; nodeSelector, tolerations, env and volumes go below "
        "spec.template, GPUs and memory below spec.resources",
        under=("spec", "template", "training"),
    ),
    ForeignName(
        ("pytorch_replica_specs", "mpi_replica_specs", "tf_replica_specs", "trainer", "elastic_policy", "completions",
         "completion_mode", "replicated_jobs"),
        KUBERNETES, "spec.resources.nodes",
        "the number of pods; GPUs of each are spec.resources.gpusPerNode; nodeSelector and tolerations go below "
        "spec.template", same=False,
    ),
    ForeignName(
        ("runtime_ref", "run_policies"), KUBERNETES, None,
        "leave it out: spec.launcher selects the kind of job that runs the pods",
    ),
    ForeignName(
        ("initializer",), KUBERNETES, "spec.model.uri", "the address of the data is spec.dataset.uri", same=False
    ),
    ForeignName(("storage_uri",), KUBERNETES, "spec.model.uri", under=("model",)),
    ForeignName(("storage_uri",), KUBERNETES, "spec.dataset.uri", under=("dataset",)),
    ForeignName(
        ("host_network", "host_pid", "host_ipc", "runtime_class_name", "scheduler_name", "restart_policy", "dns_policy",
         "env_from", "termination_grace_period_seconds"),
        KUBERNETES, None, "leave it out: this setting of pods is not configurable",
        under=("", "spec", "template", "runPolicy", "resources"),
    ),
    ForeignName(
        ("backoff_limit", "max_retries", "retries", "backoff"), KUBERNETES, "spec.runPolicy.maxRestarts"
    ),
    ForeignName(("timeout", "timeout_seconds", "deadline"), KUBERNETES, "spec.runPolicy.activeDeadlineSeconds"),
    ForeignName(
        ("max_run", "max_run_seconds", "max_runtime_seconds", "max_runtime", "time_limit"), f"{HF}, {KUBERNETES}",
        "spec.runPolicy.activeDeadlineSeconds", under=("", "spec", "training", "resources", "runPolicy"),
    ),
    ForeignName(("max_wait",), HF, "spec.spot.maxWaitSeconds"),
    ForeignName(
        ("use_spot_instances", "spot_instances", "use_spot", "spot_instance", "preemptible", "enable_spot",
         "use_preemptible", "train_on_spot"),
        f"{HF}, {KUBERNETES}", "spec.spot.enabled",
    ),
    ForeignName(("ttl", "ttl_seconds"), KUBERNETES, "spec.runPolicy.ttlSecondsAfterFinished"),
    ForeignName(("priority", "priority_class"), KUBERNETES, "spec.runPolicy.priorityClassName"),
    ForeignName(
        ("queue", "queue_name"), KUBERNETES, None,
        "leave it out: queues are not supported in this version", under=("", "spec", "metadata", "resources"),
    ),
    ForeignName(
        ("pvc", "pvc_name", "claim", "claim_name", "persistent_volume_claim", "volume_claim"), KUBERNETES,
        "spec.storage.workspace", "pvc:// before the claim's name",
    ),
    *(
        ForeignName(
            ("pvc", "pvc_name", "claim", "claim_name", "persistent_volume_claim", "volume_claim"), KUBERNETES,
            f"spec.{block}.uri", "pvc:// before the claim's name", under=(block,), writes_beside=claim_of(block),
        )
        for block in ("model", "dataset")
    ),
    *(
        ForeignName(
            ("sub_path", "subpath", "path_in_claim", "mount_path"), KUBERNETES, f"spec.{block}.uri",
            "pvc://claim/path", under=(block,), same=False,
        )
        for block in ("model", "dataset")
    ),
    ForeignName(("storage",), KUBERNETES, "spec.storage.size", under=("requests",)),
    ForeignName(
        ("resources", "requests"), KUBERNETES, "spec.storage.size", under=("storage",), same=False, writes=claim_size
    ),
    ForeignName(("disk", "disk_size", "storage_size"), KUBERNETES, "spec.storage.size"),
    ForeignName(("pull_policy",), KUBERNETES, "spec.imagePullPolicy"),
    ForeignName(
        ("pull_secrets", "image_pull_secret", "image_pull_secrets", "pull_secret"), KUBERNETES,
        "spec.template.imagePullSecrets", same=False, under=("image", "", "spec", "resources", "training"),
        writes=pull_secrets,
    ),
    ForeignName(("storage_class",), KUBERNETES, "spec.storage.storageClassName"),
    ForeignName(("service_account",), KUBERNETES, "spec.template.serviceAccountName"),
    ForeignName(
        ("secret", "secret_name", "secret_ref"), KUBERNETES, "spec.secrets.hubToken.name",
        "for a token of the Hub", same=False,
    ),
    ForeignName(
        ("secret_name", "secret"), KUBERNETES, "spec.secrets.hubToken.name", under=("hubToken",),
    ),
    ForeignName(
        ("secret_key", "key_name", "entry", "field"), KUBERNETES, "spec.secrets.hubToken.key", under=("hubToken",),
    ),
    ForeignName(
        ("huggingface", "hf", "hub", "hugging_face", "token", "hf_secret", "hub_secret", "name"), KUBERNETES,
        "spec.secrets.hubToken.name", under=("secrets",),
    ),
    *(
        ForeignName(
            names, KUBERNETES, "spec.template.env",
            f"a variable {variable}, with valueFrom.secretKeyRef", under=("secrets",), same=False,
            writes=key_variable(variable),
        )
        for names, variable in (
            (("wandb", "wandb_api_key", "wandb_key", "wandb_token", "wandb_secret"), "WANDB_API_KEY"),
            (("mlflow_token", "mlflow_tracking_token"), "MLFLOW_TRACKING_TOKEN"),
            (("databricks", "databricks_token"), "DATABRICKS_TOKEN"),
            (("openai", "openai_api_key", "vllm_api_key"), "OPENAI_API_KEY"),
        )
    ),
    ForeignName(("key", "secret_key"), KUBERNETES, "spec.secrets.hubToken.key", under=("secrets",)),
    ForeignName(
        ("hf_token_secret", "hub_token_secret", "token_secret", "hf_token_secret_name",
         "huggingface_secret"),
        KUBERNETES, "spec.secrets.hubToken.name",
    ),
    ForeignName(
        ("max_tokens", "tokens", "length", "token_limit"), HF, "spec.preparation.maxLength", "in tokens",
        under=("preparation", "dataset", "model", "tokenizer", "preprocessing"),
    ),
    ForeignName(("max_length",), HF, "spec.generation.maxNewTokens", "in tokens", under=("generation",)),
    ForeignName(("min_length", "min_new_tokens"), HF, None,
        "leave it out: spec.generation.maxNewTokens limits the output", under=("generation",)),
    ForeignName(("name", "namespace"), KUBERNETES, None, "move it below metadata", under=("", "spec")),
    ForeignName(("labels", "annotations"), KUBERNETES, None, "move it below metadata", under=("",)),
    ForeignName(
        ("serve", "serving", "inference_service", "deploy", "deployment", "server", "inference_server"), KUBERNETES,
        "spec.endpoint", "{} takes the defaults", {},
    ),
    ForeignName(
        ("min_replicas", "min", "num_replicas", "initial_replicas"), KUBERNETES, "spec.endpoint.replicas",
        under=("endpoint", "autoscaling"),
    ),
    ForeignName(("max",), KUBERNETES, "spec.endpoint.maxReplicas", under=("endpoint", "autoscaling")),
    ForeignName(
        ("target_cpu_utilization", "target_cpu_utilization_percentage", "target_cpu", "autoscale", "autoscaling",
         "auto_scaling", "scaling", "hpa"),
        KUBERNETES, None,
        "leave it out: with maxReplicas above replicas, servers are added above 70 % of the CPU request",
        under=("endpoint", "autoscaling"),
    ),
    ForeignName(
        ("port", "ports", "service_port", "host", "service_type", "ingress", "engine", "server"), KUBERNETES, None,
        "leave it out: the operator writes the server and its Service; status.endpointUrl is the address",
        under=("endpoint",),
    ),
    ForeignName(
        ("max_lora_rank", "max_rank"), EVERYBODY, "spec.endpoint.maxAdapterRank", under=("endpoint",),
    ),
    ForeignName(
        ("gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "max_loras"), EVERYBODY, None,
        "leave it out: the operator sets the options of vLLM's servers", under=("endpoint",),
    ),
    ForeignName(
        ("timeout", "latency", "max_latency", "max_batch_delay"), EVERYBODY, "spec.endpoint.maxLatencyMilliseconds",
        "in milliseconds", under=("endpoint",),
    ),
    ForeignName(
        ("schedule", "cron", "cron_schedule", "cron_job", "cron_expression", "start_at", "start_time", "repeat",
         "repeat_every", "recurrence", "recurring", "every", "run_every"),
        KUBERNETES, None,
        "leave it out: a job starts when it is created; a CronJob of Kubernetes that creates it can repeat it",
        under=("", "spec", "runPolicy"),
    ),
    ForeignName(
        ("concurrency_policy", "concurrent_policy", "allow_concurrent", "max_concurrent", "max_concurrent_runs",
         "max_active_runs"),
        KUBERNETES, None,
        ONE_AT_A_TIME,
        under=("", "spec", "runPolicy"),
    ),
    ForeignName(
        ("starting_deadline_seconds", "successful_jobs_history_limit", "failed_jobs_history_limit", "time_zone",
         "timezone", "job_template", "catchup", "start_date", "end_date"),
        KUBERNETES, None, "leave it out: it belongs to the CronJob that creates the job",
        under=("", "spec", "runPolicy"),
    ),
    ForeignName(
        ("job_type", "kind_of_job", "trainer_type"), EVERYBODY, None, NO_COUNTERPART,
    ),
)  # fmt: skip
