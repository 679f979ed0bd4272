"""Records of the golden jobs' documents: plan.json, deepspeed.json, and all objects that the operator creates.

`tests/golden/whole` has some documents whole. All documents of a job are recorded as their differences from those, in
the job's file of `tests/golden/differences`:

    train/PyTorchJob of one-gpu
      spec.nprocPerNode: "2"

Differences are taken between documents that are both rendered now. So a change in all of them changes only the whole
ones. Parts that follow from other documents are reduced to their difference from those.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from differences import difference, patched, read, same, written
from finetune_operator.cli.yaml_text import documents as yaml_text
from finetune_operator.rendering.contract import DEEPSPEED_FILE, JOB_FILE, files, fingerprint
from finetune_operator.rendering.endpoint_objects import RUNTIMES, SHARED_KINDS
from finetune_operator.rendering.render_types import STAGE_LABEL, Manifest
from golden_cases import golden_manifests, golden_plan

REVISION_KINDS = (("v1", "ConfigMap"), RUNTIMES["deployment"])
"""Kinds of each revision's own objects."""
ENDPOINT_KINDS = (*SHARED_KINDS, *REVISION_KINDS)
"""All kinds of an endpoint without KServe."""

Document = dict[str, Any]
Documents = dict[str, Document]
PLAN_FILE, ORDER = "plan.json", "order"
BASES = {
    "": ("one-gpu",),
    PLAN_FILE: ("one-gpu", "examples/cpu-only"),
    DEEPSPEED_FILE: ("lora-zero2", "large-model-zero3"),
    ORDER: ("one-gpu", "examples/cpu-only"),
    "workspace/PersistentVolumeClaim": ("one-gpu", "eight-gpus-priced"),
    "prepare/SparkApplication": ("by-spark",),
    "predict/SparkApplication": ("by-spark",),
    "train/Service": ("tensor-and-pipeline-chosen",),
    "train/PyTorchJob": ("one-gpu", "tensor-and-pipeline-chosen"),
    "train/MPIJob": ("one-gpu", "tensor-and-pipeline-chosen"),
    "train/Job": ("one-gpu", "tensor-and-pipeline-chosen"),
    **{f"serve/{kind}": ("served",) for _, kind in ENDPOINT_KINDS},
    "serve/InferenceService": ("served-by-kserve",),
    "predict/ConfigMap": ("examples/chat-lora",),
    "predict/Job": ("examples/chat-lora",),
}
"""Document's name -> jobs with a whole record of it; "": all names without a row."""


@functools.cache
def documents(job: str) -> Documents:
    """Return the job's documents by names such as `plan.json` and `train/PyTorchJob`, in the form of the comparison.

    An object that is the same for several launchers occurs once. `order` has the names of each launcher's objects in
    the order in which they are applied.
    """
    found = {PLAN_FILE: json.loads(golden_plan(job).to_json())}
    if DEEPSPEED_FILE in (texts := files(golden_plan(job))):
        found[DEEPSPEED_FILE] = json.loads(texts[DEEPSPEED_FILE])
    order: dict[str, list[str]] = {}
    for launcher, manifests in golden_manifests(job).items():
        names = order[launcher] = []
        for name, manifest in zip(map(_name, manifests), reduced(parsed(manifests), found), strict=True):
            if not same(found.get(name, manifest), manifest):
                name = f"{name}@{launcher}"
            assert name not in names, f"two objects of {job} are {name}"
            found[name] = manifest
            names.append(name)
    return found | ({ORDER: order} if order else {})


def _name(manifest: Manifest) -> str:
    """Return stage and kind; without a stage, the last word of the object's name, and its kind."""
    metadata = manifest["metadata"]
    where = metadata["labels"].get(STAGE_LABEL) or metadata["name"].rpartition("-")[2]
    return f"{where}/{manifest['kind']}"


# --------------------------------------------------------------------------------------------- objects as differences


def reduced(manifests: Iterable[Manifest], others: Documents) -> list[Manifest]:
    """Return the objects with the files of ConfigMaps as differences from plan.json and deepspeed.json."""
    return [_with_files(each, lambda file, value: difference(_source(file, others), value)) for each in manifests]


