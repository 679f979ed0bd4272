"""Paths, environment variable names and exit codes that both sides rely on: one table each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ENV_REPORT = "FINETUNE_REPORT"
"""File for this process's `TrainerReport`; `{rank}` is replaced by the rank. In a pod: the termination message."""
ENV_PROGRESS = "FINETUNE_PROGRESS"
"""File to which rank 0 appends one `Progress` as a JSON line at most twice a second; unset: no file is written."""
ENV_KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
ENV_KUBEFLOW_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
ENV_KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""Path of a file with the bearer token, read for each request because the kubelet rotates it."""

ENV_GRACE_SECONDS = "FINETUNE_GRACE_SECONDS"
"""Seconds between SIGTERM and SIGKILL of a pod (`terminationGracePeriodSeconds`); its launcher ends all processes
earlier.
"""
DEFAULT_GRACE_SECONDS = 60
ENV_STACKS_SECONDS = "FINETUNE_STACKS_SECONDS"
"""Seconds without progress after which a process writes its Python stacks into its log; unset: never."""
ENV_NCCL = "FINETUNE_NCCL"
"""Folder for NCCL's logs and the flight recorder's dumps, set by the ranks' launcher; unset: a temporary one."""
ENV_CACHE = "FINETUNE_CACHE"
"""Folder that jobs share, with prepared data among others; unset: `.cache` of the workspace."""
ENV_ATTEMPT = "FINETUNE_ATTEMPT"
"""Identifier that only the pods of one Indexed Job that prepares or predicts share."""
ENV_CHECKPOINT_SECRET = "FINETUNE_CHECKPOINT_SECRET"
"""Key that signs checkpoints, from a Secret that the job names; read if `CheckpointSchedule.signed`."""
ENV_DELETE_CHECKPOINTS = "FINETUNE_DELETE_CHECKPOINTS"
"""Set for the pods of a job's last stage: its first process deletes the checkpoints once the stage has succeeded. Not a
field of job.json, which images of earlier releases would refuse.
"""
CHECKPOINTS_DELETED = "checkpoints_deleted"
"""Key of `TrainerReport.artifacts` in place of `checkpoints` once they are deleted."""
ENV_INDEX = "JOB_COMPLETION_INDEX"
"""Index of a pod of an Indexed Job, set by Kubernetes."""
ENV_FORWARD = "FINETUNE_FORWARD_ENV"
"""Names of further variables, comma-separated, that mpirun forwards to the ranks in other pods: the user's own."""
ADAPTER_CARD = "finetune.json"
"""File in an adapter's folder with the facts that peft does not store."""
SERVE_PORT = 8080
METRICS_PATH = "/metrics"
INFERENCE_PATHS = (
    "/",
    "/models/{name}",
    "/v2/models/{name}/infer",
    "/v1/completions",
    "/v1/chat/completions",
)
"""Paths of requests to a server's model, as the label `path` of its metrics has them."""
REQUESTS_METRIC = "finetune_serving_requests"
"""Counter of a server's answers, with the labels `path`, `code` and `model`."""
LATENCY_METRIC = "finetune_serving_request_seconds"
"""Histogram of the seconds until a server's answer, with the label `path`."""
"""Port of a server of the model in its pod."""
ENV_SERVE_TOKEN = "FINETUNE_SERVE_TOKEN"
"""Bearer token that requests to a model server must carry, from a Secret that the job names; unset: none."""
ENV_ENDPOINT_REVISION = "FINETUNE_ENDPOINT_REVISION"
"""Number of the endpoint revision that a server belongs to, sent with each answer; unset: it has none."""
MPI_HOSTFILE = "/etc/mpi/hostfile"
SSH_PORT = 2222
"""Port of the MPI workers' sshd: a process that is not root cannot bind 22."""

