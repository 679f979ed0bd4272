"""docs/install.md stays true: the things that it names exist, its values are valid, and its commands are commands."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from chart_files import ROOT, leaves, values
from chart_rendering import render
from finetune_command import finetune

TEXT = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) if "apiVersion:" not in block]
"""Values of the chart; tests/cluster/test_operator_webhook.py tries the API server's own files."""
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_overlay_is_in_the_table() -> None:
    listed = set(re.findall(r"\| `manifests/overlays/([a-z-]+)` \|", TEXT))
    assert listed == {folder.name for folder in (ROOT / "manifests" / "overlays").iterdir()}


@pytest.mark.parametrize("block", BLOCKS)
def test_values_are_taken(block: str) -> None:
    assert render(yaml.safe_load(block))


def test_values_that_are_named_are_there() -> None:
    known = {value.path for value in leaves()} | {value.path for value in values()}
    named = set(re.findall(r"--set ([A-Za-z.]+)=", TEXT)) | set(re.findall(r"`([a-z]+(?:\.[a-zA-Z]+)+)[=`]", TEXT))
    named = {name for name in named if name.split(".")[0] in {value.path for value in values()}}
    assert len(named) > 10
    wrong = {name for name in named if name not in known and not name.startswith("settings.")}
    assert {name for name in wrong if name not in ("values.yaml",)} == set()


def test_documented_output_of_finetune_images_is_current() -> None:
    command = next(line for line in COMMANDS if line.startswith("finetune images"))
    ran = finetune(*shlex.split(command)[1:], folder=ROOT)
    assert f"```text\n{ran.stdout}```" in TEXT
