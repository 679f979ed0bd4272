"""docs/scripts.md matches the code. tests/trainer/test_scripts.py runs its program."""

from __future__ import annotations

import json
import re

import yaml

from finetune_contract.layout import EXIT_CODES, SCRIPT_VARIABLES, FailureClass
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.checks.template import template_problems
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJobSpec
from script_support.programs import PAGE, documented

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_of_variables_is_the_contracts() -> None:
    rows = re.findall(r"^\| `(FINETUNE_\w+)` \| (.*) \|$", TEXT, re.MULTILINE)
    assert dict(rows) == SCRIPT_VARIABLES
    assert len(rows) == len(SCRIPT_VARIABLES) > 8


def test_documented_job_is_accepted_and_planned() -> None:
    job, problems = validate_job(yaml.safe_load(documented("yaml")))
    assert job is not None, problems
    made = plan(job, Facts(), Settings())
    assert made.trainer.script is not None
    assert made.trainer.script.arguments == ("--epochs", "2", "--learning_rate", "2e-05")
    assert [stage.value for stage in made.stages] == ["prepare", "train", "evaluate"]


def test_the_template_for_a_certificate_is_accepted() -> None:
    block = next(text for text in re.findall(r"```yaml\n(template:.*?)```", TEXT, re.DOTALL))
    frame = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "predict": {"dataset": {"uri": "hf://c/d"}}}
    spec = FineTuneJobSpec.model_validate_json(json.dumps({**frame, **yaml.safe_load(block)}))
    assert list(template_problems(spec)) == []


def test_the_table_of_ends_names_classes_that_there_are() -> None:
    table = TEXT[TEXT.index("| how it ends |") : TEXT.index("Restarted programs")]
    named = set(re.findall(r"`([A-Z][A-Za-z]+(?:Error|Memory|Failed|ed))`", table))
    assert named == {"ProgramError", "OutOfMemory", "CollectiveFailed", "Preempted", "Killed"}
    assert named <= {each.value for each in FailureClass}
    assert EXIT_CODES[FailureClass.PROGRAM] == 1


def test_the_program_is_short_and_uses_only_variables_that_there_are() -> None:
    program = documented("python")
    compile(program, str(PAGE), "exec")
    assert program.count("\n") <= 50
    assert set(re.findall(r"FINETUNE_\w+", program)) <= set(SCRIPT_VARIABLES)
