"""docs/operator.md stays true: its tables match the code, and its example works as described."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from finetune_contract.layout import ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN, ENV_KUBEFLOW_URL
from finetune_operator.controller.servers.progress_protocol import progress_of, update_of
from finetune_operator.jobs.outcomes.remedies import REMEDIES, Remedy
from finetune_operator.spec.types import ConditionType, Phase

TEXT = (Path(__file__).parents[2] / "docs" / "operator.md").read_text(encoding="utf-8")
REMEDY_TEXTS = {
    "fails": Remedy.FAIL,
    "adapts": Remedy.ADAPT,
    "restarts free of charge": Remedy.FREE,
    "restarts, counted": Remedy.COUNTED,
    "restarts with a new plan": Remedy.REPLAN,
}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table with this first heading."""
    lines = TEXT.splitlines()
    found = []
    for line in lines[next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_documented_failure_handling_matches_the_operator() -> None:
    documented_remedies = {cause: REMEDY_TEXTS[row[2]] for row in rows("class") for cause in quoted(row[0])}
    assert documented_remedies == {cause.value: remedy for cause, remedy in REMEDIES.items()}


def test_every_condition_and_every_phase_is_described() -> None:
    assert {row[0] for row in rows("condition")} == set(get_args(ConditionType))
    named = {phase for row in rows("phase") for phase in row[0].split(", ")}
    assert named | {"Queued"} == set(get_args(Phase))


def test_documented_example_posts_readable_progress(monkeypatch, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert {ENV_KUBEFLOW_URL, ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN} == set(re.findall(r'environ\["(\w+)"\]', code))
    built, _, sent = code.partition("context = ssl")
    assert "urlopen(request, context=context" in sent
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv(ENV_KUBEFLOW_URL, "https://127.0.0.1/")
    monkeypatch.setenv(ENV_KUBEFLOW_TOKEN, str(tmp_path / "token"))
    names: dict[str, object] = {}
    exec(built, names)
    request = names["request"]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    read = progress_of(update_of(request.data), now)  # type: ignore[attr-defined]
    assert (read.percent, read.loss, read.remaining_seconds) == (45, 0.412, 312)
    assert request.get_header("Authorization") == "Bearer secret"  # type: ignore[attr-defined]
    assert json.loads(request.data)["trainerStatus"]["metrics"]  # type: ignore[attr-defined]
