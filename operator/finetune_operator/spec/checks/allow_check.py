"""Check of jobs against `settings.allow`: the objects of the namespace that they may name, and their largest size.

Whoever may create a job can run pods with everything that it names. So all of it can be bounded: service accounts,
Secrets, ConfigMaps, claims, CSI drivers, tokens, priority classes, environment variables, folders, annotations,
Gateways, and the size of a job. Names are matched by globs; labels would need a right to read the objects.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from pydantic import JsonValue

from finetune_operator.spec.checks.named_objects import (
    claims,
    config_maps,
    in_volumes,
    priority_classes,
    projected_sources,
    secrets,
    service_accounts,
)
from finetune_operator.spec.checks.syntax import normal_folder
from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.problems import Problem, describe_value, format_path
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJobSpec

SYSTEM_PRIORITY = "system-"
API_AUDIENCE = "api"
"""Name of a token without an audience, which is for the API server itself."""


def allowed_problems(spec: FineTuneJobSpec, settings: Settings) -> Iterator[Problem]:
    """Return the problems of names and sizes that the settings do not allow."""
    allow, template = settings.allow, spec.template
    named: tuple[tuple[tuple[str, ...], str, Iterable[tuple[Path, str]]], ...] = (
        (allow.names("service_accounts"), "a service account", service_accounts(spec)),
        (allow.names("priority_classes"), "a priority class", priority_classes(spec)),
        (allow.names("secrets"), "a Secret", secrets(spec)),
        (allow.names("config_maps"), "a ConfigMap", config_maps(spec)),
        (allow.names("claims"), "a claim", claims(spec)),
        (allow.names("csi_drivers"), "a CSI driver", in_volumes(template.volumes, ("csi", "driver"))),
        (allow.names("token_audiences"), "a token audience", _audiences(template.volumes)),
        (allow.names("env"), "an environment variable", _variables(template.env)),
        (allow.names("mount_paths"), "a folder", _mounts(template.volume_mounts)),
        (allow.names("annotations"), "an annotation", _annotations(template.annotations)),
        (allow.names("gateways"), "a Gateway", _gateways(spec)),
    )
    for globs, kind, names in named:
        for path, name in names:
            if not any(fnmatch.fnmatchcase(name, glob) for glob in globs):
                yield _refused(path, f"is {kind} that the settings do not allow", _allowed_hint(globs, path), name)
    for path, name in priority_classes(spec):
        if name.startswith(SYSTEM_PRIORITY):
            rule = "is reserved for Kubernetes system components; it would preempt other pods"
            yield _refused(path, rule, "use another priority class, or leave it out", name)
    if allow.profile == "strict":
        yield from _beyond_the_namespace(spec)
    yield from _sizes(spec, settings)


def _beyond_the_namespace(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield the problems of scheduling that keeps the nodes of others from them, or takes those kept for others."""
    for index, toleration in enumerate(spec.template.tolerations):
        if toleration.get("operator") == "Exists" and not toleration.get("key"):
            path: Path = ("template", "tolerations", index, "operator")
            rule = "tolerates every taint without a key, also of control planes, which the settings do not allow"
            yield _refused(path, rule, "name the key of the taint", "Exists")
    during = "DuringSchedulingIgnoredDuringExecution"
    for kind in ("podAffinity", "podAntiAffinity"):
        for terms, inside in ((f"required{during}", ()), (f"preferred{during}", ("podAffinityTerm",))):
            found = value_at(spec.template.affinity, (kind, terms))
            for index, term in enumerate(found if isinstance(found, list) else ()):
                for field in ("namespaces", "namespaceSelector"):
                    value = value_at(term, (*inside, field))
                    if value is not None and value != []:
                        path = ("template", "affinity", kind, terms, index, *inside, field)
                        rule = "is about pods of other namespaces, which the settings do not allow"
                        yield _refused(
                            path, rule, "leave it out: the term is then about the job's own namespace", value
                        )