ENV_SCRIPT_MODEL = "FINETUNE_MODEL"
ENV_SCRIPT_REVISION = "FINETUNE_MODEL_REVISION"
ENV_SCRIPT_DATASET = "FINETUNE_DATASET"
ENV_SCRIPT_DATASET_REVISION = "FINETUNE_DATASET_REVISION"
ENV_SCRIPT_DATASET_CONFIG = "FINETUNE_DATASET_CONFIG"
ENV_SCRIPT_SPLITS = "FINETUNE_DATASET_SPLITS"
ENV_SCRIPT_COLUMNS = "FINETUNE_DATASET_COLUMNS"
ENV_SCRIPT_OUTPUT = "FINETUNE_OUTPUT"
ENV_SCRIPT_CHECKPOINTS = "FINETUNE_CHECKPOINTS"
ENV_SCRIPT_RESUME_FROM = "FINETUNE_RESUME_FROM"
SCRIPT_VARIABLES: dict[str, str] = {
    ENV_SCRIPT_MODEL: "The model to start from, as `from_pretrained` accepts it: a folder, or `org/name` of the Hub.",
    ENV_SCRIPT_REVISION: "Revision of a Hub model. Not set for a folder.",
    ENV_SCRIPT_DATASET: "The data: a folder, a file or a glob, `org/name` of the Hub, or an s3://, gs:// or az:// URI.",
    ENV_SCRIPT_DATASET_REVISION: "Revision of a Hub data set. Not set when `dataset.uri` has none.",
    ENV_SCRIPT_DATASET_CONFIG: "`dataset.config`. Not set without it.",
    ENV_SCRIPT_SPLITS: "`dataset.splits` as a JSON object, without the splits that the job omits.",
    ENV_SCRIPT_COLUMNS: "`dataset.columns` as a JSON object, with the task's default names for omitted ones.",
    ENV_SCRIPT_OUTPUT: "The folder to save the model in, by `save_pretrained`. The training has succeeded when it "
    "holds `config.json` (or `adapter_config.json`) and weights.",
    ENV_SCRIPT_CHECKPOINTS: "The folder for checkpoints; its content survives restarts.",
    ENV_SCRIPT_RESUME_FROM: "The newest complete checkpoint in that folder, for `resume_from_checkpoint`. Not set "
    "when there is none, or with `checkpoints.resume: never`.",
}
"""Environment of a user's own training program, in addition to torchrun's variables."""

DEFAULT_REPORT_PATH = "/dev/termination-log"
ESTIMATE_FILE = "estimate.json"
"""File beside job.json with the estimates of its plan (`plan_check.PlannedTraining`)."""

REPORT_LIMIT_BYTES = 4096
"""Size of a termination message that the kubelet keeps; a report stays below it."""

COMPLETION_MARKER = "COMPLETE"
"""File written last into a folder whose content is whole. A folder without it is not used."""
FACTS_FILE = "data.json"
"""`DataFacts` in the folder of prepared data."""


class FailureClass(StrEnum):
    """Class of a stage's failure, as the operator and a human need to distinguish it."""

    DATA = "DataError"
    CONFIG = "ConfigError"
    MODEL = "ModelError"
    STRATEGY_NOT_IN_EFFECT = "StrategyNotInEffect"
    WORLD_SIZE = "WorldSizeMismatch"
    GATE_NOT_MET = "GateNotMet"
    STORAGE_FULL = "StorageFull"
    LOSS_NOT_FINITE = "LossNotFinite"
    CHECKPOINT = "CheckpointError"
    PROGRAM = "ProgramError"
    OUT_OF_MEMORY = "OutOfMemory"
    KILLED = "Killed"
    PREEMPTED = "Preempted"
    COLLECTIVE = "CollectiveFailed"
    STORAGE_LOST = "StorageUnavailable"
    HUB_UNAVAILABLE = "HubUnavailable"
    CODE_UNAVAILABLE = "CodeUnavailable"
    REPLANNED = "Replanned"


