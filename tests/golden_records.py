"""Records of the golden jobs: plan.json, deepspeed.json, and all objects that the operator creates.

`tests/golden/whole` has some documents whole. The choices and objects of every job are recorded as differences from
those, in the job's file of `tests/golden/differences`. Both sides of a difference are rendered now, so that a change in
all documents of a kind changes only the whole one.

Numbers and sentences of all jobs are in two files instead, so that a changed formula changes those and the whole plans:
`numbers.txt` has a row for each job, `sentences.txt` the plans' sentences, each with the numbers that `#` stands for.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from differences import difference, written
from finetune_contract.layout import ESTIMATE_FILE
from finetune_operator.cli.terminal.yaml_text import documents as yaml_text
from finetune_operator.endpoints.render.endpoint_objects import RUNTIMES, SHARED_KINDS
from finetune_operator.jobs.render.contract import DEEPSPEED_FILE, JOB_FILE, files, fingerprint
from finetune_operator.jobs.render.render_types import STAGE_LABEL, Manifest
from golden_cases import JOBS, golden_manifests, golden_plan

REVISION_KINDS = (("v1", "ConfigMap"), RUNTIMES["deployment"])
"""Kinds of each revision's own objects."""
ENDPOINT_KINDS = (*SHARED_KINDS, *REVISION_KINDS)
"""All kinds of an endpoint without KServe."""

Document = dict[str, Any]
Numbers = dict[str, dict[str, str]]
"""Title of a table -> column -> number."""
PLAN_FILE, ORDER = "plan.json", "order"
FILES = (JOB_FILE, DEEPSPEED_FILE, ESTIMATE_FILE)
BASES = {
    PLAN_FILE: ("one-gpu", "eight-gpus-priced", "examples/cpu-only"),
    DEEPSPEED_FILE: ("lora-zero2", "large-model-zero3"),
    "prepare/SparkApplication": ("by-spark",),
    "train/Service": ("tensor-and-pipeline-chosen",),
    **{f"train/{kind}": ("one-gpu", "tensor-and-pipeline-chosen") for kind in ("PyTorchJob", "MPIJob", "Job")},
    **{f"serve/{kind}": ("served",) for _, kind in ENDPOINT_KINDS},
    "serve/InferenceService": ("served-by-kserve",),
}
"""Document's name -> jobs with a whole record of it; `one-gpu` for a name without a row."""
ALIKE = {
    "predict/ConfigMap": "evaluate/ConfigMap",
    "predict/Job": "evaluate/Job",
    "predict/SparkApplication": "prepare/SparkApplication",
}
"""Document's name -> name of the whole documents that it is compared with, if it is another."""
MEMORY, TIME, SIZES, MODEL = "memory of a process in MiB", "time and steps", "sizes in objects", "models"
"""Titles of the tables of numbers."""
_SIZE = re.compile(r"\d+(Ki|Mi|Gi|Ti)")
_NUMBER = re.compile(
    r"(?:less than )?(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)"
    r"(?:%| (?:ms|s|min|h|days|KiB|MiB|GiB|TiB|million|billion)\b)?"
)

# ----------------------------------------------------------------------------------------------------------- documents


def plan_record(plan: Document) -> tuple[Document, Numbers, list[str]]:
    """Divide a plan into its choices, its numbers and its sentences."""
    choices = copy.deepcopy(plan)
    estimate, model, training = choices["estimate"], choices["model"], choices["trainer"]["training"] or {}
    memory = choices.pop("memory") or {"terms": []}
    terms = memory.pop("terms")
    sentences = [f"{kind}: {each}" for kind in ("reasons", "assumptions") for each in choices.pop(kind)]
    sentences.append(f"estimate: {estimate.pop('basis')}")
    sentences += [f"memory of {term['name']}: {term['formula']}" for term in terms]
    layers = model.pop("linearLayers")
    sentences += [
        f"linear layer {name}: " + ", ".join(f"{layers[name][key]} {key}" for key in layers[name]) for name in layers
    ]
    steps = {key: training.pop(key) for key in ("maxSteps", "stepsPerEpoch", "warmupSteps") if key in training}
    if "checkpoints" in training:
        steps["checkpoint everySteps"] = training["checkpoints"].pop("everySteps")
    parts, pauses = estimate.pop("stepParts"), estimate.pop("pauses")
    times = {
        **{f"{key} s": estimate.pop(key) for key in ("seconds", "stepSeconds")},
        **{f"{name} s": seconds for name, seconds in (parts | pauses).items()},
        "cost": estimate.pop("cost"),
    }
    sizes = {term["name"]: term["bytes"] for term in terms} | memory
    numbers: Numbers = {
        MEMORY: {name.removesuffix("Bytes"): f"{size / 2**20:.1f}" for name, size in sizes.items()},
        TIME: {name: _rounded(number) for name, number in (times | steps).items() if number is not None},
        MODEL: {name: str(model.pop(name)) for name, value in [*model.items()] if type(value) is int},
    }
    return choices, numbers, sentences


