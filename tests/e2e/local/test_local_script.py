"""`finetune run` with a program of the user's own, fetched from a git host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from script_support.git_host import HOST, GitHost, git_host
from script_support.programs import TELLTALE_FILES


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitHost]:
    with git_host(tmp_path_factory.mktemp("host") / "git") as host, pytest.MonkeyPatch.context() as patch:
        for name, value in host.environment.items():
            patch.setenv(name, value)
        yield host


@pytest.fixture
def own(finetune: Any, host: GitHost) -> Any:
    """Writes a job whose program is `repository`; the arguments of `finetune run` for it."""
    (finetune.folder / "settings.yaml").write_text(yaml.safe_dump({"gitHosts": [HOST], "schemes": ["file"]}))

    def write(repository: str, **script: Any) -> tuple[str, ...]:
        job = finetune.job(repository)
        training = {"script": {"git": {"url": host.url(repository)}, **script}}
        job["spec"] = {"task": "text-classification", "model": job["spec"]["model"], "dataset": job["spec"]["dataset"],
                       "training": training, "resources": {"processesPerNode": 1}}  # fmt: skip
        file = finetune.write(f"{repository}.yaml", job)
        return ("run", file.name, "--no-measure", "--settings", "settings.yaml", "-o", "json")

    return write


def test_a_program_runs_is_kept_and_is_not_mixed_with_another(finetune: Any, own: Any, host: GitHost) -> None:
    commit = host.commit("telltale", TELLTALE_FILES)
    code, out, err = finetune(*own("telltale", hyperparameters={"text": "$(x) {{ y }}", "flag": True}))
    assert code == 0, err
    result = json.loads(out)
    folder = finetune.folder / "runs/telltale"
    assert (result["strategy"], [stage["name"] for stage in result["stages"]]) == ("script", ["prepare", "train"])
    seen = json.loads((folder / "checkpoints/seen-0.json").read_text())
    assert seen["argv"] == ["--flag", "true", "--text", "$(x) {{ y }}"]
    assert seen["environment"]["FINETUNE_DATASET"] == str(finetune.folder / "data")
    assert seen["environment"]["KUBEFLOW_TRAINER_SERVER_URL"].startswith("http://127.0.0.1:")
    assert json.loads((folder / "code/code.json").read_text())["commit"] == commit
    assert (folder / "model/config.json").is_file()
    assert "train.py of https://git.example.com/telltale at main" in (folder / "report.html").read_text()

    code, out, _ = finetune(*own("telltale", hyperparameters={"text": "$(x) {{ y }}", "flag": True}))
    assert (code, [stage["kept"] for stage in json.loads(out)["stages"]]) == (0, [True, True])

    code, _, err = finetune(*own("telltale", hyperparameters={"text": "$(x) {{ y }}", "flag": False}))
    assert code != 0
    assert "spec.training.script.hyperparameters.flag was true and is false" in err

    host.commit("telltale", {**TELLTALE_FILES, "helper.py": "raise ValueError('a broken release')"})
    code, out, err = finetune(*own("telltale", hyperparameters={"flag": False}), "--restart")
    failure = json.loads(out)["failure"]
    assert (code, failure["class"], failure["reason"]) == (1, "ProgramError", "ValueError"), err
    assert "at helper.py, line 1: ValueError: a broken release" in failure["message"]
    aside = finetune.folder / "runs/telltale.previous-1"
    assert json.loads((aside / "code/code.json").read_text())["commit"] == commit


def test_a_host_that_the_settings_do_not_name_is_refused(finetune: Any, own: Any) -> None:
    arguments = own("telltale", git={"url": "https://elsewhere.example.com/x"})
    code, _, err = finetune(*arguments)
    assert code != 0
    assert "spec.training.script.git.url" in err
    assert "is on a host that is not allowed" in err
    assert not Path(finetune.folder / "runs/elsewhere").exists()
