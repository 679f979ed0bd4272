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
def own(quick: Any, host: GitHost) -> Any:
    """Return a function: write a job whose program is `repository`; return the arguments of `finetune run` for it."""
    (quick.folder / "settings.yaml").write_text(yaml.safe_dump({"gitHosts": [HOST], "schemes": ["file"]}))

    def write(repository: str, **script: Any) -> tuple[str, ...]:
        job = quick.job(repository)
        training = {"script": {"git": {"url": host.url(repository)}, **script}}
        job["spec"] = {"task": "text-classification", "model": job["spec"]["model"], "dataset": job["spec"]["dataset"],
                       "training": training, "resources": {"processesPerNode": 1}}  # fmt: skip
        file = quick.write(f"{repository}.yaml", job)
        return ("run", file.name, "--no-measure", "--settings", "settings.yaml", "-o", "json")

    return write


def test_a_program_runs_is_kept_and_is_not_mixed_with_another(quick: Any, own: Any, host: GitHost) -> None:
    commit = host.commit("telltale", TELLTALE_FILES)
    code, out, err = quick(*own("telltale", hyperparameters={"text": "$(x) {{ y }}", "flag": True}))
    assert code == 0, err
    result = json.loads(out)
    folder = quick.folder / "runs/telltale"
    assert (result["strategy"], [stage["name"] for stage in result["stages"]]) == ("script", ["prepare", "train"])
    seen = json.loads((folder / "checkpoints/seen-0.json").read_text())
    assert seen["argv"] == ["--flag", "true", "--text", "$(x) {{ y }}"]
    assert seen["environment"]["FINETUNE_DATASET"] == str(quick.folder / "data")
    assert seen["environment"]["KUBEFLOW_TRAINER_SERVER_URL"].startswith("http://127.0.0.1:")
    assert json.loads((folder / "code/code.json").read_text())["commit"] == commit
    assert (folder / "model/config.json").is_file()
    assert "train.py of https://git.example.com/telltale at main" in (folder / "report.html").read_text()

    code, out, _ = quick(*own("telltale", hyperparameters={"text": "$(x) {{ y }}", "flag": True}))
    assert (code, [stage["kept"] for stage in json.loads(out)["stages"]]) == (0, [True, True])

    code, _, err = quick(*own("telltale", hyperparameters={"text": "$(x) {{ y }}", "flag": False}))
    assert code != 0
    assert "spec.training.script.hyperparameters.flag was true and is false" in err

    host.commit("telltale", {**TELLTALE_FILES, "helper.py": "raise ValueError('a broken release')"})
    code, out, err = quick(*own("telltale", hyperparameters={"flag": False}), "--restart")
    failure = json.loads(out)["failure"]
    assert (code, failure["class"], failure["reason"]) == (1, "ProgramError", "ValueError"), err
    assert "at helper.py, line 1: ValueError: a broken release" in failure["message"]
    previous = quick.folder / "runs/telltale.previous-1"
    assert json.loads((previous / "code/code.json").read_text())["commit"] == commit


def test_a_host_that_the_settings_do_not_name_is_refused(quick: Any, own: Any) -> None:
    arguments = own("telltale", git={"url": "https://elsewhere.example.com/x"})
    code, _, err = quick(*arguments)
    assert code != 0
    assert "spec.training.script.git.url" in err
    assert "is on a host that is not allowed" in err
    assert not Path(quick.folder / "runs/elsewhere").exists()
