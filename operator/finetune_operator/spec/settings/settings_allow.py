"""Settings of what jobs may use: Secrets, ConfigMaps, environment variables and the like, by profile or by name."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from finetune_operator.spec.types import (
    Count,
    NonNegative,
    Quantity,
    SpecModel,
    Text,
)

Globs: TypeAlias = Annotated[tuple[Text, ...], Field(max_length=256)]
ANY = ("*",)
HARMLESS_ENV = (
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_*", "NCCL_IB_*", "NCCL_P2P_*", "NCCL_SHM_*", "NCCL_NVLS_*"),
    *("NCCL_NET_GDR_*", "NCCL_ALGO", "NCCL_PROTO", "NCCL_*_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_CROSS_NIC", "NCCL_TIMEOUT", "GLOO_SOCKET_*", "TORCH_NCCL_*_WAIT", "TORCH_NCCL_*_HANDLING"),
    *("TORCH_NCCL_*_SEC", "TORCH_NCCL_*_SIZE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_ON_TIMEOUT"),
    *("TORCH_SHOW_CPP_STACKTRACES", "TORCH_ALLOW_TF32_*", "TOKENIZERS_PARALLELISM", "TZ", "LANG", "LC_*"),
    *("HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_DISABLE_*", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE"),
    *("WANDB_PROJECT", "WANDB_NAME", "MLFLOW_RUN_ID"),
)
"""Variables that name no other code and no other server, unlike others of the same libraries: NCCL_NET_PLUGIN and
TORCH_EXTENSIONS_DIR name libraries, TRITON_PTXAS_PATH a program, NCCL_COMM_ID a server, and TRITON_CACHE_DIR and
XDG_CACHE_HOME folders with compiled code.
"""
Profile: TypeAlias = Literal["open", "strict"]
AllowedNames: TypeAlias = Literal[
    "service_accounts",
    "secrets",
    "config_maps",
    "claims",
    "csi_drivers",
    "token_audiences",
    "priority_classes",
    "env",
    "mount_paths",
    "annotations",
    "gateways",
]
PROFILES: Mapping[Profile, Mapping[AllowedNames, tuple[str, ...]]] = {
    "open": dict.fromkeys(get_args(AllowedNames), ANY),
    "strict": {
        "service_accounts": ("default",),
        "secrets": ("finetune-*",),
        "config_maps": ANY,
        "claims": ANY,
        "csi_drivers": (),
        "token_audiences": (),
        "priority_classes": (),
        "env": HARMLESS_ENV,
        "mount_paths": ("/data", "/data/*", "/mnt", "/mnt/*", "/scratch", "/scratch/*"),
        "annotations": (),
        "gateways": (),
    },
}
"""Default of each list, by profile."""


class Allow(SpecModel):
    """Resources of a namespace that jobs may use, and limits of their size."""

    profile: Profile = Field(
        default="open",
        description="Defaults of the lists below. open: allow everything, for namespaces whose users may create pods "
        "anyway. strict: allow the service account default, Secrets named finetune-*, no CSI drivers, "
        "tokens, priority classes, annotations or Gateways, only variables that name no other code or server, and "
        "volumes at /data, /mnt, /scratch and below; refuse tolerations without a key, and affinities to pods of other "
        "namespaces. Defaults to open.",
    )
    service_accounts: Globs | None = Field(
        default=None, description="Globs of service accounts that a job may use. Defaults to those of the profile."
    )
    secrets: Globs | None = Field(
        default=None,
        description="Globs of Secrets that a job may reference in any field. Defaults to those of the profile.",
    )
    config_maps: Globs | None = Field(
        default=None, description="Globs of ConfigMaps that a job may reference. Defaults to any."
    )
    claims: Globs | None = Field(
        default=None,
        description="Globs of claims that a job may use, in pvc:// URIs and in volumes; the claim of its own workspace"
        " is always allowed. Defaults to any.",
    )
    csi_drivers: Globs | None = Field(
        default=None,
        description="Globs of CSI drivers that a job may use for volumes of its pods; some expose secrets to any pod. "
        "Defaults to those of the profile.",
    )
    token_audiences: Globs | None = Field(
        default=None,
        description="Globs of token audiences that a job may project into its pods; api stands for that of the API "
        "server. Defaults to those of the profile.",
    )
    priority_classes: Globs | None = Field(
        default=None,
        description="Globs of priority classes that a job may use. The classes system-* of Kubernetes are never "
        "allowed. Defaults to those of the profile.",
    )
    env: Globs | None = Field(
        default=None, description="Globs of environment variables that a job may set. Defaults to those of the profile."
    )
    mount_paths: Globs | None = Field(
        default=None,
        description="Globs of folders at which a job may mount volumes; * matches / as well. Folders of the image and "
        "of the operator are never allowed. Defaults to those of the profile.",
    )
    annotations: Globs | None = Field(
        default=None,
        description="Globs of annotations that a job may set on its pods. Defaults to those of the profile.",
    )
    gateways: Globs | None = Field(
        default=None,
        description="Globs of Gateways that may lead requests to a job's endpoint, as the job writes them: NAME or "
        "NAMESPACE/NAME. A Gateway's listeners allow namespaces and host names of their own. Defaults to those of the "
        "profile.",
    )
    max_nodes: Count | None = Field(
        default=None, description="Maximum number of nodes of a job. If unset, there is no limit."
    )
    max_gpus: NonNegative | None = Field(
        default=None, description="Maximum number of GPUs of a job over all its nodes. If unset, there is no limit."
    )
    max_workers: Count | None = Field(
        default=None, description="Maximum number of workers that prepare or predict. If unset, there is no limit."
    )
    max_storage: Quantity | None = Field(
        default=None,
        description="Maximum size of a claim created for a job: its workspace, or a volume of one of its pods, e.g. "
        "500Gi. If unset, there is no limit.",
    )
    max_cost: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Maximum cost of a job, in `currency`, at the prices below. A job is refused if its estimate is "
        "higher or its nodes have no price, and is stopped with a checkpoint once it has cost this much. "
        "If unset, there is no limit.",
    )

    def names(self, which: AllowedNames) -> tuple[str, ...]:
        """Return the globs of one list: its own, or else the profile's."""
        configured: tuple[str, ...] | None = getattr(self, which)
        return PROFILES[self.profile][which] if configured is None else configured
