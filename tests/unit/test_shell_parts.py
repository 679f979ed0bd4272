"""The small decisions of the operator's shell: when a status is written, who leads where, which settings are taken."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune_contract.choices import Stage
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import FineTuneJobStatus, ProgressStatus, StageStatus
from finetune_operator.settings_file import SettingsError, read_settings_file
from finetune_operator.shell.command import LogFormat, LogLevel, _set_up_logs, app
from finetune_operator.shell.leader import address_in
from finetune_operator.shell.reconciler import only_progress_differs, status_body
from finetune_operator.shell.state import ProgressBook

STATUS = FineTuneJobStatus(
    observed_generation=1,
    phase="Training",
    stages=(StageStatus(name="train", state="Running", attempt=1),),
    progress=ProgressStatus(step=10, total_steps=100, loss=0.5),
)
FURTHER = STATUS.model_copy(update={"progress": ProgressStatus(step=11, total_steps=100, loss=0.25)})


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        pytest.param(STATUS, False, id="nothing differs"),
        pytest.param(FURTHER, True, id="it is further"),
        pytest.param(STATUS.model_copy(update={"progress": None}), True, id="progress is taken back"),
        pytest.param(
            FURTHER.model_copy(update={"phase": "Evaluating"}), False, id="it is further, and in another phase"
        ),
        pytest.param(STATUS.model_copy(update={"restarts": 1}), False, id="it was restarted"),
    ],
)
def test_a_status_that_differs_in_progress_alone_may_wait(new: FineTuneJobStatus, expected: bool):
    assert only_progress_differs(new, STATUS) is expected


def test_a_status_that_was_written_reads_back_as_equal():
    body = status_body(STATUS)

    assert FineTuneJobStatus.model_validate(json.loads(json.dumps(body))) == STATUS
    assert body["progress"] == {"step": 10, "totalSteps": 100, "loss": 0.5}


def test_the_progress_of_an_attempt_is_that_attempts_alone():
    book = ProgressBook()
    early, late = ProgressStatus(step=1), ProgressStatus(step=2)
    book.note("uid", Stage.TRAIN, 2, late)
    book.note("uid", Stage.TRAIN, 1, early)

    assert book.of("uid", Stage.TRAIN, 2) == late
    assert book.of("uid", Stage.TRAIN, 1) is None
    assert book.of("uid", Stage.EVALUATE, 2) is None
    book.note("uid", Stage.EVALUATE, 1, early)
    assert book.of("uid", Stage.EVALUATE, 1) == early
    assert book.heard_of("uid") > 0
    book.forget("uid")
    assert (book.of("uid", Stage.EVALUATE, 1), book.heard_of("uid")) == (None, 0.0)


@pytest.mark.parametrize(
    ("holder", "address"),
    [
        ("finetune-operator-5d8c_10.0.0.7", "10.0.0.7"),
        ("finetune-operator-5d8c_fd00::7", "fd00::7"),
        ("a_host_with_lines-1_", None),
        ("evil_example.org", None),
        ("", None),
        (None, None),
    ],
)
def test_the_leaders_address_is_read_from_its_name(holder: str | None, address: str | None):
    assert address_in(holder) == address


@pytest.mark.parametrize(
    "text", [pytest.param("", id="an empty file"), pytest.param("# progress: {}\n", id="comments alone")]
)
def test_a_settings_file_without_settings_gives_the_defaults(tmp_path: Path, text: str):
    file = tmp_path / "settings.yaml"
    file.write_text(text)

    assert read_settings_file(file) == Settings()


def test_all_that_is_wrong_with_a_settings_file_is_told(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("progres: {}\nlimits: {imagePullSeconds: 0}\nschemes: [http]\n")

    with pytest.raises(SettingsError) as raised:
        read_settings_file(file)
    told = [problem.removeprefix(f"{file}: ").split()[0].rstrip(":") for problem in raised.value.problems]
    assert sorted(told) == ["limits.imagePullSeconds", "progres", "schemes[0]"]


def test_a_settings_file_is_checked_without_a_cluster(tmp_path: Path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("trustRemoteCode: ['trusted/*']\n")
    bad.write_text("image: x\nimages: 7\n")

    assert CliRunner().invoke(app, ["check-settings", str(good)]).exit_code == 0
    refused = CliRunner().invoke(app, ["check-settings", str(bad)])
    assert (refused.exit_code, refused.stderr.count("Error: ")) == (2, 2)


@pytest.mark.parametrize("command", ["run", "check-settings"])
def test_a_settings_file_that_is_not_there_is_a_wrong_call(tmp_path: Path, command: str):
    missing = str(tmp_path / "none.yaml")
    arguments = [command, missing] if command == "check-settings" else [command, "--settings", missing]
    ran = CliRunner().invoke(app, arguments)

    assert ran.exit_code == 2
    assert f"cannot read {missing}: No such file" in ran.stderr


def test_a_log_line_in_json_is_one_object(capsys: pytest.CaptureFixture[str]):
    before = logging.root.handlers[:], logging.root.level
    try:
        _set_up_logs(LogFormat.JSON, LogLevel.INFO)
        logging.getLogger("finetune_operator.shell.x").info("%s: %s\n-> more", "team/demo", '"new"')
        logging.getLogger("kopf.objects").error("not ours")
    finally:
        logging.root.handlers[:], level = before
        logging.root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()

    assert len(lines) == 1
    entry = json.loads(lines[0])
    assert (entry["level"], entry["message"]) == ("info", 'team/demo: "new"\n-> more')