def expanded(manifests: Iterable[Manifest], others: Documents) -> list[Manifest]:
    """Return the objects before `reduced`."""
    return [_with_files(each, lambda file, value: patched(_source(file, others), value)) for each in manifests]


def parsed(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return a launcher's objects with the files of ConfigMaps as JSON, and each hash over them as the name of its
    ConfigMap.
    """
    found, hashes = [], {}
    for each in manifests:
        if texts := _files(each):
            hashes[fingerprint(texts)] = f"hash of {_name(each)}"
        found.append(_replaced(_with_files(each, lambda _, text: json.loads(text)), hashes))
    return found


def _source(file: str, others: Documents) -> Document:
    """Return the document from which a file of a ConfigMap follows."""
    return others[PLAN_FILE]["trainer"] if file == JOB_FILE else others[DEEPSPEED_FILE]


def _files(manifest: Manifest) -> dict[str, Any]:
    data = manifest["data"] if manifest["kind"] == "ConfigMap" else {}
    return {file: data[file] for file in (JOB_FILE, DEEPSPEED_FILE) if file in data}


def _with_files(manifest: Manifest, changed: Callable[[str, Any], Any]) -> Manifest:
    data = {file: changed(file, value) for file, value in _files(manifest).items()}
    return manifest | {"data": manifest["data"] | data} if data else manifest


def _replaced(node: Any, texts: dict[str, str]) -> Any:
    match node:
        case dict():
            return {key: _replaced(value, texts) for key, value in node.items()}
        case list():
            return [_replaced(each, texts) for each in node]
        case str():
            return texts.get(node, node)
    return node


# ---------------------------------------------------------------------------------------------------------- the records


def bases(name: str) -> tuple[str, ...]:
    """Return the jobs with a whole record of the document of this name."""
    return BASES.get(name.partition("@")[0], BASES[""])


def whole_names() -> list[tuple[str, str]]:
    """Return job and name of all documents with a whole record."""
    return [(job, name) for job in _base_jobs() for name in documents(job) if job in bases(name)]


def _base_jobs() -> list[str]:
    return sorted({job for jobs in BASES.values() for job in jobs})


def whole_file(job: str, name: str) -> str:
    """Return the file of a document's whole record."""
    return f"whole/{job}/{name.replace('/', '.')}" + ("" if name.endswith(".json") else ".yaml")


def whole_text(job: str, name: str) -> str:
    """Return a document as written by the product."""
    if name == PLAN_FILE:
        return golden_plan(job).to_json()
    if name == DEEPSPEED_FILE:
        return files(golden_plan(job))[name]
    order = documents(job)[ORDER]
    if name == ORDER:
        return yaml_text([order])
    launcher, names = next(each for each in order.items() if name in each[1])
    return yaml_text([golden_manifests(job)[launcher][names.index(name)]])


def job_file(job: str) -> str:
    """Return the file with the differences of a job's documents."""
    return f"differences/{job}.txt"


def job_text(job: str, recorded: str) -> str:
    """Return the text of a job's file: a head for each document, and below it the difference from its base.

    A document keeps its base in the `recorded` text, so that the text changes only with the difference itself; a new
    document has the nearest base.
    """
    kept = {name: base for name, base, _ in _sections(recorded)}
    lines = []
    for name, document in documents(job).items():
        choices = (kept[name],) if kept.get(name) in bases(name) else bases(name)
        found = {base: written(difference(_base(name, base), document)) for base in choices}
        base = min(choices, key=lambda each: sum(map(len, found[each])))
        lines += [f"{name} of {base}", *(f"  {line}" for line in found[base])]
    return "".join(f"{line}\n" for line in lines)


def rebuilt(text: str) -> Documents:
    """Return the documents recorded in a job's file."""
    return {name: patched(_base(name, base), read(lines)) for name, base, lines in _sections(text)}


def _base(name: str, job: str) -> Document:
    found = documents(job)
    return found[name if name in found else name.partition("@")[0]]


def _sections(text: str) -> list[tuple[str, str, list[str]]]:
    """Return name, base and lines of each document of a job's file."""
    found: list[tuple[str, str, list[str]]] = []
    for line in text.split("\n")[:-1]:
        if line.startswith("  "):
            found[-1][2].append(line[2:])
        else:
            name, _, base = line.rpartition(" of ")
            found.append((name, base, []))
    return found
