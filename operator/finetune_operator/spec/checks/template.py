"""Rules of `spec.template`: contents that Kubernetes refuses, that escape confinement, or that break the trainer.

Kubernetes' own objects are read by the models of `pod_types`, so that a misspelt key is reported here and not by a pod
that never starts. Also refused are: names, folders and variables that the trainer's pods use already, whatever
PodSecurity `restricted` refuses, tokens for the operator's own audience, and secrets in plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

from pydantic import BaseModel, JsonValue

from finetune_operator.spec.checks.field_checks import read_fields, without_nulls
from finetune_operator.spec.checks.syntax import (
    LABEL_KEY_RULE,
    LABEL_VALUE_RULE,
    is_label_key,
    is_label_value,
    label_problems,
    normal_folder,
)
from finetune_operator.spec.fields.field_values import Path
from finetune_operator.spec.fields.shapes import Shape, shape_of
from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.problems import (
    HIDDEN,
    Problem,
    Reason,
    describe_value,
    format_path,
    holds_secret,
    is_secret_name,
)
from finetune_operator.spec.quantities import parse_quantity, size_hint, too_small_rule
from finetune_operator.spec.types import FineTuneJobSpec, SecretKeySpec, TemplateSpec
from finetune_operator.spec.types.pod_types import Affinity, EnvVar, PodSecurityContext, Volume, VolumeMount
from finetune_operator.spec.types.selector_types import Toleration

Model = TypeVar("Model", bound=BaseModel)

PROGRESS_AUDIENCE = "finetune.dev/progress"
"""Audience of the tokens with which pods report progress; a job must not request them itself."""
RESERVED_ENV = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("PYTHONUNBUFFERED", "PYTHONSAFEPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"),
        *("JOB_COMPLETION_INDEX", "HOME", "HF_HOME"),
        *(name for launcher in SUPPORTED for name in launcher.reserved.env),
    }
)
RESERVED_ENV_PREFIXES = (
    *("MASTER_", "PET_", "TORCHELASTIC_"),
    *(prefix for launcher in SUPPORTED for prefix in launcher.reserved.env_prefixes),
    *("KUBEFLOW_TRAINER_", "FINETUNE_"),
)
TOKEN_ENV = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
RESERVED_VOLUMES = frozenset(
    {
        *("config", "workspace", "cache", "shm", "shared-memory", "tmp", "progress-token", "offload"),
        *(name for launcher in SUPPORTED for name in launcher.reserved.volumes),
    }
)
_LEAST_VOLUME = "1Mi"
RESERVED_VOLUME_PREFIX = "claim-"
CODE_ENV = frozenset({"LD_PRELOAD", "LD_AUDIT", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "BASH_ENV", "PATH"})
"""Variables that decide which code runs in the trainer's place."""
NO_SECRET_ENV = frozenset({"PWD", "OLDPWD"})
FLAGS = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off", "none"})
REFUSED_ANNOTATIONS = (
    *("container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/"),
    *("container.seccomp.security.alpha.kubernetes.io/", "k8s.v1.cni.cncf.io/", "v1.multus-cni.io/"),
    *("io.kubernetes.cri-o.", "security.alpha.kubernetes.io/"),
)
"""Prefixes of annotations that loosen a pod's confinement, or give it another network."""
SIDECAR_ANNOTATIONS: Mapping[str, str] = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "consul.hashicorp.com/connect-inject": "false",
    "kuma.io/sidecar-injection": "disabled",
    "vault.hashicorp.com/agent-inject": "false",
    "dapr.io/enabled": "false",
}
"""Annotations that inject another container into the pod, except with this value."""
SYSTEM_FOLDERS = (
    *("/bin", "/boot", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/root", "/sbin", "/src"),
    *("/usr", "/var"),
)
"""Folders of the image's code, or of settings that select it."""
RESERVED_FOLDERS = (
    *("/etc/finetune", "/workspace", "/cache", "/claims", "/offload", "/tmp", "/home/mpiuser", "/etc/mpi"),
    *("/dev", "/proc", "/sys", "/run/secrets", "/var/run/secrets"),
)
REFUSED_SOURCES = frozenset(
    {
        *("hostPath", "gcePersistentDisk", "awsElasticBlockStore", "gitRepo", "nfs", "iscsi", "glusterfs", "rbd"),
        *("flexVolume", "cinder", "cephfs", "flocker", "fc", "azureFile", "vsphereVolume", "quobyte", "azureDisk"),
        *("portworxVolume", "photonPersistentDisk", "scaleIO", "storageos", "image"),
    }
)
"""Volume sources of core/v1 that PodSecurity `restricted` does not allow."""
ALLOWED_SOURCES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
)
PROJECTED_SOURCES = ("configMap", "secret", "downwardAPI", "serviceAccountToken")
VALUE_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef")
REFUSED_CONTEXT: Mapping[str, str] = {
    **dict.fromkeys(
        ("privileged", "allowPrivilegeEscalation", "capabilities", "procMount"),
        "is a setting of the container, which the operator controls",
    ),
    "readOnlyRootFilesystem": "is a setting of the container, which the operator controls",
    "sysctls": "would change the node's kernel",
    "windowsOptions": "is for Windows; trainers run on Linux",
}


