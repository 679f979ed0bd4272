"""Pods of a stage: their command, environment, volumes and placement.

One function builds the environment, one the mounts, one the pod; launchers differ only in the command, a port and the
source of the rendezvous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_contract.choices import Stage
from finetune_contract.layout import (
    ENV_ATTEMPT,
    ENV_CACHE,
    ENV_CHECKPOINT_SECRET,
    ENV_DELETE_CHECKPOINTS,
    ENV_ENDPOINT_REVISION,
    ENV_GRACE_SECONDS,
    ENV_KUBEFLOW_CA,
    ENV_KUBEFLOW_TOKEN,
    ENV_KUBEFLOW_URL,
    ENV_SERVE_TOKEN,
    ENV_STACKS_SECONDS,
)
from finetune_contract.python_command import ENV_SAFE_PATH, module_command
from finetune_operator.jobs.render.claims import Storage, storage
from finetune_operator.jobs.render.contract import (
    DEEPSPEED_FILE,
    JOB_FILE,
    Starter,
    fingerprint,
    launch_arguments,
    stage_arguments,
    stage_files,
)
from finetune_operator.jobs.render.deepspeed_config import OFFLOAD_FOLDER, deepspeed_config, uses_offload_folder
from finetune_operator.jobs.render.pod_parts import (
    Container,
    EnvVar,
    Mount,
    Pod,
    PodLabel,
    Volume,
    avoiding,
    config_volume,
    memory_volume,
    scratch_volume,
    token_volume,
)
from finetune_operator.jobs.render.render_types import (
    ATTEMPT_LABEL,
    CAPACITY_LABEL,
    HASH_ANNOTATION,
    MANAGED_BY,
    PROGRESS_AUDIENCE,
    STAGE_LABEL,
    Attempt,
    ProgressEndpoint,
    RenderContext,
)
from finetune_operator.jobs.render.sizes import (
    shared_memory,
    stage_device,
    stage_gpus,
    stage_resources,
    stage_threads,
)
from finetune_operator.jobs.render.spot_affinity import spot_tolerations
from finetune_operator.plan.hardware.gpu_nodes import gpu_resource, gpu_taints, requested_labels
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.launcher_rows import launcher

CONFIG = "/etc/finetune"
CA_FILE = "ca.crt"
TOKEN_FOLDER = "/var/run/secrets/finetune.dev/progress"
TOKEN_FILE = "token"
HOME = "/tmp/home"
"""Writable home: libraries write caches below it, and the root file system is read-only."""
SHARED_MEMORY = "shared-memory"
"""Name of the volume at /dev/shm."""
RENDEZVOUS_PORT = 29400
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
"""Label that the Job controller sets (kubernetes `staging/src/k8s.io/api/batch/v1/types.go`)."""


@dataclass(frozen=True)
class Role:
    """Differences of one pod of an attempt from the others."""

    home: Mapping[str, str] = field(default_factory=lambda: {"HOME": HOME})
    """Variables that point libraries to a writable home."""
    computes: bool = True
    """False if it takes no GPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables."""


TRAINER = Role()


@dataclass(frozen=True)
class StagePods:
    """Attempt of a stage with all that its pods are built from."""

    plan: JobPlan
    context: RenderContext
    attempt: Attempt

    @property
    def stage(self) -> Stage:
        return self.attempt.stage

    @property
    def names(self) -> JobNames:
        return JobNames.of(self.plan.name)

    @property
    def name(self) -> str:
        """Return the name of the child and of its ConfigMap."""
        if self.stage is Stage.SERVE:
            return self.names.servers(self.attempt.number)
        return self.names.stage(self.attempt.stage, self.attempt.number)

    @property
    def nodes(self) -> int:
        """Return the number of pods that compute."""
        world = self.plan.trainer.world
        if self.stage is Stage.PREPARE:
            return self.plan.trainer.preparation.pods
        if self.stage is Stage.PREDICT:
            return self.plan.predict_workers
        return world.nodes if self.stage is Stage.TRAIN and world is not None else 1

    @property
    def service(self) -> str | None:
        """Return the headless Service of an Indexed Job whose pods have to find each other; to prepare or predict, they
        share files instead.
        """
        return self.names.service(self.attempt.number) if self.stage is Stage.TRAIN and self.nodes > 1 else None

    @property
    def files(self) -> dict[str, str]:
        return stage_files(self.plan, self.context, self.stage)

    @property
    def reports_to(self) -> ProgressEndpoint | None:
        """Return the server for the pods' progress reports; None for servers, which send none."""
        return None if self.stage is Stage.SERVE else self.context.progress

    @property
    def offloads_to_files(self) -> bool:
        """Return whether the pods need a volume for offloaded state."""
        config = deepspeed_config(self.plan) if self.stage is Stage.TRAIN else None
        return config is not None and uses_offload_folder(config)

    @property
    def on_host_network(self) -> bool:
        """Return whether the pods use the network of their node."""
        network = self.plan.network
        return self.stage is Stage.TRAIN and network is not None and network.host

    @property
    def identity(self) -> dict[str, str]:
        """Return labels that no pod of another attempt has."""
        return {
            **self.context.job_labels(self.plan.name),
            STAGE_LABEL: self.stage.value,
            ATTEMPT_LABEL: str(self.attempt.number),
        }

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of every object of the attempt and of its pods."""
        capacity = self.attempt.capacity
        return {**MANAGED_BY, **self.identity, **({} if capacity is None else {CAPACITY_LABEL: capacity})}

    @property
    def processes_per_node(self) -> int:
        """Return the ranks on each node of the training."""
        world = self.plan.trainer.world
        assert world is not None, "only a training has ranks"
        return world.processes_per_node

    @property
    def shares_rows(self) -> bool:
        """Return whether the pods of an Indexed Job share the rows. The first pod succeeds once all rows are done, no
        matter by which pods.
        """
        by_job = self.plan.engine_of(self.stage) == "job"
        return by_job and (self.stage is Stage.PREPARE or self.nodes > 1)

    @property
    def starter(self) -> Starter:
        """Return the program that starts the ranks."""
        world = self.plan.trainer.world
        if self.shares_rows:
            return "index"
        if self.plan.trainer.inference(self.stage).processes > 1:
            return "torchrun"
        if self.stage is not Stage.TRAIN or world is None:
            return "process"
        starter = launcher(self.plan.launcher).starter
        return "process" if starter == "torchrun" and world.size == 1 else starter


def stage_pod(pods: StagePods, role: Role = TRAINER) -> Pod:
    """Return the pod template of one role, the user's own settings beside ours."""
    spec, settings, defaults = pods.context.spec, pods.context.settings, pods.context.settings.defaults
    folders, on_spot = storage(spec, pods.names, pods.stage), pods.attempt.capacity == "spot"
    gpus = stage_gpus(pods.plan, spec, pods.stage) if role.computes else 0
    resource, template = gpu_resource(spec, defaults), spec.template
    labels = requested_labels(spec, settings) if gpus else {}
    # One value of one label becomes a node selector, which is easier to read than an affinity.
    only = {key: values[0] for key, values in labels.items()} if len(labels) == 1 == len(*labels.values()) else {}
    return Pod(
        labels=pods.labels,
        annotations={HASH_ANNOTATION: fingerprint(pods.files)},
        container=_container(pods, role, folders),
        volumes=_volumes(pods, folders),
        termination_grace_seconds=defaults.termination_grace_seconds,
        node_selector=only,
        tolerations=(
            *({"key": key, "operator": "Exists"} for key in gpu_taints(resource) if gpus),
            *(spot_tolerations(settings) if on_spot else ()),
            *template.tolerations,
        ),
        affinity=avoiding(pods.attempt.avoid_nodes),
        only_nodes=settings.spot.nodes if on_spot else (),
        one_label={} if only else labels,
        image_pull_secrets=(*defaults.image_pull_secrets, *template.image_pull_secrets),
        service_account=template.service_account_name,
        priority_class=spec.run_policy.priority_class_name or defaults.priority_class_name,
        host_network=pods.on_host_network and role.computes,
        user_labels=template.labels,
        user_annotations=template.annotations,
        user_node_selector=template.node_selector,
        user_affinity=template.affinity,
        user_volumes=template.volumes,
        user_security_context=template.security_context,
    )


