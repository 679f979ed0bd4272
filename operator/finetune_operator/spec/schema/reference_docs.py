"""API reference and settings as Markdown, generated from the models: one table for each block of fields.

It contains only the models' own texts; guides are elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pydantic import JsonValue

from finetune_contract.arguments import FREE, OWNED_BY_PLAN, known_arguments
from finetune_operator.spec.checks.copied_settings import ARGUMENTS, COPIED, SAME, Copied
from finetune_operator.spec.fields.shapes import Fields, Items, Shape, sentence, shape_of, spec_shape, status_shape
from finetune_operator.spec.fields.support import ROWS
from finetune_operator.spec.hints.foreign_table import NameRow, ValueRow, name_rows, value_rows
from finetune_operator.spec.launcher_rows import SUPPORTED, TRAINING, unsupported_note
from finetune_operator.spec.problems import hint_text
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import API_VERSION, KIND


def api_reference() -> str:
    """Return the whole reference, ending in a newline; equal models give equal text."""
    lines = [
        f"# {KIND} ({API_VERSION})",
        "",
        "Generated from the models by `make generate`; do not edit.",
        "",
        *_sections("spec", spec_shape()),
        "## Rules between fields",
        "",
        *(f"- `{rule.path}` {rule.text}." for rule in RULES),
        "",
        "## Not supported yet",
        "",
        "`finetune validate`, with reason `NotYetSupported`, and the API server refuse these fields except for the "
        "supported values.",
        "",
        "| Field | Supported values |",
        "|---|---|",
        *(f"| `spec.{row.path}` | {row.works if row.values or row.schemes else 'the default only'} |" for row in ROWS),
        "",
        *_sections("status", status_shape()),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


SETTINGS_EXAMPLE = """\
namespaces: [ml-team, research]
defaults:
  image: registry.example.com/finetune-trainer:0.1.0
  imagePullSecrets: [{name: registry}]
  storageClassName: fast
  ttlSecondsAfterFinished: 604800
limits:
  imagePullSeconds: 1200
  unschedulableSeconds: 86400
