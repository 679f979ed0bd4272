"""Facts of each launcher, one row each.

Validation, planning, discovery, RBAC, metrics, help and documentation read these rows, and none of them names a
launcher itself. The launcher's folder in `jobs/launchers` renders the manifest and reads the status. No module of ours
is imported here, as `finetune --help` reads the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TrainingLauncher: TypeAlias = Literal["pytorchjob", "mpijob", "trainjob", "jobset", "job"]
"""Values of spec.launcher."""
LauncherName: TypeAlias = Literal["pytorchjob", "mpijob", "trainjob", "jobset", "job", "sparkapplication"]
StageName: TypeAlias = Literal["prepare", "train", "evaluate", "predict"]


@dataclass(frozen=True)
class Reserved:
    """Names that a launcher's controller sets in its pods and the job's template must not set."""

    label_prefixes: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    env_prefixes: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launcher:
    """A kind of object that runs the pods of a stage."""

    name: LauncherName
    api_version: str
    kind: str
    plural: str
    installed_by: str
    """Controller that an administrator installs for it, as part of a sentence."""
    manifest: str = ""
    """Object that the operator creates, for docs/operator.md."""
    stages: tuple[StageName, ...] = ("train",)
    """Stages that it can run."""
    supported: bool = True
    """False if the API accepts its name but validation refuses it as not supported in this version."""
    built_in: bool = False
    """True if every Kubernetes cluster serves it."""
    engine: Literal["spark"] | None = None
    """Value of preparation.engine or predict.engine that selects it."""
    starter: Literal["torchrun", "mpirun"] = "torchrun"
    """Program that starts the ranks of a training."""
    starter_pod: tuple[str, str] | None = None
    """Label and value of the extra pod that starts the ranks; None if there is no such pod."""
    first_host: str = ""
    """Suffix of its name that gives the host of rank 0. Empty if a Service of ours is needed."""
    index_label: str | None = None
    """Label of its pods that holds the node rank."""
    pod_suffix: str = ""
    """Longest suffix that its controller appends to its name for a pod, with 10,000 nodes."""
    job_between: str | None = None
    """Suffix of the batch Job that its controller creates between it and one of its pods."""
    driver: str | None = None
    """Suffix of the pod that creates its other pods, and that may have no controller."""
    reserved: Reserved = Reserved()
    foreign_names: tuple[str, ...] = ()
    """Other names for it that users write in spec.launcher."""
    foreign_tools: str = "Kubernetes"
    """Project or tool that uses these names, as in docs/names.md."""

    @property
    def group(self) -> str:
        """Return the API group of its kind."""
        return self.api_version.partition("/")[0]

    @property
    def served_as(self) -> str:
        """Return its kind and version, as part of a sentence."""
        return f"{self.kind} ({self.api_version})"


_KUBEFLOW = "training.kubeflow.org/"
_REPLICA = f"{_KUBEFLOW}replica-index"

LAUNCHERS: tuple[Launcher, ...] = (
    # The most widely installed; its Services give the rendezvous an address.
    Launcher(
        "pytorchjob", "kubeflow.org/v1", "PyTorchJob", "pytorchjobs", installed_by="the Kubeflow Training Operator",
        manifest="PyTorchJob, workers only, rendezvous by c10d", first_host="-worker-0",
        index_label=_REPLICA, pod_suffix="-worker-9999", reserved=Reserved(label_prefixes=(_KUBEFLOW,)),
        foreign_names=("pytorch", "kubeflow", "training-operator"),
    ),
    # Needs an SSH server in each worker and one more pod, which has a replica index too.
    Launcher(
        "mpijob", "kubeflow.org/v2beta1", "MPIJob", "mpijobs", installed_by="the MPI Operator",
        manifest="MPIJob v2beta1, Open MPI over ssh on port 2222", starter="mpirun",
        starter_pod=(f"{_KUBEFLOW}job-role", "launcher"), index_label=_REPLICA, pod_suffix="-worker-9999",
        job_between="-launcher", foreign_names=("mpirun", "mpi", "horovodrun"), foreign_tools="Hugging Face",
        reserved=Reserved(
            label_prefixes=(_KUBEFLOW,), env=("K_MPI_JOB_ROLE",), env_prefixes=("OMPI_", "PRTE_"),
            volumes=("ssh-auth", "mpi-job-config", "ssh-home"),
        ),
    ),
    Launcher(
        "trainjob", "trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", installed_by="Kubeflow Trainer",
        supported=False,
    ),
    Launcher(
        "jobset", "jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", installed_by="the JobSet controller",
        supported=False,
    ),
    Launcher(
        "job", "batch/v1", "Job", "jobs", installed_by="Kubernetes' own Job controller", built_in=True,
        manifest="Indexed Job with a headless Service", stages=("prepare", "train", "evaluate", "predict"),
        index_label="batch.kubernetes.io/job-completion-index", pod_suffix="-9999",
        reserved=Reserved(label_prefixes=("batch.kubernetes.io/",)), foreign_names=("batch", "k8s-job", "batch/v1"),
    ),
    Launcher(
        "sparkapplication", "sparkoperator.k8s.io/v1beta2", "SparkApplication", "sparkapplications",
        installed_by="the Kubeflow Spark Operator", stages=("prepare", "predict"), engine="spark",
        pod_suffix="-driver", driver="-driver",
    ),
)  # fmt: skip
"""Launchers in the order in which `spec.launcher: auto` prefers those that the API server serves."""

SUPPORTED: tuple[Launcher, ...] = tuple(row for row in LAUNCHERS if row.supported)
TRAINING: tuple[LauncherName, ...] = tuple(row.name for row in SUPPORTED if "train" in row.stages)
"""Supported launchers of a training, in order of preference."""
BUILT_IN: tuple[LauncherName, ...] = tuple(row.name for row in SUPPORTED if row.built_in)
ENGINES: tuple[LauncherName, ...] = tuple(row.name for row in SUPPORTED if row.engine is not None)
"""Launchers selected by the engine of a stage."""
LONGEST_POD_SUFFIX = max(len(row.pod_suffix) for row in SUPPORTED)


def launcher(name: str) -> Launcher:
    """Return the row of `name`. Raise LookupError if there is none."""
    for row in LAUNCHERS:
        if row.name == name:
            return row
    raise LookupError(f"there is no launcher {name}")


def launcher_of(stage: str, training: str = "job", engine: str = "auto") -> Launcher:
    """Return the launcher of `stage`: `training` is the training's launcher, `engine` the stage's requested engine.
    Raise LookupError as `launcher` does.
    """
    if stage == "train":
        return launcher(training)
    matching = (row for row in SUPPORTED if stage in row.stages and engine == row.engine)
    return next(matching, launcher("job"))


def unsupported_note(fate: str, quote: str = "") -> str:
    """Return ` A and B are <fate>.` for the unsupported launchers; empty if there are none."""
    names = [f"{quote}{row.name}{quote}" for row in LAUNCHERS if not row.supported]
    return f" {' and '.join(names)} {'are' if names[1:] else 'is'} {fate}." if names else ""