# ------------------------------------------------------------------------------------------------------------ container


def _container(pods: StagePods, role: Role, folders: Storage) -> Container:
    spec, defaults = pods.context.spec, pods.context.settings.defaults
    return Container(
        image=spec.image or defaults.image,
        image_pull_policy=spec.image_pull_policy or defaults.image_pull_policy,
        command=trainer_command(*_launch(pods, folders)),
        env=(*_environment(pods, role, folders), *_secrets(pods)),
        env_from_secret=None if spec.secrets.storage is None else spec.secrets.storage.name,
        mounts=_mounts(pods, folders),
        resources=stage_resources(pods.plan, spec, defaults, pods.stage, pods.offloads_to_files),
        # Else it is the root folder, beside the folders of the user's volumes.
        working_folder=CONFIG,
        user_env=spec.template.env,
        user_mounts=spec.template.volume_mounts,
    )


def trainer_command(*arguments: str) -> tuple[str, ...]:
    """Return the command of a container that runs the trainer."""
    return tuple(module_command("finetune_trainer", *arguments, python="python"))


def _launch(pods: StagePods, folders: Storage) -> tuple[str, ...]:
    if pods.stage is Stage.SERVE:
        return stage_arguments(pods.stage, f"{CONFIG}/{JOB_FILE}", folders.workspace)
    deepspeed = f"{CONFIG}/{DEEPSPEED_FILE}" if DEEPSPEED_FILE in pods.files else None
    return launch_arguments(pods.stage, f"{CONFIG}/{JOB_FILE}", folders.workspace, pods.starter, deepspeed)


