"""Every hint in the product is tried: its edit is applied to the document, and the error disappears."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import finetune_contract
import finetune_operator
import finetune_trainer
from each_case import each_case, pairs_of
from finetune_operator.cli.main import app
from finetune_operator.documents import read_documents
from finetune_operator.spec import problems
from finetune_operator.spec.checks import deepspeed_overrides, template, validation
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.fields import support
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.fields.shapes import Fields, accepts, find, leaves, spec_shape
from finetune_operator.spec.fields.support import works
from finetune_operator.spec.fields.uri_hints import as_uri
from finetune_operator.spec.hint_values import Drop, Hint, Move, Rename, ReplaceBy, SetTo
from finetune_operator.spec.hints import faulty_fields, other_tools
from finetune_operator.spec.hints.field_lookup import fields_by_name
from finetune_operator.spec.hints.foreign_table import NameRow, ValueRow, find_name, find_value, name_rows, value_rows
from finetune_operator.spec.problems import Problem, format_path, hint_data, hint_text
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.rules.column_rules import COLUMN_TASKS
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from finetune_operator.spec.types import ObjectMeta
from mending import Edit, alternatives, apply, job_document, mend, parts, without_gone

JOBS = Path(__file__).parent / "jobs"
BAD = sorted(path.stem for path in (JOBS / "bad").glob("*.yaml"))
BY_HAND: dict[str, dict[str, Any]] = yaml.safe_load((JOBS / "mended.yaml").read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load((JOBS / "rules.yaml").read_text(encoding="utf-8"))
ROUNDS = 3
"""Rounds of mending: a fix may uncover another problem, which the first message could not name."""


def job(**spec: Any) -> dict[str, Any]:
    return job_document(spec)


def problems_of(value: Any, settings: Settings = LOCAL_SETTINGS) -> list[Problem]:
    return validate_job(value, settings)[1]


def text_of(problem: Problem) -> str:
    return f"{problem.path}: {problem.value}: {problem.rule}. {problem.hint}"


# ---------------------------------------------------------------------------------------------------------- whole files


def document_of(name: str) -> dict[str, Any]:
    """Return the document of a bad file; text that is no YAML is first edited by hand as its message asks."""
    text = (JOBS / "bad" / f"{name}.yaml").read_text(encoding="utf-8")
    documents, unreadable = read_documents(text)
    replaced = BY_HAND.get(name, {}).get("text", {})
    assert bool(unreadable) == bool(replaced), unreadable
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    documents, unreadable = read_documents(text)
    assert not unreadable
    value = documents[0].value
    assert isinstance(value, dict)
    return value


def mended(name: str) -> tuple[list[str], set[str]]:
    """Return the problems left in a bad file after its messages were followed, and the manual edits that this took."""
    document, used = document_of(name), {"text"}
    for _ in range(ROUNDS):
        problems = problems_of(document)
        if not problems:
            break
        document, taken = mend(document, problems, BY_HAND.get(name, {}))
        used |= taken
    return [text_of(problem) for problem in problems_of(document)], used


@each_case("name", BAD)
def test_a_bad_file_is_good_once_its_messages_are_followed(name: str) -> None:
    left, used = mended(name)
    assert left == []
    assert set(BY_HAND.get(name, {})) - used == set(), "manual edits that no message requires"


def test_edits_by_hand_belong_to_bad_files() -> None:
    assert set(BY_HAND) <= set(BAD)


# ---------------------------------------------------------------------------------------------------------------- rules

_BROKEN = [
    pytest.param(name, patch, id=f"{name}-{json.dumps(patch)[:80]}")
    for name, rows in ROWS.items()
    for patch in rows["broken"]
]
_COLUMNS = [
    pytest.param(
        f"{block}.columns.{column}-is-for-{tasks[0]}",
        {
            "task": "masked-lm" if "masked-lm" not in tasks else "token-classification",
            **({"dataset": rows} if block == "dataset" else {"predict": {"dataset": rows}}),
        },
        id=f"{block}-{column}",
    )
    for block in ("dataset", "predict.dataset")
    for column, tasks in COLUMN_TASKS.items()
    for rows in ({"uri": "hf://c/d", "columns": {column: "x"}},)
]


@each_case(("name", "patch"), [*_BROKEN, *_COLUMNS])
def test_the_hint_of_a_rule_keeps_the_rule(name: str, patch: dict[str, Any]) -> None:
    """Each readable alternative of the message clears the problem; one of all, or one of the specs in `mended` beside
    the rule's broken specs, leaves no problem at all.
    """
    rule = next(rule for rule in RULES if rule.name == name)
    document = job(**patch)
    # A block without behaviour is reported alone: its rules wait until it is supported.
    blamed = [problem for problem in problems_of(document) if problem.path == f"spec.{rule.path}"]
    problems = blamed or [problem for problem in problems_of(document) if problem.reason == "NotYetSupported"]
    assert problems, "no problem is reported"
    ways = [without_gone(apply(document, edits)) for edits in alternatives(problems[0])]
    for way in ways:
        kept = [problem for problem in problems_of(way) if text_of(problem) == text_of(problems[0])]
        assert kept == [], (way, text_of(problems[0]))
    ways += [job(**other) for other in ROWS.get(name, {}).get("mended", [])]
    assert [] in [problems_of(way) for way in ways], text_of(problems[0])


# ------------------------------------------------------------------------------------------------- wrong forms anywhere

FIELDS = sorted(
    {".".join(steps[:count]) for steps in (path.split(".") for path in leaves(spec_shape()))
     for count in range(1, len(steps) + 1)}
)  # fmt: skip
"""Each field below spec, dotted."""
CHOICES = (
    "set it: ", "change it", "set minimum", "set maximum", "set one of them", "write one URI: ", "write a list",
    "write its fields in place of the brackets", "write one of its items, without the list", "leave it out, or write",
    "write one column: ",
    "did you mean",
    r"write (hf|pvc|file):// before", r"[\w-]+ has accuracy", r"\w+ is better when", "set it to a name of",
    "set it to a pattern", "The fields are: ", "remove one of the two", "write it with", "name two columns",
)  # fmt: skip
"""Begins of hints that leave a value to their reader, who knows what the job is for."""


FORMS: tuple[Any, ...] = ([], {}, "text", ["a", "b"], 0, True)


def kind_of(field: str) -> tuple[str, bool]:
    """Return the form of a field below spec."""
    shape = find(spec_shape(), field.split("."))
    assert shape is not None
    return type(shape.body).__name__, bool(shape.words)


def test_hints_for_a_wrong_form_of_any_field_can_be_followed(pytestconfig: pytest.Config) -> None:
    """Each hint is an edit that `mending` reads, or leaves a choice to its reader; edits lead to a valid job."""
    tried = 0
    for field, value in pairs_of(FIELDS, FORMS, kind_of, pytestconfig.getoption("--everything")):
        document, read = apply(job(), [Edit(f"spec.{field}", value)]), True
        for _ in range(ROUNDS):
            problems = problems_of(document) if read else []
            for problem in problems:
                ways = alternatives(problem)
                assert ways or re.match("|".join(CHOICES), problem.hint), (field, value, text_of(problem))
                read = read and bool(ways)
            for problem in problems if read else ():
                document = apply(document, alternatives(problem)[0])
            document = without_gone(document)
        if read:
            assert [text_of(problem) for problem in problems_of(document)] == [], (field, value)
            tried += 1
    assert tried > 100


# ------------------------------------------------------------------------------------------------- names of other tools


def shape_at(field: str) -> Any:
    head, *rest = field.split(".")
    if head == "metadata":
        return rest[0] in ObjectMeta.model_fields
    return find(spec_shape(), rest)


@each_case("row", name_rows(), ids=lambda row: row.names[0])
def test_a_foreign_name_points_to_a_field_that_exists_and_works(row: NameRow) -> None:
    assert row.names
    if not row.field:
        assert row.answer, "a name without a counterpart needs a hint"
        return
    assert shape_at(row.field), row.field
    assert works(row.field.removeprefix("spec.")), row.field
    if row.value is not None and "arguments" not in row.field:
        assert accepts(find(spec_shape(), row.field.split(".")[1:]), row.value)  # type: ignore[arg-type]


@each_case("row", value_rows(), ids=lambda row: f"{row.field}-{row.values[0]}")
def test_a_foreign_value_points_to_values_that_are_taken(row: ValueRow) -> None:
    shape = shape_at(row.field)
    assert shape
    for name in row.values:
        assert not accepts(shape, name), f"{row.field} takes {name} itself"
        assert find_value(row.field, name) == row
    assert row.answer
    for field, value in row.sets.items():
        assert accepts(shape_at(field), value), (field, value)
        assert works(field.removeprefix("spec."))


def test_every_field_that_a_hint_of_the_table_names_exists() -> None:
    for row in (*name_rows(), *value_rows()):
        for field in re.findall(r"spec(?:\.[A-Za-z_]+)+", f"{row.note} {row.none} {row.advice}"):
            body = find(spec_shape(), field.split(".")[1:])
            assert body is not None or field.startswith("spec.parallelism.deepspeedConfig."), field


def test_a_name_is_in_the_table_once_for_each_place() -> None:
    seen: dict[tuple[str, str], NameRow] = {}
    for row in name_rows():
        for name in row.names:
            for parent in row.under or ("",) * (not row.under):
                key = (plain(name), parent if row.under else "*")
                assert seen.setdefault(key, row) == row, key


OTHER_MEANING = frozenset({
    "annotations", "chat_template", "dataset", "dropout", "engine", "every", "format", "image", "labels", "output",
    "revision", "schedule", "server", "spec", "steps", "storage", "strategy", "template",
})  # fmt: skip
"""Fields whose name means something else in some objects, where a row says so."""


def test_no_row_denies_a_setting_that_exists() -> None:
    """A new field is answered by its place, in any spelling; a row that still denies its name is found here."""
    fields = fields_by_name()
    denied = {name: row for row in name_rows() if not row.field for name in row.names if plain(name) in fields}
    assert {name for name, row in denied.items() if not row.under} == set()
    assert denied.keys() == OTHER_MEANING
    for row in name_rows():
        for parent in row.under:
            places = [path.split(".") for path in leaves(spec_shape())]
            own = {steps[-1] for steps in places if steps[-2:-1] == [parent]}
            own |= own_names("spec") if parent == "spec" else set()
            assert set(map(plain, own)) & set(map(plain, row.names)) == set()


PLACES = ("", "spec", "spec.training", "spec.model", "spec.resources", "spec.parallelism", "spec.dataset")


def own_names(place: str) -> set[str]:
    """Return the fields of an object."""
    body = spec_shape() if place in ("", "spec") else find(spec_shape(), place.split(".")[1:])
    assert body is not None
    assert isinstance(body.body, Fields)
    return {plain(name) for name in body.body.fields} if place else {"spec", "kind", "metadata"}


def places_of(everything: bool) -> Iterator[tuple[str, str]]:
    """Yield names with places where they are foreign: one for each name, in turn; all with `everything`."""
    own = {place: own_names(place) for place in PLACES}
    for at, name in enumerate(name for row in name_rows() for name in row.names):
        places = [
            place
            for place in PLACES
            if plain(name) not in own[place] and find_name(name, place.rpartition(".")[2]) is not None
        ]
        yield from ((name, place) for place in (places if everything or not places else [places[at % len(places)]]))


def test_foreign_name_in_any_object_gets_a_valid_hint(pytestconfig: pytest.Config) -> None:
    """At every depth, each readable edit of the message removes the name and leads to no other unknown name."""
    tried: Counter[str] = Counter()
    for name, place in places_of(pytestconfig.getoption("--everything")):
        document = job()
        target = document
        for part in parts(place):
            target = target.setdefault(str(part), {})
        target[name] = 1
        path = format_path((*parts(place), name))
        (problem,) = [problem for problem in problems_of(document) if problem.path == path]
        assert "the fields here are" not in problem.hint, text_of(problem)
        for edits in alternatives(problem):
            after = problems_of(without_gone(apply(document, edits)))
            assert path not in [found.path for found in after], text_of(problem)
            unknown = [found for found in after if found.reason in ("Unknown", "NotYetSupported", "Forbidden")]
            assert unknown == [], text_of(problem)
            tried[place] += 1
    assert min(tried[place] for place in PLACES) > 20


@each_case("row", value_rows(), ids=lambda row: f"{row.field}-{row.values[0]}")
def test_foreign_value_gets_a_valid_hint(row: ValueRow) -> None:
    for name in row.values:
        document = apply(job(), [])
        target = document["spec"]
        *above, leaf = row.field.split(".")[1:]
        for part in above:
            target = target.setdefault(part, {})
        target[leaf] = name
        (problem,) = [problem for problem in problems_of(document) if problem.path == row.field]
        if not row.sets:
            assert problem.remedy == row.answer
            continue
        after = without_gone(apply(document, alternatives(problem)[0]))
        assert row.field not in [found.path for found in problems_of(after) if found.reason == "NotSupported"]
        for field, value in row.sets.items():
            written: Any = after
            for part in field.split("."):
                written = written[part]
            assert written == value


# ----------------------------------------------------------------------------------------------------------- one by one

ONE_BY_ONE = {
    "per device": ({"training": {"per_device_train_batch_size": 8}}, "did you mean microBatchSize?"),
    "epochs": ({"training": {"num_train_epochs": 3}}, "did you mean epochs?"),
    "half precision": ({"training": {"fp16": True}}, "set spec.training.precision to fp16"),
    "no half precision": ({"training": {"fp16": False}}, "leave it out"),
    "accumulation": (
        {"training": {"gradientAccumulationSteps": 4}},
        "set spec.training.globalBatchSize, which is micro-batch x accumulation x processes",
    ),
    "lora": (
        {"lora": {"r": 8, "lora_alpha": 16}},
        "set spec.model.adapter.method to lora, spec.model.adapter.rank to 8 and spec.model.adapter.alpha to 16",
    ),
    "type of an adapter": ({"model": {"uri": "hf://a/b", "adapter": {"type": "lora"}}}, "did you mean method?"),
    "adapter in a word": ({"model": {"uri": "hf://a/b", "adapter": "lora"}}, "write {method: lora}"),
    "deepspeed": ({"deepspeed": "ds.json"}, "set spec.parallelism.strategy to deepspeed"),
    "zero2": ({"parallelism": {"strategy": "zero2"}}, "strategy to deepspeed and spec.parallelism.zeroStage to 2"),
    "limits": ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "set spec.resources.gpusPerNode to 1"),
    "nodeSelector": ({"nodeSelector": {"a": "b"}}, "move it below spec.template"),
    "tolerations": ({"resources": {"tolerations": []}}, "move it below spec.template"),
    "causal-lm": ({"task": "causal-lm"}, "write text-generation"),
    "sentiment": ({"task": "sentiment"}, "write text-classification"),
    "sft": ({"task": "sft"}, "write text-generation"),
    "dpo": ({"task": "dpo"}, "write preference-tuning"),
    "16 GB": ({"resources": {"memory": "16 GB"}}, "write 16G (or 16Gi for powers of 1024)"),
    "warm-up": ({"training": {"warmup_ratio": 0.1}}, "did you mean warmupSteps? (a fraction of all steps below 1"),
    "evaluation": ({"training": {"evaluation_strategy": "epoch"}}, "validation is measured after each epoch"),
    "epochs too high up": ({"epochs": 3}, "move it below spec.training"),
    "rate too high up": ({"learningRate": 1e-4}, "move it below spec.training"),
    "another spelling too high up": ({"learning_rate": 1e-4}, "move it below spec.training, as learningRate"),
    "too deep": ({"training": {"nodes": 2}}, "move it below spec.resources"),
    "an argument": ({"training": {"tf32": True}}, "move it below spec.training.arguments"),
    "steps between checkpoints": ({"checkpoints": {"every": 500}}, "write {steps: 500}"),
    "an address of the Hub": ({"dataset": {"uri": "https://huggingface.co/datasets/a/b"}}, "write hf://a/b"),
    "a file": ({"dataset": {"uri": "data.csv"}}, "write file://data.csv"),
    "a model alone": ({"model": "bert-base-uncased"}, "write {uri: hf://bert-base-uncased}"),
    "an address behind hf": ({"model": {"uri": "hf://https://huggingface.co/a/b"}}, "write hf://a/b"),
    "reversed columns": (
        {"dataset": {"uri": "hf://c/d", "columns": {"review": "text"}}},
        "set spec.dataset.columns.text to review (our name is on the left",
    ),
    "a column of a pair": (
        {"dataset": {"uri": "hf://c/d", "columns": {"sentence2": "b", "label": "l"}}},
        "did you mean textPair?",
    ),
    "splits in a list": (
        {"dataset": {"uri": "hf://c/d", "splits": ["train", "test"]}},
        "write {train: train, test: test}",
    ),
    "labels in a list": (
        {"dataset": {"uri": "hf://c/d", "labels": ["no", "yes"]}},
        'write {"0": "no", "1": "yes"}',
    ),
    "files of splits": (
        {"dataset": {"train": "rows/a.csv", "test": "rows/b.csv"}},
        "set spec.dataset.uri to file://rows and spec.dataset.splits.train to a",
    ),
    "the name of a configuration": (
        {"dataset": {"uri": "hf://c/d", "name": "sst2"}},
        "set spec.dataset.config to sst2",
    ),
    "a claim with a path": (
        {"dataset": {"claimName": "inputs", "path": "rows"}},
        "set spec.dataset.uri to pvc://inputs/rows",
    ),
    "number and product of GPUs": (
        {"resources": {"accelerator": "2x H100"}},
        "set spec.resources.accelerator.product to H100 and spec.resources.gpusPerNode to 2",
    ),
    "product and number of GPUs": (
        {"resources": {"gpusPerNode": "A100-80GB:4"}},
        "set spec.resources.accelerator.product to A100-80GB and spec.resources.gpusPerNode to 4",
    ),
    "GPUs in an object": (
        {"resources": {"gpu": {"type": "L4", "count": 2}}},
        "set spec.resources.accelerator.product to L4 and spec.resources.gpusPerNode to 2",
    ),
    "a part of a GPU": (
        {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}},
        "set spec.resources.accelerator.resource to nvidia.com/mig-1g.10gb",
    ),
    "a condition as a gate": (
        {"evaluation": {"gate": "accuracy >= 85%"}},
        "write {metric: accuracy, minimum: 0.85}",
    ),
    "a metric with its limit": (
        {"evaluation": {"gate": {"f1": 0.8}}},
        "spec.evaluation.gate.metric to f1 and spec.evaluation.gate.minimum to 0.8",
    ),
    "a limit in the name of a metric": (
        {"evaluation": {"maxLoss": 0.5}},
        "set spec.evaluation.gate.metric to loss and spec.evaluation.gate.maximum to 0.5",
    ),
    "a schedule": ({"schedule": "0 2 * * *"}, "leave it out: a job starts when it is created"),
    "the words of a path": ({"checkpointing": {"intervalSteps": 5}}, "checkpoints"),
    "an unknown object with known content": (
        {"preprocessing": {"max_seq_length": 64}},
        "set spec.preparation.maxLength to 64",
    ),
    "requests of a server": (
        {"endpoint": {"resources": {"requests": {"cpu": 2}}}},
        "set spec.endpoint.resources.cpu to 2",
    ),
    "a reference to a Secret": (
        {"secrets": {"hubToken": {"secretKeyRef": {"name": "hub", "key": "t"}}}},
        "set spec.secrets.hubToken.name to hub and spec.secrets.hubToken.key to t",
    ),
    "the task of a chat": ({"task": "llm-finetuning"}, "write text-generation"),
    "a slash at the end": ({"model": {"uri": "hf://bert-base-uncased/"}}, "write hf://bert-base-uncased"),
}


@each_case("case", ONE_BY_ONE)
def test_mistakes_of_beginners_get_a_hint(case: str) -> None:
    patch, expected = ONE_BY_ONE[case]
    # Problems that the edit then causes follow.
    problem, *_ = problems_of(job(**patch))
    assert expected in problem.hint


def test_hint_names_the_place_of_a_field_next_to_spec() -> None:
    problems = problems_of({**job(), "epochs": 3, "training": {}, "namespace": "x"})
    assert [(problem.path, problem.hint) for problem in problems] == [
        ("epochs", "move it below spec.training"),
        ("training", "move it below spec"),
        ("namespace", "move it below metadata"),
    ]


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("org/name", "hf://org/name"),
        ("https://huggingface.co/org/name/tree/main", "hf://org/name"),
        ("./rows", "file://rows"),
        ("/data/rows", "file:///data/rows"),
        ("rows/*.jsonl", "file://rows/*.jsonl"),
        ("s3://bucket/x", None),
        ("two words", None),
        ("", None),
        (5, None),
    ],
)
def test_a_name_an_address_and_a_path_become_uris(text: Any, uri: str | None) -> None:
    assert as_uri(text) == uri


# ------------------------------------------------------------------------------------------------- served, in this mode


def test_a_hint_offers_only_schemes_that_are_served_and_allowed() -> None:
    document = job(dataset={"uri": "file:///rows"}, storage={"workspace": "s3://b/x"}, model={"uri": "bert-base"})
    for settings, offered in (
        (CLUSTER_SETTINGS, {"hf", "pvc"}),
        (LOCAL_SETTINGS, {"hf", "file", "pkg", "pvc"}),
        (Settings(schemes=("pvc",)), {"pvc"}),
    ):
        for problem in problems_of(document, settings):
            text = f"{problem.rule} {problem.hint}".replace("hf://bert-base", "")
            named = {scheme for scheme in ("hf", "s3", "gs", "az", "pvc", "file", "pkg") if f"{scheme}://" in text}
            assert named <= offered, text_of(problem)


CLUSTER_HINTS = {
    "data of one machine": (
        {"dataset": {"uri": "file:///rows"}},
        "is a path of one machine, which pods cannot read",
        "copy the data, and write hf://ORG/NAME or pvc://CLAIM/PATH; or run the job with finetune run",
    ),
    "a model in a package": (
        {"model": {"uri": "pkg://package/model"}},
        "is a path of one machine, which pods cannot read",
        "copy the model, and write hf://ORG/NAME or pvc://CLAIM/PATH; or run the job with finetune run",
    ),
    "predictions on one machine": (
        {"predict": {"output": "file://out.jsonl"}},
        "is a path of one machine, which pods cannot write to",
        "write pvc://CLAIM/PATH; or run the job with finetune run",
    ),
    "a workspace on one machine": (
        {"storage": {"workspace": "file:///runs"}}, "is not supported in this version", "write pvc://CLAIM/PATH",
    ),
    "a store": (
        {"dataset": {"uri": "s3://bucket/rows"}}, "is not supported in this version",
        "copy the data, and write hf://ORG/NAME or pvc://CLAIM/PATH",
    ),
    "Databricks": (
        {"dataset": {"uri": "dbfs:/rows"}}, "must be a URI that begins with hf:// or pvc://",
        "copy the data, and write hf://ORG/NAME or pvc://CLAIM/PATH: dbfs:// is not supported in this version",
    ),
    "the mount of Databricks": (
        {"dataset": {"uri": "/dbfs/rows"}}, "must be a URI that begins with hf:// or pvc://",
        "copy the data to a claim, and write pvc://CLAIM/PATH: it is a path of one machine, which pods cannot read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLUSTER_HINTS)
def test_place_that_pods_do_not_reach_gets_one_hint(case: str) -> None:
    patch, rule, hint = CLUSTER_HINTS[case]
    (problem,) = problems_of(job(**patch), CLUSTER_SETTINGS)
    assert (problem.rule, problem.hint) == (rule, hint)


def test_hint_offers_only_supported_values() -> None:
    (problem,) = problems_of(job(launcher="trainjobs"))
    assert "trainjob," not in f"{problem.rule} {problem.hint}"
    assert "endpoint" not in " ".join(map(text_of, problems_of(job(training=None))))


def test_a_hint_names_no_field_that_is_refused() -> None:
    config = {"strategy": "deepspeed", "deepspeedConfig": {"elasticity": {"enabled": True}}}
    (problem,) = problems_of(job(parallelism=config))
    assert problem.hint == "leave it out: spec.resources.elastic is not supported in this version"


def test_unsupported_field_is_the_only_problem_of_its_block() -> None:
    problems = problems_of(job(resources={"elastic": {"minNodes": 3, "maxNodes": 2}}, endpoint={"maxReplicas": 1}))
    assert {problem.reason for problem in problems} == {"NotYetSupported"}


# ----------------------------------------------------------------------------------------------------- files of others

AXOLOTL_FILE = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
datasets:
  - {path: teknium/GPT4-LLM-Cleaned, type: alpaca}
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_target_modules: [gate_proj]
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
"""
FACTORY_FILE = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/sft
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
DEEPSPEED_FILE = (
    '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "gradient_clipping": 1}'
)
ARGUMENTS_FILE = "model_name_or_path: bert-base-uncased\ndataset_name: imdb\nnum_train_epochs: 3\noutput_dir: out\n"


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (AXOLOTL_FILE, "axolotl"),
        (FACTORY_FILE, "LLaMA-Factory"),
        (DEEPSPEED_FILE, "DeepSpeed"),
        (ARGUMENTS_FILE, "Hugging Face"),
    ],
)
def test_configuration_of_another_tool_is_one_problem(text: str, tool: str, beside: bool) -> None:
    value = yaml.safe_load(text)
    (problem,) = problems_of({**job(), "spec": value} if beside else value)
    assert f"a configuration of {tool}," in problem.rule
    assert problem.path == ("spec" if beside else "")
    assert "docs/names.md" in problem.hint


