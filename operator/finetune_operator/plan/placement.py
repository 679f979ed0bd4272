"""Placement of a job: the launcher, and the processes of the training.

Refuses hardware that the node does not have, and without a cluster the features of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from finetune_contract.choices import StrategyName
from finetune_contract.layout import ENV_CHECKPOINT_SECRET
from finetune_contract.trainer_job import World
from finetune_operator.plan.types.draft import Draft
from finetune_operator.spec.launcher_rows import TRAINING, launcher
from finetune_operator.spec.problems import any_of
from finetune_operator.spec.rules.process_counts import least_processes, requested_strategy
from finetune_operator.spec.types import FineTuneJobSpec, RunPolicySpec, StorageSpec, TemplateSpec


def check_place(draft: Draft) -> Draft:
    """Refuse settings that the place of the job cannot meet; without a cluster, list those without effect."""
    resources = draft.spec.resources
    if not draft.local:
        if resources.gpus_per_node == "auto" and draft.inputs.facts.hardware is None:
            draft = draft.refusing(
                ("resources", "gpusPerNode"),
                "auto",
                "the GPUs of the node that the job will get are not known in a cluster",
                "set gpusPerNode to a number",
                "NotSupported",
            )
        return draft
    for path, uri in _claims(draft.spec):
        draft = draft.refusing(
            path,
            uri,
            "a claim needs a cluster",
            "name a folder or file with file://, or apply the job to a cluster",
            "NotSupported",
        )
    if draft.spec.run_policy.suspend:
        draft = draft.refusing(
            ("runPolicy", "suspend"),
            True,
            "a suspended job does not run, and without a cluster nothing would resume it",
            "leave it out",
            "NotSupported",
        )
    if ignored := _without_effect(draft.spec):
        draft = draft.because(f"without a cluster these have no effect: {', '.join(ignored)}")
    if draft.spec.secrets.hub_token is not None:
        draft = draft.because("secrets.hubToken: without a cluster, HF_TOKEN of the environment is used in its place")
    if draft.spec.checkpoints.signing_key is not None:
        variable = f"{ENV_CHECKPOINT_SECRET} of the environment"
        draft = draft.because(f"checkpoints.signingKey: without a cluster, {variable} is used in its place")
    return draft


def _claims(spec: FineTuneJobSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and URI of inputs and outputs on claims, without the workspace, as a local run has its own."""
    predict = spec.predict
    uris = (
        (("model", "uri"), spec.model.uri),
        (("dataset", "uri"), spec.dataset.uri if spec.dataset else None),
        (("predict", "dataset", "uri"), predict.dataset.uri if predict and predict.dataset else None),
        (("predict", "output"), predict.output if predict else None),
    )
    return ((path, uri) for path, uri in uris if uri is not None and uri.startswith("pvc://"))


def _without_effect(spec: FineTuneJobSpec) -> list[str]:
    """Return the changed fields that concern pods, claims or the operator."""
    blocks = {
        "resources.network": spec.resources.network not in ("auto", "tcp"),
        "resources.sharedMemory": spec.resources.shared_memory != "auto",
        "storage": spec.storage != StorageSpec(),
        "secrets.storage": spec.secrets.storage is not None,
        "template": spec.template != TemplateSpec(),
        "image": spec.image is not None,
        "imagePullPolicy": spec.image_pull_policy is not None,
    }
    given, defaults = spec.run_policy.model_dump(by_alias=True), RunPolicySpec().model_dump(by_alias=True)
    policies = [f"runPolicy.{name}" for name in given if name != "suspend" and given[name] != defaults[name]]
    return [*(name for name, is_set in blocks.items() if is_set), *policies]