def _gateways(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    if spec.routed_traffic is not None and spec.routed_traffic.gateway is not None:
        yield ("endpoint", "traffic", "gateway"), spec.routed_traffic.gateway


def _annotations(given: Iterable[str]) -> Iterator[tuple[Path, str]]:
    return ((("template", "annotations", key), key) for key in given)


def _allowed_hint(globs: Sequence[str], path: Path) -> str:
    if globs:
        return f"use one of {', '.join(globs)}"
    match path:
        case (*_, "uri"):
            return "name data that are not in a claim, or ask the administrator"
        case ("template", str(), int(), _, *_):
            owner: Path = path[:3]
        case (("secrets" | "checkpoints" | "endpoint"), _, "name"):
            owner = path[:2]
        case _:
            return "leave it out, or ask the administrator"
    return f"leave {format_path(('spec', *owner))} out, or ask the administrator"


def _refused(path: Path, rule: str, hint: str, value: object) -> Problem:
    full = ("spec", *path)
    return Problem(format_path(full), describe_value(value, full), rule, hint, reason="Forbidden")


def _audiences(volumes: Sequence[Mapping[str, JsonValue]]) -> Iterator[tuple[Path, str]]:
    for path, source in projected_sources(volumes):
        token = source.get("serviceAccountToken")
        if isinstance(token, dict):
            yield (*path, "serviceAccountToken", "audience"), str(token.get("audience") or API_AUDIENCE)


def _variables(env: Sequence[Mapping[str, JsonValue]]) -> Iterator[tuple[Path, str]]:
    for index, variable in enumerate(env):
        name = variable.get("name")
        if isinstance(name, str):
            yield ("template", "env", index, "name"), name


def _mounts(mounts: Sequence[Mapping[str, JsonValue]]) -> Iterator[tuple[Path, str]]:
    for index, mount in enumerate(mounts):
        folder = mount.get("mountPath")
        if isinstance(folder, str):
            yield ("template", "volumeMounts", index, "mountPath"), normal_folder(folder)


def _sizes(spec: FineTuneJobSpec, settings: Settings) -> Iterator[Problem]:
    allow, resources = settings.allow, spec.resources
    nodes = max(resources.nodes, resources.elastic.max_nodes if resources.elastic is not None else 0)
    where = ("resources", "nodes") if nodes == resources.nodes else ("resources", "elastic", "maxNodes")
    gpus = resources.gpus_per_node if isinstance(resources.gpus_per_node, int) else 0
    predicting = 0 if spec.predict is None else spec.predict.workers
    workers = {
        ("preparation", "workers"): spec.preparation.workers,
        # With auto the plan observes the limit.
        ("predict", "workers"): 0 if predicting == "auto" else predicting,
    }
    servers = most_servers(spec)
    larger = "maxReplicas" if spec.endpoint is not None and servers > spec.endpoint.replicas else "replicas"
    for most, path, requested, unit in (
        (allow.max_workers, ("endpoint", larger), servers, "servers"),
        (allow.max_gpus, ("endpoint", larger), servers * min(1, gpus), "GPUs for servers"),
        (allow.max_nodes, where, nodes, "nodes"),
        (allow.max_gpus, ("resources", "gpusPerNode"), nodes * gpus, "GPUs on all nodes"),
        *((allow.max_workers, path, count, "workers") for path, count in workers.items()),
    ):
        if most is not None and requested > most:
            rule = f"requests {requested} {unit}; the settings allow {most}"
            yield _refused(path, rule, f"request at most {most}", requested)
    if allow.max_storage is not None:
        yield from _too_large(_storage(spec), allow.max_storage)


def most_servers(spec: FineTuneJobSpec) -> int:
    """Return the maximum number of the endpoint's servers; 0 without one."""
    endpoint = spec.endpoint
    return 0 if endpoint is None else max(endpoint.replicas, endpoint.max_replicas or 0)


def _too_large(sizes: Iterable[tuple[Path, str]], most: str) -> Iterator[Problem]:
    for path, size in sizes:
        with suppress(ValueError):  # other checks report values that are no quantity
            if parse_quantity(size) > parse_quantity(most):
                yield _refused(path, f"exceeds {most}, the maximum in the settings", f"request at most {most}", size)


def _storage(spec: FineTuneJobSpec) -> Iterator[tuple[Path, str]]:
    """Return the sizes of the claims created for the job: its workspace, and those of each of its pods."""
    if spec.storage.workspace is None:
        yield ("storage", "size"), spec.storage.size
    yield from in_volumes(
        spec.template.volumes, ("ephemeral", "volumeClaimTemplate", "spec", "resources", "requests", "storage")
    )