def template_problems(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield all problems of `spec.template`."""
    template, path = spec.template, ("spec", "template")
    yield from _labels(template, path)
    yield from label_problems(
        template.node_selector, (*path, "nodeSelector"), "write the label as kubectl get nodes --show-labels prints it"
    )
    for index, toleration in enumerate(template.tolerations):
        yield from _toleration(toleration, (*path, "tolerations", index))
    if template.affinity:
        yield from _affinity(dict(template.affinity), (*path, "affinity"))
    yield from _env(template.env, spec.secrets.hub_token, (*path, "env"))
    yield from _volumes(template, path)
    if template.security_context:
        yield from _security_context(dict(template.security_context), (*path, "securityContext"))
    names = [secret.name for secret in template.image_pull_secrets]
    yield from _duplicates(names, (*path, "imagePullSecrets"))


def _read(model: type[Model], value: JsonValue, path: Path) -> tuple[Model | None, tuple[Problem, ...]]:
    """Return the object without its faults, and their problems."""
    shape = partial(_shape, model)
    read = read_fields(model, shape, without_nulls(value, shape), path)
    return read.value, read.problems


@cache
def _shape(model: type[BaseModel]) -> Shape:
    return shape_of(model)


def _forbidden(path: Path, value: object, rule: str, hint: str, reason: Reason = "Forbidden") -> Problem:
    return Problem(format_path(path), None if value is None else describe_value(value, path), rule, hint, reason=reason)


def _duplicates(names: Sequence[str | None], path: Path, field: str = "name") -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name is not None and name in names[:index]:
            yield _forbidden(
                (*path, index, field), name, "is a duplicate", "remove it, or use another name", "Duplicate"
            )


def _exactly_one(value: BaseModel | None, path: Path, names: Sequence[str]) -> Iterator[Problem]:
    """Check that exactly one field of a Kubernetes union is set."""
    if value is None:
        return
    given = [name for name in value.model_dump(by_alias=True, exclude_none=True) if name in names]
    if len(given) != 1:
        excess = f"; {', '.join(given)} are set" if given else ""
        rule = f"takes exactly one of {', '.join(names)}{excess}"
        yield Problem(format_path(path), None, rule, "keep one of them" if given else "set one of them")


# ------------------------------------------------------------------------------------------------ labels and scheduling


def _labels(template: TemplateSpec, path: Path) -> Iterator[Problem]:
    yield from label_problems(template.labels, (*path, "labels"), "move longer text to spec.template.annotations")
    for key in template.annotations:
        # An annotation's key has a label's form, except that capital letters are allowed.
        full = (*path, "annotations", key)
        if not is_label_key(key.lower()):
            yield Problem(format_path(full), None, LABEL_KEY_RULE, "change the key")
        elif key.startswith(REFUSED_ANNOTATIONS):
            yield _forbidden(
                full, None, "would weaken the pod's isolation, or attach it to another network", "leave it out"
            )
        elif key in SIDECAR_ANNOTATIONS and template.annotations[key] != SIDECAR_ANNOTATIONS[key]:
            yield _forbidden(
                full, template.annotations[key], "would inject a sidecar container, so that the pod never completes",
                f'leave it out, or set it to "{SIDECAR_ANNOTATIONS[key]}"',
            )  # fmt: skip


def _toleration(value: JsonValue, path: Path) -> Iterator[Problem]:
    toleration, problems = _read(Toleration, value, path)
    yield from problems
    if toleration is not None and not problems:
        yield from toleration_problems(toleration, path)


def toleration_problems(toleration: Toleration, path: Path) -> Iterator[Problem]:
    """Yield contradictions in the toleration at `path`."""
    if toleration.key and not is_label_key(toleration.key):
        yield Problem(format_path((*path, "key")), describe_value(toleration.key), LABEL_KEY_RULE, "change the key")
    if not toleration.key and toleration.operator != "Exists":
        yield Problem(
            format_path((*path, "operator")), describe_value(toleration.operator), "must be Exists if there is no key",
            "add the taint's key, or set operator to Exists",
        )  # fmt: skip
    if toleration.operator == "Exists" and toleration.value:
        yield Problem(
            format_path((*path, "value")), describe_value(toleration.value), "is not allowed with operator Exists",
            "leave it out, or set operator to Equal",
        )  # fmt: skip
    if toleration.value and not is_label_value(toleration.value):
        yield Problem(format_path((*path, "value")), describe_value(toleration.value), LABEL_VALUE_RULE, "change it")
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        yield Problem(
            format_path((*path, "tolerationSeconds")), describe_value(toleration.toleration_seconds),
            "needs effect NoExecute", "set effect to NoExecute, or leave it out",
        )  # fmt: skip


def _affinity(value: JsonValue, path: Path) -> Iterator[Problem]:
    affinity, problems = _read(Affinity, value, path)
    yield from problems
    if affinity is not None and not problems:
        yield from _requirements(affinity.model_dump(by_alias=True, exclude_none=True), path)


def _requirements(value: object, path: Path) -> Iterator[Problem]:
    """Yield contradictory keys, operators and values anywhere in the affinity."""
    match value:
        case {"key": str(key), "operator": str(operator), **rest}:
            values = rest.get("values", ())
            assert isinstance(values, list | tuple), "the model has read a list of texts"
            yield from _requirement(key, operator, values, path)
        case dict():
            for name, inner in value.items():
                if name == "matchLabels":
                    yield from label_problems(inner, (*path, name), "use the label's value on the selected objects")
                elif name == "topologyKey" and not is_label_key(inner):
                    yield Problem(format_path((*path, name)), describe_value(inner), LABEL_KEY_RULE, "change the key")
                else:
                    yield from _requirements(inner, (*path, name))
        case list() | tuple():
            for index, inner in enumerate(value):
                yield from _requirements(inner, (*path, index))


def _requirement(key: str, operator: str, values: Sequence[str], path: Path) -> Iterator[Problem]:
    where = format_path((*path, "values"))
    on_field = "matchFields" in path
    if not on_field and not is_label_key(key):
        yield Problem(format_path((*path, "key")), describe_value(key), LABEL_KEY_RULE, "change the key")
    if on_field and (key != "metadata.name" or operator not in ("In", "NotIn") or len(values) != 1):
        yield Problem(
            format_path(path),
            None,
            "matchFields supports only metadata.name with In or NotIn and one value",
            "change it, or use matchExpressions",
        )
    elif operator in ("Exists", "DoesNotExist") and values:
        yield Problem(where, describe_value(values), f"is not allowed with operator {operator}", "leave it out")
    elif operator in ("In", "NotIn") and not values:
        yield Problem(where, None, f"is required for operator {operator}", "add at least one value", reason="Required")
    elif operator in ("Gt", "Lt") and not (len(values) == 1 and values[0].lstrip("+-").isdecimal()):
        yield Problem(
            where, describe_value(values), f"must be one quoted integer for operator {operator}", "write one number"
        )
    elif operator in ("In", "NotIn") and not on_field:
        for index, text in enumerate(values):
            if not is_label_value(text):
                full = (*path, "values", index)
                yield Problem(format_path(full), describe_value(text), LABEL_VALUE_RULE, "change it")


# ---------------------------------------------------------------------------------------------------------- environment


def _env(given: Sequence[JsonValue], hub_token: SecretKeySpec | None, path: Path) -> Iterator[Problem]:
    names: list[str | None] = []
    for index, value in enumerate(given):
        full = (*path, index)
        variable, problems = _read(EnvVar, value, full)
        yield from problems
        names.append(None if variable is None or problems else variable.name)
        if variable is not None and not problems:
            yield from _env_name(variable, hub_token, (*full, "name"))
            yield from _env_value(variable, full)
    yield from _duplicates(names, path)


def _env_name(variable: EnvVar, hub_token: SecretKeySpec | None, path: Path) -> Iterator[Problem]:
    name = variable.name
    if name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES):
        yield _forbidden(
            path, name, "is set by the operator or the launcher", "use another name, or leave the variable out"
        )
    elif name in CODE_ENV:
        yield _forbidden(
            path,
            name,
            "controls which code runs in the image",
            "leave the variable out, or set spec.image to your own image",
        )
    elif name in TOKEN_ENV and hub_token is not None:
        yield _forbidden(path, name, "is set from spec.secrets.hubToken", "remove one of the two")
    elif name in TOKEN_ENV and variable.value:
        yield Problem(
            format_path((*path[:-1], "value")), HIDDEN, "a job must not contain a token in plain text",
            "put it into a Secret, and reference that in spec.secrets.hubToken", reason="Forbidden",
        )  # fmt: skip


def _env_value(variable: EnvVar, path: Path) -> Iterator[Problem]:
    if variable.value and variable.value_from is not None:
        yield Problem(
            format_path((*path, "valueFrom")), None, "is not allowed together with value", "remove one of the two"
        )
    if variable.value and _is_credential(variable.name, variable.value):
        yield Problem(
            format_path((*path, "value")), HIDDEN, f"{variable.name} is the name of a credential, which a job must not "
            "contain in plain text", "put it into a Secret, and reference that in valueFrom.secretKeyRef",
            reason="Forbidden",
        )  # fmt: skip
    elif variable.value and holds_secret(variable.value):
        yield Problem(
            format_path((*path, "value")), HIDDEN, "looks like a credential, which a job must not contain",
            "put it into a Secret, and reference that in valueFrom.secretKeyRef", reason="Forbidden",
        )  # fmt: skip
    yield from _exactly_one(variable.value_from, (*path, "valueFrom"), VALUE_SOURCES)


def _is_credential(name: str, value: str) -> bool:
    """Return True if the name of the variable marks its value as a credential, e.g. `*_PASSWORD`, `*_API_KEY` or
    `AWS_SECRET_ACCESS_KEY`. Exceptions are paths (to a file of a mounted Secret) and flags such as
    `HF_HUB_DISABLE_IMPLICIT_TOKEN=1`. Hub tokens have a rule of their own.
    """
    by_name = is_secret_name(name) and name not in NO_SECRET_ENV and name not in TOKEN_ENV
    return by_name and not value.startswith("/") and value.lower() not in FLAGS


# -------------------------------------------------------------------------------------------------------------- volumes


def _volumes(template: TemplateSpec, path: Path) -> Iterator[Problem]:
    names: list[str | None] = []
    for index, given in enumerate(template.volumes):
        full = (*path, "volumes", index)
        name = given.get("name")
        names.append(name if isinstance(name, str) else None)
        yield from _volume(dict(given), full)
    yield from _duplicates(names, (*path, "volumes"))
    folders: list[str | None] = []
    for index, given in enumerate(template.volume_mounts):
        full = (*path, "volumeMounts", index)
        mount, problems = _read(VolumeMount, dict(given), full)
        yield from problems
        folders.append(None if mount is None or problems else normal_folder(mount.mount_path))
        if mount is not None and not problems:
            yield from _mount(mount, names, full)
    yield from _duplicates(folders, (*path, "volumeMounts"), "mountPath")


def _volume(given: dict[str, JsonValue], path: Path) -> Iterator[Problem]:
    allowed = ", ".join(ALLOWED_SOURCES)
    refused = sorted(REFUSED_SOURCES & given.keys())
    for source in refused:
        yield _forbidden(
            (*path, source),
            given.pop(source),
            "is a volume type that PodSecurity restricted does not allow",
            f"use {allowed}",
        )
    volume, problems = _read(Volume, given, path)
    yield from problems
    if volume is None or problems:
        return
    if volume.name in RESERVED_VOLUMES or volume.name.startswith(RESERVED_VOLUME_PREFIX):
        yield _forbidden(
            (*path, "name"), volume.name, "is reserved for a volume of the operator", "choose another name"
        )
    if not refused:
        yield from _exactly_one(volume, path, ALLOWED_SOURCES)
    yield from _sizes(volume, path)
    for index, projected in enumerate(volume.projected.sources if volume.projected else ()):
        full = (*path, "projected", "sources", index)
        yield from _exactly_one(projected, full, PROJECTED_SOURCES)
        token = projected.service_account_token
        if token is not None and token.audience == PROGRESS_AUDIENCE:
            yield _forbidden(
                (*full, "serviceAccountToken", "audience"),
                PROGRESS_AUDIENCE,
                "is reserved for the operator's own tokens",
                "use the audience of your own service",
            )


def _sizes(volume: Volume, path: Path) -> Iterator[Problem]:
    sizes: dict[Path, str | None] = {}
    if volume.empty_dir is not None:
        sizes["emptyDir", "sizeLimit"] = volume.empty_dir.size_limit
    if volume.ephemeral is not None:
        claim = volume.ephemeral.volume_claim_template.spec
        storage = ("ephemeral", "volumeClaimTemplate", "spec", "resources", "requests", "storage")
        sizes[storage] = claim.resources.requests.storage
    for place, size in sizes.items():
        # emptyDir: 0 means no limit.
        if size is not None and 0 < parse_quantity(size) < parse_quantity(_LEAST_VOLUME):
            yield Problem(
                format_path((*path, *place)),
                describe_value(size),
                too_small_rule(_LEAST_VOLUME),
                size_hint(size, _LEAST_VOLUME, "10Gi"),
            )


def _mount(mount: VolumeMount, volumes: Sequence[str | None], path: Path) -> Iterator[Problem]:
    if mount.name not in volumes:
        named = ", ".join(name for name in volumes if name) or "none"
        yield Problem(
            format_path((*path, "name")),
            describe_value(mount.name),
            "must be the name of a volume in spec.template.volumes",
            f"add that volume, or use one of these: {named}",
        )
    folder = normal_folder(mount.mount_path)
    where = (*path, "mountPath")
    if ".." in mount.mount_path.split("/"):
        yield Problem(
            format_path(where), describe_value(mount.mount_path), "must not contain ..", "write the path without .."
        )
    elif reserved := [other for other in RESERVED_FOLDERS if _overlap(folder, other)]:
        yield _forbidden(
            where,
            mount.mount_path,
            f"overlaps {reserved[0]}, which the trainer uses",
            "choose another folder, e.g. /mnt",
        )
    elif system := [other for other in SYSTEM_FOLDERS if _overlap(folder, other)]:
        yield _forbidden(
            where, mount.mount_path, f"overlaps {system[0]}, which holds code and settings of the image",
            "choose another folder, e.g. below /mnt",
        )  # fmt: skip
    for field, text in (("subPath", mount.sub_path), ("subPathExpr", mount.sub_path_expr)):
        if text is not None and ".." in text.split("/"):
            yield Problem(
                format_path((*path, field)), describe_value(text), "must not contain ..", "write the path without .."
            )
    if mount.sub_path is not None and mount.sub_path_expr is not None:
        yield Problem(
            format_path((*path, "subPathExpr")), None, "is not allowed together with subPath", "remove one of the two"
        )


def _overlap(folder: str, other: str) -> bool:
    """Return True if one folder is or contains the other; a mount above one of our folders would hide it."""
    return folder == "/" or folder == other or folder.startswith(f"{other}/") or other.startswith(f"{folder}/")


# ------------------------------------------------------------------------------------------------------------- security


def _security_context(given: dict[str, JsonValue], path: Path) -> Iterator[Problem]:
    for name in [name for name in given if name in REFUSED_CONTEXT]:
        yield _forbidden((*path, name), given.pop(name), REFUSED_CONTEXT[name], "leave it out")
    for name, never in (("runAsUser", 0), ("runAsNonRoot", False)):
        if given.get(name) == never and isinstance(given[name], bool) == isinstance(never, bool):
            yield _forbidden(
                (*path, name), given.pop(name), "would run the trainer as root", "leave it out: the image has a user"
            )
    context, problems = _read(PodSecurityContext, given, path)
    yield from problems
    if context is None:
        return
    for name, profile in (("seccompProfile", context.seccomp_profile), ("appArmorProfile", context.app_armor_profile)):
        if profile is not None and (profile.type == "Localhost") != (profile.localhost_profile is not None):
            yield Problem(
                format_path((*path, name)), None, "localhostProfile is required for type Localhost, and only for it",
                "set both, or set type to RuntimeDefault",
            )  # fmt: skip
        if profile is not None and ".." in (profile.localhost_profile or "").split("/"):
            yield _forbidden(
                (*path, name, "localhostProfile"), profile.localhost_profile, "must not contain ..",
                "use a path below the kubelet's profile folder",
            )  # fmt: skip