schemes: [hf, pvc]
images: [registry.example.com/*]
trustRemoteCode: [our-organisation/*]
currency: EUR
prices:
  - {product: NVIDIA-H100-80GB-HBM3, gpus: 8, perHour: 90.0, spotPerHour: 35.0}
  - {product: cpu, gpus: 0, perHour: 1.2}
"""
"""Installation that restricts jobs; a test reads it."""


def settings_reference() -> str:
    """Return the settings of an installation as Markdown, ending in a newline."""
    shape = shape_of(Settings, "Settings of the administrator for all jobs.")
    lines = [
        "# Settings",
        "",
        "Generated from the models by `make generate`; do not edit.",
        "",
        "One YAML file with any subset of these settings; unset ones have the defaults below. The operator reports an",
        "unknown or invalid setting with its path, and does not start.",
        "",
        "```yaml",
        *SETTINGS_EXAMPLE.splitlines(),
        "```",
        "",
        *_sections("settings", shape),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def names_reference() -> str:
    """Return other tools' names and their replacements, as Markdown ending in a newline."""
    lines = [
        "# Names of other tools",
        "",
        "Names of settings in Hugging Face, axolotl, LLaMA-Factory, DeepSpeed and Kubernetes, and the field of a",
        "FineTuneJob to use instead. `finetune validate` gives the same hint for each of them. A name is",
        "recognized in any spelling: `per_device_train_batch_size` is `perDeviceTrainBatchSize`.",
        "",
        "Generated from the models by `make generate`; do not edit.",
        "",
        "## Fields",
        "",
        "| Name | Used by | Write | Note |",
        "|---|---|---|---|",
        *(_name_row(row) for row in name_rows()),
        "",
        "## Values",
        "",
        "| Field | Value | Used by | Write | Note |",
        "|---|---|---|---|---|",
        *(_value_row(row) for row in value_rows()),
        "",
        "A quantity of memory is `16Gi` (powers of 1024) or `16G` (powers of 1000), not `16 GB`.",
        "",
        "## Settings that are accepted unchanged",
        "",
        "These settings are accepted in `spec.training.arguments` or `spec.parallelism.deepspeedConfig`. They set a",
        "field of the job that has its default, or are ignored if they change nothing; `finetune validate`, `plan` and",
        "`run` report this. In `deepspeedConfig`, every `auto` is ignored as well, and any key that equals its field.",
        "",
        "| In | Setting | Effect |",
        "|---|---|---|",
        *(_copied_row(row) for row in COPIED),
        *(
            f"| `spec.{ARGUMENTS}` | `{name}` | ignored if `spec.{field}` has the same value |"
            for name, field in SAME.items()
        ),
        "",
        *_training_arguments(),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _training_arguments() -> Iterator[str]:
    """Yield a section that lists which fields of TrainingArguments a job may set."""
    ignored = {
        name for row in COPIED if row.block == ARGUMENTS and row.field is None and not row.when for name in row.names
    }
    rest = sorted(known_arguments().keys() - FREE - OWNED_BY_PLAN.keys() - ignored)
    yield from ("## Fields of transformers.TrainingArguments", "")
    yield from ("`spec.training.arguments` accepts these fields:", "", f"{_codes(sorted(FREE))}.", "")
    yield from ("These are refused, because a field of the job decides them:", "", "| Field | Set |", "|---|---|")
    yield from (f"| `{name}` | `spec.{field}` |" for name, field in OWNED_BY_PLAN.items())
    yield from ("", "These are refused but for the values above, because the trainer itself controls their effect:", "")
    yield f"{_codes(rest)}."


def _name_row(row: NameRow) -> str:
    place = f", in {' or '.join(name for name in row.under if name)}" if any(row.under) else ""
    written = f"`{row.field}`" if row.field else ""
    written += "" if row.value is None else f": `{_scalar(row.value)}`"
    note = row.note if row.field else hint_text(row.answer, "")
    return f"| {_codes(row.names)}{place} | {row.tools} | {written} | {_cell(note)} |"


def _value_row(row: ValueRow) -> str:
    written = ", ".join(f"`{field}: {_scalar(value)}`" for field, value in row.sets.items())
    note = row.note if row.sets else hint_text(row.answer, row.field)
    return f"| `{row.field}` | {_codes(map(_scalar, row.values))} | {row.tools} | {written} | {_cell(note)} |"


def _scalar(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _copied_row(row: Copied) -> str:
    becomes = (
        f"sets `spec.{row.field}`" if row.field else f"ignored{f' when {row.when}' * bool(row.when)}: {row.becomes}"
    )
    return f"| `spec.{row.block}` | {_codes(row.names)} | {becomes} |"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sections(path: str, shape: Shape) -> Iterator[str]:
    """Yield a table for the fields of one block, then those of the blocks in it."""
    fields = _fields(shape)
    yield from (f"## {path}", "", _cell(shape.group or shape.description), "")
    yield from ("| Field | Values | Default | Description |", "|---|---|---|---|")
    for name, inner in fields.items():
        values = _cell(sentence(inner)) if not _fields(inner) else " or ".join([*inner.words, "see below"])
        yield f"| `{name}` | {values} | {_default(inner)} | {_cell(inner.description)} |"
    yield ""
    for name, inner in fields.items():
        if _fields(inner):
            yield from _sections(f"{path}.{name}{'[]' if isinstance(inner.body, Items) else ''}", inner)


def _fields(shape: Shape) -> dict[str, Shape]:
    match shape.body:
        case Fields(fields):
            return dict(fields)
        case Items(item):
            return _fields(item)
        case _:
            return {}


def _default(shape: Shape) -> str:
    return "" if shape.default is None or _fields(shape) else f"`{json.dumps(shape.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def launchers_table() -> str:
    """Return the table of docs/operator.md: the choices of `launcher: auto`, in their order."""
    rows = [launcher for launcher in SUPPORTED if launcher.name in TRAINING]
    lines = ["| launcher | object of the train stage | needs |", "|---|---|---|"]
    for row in rows:
        needs = "nothing" if row.built_in else row.installed_by.removeprefix("the ")
        lines.append(f"| `{row.name}` | {row.manifest} | {needs} |")
    lines += ["", "`launcher: auto` selects the first of these that the API server serves."]
    return "\n".join(lines) + unsupported_note("refused as not yet supported", "`") + "\n"