EXIT_OK = 0
EXIT_CODES: dict[FailureClass, int] = {
    # 1 to 127: an identical attempt would fail the same way.
    FailureClass.PROGRAM: 1,
    FailureClass.DATA: 10,
    FailureClass.CONFIG: 11,
    FailureClass.MODEL: 12,
    FailureClass.STRATEGY_NOT_IN_EFFECT: 13,
    FailureClass.WORLD_SIZE: 14,
    FailureClass.GATE_NOT_MET: 15,
    FailureClass.STORAGE_FULL: 16,
    FailureClass.LOSS_NOT_FINITE: 17,
    FailureClass.CHECKPOINT: 18,
    # 128 to 255: worth another attempt, unchanged or adapted.
    FailureClass.KILLED: 137,  # 128 + SIGKILL
    FailureClass.PREEMPTED: 143,  # 128 + SIGTERM
    FailureClass.COLLECTIVE: 150,
    FailureClass.STORAGE_LOST: 151,
    FailureClass.HUB_UNAVAILABLE: 152,
    FailureClass.CODE_UNAVAILABLE: 153,
    FailureClass.REPLANNED: 154,
    FailureClass.OUT_OF_MEMORY: 155,
}


CLASS_OF_EXIT_CODE = {code: failure_class for failure_class, code in EXIT_CODES.items()}


def retryable(exit_code: int) -> bool:
    """Return True if another attempt can end differently."""
    return exit_code >= 128


@dataclass(frozen=True)
class JobPaths:
    """Paths below one job's folder, `<workspace>/<job name>/`."""

    root: Path

    @classmethod
    def of(cls, workspace: Path, job_name: str) -> JobPaths:
        """Return the paths of job `job_name` in `workspace`."""
        return cls(workspace / job_name)

    @property
    def job(self) -> Path:
        """The `TrainerJob` in force."""
        return self.root / "job.json"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed configuration in force; absent with other strategies."""
        return self.root / "deepspeed.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def run(self) -> Path:
        """Run that the folder belongs to (`TrainerJob.run`); absent when the stages were started without one."""
        return self.root / "run.json"

    @property
    def code(self) -> Path:
        """A user's own training program: `code.json`, `repository/`, the completion marker."""
        return self.root / "code"

    @property
    def prepared(self) -> Path:
        """Prepared data: `data.json` (`DataFacts`), `<role>-<number>-of-<files>.arrow`, the completion marker."""
        return self.root / "prepared"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def offload(self) -> Path:
        """State offloaded to files during a training without a cluster."""
        return self.root / "offload"

    @property
    def model(self) -> Path:
        """The trained model in Hub layout; its completion marker is `state/train.json`."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The adapter by itself, as peft reads it; absent when all weights were trained."""
        return self.root / "adapter"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def optimization(self) -> Path:
        """Measurements of the methods of computing predictions."""
        return self.root / "optimization.json"

    @property
    def predictions_jsonl(self) -> Path:
        return self.root / "predictions.jsonl"

    @property
    def predictions_parquet(self) -> Path:
        return self.root / "predictions.parquet"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def history(self) -> Path:
        """One JSON line per logged step of training: step, epoch, loss, learning_rate, grad_norm, samples_per_second,
        tokens_per_second, tokens, computed_tokens (with padding), seconds (by part of the time); and one for each
        evaluation, and for the seconds of evaluations and checkpoints.
        """
        return self.root / "history.jsonl"

    @property
    def tracking(self) -> Path:
        """Output of the trackers that `training.arguments.report_to` names: `tensorboard/`, `mlflow/`, `wandb/`."""
        return self.root / "tracking"

    @property
    def state(self) -> Path:
        """One `<stage>.json` (the rank 0 `TrainerReport`) for each stage that succeeded."""
        return self.root / "state"

    @property
    def reports(self) -> Path:
        """`<stage>-<rank>.json`: reports of a local run's launchers, by the rank that each is about."""
        return self.root / "reports"

    @property
    def logs(self) -> Path:
        """`<stage>.log`: output of a local run's stages."""
        return self.root / "logs"