def _rounded(number: float) -> str:
    """Return an integer as it is, and another number with four digits."""
    digits = 0 if isinstance(number, int) or number == 0 else max(0, 3 - math.floor(math.log10(number)))
    return f"{number:.{digits}f}"


def parsed(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return a launcher's objects with the files of ConfigMaps as JSON, and each hash over them as the name of its
    ConfigMap.
    """
    found: list[Manifest] = []
    hashes: dict[str, str] = {}
    for each in manifests:
        data = each["data"] if each["kind"] == "ConfigMap" else {}
        texts = {file: data[file] for file in FILES if file in data}
        if texts:
            hashes[fingerprint(texts)] = f"hash of {object_name(each)}"
            each = each | {"data": data | {file: json.loads(text) for file, text in texts.items()}}
        found.append(_changed(each, lambda _, text: hashes.get(text, text)))
    return found


def object_record(manifest: Manifest, origin: Document) -> tuple[Document, list[tuple[str, str]]]:
    """Return an object of `parsed` with the files of a ConfigMap as differences from `sources` and `#` for sizes,
    and the columns and sizes.
    """
    sizes: list[tuple[str, str]] = []
    stage = object_name(manifest).partition("/")[0]

    def masked(path: tuple[str, ...], text: str) -> str:
        if not _SIZE.fullmatch(text):
            return text
        sizes.append((" ".join((stage, *path[-2:])), text))
        return "#"

    data = manifest.get("data", {})
    found = {file: difference(origin[file], data[file]) for file in origin if file in data}
    return _changed(manifest | {"data": data | found} if found else manifest, masked), sizes


def sources(plan: Document, deepspeed: Document | None) -> Document:
    """Return the files of ConfigMaps as they follow from the recorded documents."""
    memory, estimate = plan["memory"] or {}, plan["estimate"]
    terms = {term["name"]: term["bytes"] for term in memory.get("terms", ())}
    steps = {field: estimate[field] for field in ("stepSeconds", "stepParts")}
    planned = {"memoryBytes": memory.get("totalBytes"), "memoryTerms": terms} | steps
    return {JOB_FILE: plan["trainer"], DEEPSPEED_FILE: deepspeed or {}, ESTIMATE_FILE: planned}


def object_name(manifest: Manifest) -> str:
    """Return stage and kind; without a stage, the last word of the object's name, and its kind."""
    metadata = manifest["metadata"]
    where = metadata["labels"].get(STAGE_LABEL) or metadata["name"].rpartition("-")[2]
    return f"{where}/{manifest['kind']}"


def _changed(node: Any, change: Callable[[tuple[str, ...], str], str], path: tuple[str, ...] = ()) -> Any:
    """Return the node with `change(path, text)` for each text."""
    match node:
        case dict():
            return {key: _changed(value, change, (*path, key)) for key, value in node.items()}
        case list():
            return [_changed(each, change, path) for each in node]
        case str():
            return change(path, node)
    return node


# ------------------------------------------------------------------------------------------------------------- the jobs


@functools.cache
def plan_files(job: str) -> tuple[Document, Document | None]:
    """Return the job's plan.json and deepspeed.json."""
    text = files(golden_plan(job)).get(DEEPSPEED_FILE)
    return json.loads(golden_plan(job).to_json()), None if text is None else json.loads(text)


@functools.cache
def job_record(job: str) -> tuple[dict[str, Document], Numbers, list[str]]:
    """Return the job's documents by names such as `plan.json` and `train/PyTorchJob`, its numbers and its sentences.

    An object that is the same for several launchers occurs once. `order` has the names of each launcher's objects in
    the order in which they are applied.
    """
    plan, deepspeed = plan_files(job)
    choices, numbers, sentences = plan_record(plan)
    found = {PLAN_FILE: choices} | ({} if deepspeed is None else {DEEPSPEED_FILE: deepspeed})
    order: dict[str, list[str]] = {}
    sizes: dict[str, dict[str, None]] = {}
    for launcher, manifests in golden_manifests(job).items():
        names = order[launcher] = []
        for manifest in parsed(manifests):
            name = object_name(manifest)
            document, own = object_record(manifest, sources(plan, deepspeed))
            if difference(found.get(name, document), document):
                name = f"{name}@{launcher}"
            assert name not in names, f"two objects of {job} are {name}"
            found[name] = document
            names.append(name)
            for column, size in own:
                sizes.setdefault(column, {})[size] = None
    numbers[SIZES] = {column: "/".join(values) for column, values in sizes.items()}
    return found | ({ORDER: order} if order else {}), numbers, sentences


# ----------------------------------------------------------------------------------------------------------- the files


def whole_names() -> list[tuple[str, str]]:
    """Return job and name of all documents with a whole record."""
    jobs = sorted({"one-gpu", *itertools.chain(*BASES.values())})
    return [
        (job, name)
        for job in jobs
        for name in job_record(job)[0]
        if job in bases(name) and name not in ALIKE and name != ORDER and "@" not in name
    ]


def bases(name: str) -> tuple[str, ...]:
    """Return the jobs with a whole record of the document of this name."""
    return BASES.get(name, ("one-gpu",))


def whole_file(job: str, name: str) -> str:
    """Return the file of a document's whole record."""
    return f"whole/{job}/{name.replace('/', '.')}" + ("" if name.endswith(".json") else ".yaml")


def whole_text(job: str, name: str) -> str:
    """Return a document as written by the product."""
    if name == PLAN_FILE:
        return golden_plan(job).to_json()
    if name == DEEPSPEED_FILE:
        return files(golden_plan(job))[name]
    every = itertools.chain(*golden_manifests(job).values())
    return yaml_text([next(each for each in every if object_name(each) == name)])


def job_file(job: str) -> str:
    """Return the file with the differences of a job's documents."""
    return f"differences/{job}.txt"


def job_text(job: str) -> str:
    """Return the text of a job's file: a head for each document, and below it the difference from the nearest base."""
    lines = []
    for name, document in job_record(job)[0].items():
        if name == ORDER:
            lines += [f"{ORDER} of {launcher}: {', '.join(names)}" for launcher, names in document.items()]
            continue
        plain = name.partition("@")[0]
        other = ALIKE.get(plain, plain)
        found = {base: written(difference(job_record(base)[0][other], document)) for base in bases(other)}
        base = min(found, key=lambda each: sum(map(len, found[each])))
        head = f"{name} of {base}" if other == plain else f"{name} of {base}: {other}"
        lines += [head, *(f"  {line}" for line in found[base])]
    return "".join(f"{line}\n" for line in lines)


def numbers_text() -> str:
    """Return tables with a row for each job and a column for each number."""
    return "\n".join("".join(f"{line}\n" for line in _table(title)) for title in (MEMORY, TIME, SIZES, MODEL))


def _table(title: str) -> Iterator[str]:
    rows = {job: row for job in JOBS if (row := job_record(job)[1][title])}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    heads = [column.split() for column in columns]
    depth = max(map(len, heads))
    lines = [("", *level) for level in zip(*([""] * (depth - len(each)) + each for each in heads), strict=True)]
    lines += [(job, *(row.get(column, ".") for column in columns)) for job, row in rows.items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    yield f"{title}:"
    for first, *others in lines:
        yield "  ".join((first.ljust(widths[0]), *map(str.rjust, others, widths[1:]))).rstrip()


def sentences_text() -> str:
    """Return each sentence of the plans with `#` for numbers, and below it the numbers and the jobs with them."""
    found: dict[str, dict[str, list[str]]] = {}
    for job in JOBS:
        for sentence in job_record(job)[2]:
            shape, numbers = _NUMBER.sub("#", sentence), " | ".join(_NUMBER.findall(sentence))
            found.setdefault(shape, {}).setdefault(numbers, []).append(job)
    lines = []
    for shape, rows in sorted(found.items()):
        lines.append(shape)
        for numbers, jobs in rows.items():
            text = f"{numbers}: {', '.join(jobs)}" if numbers else ", ".join(jobs)
            lines += textwrap.wrap(text, 120, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)