def choose_launcher(draft: Draft) -> Draft:
    """Choose `local` without a cluster, the named launcher if served, else the first served one of `TRAINING`."""
    asked, served = draft.spec.launcher, tuple(name for name in draft.inputs.facts.served if name in TRAINING)
    if draft.local:
        draft = replace(draft, launcher="local")
        if asked == "auto":
            return draft.because("launcher local: the stages run as processes of this machine")
        return draft.because(f"launcher local: there is no cluster here; in one, {asked} would run the training")
    if asked != "auto":
        if asked not in TRAINING:
            return draft.refusing(
                ("launcher",),
                asked,
                "it cannot be rendered yet",
                f"set launcher to {' or '.join(['auto', *(name for name in TRAINING if name in served)])}",
                "NotYetSupported",
            )
        if asked not in served:
            row = launcher(asked)
            install = f"install {row.installed_by}, which serves {row.served_as}"
            return draft.refusing(
                ("launcher",),
                asked,
                f"the cluster has to serve it; it serves {', '.join(served)}",
                f"{install}, or set launcher to auto or {served[0]}" if served else install,
                "NotSupported",
            )
        return replace(draft, launcher=asked).because(f"launcher {asked}: as asked")
    chosen = next((name for name in TRAINING if name in served), None)
    if chosen is None:
        return draft.refusing(
            ("launcher",),
            asked,
            f"the cluster has to serve {any_of(TRAINING)}",
            "let the operator create Jobs",
            "NotSupported",
        )
    return replace(draft, launcher=chosen).because(
        f"launcher {chosen}: the first of {', '.join(TRAINING)} that is served"
    )


def choose_world(draft: Draft) -> Draft:
    """Choose nodes, processes on each, their device and their CPU threads."""
    resources, hardware = draft.spec.resources, draft.hardware
    if draft.local and resources.nodes > 1:
        draft = draft.refusing(
            ("resources", "nodes"),
            resources.nodes,
            "without a cluster there is one node",
            "set nodes to 1",
            "NotSupported",
        )
    asked = requested_strategy(draft.spec.parallelism)
    gpus = draft.gpus_per_node
    if resources.gpus_per_node == "auto":
        if gpus > 1 and asked == "single":
            gpus = 1
        draft = draft.because(
            f"{gpus} GPU{'s' if gpus > 1 else ''} a node: "
            + ("what strategy single can use" if asked == "single" and gpus else "what the node has")
            if gpus
            else "CPU: the node has no GPU"
        )
    elif gpus == 0 and hardware.gpus_per_node:
        there = hardware.gpus_per_node
        draft = draft.because(
            f"CPU: resources.gpusPerNode is 0, so the node's {there} GPU{'s' if there > 1 else ''} stay"
            f"{'' if there > 1 else 's'} idle; set it to auto to train on {'them' if there > 1 else 'it'}"
        )
    if gpus > hardware.gpus_per_node:
        has, fewer = "none", "0"
        if hardware.gpus_per_node:
            has, fewer = f"{hardware.gpus_per_node}", f"{hardware.gpus_per_node} or less"
        return draft.refusing(
            ("resources", "gpusPerNode"),
            gpus,
            f"a node has to have as many GPUs as asked for, and it has {has}",
            f"set gpusPerNode to {fewer}, or plan for other hardware",
        )
    draft, processes = _processes(draft, gpus, asked)
    threads = max(1, hardware.cpu_cores // processes)
    world = World(
        nodes=resources.nodes,
        processes_per_node=processes,
        device="cuda" if gpus else "cpu",
        threads_per_process=threads,
    )
    sharing = f"{hardware.cpu_cores} cores / {processes} process{'es' if processes > 1 else ''}"
    return replace(draft, world=world).because(f"{threads} thread{'s' if threads > 1 else ''} a process: {sharing}")


def _processes(draft: Draft, gpus: int, asked: StrategyName | None) -> tuple[Draft, int]:
    """Choose the processes on each node, and add the reason."""
    wanted, cores = draft.spec.resources.processes_per_node, draft.hardware.cpu_cores
    if wanted != "auto":
        note = ""
        if gpus > wanted:
            note = f"; {gpus - wanted} of {gpus} GPUs stay idle"
        elif not gpus and wanted > cores:
            note = f"; they share {cores} core{'s' if cores > 1 else ''} and slow each other down"
        return draft.because(f"{wanted} process{'es' if wanted > 1 else ''} a node: as asked{note}"), wanted
    if gpus:
        return draft.because(f"{gpus} process{'es' if gpus > 1 else ''} a node: one a GPU"), gpus
    if draft.loops and draft.replica_ranks > 1:
        least = least_processes(draft.spec)
        what = "hold one replica of the model" if draft.model_ranks > 1 else "the slices of a row take"
        return draft.because(f"{least} process{'es' * (least > 1)} a node: as few as {what}"), least
    if asked in ("ddp", "fsdp", "deepspeed") and cores >= 2:
        return draft.because(f"2 processes a node: {asked} spreads over processes, and there are {cores} cores"), 2
    return draft.because("1 process a node: on CPU one process uses all cores by its threads"), 1