def program_arguments(pods: StagePods) -> tuple[str, ...]:
    """Return the arguments of the trainer's program, for a launcher that starts it by itself."""
    folders = storage(pods.context.spec, pods.names, pods.stage)
    return stage_arguments(pods.stage, f"{CONFIG}/{JOB_FILE}", folders.workspace)


# ---------------------------------------------------------------------------------------------------------- environment


def _environment(pods: StagePods, role: Role, folders: Storage) -> tuple[EnvVar, ...]:
    plan, spec = pods.plan, pods.context.spec
    variables = {
        "PYTHONUNBUFFERED": "1",
        ENV_SAFE_PATH: "1",
        "OMP_NUM_THREADS": str(stage_threads(plan, pods.stage)),
        "TOKENIZERS_PARALLELISM": "true",
        # The workspace of servers is read-only.
        "HF_HOME": folders.cache or f"{HOME}/huggingface" if pods.stage is Stage.SERVE else folders.hub_cache,
        ENV_GRACE_SECONDS: str(pods.context.settings.defaults.termination_grace_seconds),
        **role.home,
    }
    if stage_device(plan, spec, pods.stage) == "cpu":
        # DeepSpeed detects accelerators by itself, and the plan may use the CPU of a node with GPUs.
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if folders.cache is not None and pods.stage is Stage.PREPARE:
        variables[ENV_CACHE] = folders.cache
    if pods.stage is not Stage.SERVE:
        variables |= _stacks(pods)
    if pods.stage is Stage.TRAIN and plan.network is not None:
        variables |= plan.network.env
    if _deletes_checkpoints(pods):
        variables[ENV_DELETE_CHECKPOINTS] = "1"
    variables |= {**_rendezvous(pods), **_progress(pods), **role.env}
    # The uid of the Job: a new Job of the same name has another one.
    attempt = (EnvVar(ENV_ATTEMPT, PodLabel(JOB_UID_LABEL)),) if pods.starter == "index" else ()
    if pods.stage is Stage.SERVE:
        attempt = (EnvVar(ENV_ENDPOINT_REVISION, PodLabel(ATTEMPT_LABEL)),)
    return (*(EnvVar(name, value) for name, value in variables.items()), *attempt)