def test_few_foreign_names_are_reported_one_by_one() -> None:
    assert len(problems_of(job(base_model="x", num_epochs=3))) == 2


def test_token_in_a_configuration_of_another_tool_is_reported() -> None:
    value = {**yaml.safe_load(FACTORY_FILE), "hf_token": "hf_" + "a" * 34}
    problems = problems_of(value)
    assert [problem.reason for problem in problems] == ["Forbidden", "Unknown"]
    assert "aaaa" not in " ".join(map(text_of, problems))


# ------------------------------------------------------------------------------------------------------------- coverage

MODULES = (validation, faulty_fields, support, template, deepspeed_overrides, other_tools)


def problem_lines(module: ModuleType) -> dict[int, str]:
    """Return the lines that create a problem."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    makers = {"Problem", "_forbidden", "quote", "_limit_problem"}
    return {
        node.lineno: f"{Path(module.__file__).name}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
    }


BEYOND_FILES = {
    "validation": ("_limit_problem", "_exceeded_limit", "validate_job", "_metadata", "_settings", "_hyperparameters"),
    "other_tools": ("_configuration", "workload"),
}
"""Functions whose problems need values that no file of bad/ has: too large, other settings, another tool's file."""


def test_bad_files_cover_every_line_that_creates_a_problem() -> None:
    wanted = {module.__file__: problem_lines(module) for module in MODULES}
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in wanted:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        for name in BAD:
            problems_of(document_of(name))
    finally:
        sys.settrace(None)
    missed = []
    for module in MODULES:
        assert module.__file__
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        spared = BEYOND_FILES.get(module.__name__.rpartition(".")[2], ())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            lines = [at for at in wanted[module.__file__] if function.lineno <= at <= (function.end_lineno or 0)]
            if function.name not in spared:
                missed += [wanted[module.__file__][at] for at in lines if (module.__file__, at) not in reached]
    assert missed == []


