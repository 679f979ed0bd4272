"""Objects of the cluster that a job names, each with its field: claims, Secrets, ConfigMaps, accounts and classes.

Objects of Kubernetes in `template` are taken as written: other checks report their faults. A path begins below `spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.types import FineTuneJobSpec

CLAIM_SCHEME = "pvc://"
_PART = re.compile(r"[^.\[\]]+")


def service_accounts(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Yield the service account of the pods."""
    if spec.template.service_account_name is not None:
        yield ("template", "serviceAccountName"), spec.template.service_account_name


def priority_classes(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Yield the priority class of the pods."""
    if spec.run_policy.priority_class_name is not None:
        yield ("runPolicy", "priorityClassName"), spec.run_policy.priority_class_name


def storage_classes(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Yield the storage classes of the claims that are created for the job."""
    if spec.storage.storage_class_name is not None and spec.storage.workspace is None:
        yield ("storage", "storageClassName"), spec.storage.storage_class_name
    claim = ("ephemeral", "volumeClaimTemplate", "spec")
    yield from in_volumes(spec.template.volumes, (*claim, "storageClassName"))


def named_uris(spec: FineTuneJobSpec) -> Iterator[tuple[str, str]]:
    """Return every URI of the job by its path."""
    predict = spec.predict
    uris = {
        "spec.model.uri": spec.model.uri,
        "spec.dataset.uri": spec.dataset.uri if spec.dataset else None,
        "spec.storage.workspace": spec.storage.workspace,
        "spec.storage.cache": spec.storage.cache,
        "spec.checkpoints.uri": spec.checkpoints.uri,
        "spec.predict.dataset.uri": predict.dataset.uri if predict and predict.dataset else None,
        "spec.predict.output": predict.output if predict else None,
    }
    for at, adapter in enumerate(() if spec.endpoint is None else spec.endpoint.adapters):
        uris[f"spec.endpoint.adapters[{at}].uri"] = adapter.uri
    return ((path, uri) for path, uri in uris.items() if uri is not None)


def claims(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Return every claim that the job names; not those created for it."""
    for path, uri in named_uris(spec):
        if uri.startswith(CLAIM_SCHEME):
            parts = _PART.findall(path)[1:]
            claim = uri.removeprefix(CLAIM_SCHEME).partition("/")[0]
            yield tuple(int(part) if part.isdecimal() else part for part in parts), claim
    yield from in_volumes(spec.template.volumes, ("persistentVolumeClaim", "claimName"))


def config_maps(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Yield every ConfigMap that the job names."""
    reference = ("valueFrom", "configMapKeyRef", "name")
    for index, variable in enumerate(spec.template.env):
        name = value_at(variable, reference)
        if isinstance(name, str):
            yield ("template", "env", index, *reference), name
    yield from in_volumes(spec.template.volumes, ("configMap", "name"))
    for path, source in projected_sources(spec.template.volumes):
        name = value_at(source, ("configMap", "name"))
        if isinstance(name, str):
            yield (*path, "configMap", "name"), name


def in_volumes(volumes: Sequence[Mapping[str, JsonValue]], reference: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Return the value of each volume at `reference`, if it is text."""
    for index, volume in enumerate(volumes):
        name = value_at(volume, reference)
        if isinstance(name, str):
            yield ("template", "volumes", index, *reference), name


def secrets(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Yield every Secret that the job names."""
    if spec.secrets.hub_token is not None:
        yield ("secrets", "hubToken", "name"), spec.secrets.hub_token.name
    if spec.secrets.storage is not None:
        yield ("secrets", "storage", "name"), spec.secrets.storage.name
    if spec.checkpoints.signing_key is not None:
        yield ("checkpoints", "signingKey", "name"), spec.checkpoints.signing_key.name
    if spec.endpoint is not None and spec.endpoint.token is not None:
        yield ("endpoint", "token", "name"), spec.endpoint.token.name
    for index, secret in enumerate(spec.template.image_pull_secrets):
        yield ("template", "imagePullSecrets", index, "name"), secret.name
    for place, items, references in (
        ("env", spec.template.env, (("valueFrom", "secretKeyRef", "name"),)),
        ("volumes", spec.template.volumes, (("secret", "secretName"), ("csi", "nodePublishSecretRef", "name"))),
    ):
        for index, item in enumerate(items):
            for reference in references:
                name = value_at(item, reference)
                if isinstance(name, str):
                    yield ("template", place, index, *reference), name
    for path, source in projected_sources(spec.template.volumes):
        name = value_at(source, ("secret", "name"))
        if isinstance(name, str):
            yield (*path, "secret", "name"), name


def projected_sources(volumes: Sequence[Mapping[str, JsonValue]]) -> Iterator[tuple[Path, Mapping[str, JsonValue]]]:
    """Yield the sources of projected volumes."""
    for index, volume in enumerate(volumes):
        sources = value_at(volume, ("projected", "sources"))
        for number, source in enumerate(sources if isinstance(sources, list) else ()):
            if isinstance(source, dict):
                yield ("template", "volumes", index, "projected", "sources", number), source
