"""Objects of a cluster that a job names and nobody creates for it, compared with those that exist.

Pure: the caller reads each object with one GET, as far as its rights go, and reduces it to `Facts` at once. Of a Secret
only the names of its keys are kept, never a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import JsonValue

from finetune_operator.jobs.render.claims import needs_workspace
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.plan.types.names import JobNames
from finetune_operator.spec.checks import named_objects
from finetune_operator.spec.checks.shared_claims import WORKSPACE, claim_problem
from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.problems import Problem, format_path
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobSpec

NamedKind: TypeAlias = Literal[
    "PersistentVolumeClaim", "ServiceAccount", "StorageClass", "PriorityClass", "ConfigMap", "Secret"
]
_CLUSTER_WIDE: tuple[NamedKind, ...] = ("StorageClass", "PriorityClass")
_CREATE: Mapping[NamedKind, str] = {
    "ServiceAccount": "kubectl -n {namespace} create serviceaccount {name}",
    "Secret": "kubectl -n {namespace} create secret generic {name} --from-literal=KEY=VALUE",
    "ConfigMap": "kubectl -n {namespace} create configmap {name} --from-file=FILE",
}
_MOST_KEYS = 5
"""Keys of an object that a message lists."""


@dataclass(frozen=True)
class NamedObject:
    """An object by its name in a field."""

    kind: NamedKind
    name: str
    path: Path
    """Field below `spec`; that of the settings, for one that they name."""
    keys: tuple[str, ...] = ()
    """Keys of its data that pods read."""
    by_settings: bool = False
    created: bool = False
    """True for the job's own claim, which the operator creates if an earlier job of this name has left none."""

    @property
    def field(self) -> str:
        """The field for a message."""
        return f"{format_path(self.path)} of the settings" if self.by_settings else format_path(("spec", *self.path))


@dataclass(frozen=True)
class Facts:
    """Facts of an object that exists."""

    keys: frozenset[str] = frozenset()
    access_modes: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> Facts:
        """Return the facts of a manifest, without any value."""
        keys = {key for part in ("data", "binaryData") if isinstance(held := manifest.get(part), dict) for key in held}
        modes = value_at(manifest, ("spec", "accessModes"))
        return cls(frozenset(keys), tuple(map(str, modes)) if isinstance(modes, list) else ())


@dataclass(frozen=True)
class Unread:
    """An object that could not be read."""

    reason: str


Answers: TypeAlias = Mapping[tuple[NamedKind, str], Facts | Unread | None]
"""Answer for each kind and name; None: it does not exist."""


@dataclass(frozen=True)
class LookUp:
    """Result for a job."""

    conflicts: tuple[Problem, ...] = ()
    """Problems that no later object solves: the job has to change."""
    absent: tuple[Problem, ...] = ()
    """Objects and keys that do not exist: the job's pods wait for them."""
    unread: tuple[str, ...] = ()
    """Objects that could not be read, with the reason."""
    existing: tuple[str, ...] = ()
    """Objects that are as the job needs them."""


def named_by(job: FineTuneJob, settings: Settings) -> tuple[NamedObject, ...]:
    """Return the objects that the job, or the settings for its pods, name."""
    spec, defaults = job.spec, settings.defaults
    written: JsonValue = spec.model_dump(mode="json", by_alias=True)
    named = [*_in_spec(spec, written)]
    if spec.storage.workspace is None and needs_workspace(spec):
        named.append(NamedObject("PersistentVolumeClaim", JobNames.of(job.name).claim, WORKSPACE, created=True))
        if spec.storage.storage_class_name is None and defaults.storage_class_name is not None:
            path: Path = ("defaults", "storageClassName")
            named.append(NamedObject("StorageClass", defaults.storage_class_name, path, by_settings=True))
    if spec.run_policy.priority_class_name is None and defaults.priority_class_name is not None:
        path = ("defaults", "priorityClassName")
        named.append(NamedObject("PriorityClass", defaults.priority_class_name, path, by_settings=True))
    for index, secret in enumerate(defaults.image_pull_secrets):
        path = ("defaults", "imagePullSecrets", index, "name")
        named.append(NamedObject("Secret", secret.name, path, by_settings=True))
    engines = (spec.preparation.engine, None if spec.predict is None else spec.predict.engine)
    if "spark" in engines and settings.spark.service_account_name is not None:
        path = ("spark", "serviceAccountName")
        named.append(NamedObject("ServiceAccount", settings.spark.service_account_name, path, by_settings=True))
    return tuple(named)


