"""Parts of a pod that `spec.template` may hold, with Kubernetes' own fields.

The CRD contains them, and the finetune command checks with them for faults that the API server would find much later,
in the pod, away from the file. Fields and values that PodSecurity `restricted` refuses are missing: `template.py` gives
the reasons. Fields are those of core/v1 in Kubernetes 1.30 to 1.36.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_operator.spec.types import (
    DATA_KEY_PATTERN,
    ENV_PATTERN,
    FOLDER_PATTERN,
    MAX_INT,
    RELATIVE_PATTERN,
    DnsLabel,
    ObjectName,
    Quantity,
    SpecModel,
)
from finetune_operator.spec.types.selector_types import LabelSelector, ShortText

Mode: TypeAlias = Annotated[int, Field(ge=0, le=0o777)]
DataKey: TypeAlias = Annotated[str, StringConstraints(pattern=DATA_KEY_PATTERN, max_length=253)]
Id: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]
RelativePath: TypeAlias = Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=1024)]
AccessMode: TypeAlias = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]

# ---------------------------------------------------------------------------------------------------------- environment


class FieldRef(SpecModel):
    """A field of the pod."""

    api_version: Literal["v1"] = "v1"
    field_path: ShortText


class ResourceFieldRef(SpecModel):
    """A request or limit of a container."""

    container_name: ShortText | None = None
    resource: ShortText
    divisor: Quantity | None = None


class KeyRef(SpecModel):
    """One key of a ConfigMap or Secret."""

    name: ObjectName
    key: DataKey
    optional: bool | None = None


class EnvVarSource(SpecModel):
    """Source of a value; exactly one."""

    field_ref: FieldRef | None = None
    resource_field_ref: ResourceFieldRef | None = None
    config_map_key_ref: KeyRef | None = None
    secret_key_ref: KeyRef | None = None


class EnvVar(SpecModel):
    """An environment variable."""

    name: Annotated[str, StringConstraints(pattern=ENV_PATTERN, max_length=1024)]
    value: Annotated[str, StringConstraints(max_length=32_768)] | None = None
    value_from: EnvVarSource | None = None


# -------------------------------------------------------------------------------------------------------------- volumes


class KeyToPath(SpecModel):
    """One key as a file."""

    key: DataKey
    path: RelativePath
    mode: Mode | None = None


class DownwardFile(SpecModel):
    """One field of the pod as a file."""

    path: RelativePath
    field_ref: FieldRef | None = None
    resource_field_ref: ResourceFieldRef | None = None
    mode: Mode | None = None


class ConfigMapVolume(SpecModel):
    """A ConfigMap as files."""

    name: ObjectName
    items: tuple[KeyToPath, ...] | None = None
    default_mode: Mode | None = None
    optional: bool | None = None


class SecretVolume(SpecModel):
    """A Secret as files."""

    secret_name: ObjectName
    items: tuple[KeyToPath, ...] | None = None
    default_mode: Mode | None = None
    optional: bool | None = None


class ClaimVolume(SpecModel):
    """A claim."""

    claim_name: ObjectName
    read_only: bool | None = None


class EmptyDirVolume(SpecModel):
    """A folder that lives as long as the pod."""

    medium: Literal["", "Memory"] | None = None
    size_limit: Quantity | None = None


class DownwardVolume(SpecModel):
    """Fields of the pod as files."""

    items: tuple[DownwardFile, ...] | None = None
    default_mode: Mode | None = None


class SecretName(SpecModel):
    """A Secret by its name."""

    name: ObjectName


class CsiVolume(SpecModel):
    """Volume of a CSI driver."""

    driver: ObjectName
    fs_type: ShortText | None = None
    node_publish_secret_ref: SecretName | None = None
    read_only: bool | None = None
    volume_attributes: dict[str, str] | None = None


class ClaimRequests(SpecModel):
    """The size of a claim."""

    storage: Quantity


class ClaimResources(SpecModel):
    """Resources of a claim."""

    requests: ClaimRequests


class ClaimSpec(SpecModel):
    """A claim that lives as long as the pod."""

    access_modes: tuple[AccessMode, ...] = Field(min_length=1)
    resources: ClaimResources
    storage_class_name: ObjectName | None = None
    volume_mode: Literal["Filesystem"] | None = None


class ClaimMetadata(SpecModel):
    """Labels and annotations of that claim."""

    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ClaimTemplate(SpecModel):
    """Claim to create."""

    metadata: ClaimMetadata | None = None
    spec: ClaimSpec


class EphemeralVolume(SpecModel):
    """Claim owned by the pod."""

    volume_claim_template: ClaimTemplate


class TokenFile(SpecModel):
    """A token of the service account as a file."""

    path: RelativePath
    audience: ShortText | None = None
    expiration_seconds: Annotated[int, Field(ge=600, le=2**32)] | None = None


class NamedFiles(SpecModel):
    """A ConfigMap or Secret among other sources."""

    name: ObjectName
    items: tuple[KeyToPath, ...] | None = None
    optional: bool | None = None


class DownwardFiles(SpecModel):
    """Fields of the pod among other sources."""

    items: tuple[DownwardFile, ...] | None = None


class ProjectedSource(SpecModel):
    """One of several sources of files; exactly one of these."""

    config_map: NamedFiles | None = None
    secret: NamedFiles | None = None
    downward_api: DownwardFiles | None = Field(default=None, alias="downwardAPI")
    service_account_token: TokenFile | None = None


class ProjectedVolume(SpecModel):
    """Files of several sources in one folder."""

    sources: tuple[ProjectedSource, ...]
    default_mode: Mode | None = None


class Volume(SpecModel):
    """A volume of one of the kinds that PodSecurity `restricted` allows."""

    name: DnsLabel
    config_map: ConfigMapVolume | None = None
    csi: CsiVolume | None = None
    downward_api: DownwardVolume | None = Field(default=None, alias="downwardAPI")
    empty_dir: EmptyDirVolume | None = None
    ephemeral: EphemeralVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    projected: ProjectedVolume | None = None
    secret: SecretVolume | None = None


class VolumeMount(SpecModel):
    """Mount point of a volume in the trainer's container."""

    name: DnsLabel
    mount_path: Annotated[str, StringConstraints(pattern=FOLDER_PATTERN, max_length=1024)]
    sub_path: RelativePath | None = None
    sub_path_expr: RelativePath | None = None
    read_only: bool | None = None
    mount_propagation: Literal["None", "HostToContainer"] | None = None
    """Mount propagation. Bidirectional needs a privileged container."""