def _deletes_checkpoints(pods: StagePods) -> bool:
    """Return whether a pod deletes the checkpoints at its end: it is of the last stage. A program's own are kept."""
    stages = [stage for stage in pods.plan.stages if stage is not Stage.SERVE]
    trains = pods.plan.trainer.training is not None
    return trains and pods.stage is stages[-1] and pods.context.spec.checkpoints.after_success == "auto"


def _stacks(pods: StagePods) -> dict[str, str]:
    """Return the delay after which a process without progress logs its stacks: half the progress deadline, so that the
    operator still finds them in the log.
    """
    context = pods.context
    seconds = context.settings.progress_deadline(context.spec.run_policy)
    return {ENV_STACKS_SECONDS: str(max(1, seconds // 2))} if seconds else {}


def _rendezvous(pods: StagePods) -> dict[str, str]:
    """Return the variables of torchrun's rendezvous; none for a pod that evaluates or predicts."""
    if pods.starter != "torchrun" or pods.stage is not Stage.TRAIN:
        return {}
    suffix = launcher(pods.plan.launcher).first_host
    host = "127.0.0.1" if pods.service is None else f"{pods.name}-0.{pods.service}"
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{f'{pods.name}{suffix}' if suffix else host}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": pods.name,
    }


def _progress(pods: StagePods) -> dict[str, str]:
    """Return the variables of Kubeflow's progress protocol, used by our trainer and transformers' own callback."""
    context, progress = pods.context, pods.reports_to
    if progress is None:
        return {}
    path = (
        f"/v1alpha1/namespaces/{context.namespace}/finetunejobs/{pods.plan.name}"
        f"/stages/{pods.stage.value}/attempts/{pods.attempt.number}"
    )
    return {
        ENV_KUBEFLOW_URL: progress.base_url.rstrip("/") + path,
        ENV_KUBEFLOW_CA: f"{CONFIG}/{CA_FILE}",
        ENV_KUBEFLOW_TOKEN: f"{TOKEN_FOLDER}/{TOKEN_FILE}",
    }


def _secrets(pods: StagePods) -> tuple[EnvVar, ...]:
    spec = pods.context.spec
    named = {"HF_TOKEN": spec.secrets.hub_token}
    if pods.stage is Stage.TRAIN:
        named[ENV_CHECKPOINT_SECRET] = spec.checkpoints.signing_key
    if pods.stage is Stage.SERVE and spec.endpoint is not None:
        named[ENV_SERVE_TOKEN] = spec.endpoint.token
    return tuple(EnvVar(name, key) for name, key in named.items() if key is not None)


# -------------------------------------------------------------------------------------------------------------- volumes


def _volumes(pods: StagePods, folders: Storage) -> tuple[Volume, ...]:
    plan, spec = pods.plan, pods.context.spec
    token = () if pods.reports_to is None else (token_volume("progress-token", PROGRESS_AUDIENCE, TOKEN_FILE),)
    files = (scratch_volume("offload"),) if pods.offloads_to_files else ()
    return (
        config_volume("config", pods.name),
        *folders.volumes,
        memory_volume(SHARED_MEMORY, shared_memory(plan, spec, pods.stage)),
        scratch_volume("tmp"),
        *files,
        *token,
    )


def _mounts(pods: StagePods, folders: Storage) -> tuple[Mount, ...]:
    token = () if pods.reports_to is None else (Mount("progress-token", TOKEN_FOLDER, read_only=True),)
    files = (Mount("offload", OFFLOAD_FOLDER),) if pods.offloads_to_files else ()
    return (
        Mount("config", CONFIG, read_only=True),
        *folders.mounts,
        Mount(SHARED_MEMORY, "/dev/shm"),
        Mount("tmp", "/tmp"),
        *files,
        *token,
    )