def _in_spec(spec: FineTuneJobSpec, written: JsonValue) -> Iterator[NamedObject]:
    """Yield the objects of the spec, without those that pods can do without (`optional`)."""
    by_kind: Mapping[NamedKind, Iterator[tuple[Path, str]]] = {
        "PersistentVolumeClaim": named_objects.claims(spec),
        "ServiceAccount": named_objects.service_accounts(spec),
        "StorageClass": named_objects.storage_classes(spec),
        "PriorityClass": named_objects.priority_classes(spec),
        "ConfigMap": named_objects.config_maps(spec),
        "Secret": named_objects.secrets(spec),
    }
    for kind, names in by_kind.items():
        for path, name in names:
            reference = value_at(written, path[:-1])
            if not isinstance(reference, dict):
                yield NamedObject(kind, name, path)
            elif not reference.get("optional"):
                yield NamedObject(kind, name, path, _keys(reference))


def _keys(reference: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """Return the keys of a reference to a Secret or ConfigMap; none: all that it has."""
    key, items = reference.get("key"), reference.get("items")
    if isinstance(key, str):
        return (key,)
    return tuple(str(item["key"]) for item in items if isinstance(item, dict)) if isinstance(items, list) else ()


def compare(job: FineTuneJob, named: Iterable[NamedObject], answers: Answers, namespace: str) -> LookUp:
    """Return how the objects that exist fit the job; `answers` has one for each of `named`."""
    conflicts: list[Problem] = []
    absent: list[Problem] = []
    existing: dict[str, None] = {}
    unread: dict[str, None] = {}
    for one in named:
        text = f"{one.kind} {one.name}"
        facts = answers[one.kind, one.name]
        if isinstance(facts, Unread):
            unread[f"{text}: {facts.reason}"] = None
        elif facts is None:
            if not one.created:
                absent.append(_absent(one, namespace))
        elif missing := [key for key in one.keys if key not in facts.keys]:
            absent.append(_without_key(one, missing[0], facts))
        elif conflict := _conflict(job.spec, one, facts):
            conflicts.append(conflict)
        else:
            existing[text] = None
    return LookUp(tuple(conflicts), tuple(absent), tuple(unread), tuple(existing))


def _conflict(spec: FineTuneJobSpec, one: NamedObject, facts: Facts) -> Problem | None:
    return claim_problem(spec, one.path, one.name, facts.access_modes) if one.kind == "PersistentVolumeClaim" else None


def _absent(one: NamedObject, namespace: str) -> Problem:
    where = "the cluster" if one.kind in _CLUSTER_WIDE else f"namespace {namespace}"
    create = _CREATE.get(one.kind)
    hint = "create it" if create is None else f"create it: {create.format(namespace=namespace, name=one.name)}"
    return Problem(
        one.field, f'"{one.name}"', f"{where} has no {one.kind} of this name", f"{hint}, or name another one"
    )


def _without_key(one: NamedObject, key: str, facts: Facts) -> Problem:
    keys = sorted(facts.keys)
    listed = ", ".join(keys[:_MOST_KEYS]) + (f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else "")
    rule = f'{one.kind} "{one.name}" has no such key; it has {listed or "none"}'
    return Problem(one.field, f'"{key}"', rule, "add the key, or name one that it has")