# ----------------------------------------------------------------------------------------------------------- scheduling


class NodeRequirement(SpecModel):
    """A condition on a label or field of a node."""

    key: ShortText
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[str, ...] | None = None


class NodeTerm(SpecModel):
    """Conditions that must all hold."""

    match_expressions: tuple[NodeRequirement, ...] | None = None
    match_fields: tuple[NodeRequirement, ...] | None = None


class NodeTerms(SpecModel):
    """Terms of which at least one must hold."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(min_length=1)


class PreferredNodeTerm(SpecModel):
    """Preferred term with its weight."""

    weight: Annotated[int, Field(ge=1, le=100)]
    preference: NodeTerm


class NodeAffinity(SpecModel):
    """Selected nodes."""

    required: NodeTerms | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: tuple[PreferredNodeTerm, ...] | None = Field(
        default=None, alias="preferredDuringSchedulingIgnoredDuringExecution"
    )


class PodTerm(SpecModel):
    """Pods to be near to, or away from."""

    label_selector: LabelSelector | None = None
    topology_key: ShortText
    namespaces: tuple[DnsLabel, ...] | None = None
    namespace_selector: LabelSelector | None = None


class WeightedPodTerm(SpecModel):
    """Preferred term on pods with its weight."""

    weight: Annotated[int, Field(ge=1, le=100)]
    pod_affinity_term: PodTerm


class PodAffinity(SpecModel):
    """Selected other pods."""

    required: tuple[PodTerm, ...] | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: tuple[WeightedPodTerm, ...] | None = Field(
        default=None, alias="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(SpecModel):
    """Rules for the node of a pod."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


# ------------------------------------------------------------------------------------------------------------- security


class Profile(SpecModel):
    """A seccomp or AppArmor profile; Unconfined is not among those that PodSecurity `restricted` allows."""

    type: Literal["RuntimeDefault", "Localhost"]
    localhost_profile: RelativePath | None = None


class SeLinuxOptions(SpecModel):
    """SELinux; user and role are not the job's to choose."""

    level: str | None = None
    type: Literal["", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"] | None = None


class PodSecurityContext(SpecModel):
    """Settings that PodSecurity `restricted` allows."""

    run_as_user: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    run_as_group: Id | None = None
    run_as_non_root: Literal[True] | None = None
    fs_group: Id | None = None
    fs_group_change_policy: Literal["Always", "OnRootMismatch"] | None = None
    supplemental_groups: tuple[Id, ...] | None = None
    supplemental_groups_policy: Literal["Merge", "Strict"] | None = None
    seccomp_profile: Profile | None = None
    app_armor_profile: Profile | None = None
    se_linux_options: SeLinuxOptions | None = None