@pytest.mark.parametrize("command", [("run", "job.yaml"), ("logs", "a")])
def test_stages_that_are_offered_are_those_that_run(command: tuple[str, ...]) -> None:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [*command, "--stage", "bananas"])
    assert result.exit_code == 2
    assert "predict" in result.output
    assert "serve" not in result.output


# ----------------------------------------------------------------------------------------- hints outside of validation

_TOP = "|".join(spec_shape().body.fields)  # type: ignore[union-attr]
_NAMED = re.compile(rf"(?<![\w./-])(?:spec\.)?((?:{_TOP})(?:\.[A-Za-z]\w*)+)")
_ROOTS = (Path(finetune_trainer.__path__[0]), Path(finetune_contract.__path__[0]), Path(finetune_operator.__path__[0]))
NO_FIELDS = {
    "spot.nodes": "a key of the operator's settings",
    "model.generate": "code of a model card",
    "model.tokenizer.mask_token": "code of a model card",
    "task.percentage": "the form of a progress bar",
}


def sentences(module: Path) -> Iterator[str]:
    """Yield string literals of several words, without docstrings."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
        if isinstance(text, str) and " " in text:
            yield text


def test_fields_named_in_any_message_exist_and_are_supported() -> None:
    """Messages of a failed stage cannot be tried without one; the fields that they name can be looked up."""
    named = {
        name for root in _ROOTS for module in root.rglob("*.py") for text in sentences(module)
        for name in _NAMED.findall(text)
    }  # fmt: skip
    assert len(named) > 80
    unknown = {name for name in named if find(spec_shape(), name.split(".")) is None or not works(name)}
    assert unknown == set(NO_FIELDS)


# ----------------------------------------------------------------------------------------------------- hints as values

TEXTS: dict[str, tuple[Hint, str, str]] = {
    "another name": (Rename("epochs"), "did you mean epochs?", "spec.training.epoch"),
    "another name with a note": (Rename("maxLength", "in tokens"), "did you mean maxLength? (in tokens)", "spec.a"),
    "another place": (Move(("spec.training.epochs",)), "move it below spec.training", "spec.epochs"),
    "another place and name": (Move(("spec.a.b",)), "move it below spec.a, as b", "spec.ab"),
    "two places": (Move(("spec.a.b", "spec.c.b")), "move it below spec.a or spec.c", "spec.b"),
    "the top": (Move(("kind",)), "move it to the top level of the document, next to kind", "spec.kind"),
    "other fields": (SetTo({"spec.a": 1, "spec.b": "x"}, "which is fast"),
        "set spec.a to 1 and spec.b to x, which is fast", "spec.c"),
    "three fields": (SetTo({"spec.a": 1, "spec.b": [2], "spec.c": {"d": "3"}}),
        'set spec.a to 1, spec.b to [2] and spec.c to {d: "3"}', "spec.e"),
    "none": (Drop(), "leave it out", "spec.a"),
    "none, with the reason": (Drop("it is the default"), "leave it out: it is the default", "spec.a"),
    "another value": (ReplaceBy("yes"), 'write "yes"', "spec.a"),
    "a long value": (ReplaceBy({"a": 1}, words="write its one item without the list"),
        "write its one item without the list", "spec.a"),
    "a credential": (SetTo({"spec.a": "hf_" + "a" * 34}), "set spec.a to (hidden)", "spec.b"),
    "advice": ("remove one of the two", "remove one of the two", "spec.a"),
}  # fmt: skip


@each_case("case", TEXTS)
def test_hint_is_written_as_text(case: str) -> None:
    hint, text, path = TEXTS[case]
    assert hint_text(hint, path) == text


def test_change_of_a_hint_is_data_for_programs() -> None:
    spec = {"training": {"num_train_epochs": 3, "epochs": "x"}, "resources": {"gpus": "2x H100"}, "modelname": 1}
    changes = {problem.path: hint_data(problem) for problem in problems_of(job(**spec))}
    assert changes == {
        "spec.training.num_train_epochs": {"kind": "Drop", "reason": 'spec.training.epochs is already "x"; or replace '
                                           "that value"},
        "spec.training.epochs": None,
        "spec.resources.gpus": {"kind": "SetTo", "fields": {"spec.resources.accelerator.product": "H100",
                                                            "spec.resources.gpusPerNode": 2}},
        "spec.modelname": None,
    }  # fmt: skip
    token = Problem("spec.a", None, "", SetTo({"spec.b": "hf_" + "a" * 34}))
    assert hint_data(token) is None


def test_no_code_reads_the_text_of_a_hint() -> None:
    """The words of a hint may change: what follows from it, such as the second error of a job, does not."""
    spec = {"training": {"learning_rat": 2e-5, "Epochs": 0}, "parallelism": "zero3"}
    found = [(problem.path, type(problem.remedy)) for problem in problems_of(job(**spec))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(problems, "hint_text", lambda hint, path: "")
        patched.setattr(problems, "presentable", lambda hint: "")
        reworded = problems_of(job(**spec))
    assert [(problem.path, type(problem.remedy)) for problem in reworded] == found
    assert ("spec.training.epochs", str) in found or ("spec.training.epochs", ReplaceBy) in found


# ------------------------------------------------------------------------------------------------- problems that follow


def hints_of(value: Any) -> dict[str, str]:
    return {problem.path: problem.hint for problem in problems_of(value)}


def test_values_that_a_hint_sets_are_checked_together_with_the_job() -> None:
    hints = hints_of(job(numNodes=3, resources={"gpusPerNode": 1}))
    assert hints["spec.numNodes"] == "set spec.resources.nodes to 3"
    assert hints["spec.training.globalBatchSize"].startswith("use 30 or 33")


def test_required_field_that_a_hint_sets_is_not_missing_as_well() -> None:
    assert hints_of(job(model={"name": "org/model"})) == {"spec.model.name": "set spec.model.uri to hf://org/model"}


def test_rules_apply_to_the_training_that_a_hint_adds() -> None:
    hints = hints_of(job(training=None, resources={"nodes": 3, "gpusPerNode": 1}))
    assert list(hints) == ["spec.training", "spec.training.globalBatchSize"]


def test_name_that_is_left_out_does_not_hide_problems_beside_it() -> None:
    hints = hints_of(job(evaluation={"every": "100 steps", "metrics": ["f1-macro"]}))
    assert hints["spec.evaluation.metrics"].startswith("write f1 for")


def test_list_in_place_of_an_object_does_not_hide_problems_inside_it() -> None:
    hints = hints_of(job(evaluation={"gate": [{"metric": "f1", "min": 0.8}]}))
    assert hints == {
        "spec.evaluation.gate": "write its one item without the list",
        "spec.evaluation.gate.min": "did you mean minimum?",
    }


def test_version_that_is_not_served_does_not_hide_other_problems() -> None:
    hints = hints_of({**job(task="ner", dataset=None, training=None), "apiVersion": "finetune.dev/v1"})
    assert hints["apiVersion"] == "write apiVersion: finetune.dev/v1alpha1"
    assert hints["spec.task"] == "write token-classification"


def test_fields_beside_kind_are_checked_as_fields_of_spec() -> None:
    document = job()
    hints = hints_of(
        {**{name: document[name] for name in ("apiVersion", "kind", "metadata")}, **document["spec"], "task": "ner"}
    )
    assert hints["model"] == "move it below spec"
    assert hints["task"] == "set spec.task to token-classification"
    assert hints["spec.task"] == "write token-classification"
    assert "spec" not in hints


def test_names_in_capitals_hide_no_problems_of_their_fields() -> None:
    document = job(Training={"Epochs": 1}, training=None)
    hints = hints_of(
        {
            "apiVersion": document["apiVersion"],
            "Kind": "FineTuneJob",
            **{name.title(): document[name] for name in ("metadata", "spec")},
        }
    )
    assert hints["Kind"] == "did you mean kind?"
    assert hints["spec.training.Epochs"] == "did you mean epochs?"
    assert not {"kind", "spec", "metadata.name"} & set(hints)


def test_unknown_field_without_a_value_is_left_out() -> None:
    document = job()
    document["spec"]["dtype"] = None
    assert hints_of(document) == {"spec.dtype": "leave it out"}


def test_unknown_field_of_metadata_is_refused() -> None:
    document = job()
    document["metadata"]["suspend"] = True
    assert hints_of(document) == {"metadata.suspend": "move it below spec.runPolicy"}


def test_adapter_over_4_bit_weights_is_one_method_in_all_hints() -> None:
    hints = hints_of(job(model={"uri": "hf://a/b", "load_in_4bit": True}, lora={"r": 8}))
    assert hints["spec.lora"].startswith("set spec.model.adapter.method to qlora")


def test_value_under_the_name_of_a_secret_is_not_repeated() -> None:
    hints = hints_of(job(hfToken="my-secret-value"))
    assert hints == {"spec.hfToken": "set spec.secrets.hubToken.name"}
