"""Small decisions of the operator's shell: when a status is written, who leads where, and which settings are valid."""

import asyncio
import gc
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kubernetes.aio import client
from pydantic import JsonValue
from typer.testing import CliRunner

from finetune_contract.choices import Stage
from finetune_contract.facts import DeviceFacts
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import Communication
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.cluster.leader import address_in
from finetune_operator.controller.command import _set_up_logs, app
from finetune_operator.controller.lifecycle import Options
from finetune_operator.controller.operator_options import LogFormat, LogLevel
from finetune_operator.controller.process import run
from finetune_operator.controller.reconcile.operator_state import OperatorState, ProgressBook, ReportWindow
from finetune_operator.controller.reconcile.status_writing import (
    attempt_seconds,
    only_progress_differs,
    progress_interval,
    status_body,
)
from finetune_operator.controller.servers.progress_protocol import AttemptKey
from finetune_operator.controller.servers.progress_server import KnownPod
from finetune_operator.controller.servers.serving import OperatorView
from finetune_operator.controller.store.queue import WorkQueue
from finetune_operator.controller.store.store import Store
from finetune_operator.documents.settings_file import SettingsError, read_settings_file
from finetune_operator.jobs.decide.decide import decide
from finetune_operator.jobs.fleet_metrics import Fleet
from finetune_operator.jobs.render.render_types import ProgressEndpoint
from finetune_operator.jobs.state.decision_types import NO_FINDINGS, Findings
from finetune_operator.kubernetes_api.errors import NoAnswerError, NoClusterError
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import API_VERSION, KIND, FineTuneJobStatus, ProgressStatus, StageStatus

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

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


@pytest.mark.parametrize(
    ("shortest", "minutes", "reporting", "seconds"),
    [
        pytest.param(5, 0, 1, 5, id="it has just begun"),
        pytest.param(5, 5, 1, 5, id="a short training: the setting"),
        pytest.param(5, 10, 1, 10, id="a longer one: a sixtieth of its time"),
        pytest.param(5, 30, 1, 30, id="half an hour: the longest"),
        pytest.param(5, 6000, 1, 30, id="days"),
        pytest.param(5, 0, 50, 5, id="as many as may be written every five seconds"),
        pytest.param(5, 0, 500, 50, id="many share ten writes a second"),
        pytest.param(5, 6000, 100, 30, id="long ones, and not too many"),
        pytest.param(120, 6000, 500, 120, id="the setting is longer than both"),
    ],
)
def test_progress_is_written_less_often_by_age_and_number(
    shortest: float, minutes: float, reporting: int, seconds: float
):
    assert progress_interval(shortest, 60 * minutes, reporting) == seconds


def test_attempt_counts_from_when_all_its_pods_run():
    noon = NOON
    placed = StageStatus(name="train", state="Running", attempt=2, start_time=noon - timedelta(minutes=9))
    running = placed.model_copy(update={"running_since": noon - timedelta(minutes=4)})
    ages = [
        attempt_seconds(STATUS.model_copy(update={"stages": (stage,)}), noon)
        for stage in (placed, running, running.model_copy(update={"state": "Succeeded"}))
    ]
    assert ages == [540, 240, 0]


def test_jobs_that_have_reported_lately_are_counted():
    book = ProgressBook()
    for uid in ("running", "ended", "running"):
        book.note(uid, Stage.TRAIN, 1, ProgressStatus(step=1), "", NOON)
    assert [book.reporting(since) for since in (0.0, book.last_report_at("ended"))] == [2, 1]


def test_a_status_that_was_written_reads_back_as_equal():
    body = status_body(STATUS)

    assert FineTuneJobStatus.model_validate(json.loads(json.dumps(body))) == STATUS
    assert body["progress"] == {"step": 10, "totalSteps": 100, "loss": 0.5}


def test_the_progress_of_an_attempt_is_that_attempts_alone():
    book = ProgressBook()
    early, late = ProgressStatus(step=1), ProgressStatus(step=2)
    book.note("uid", Stage.TRAIN, 2, late, "", NOON)
    book.note("uid", Stage.TRAIN, 1, early, "", NOON)

    assert book.of("uid", Stage.TRAIN, 2) == late
    assert book.of("uid", Stage.TRAIN, 1) is None
    assert book.of("uid", Stage.EVALUATE, 2) is None
    book.note("uid", Stage.EVALUATE, 1, early, "", NOON)
    assert book.of("uid", Stage.EVALUATE, 1) == early
    assert book.last_report_at("uid") > 0
    book.forget("uid")
    assert (book.of("uid", Stage.EVALUATE, 1), book.last_report_at("uid")) == (None, 0.0)


def test_measurements_of_an_attempt_outlast_reports_without_them():
    book, progress = ProgressBook(), ProgressStatus(step=1)
    found = Findings(communication=Communication(between="ib"))
    book.note("uid", Stage.TRAIN, 1, progress, "", NOON, found)
    devices = MeasuredDevices(device=DeviceFacts(product="L4", memory_bytes=1), processes=1, per_node=1)
    later = Findings(devices).after(book.findings_of("uid", Stage.TRAIN, 1))
    assert later == Findings(devices, found.communication)
    book.note("uid", Stage.TRAIN, 1, progress, "", NOON, later)
    assert book.findings_of("uid", Stage.TRAIN, 1) == later
    assert book.findings_of("uid", Stage.TRAIN, 2) == NO_FINDINGS


def test_a_report_moves_when_its_mark_is_another_or_the_attempt_is():
    book, progress = ProgressBook(), ProgressStatus(step=1)
    reports = [(1, "a", 0), (1, "a", 5), (1, "b", 7), (1, "b", 9), (2, "b", 11), (1, "c", 13)]
    last_progress_at = []
    for attempt, mark, second in reports:
        book.note("uid", Stage.TRAIN, attempt, progress, mark, NOON + timedelta(seconds=second))
        at = book.last_progress_at("uid", Stage.TRAIN, attempt)
        last_progress_at.append(None if at is None else (at - NOON).seconds)

    # The last one is a late report of the attempt before.
    assert last_progress_at == [0, 0, 7, 7, 11, None]
    assert book.last_progress_at("uid", Stage.TRAIN, 2) == NOON + timedelta(seconds=11)


HEARING: dict[str, tuple[list[tuple[float, bool]], float | None]] = {
    # (Second, whether reports can arrive) -> the second since which none can have been missed.
    "nothing is heard before it can be": ([(0, False), (1, False)], None),
    "from the first moment on": ([(0, False), (1, True), (2, True), (9, True)], 1),
    "leadership was lost for a moment": ([(0, True), (1, True), (2, False), (3, True), (4, True)], 3),
    "it cannot be heard now": ([(0, True), (1, True), (2, False)], None),
    "the process stood still": ([(0, True), (1, True), (3600, True), (3601, True)], 3600),
    "the clock was set back": ([(100, True), (101, True), (50, True), (51, True)], 50),
    "a slow moment is no break": ([(0, True), (10, True), (20, True)], 0),
}


@pytest.mark.parametrize("case", HEARING)
def test_since_when_no_report_can_have_been_missed(case: str):
    looks, expected = HEARING[case]
    report_window = ReportWindow()
    answers = [report_window.since(able, NOON + timedelta(seconds=second)) for second, able in looks]

    assert answers[-1] == (None if expected is None else NOON + timedelta(seconds=expected))


def operator_state() -> OperatorState:
    state = OperatorState(
        settings=Settings(), namespace="ops", kube=Kube(client.ApiClient(client.Configuration(host="http://x"))),
        store=Store(Settings()), queue=WorkQueue(), progress=ProgressBook(), leading=asyncio.Event(),
        synced=asyncio.Event(), leader_address=lambda: None,
    )  # fmt: skip
    state.leading.set()
    state.synced.set()
    state.progress_endpoint = ProgressEndpoint("https://p:8443", "CA")
    return state


NO_ANSWER = NoAnswerError("get /x", 0, "", "no answer")
DEAF: dict[str, Callable[[OperatorState], object]] = {
    "another replica leads": lambda state: state.leading.clear(),
    "pods are not known yet": lambda state: state.synced.clear(),
    "progress is not served": lambda state: setattr(state, "progress_endpoint", None),
    "the API server is away, which knows the tokens": lambda state: state.kube.outage.failed(NO_ANSWER),
}


@pytest.mark.parametrize("case", DEAF)
def test_reports_are_incomplete_when(case: str):
    async def reconcile() -> tuple[datetime | None, datetime | None]:
        state = operator_state()
        before = state.reports_complete_since()
        DEAF[case](state)
        after = state.reports_complete_since()
        await state.kube.api.close()  # type: ignore[no-untyped-call]
        return before, after

    before, after = asyncio.run(reconcile())
    assert before is not None
    assert after is None


def test_fleet_is_read_from_the_store_and_progress_from_moving_reports():
    async def reconcile() -> tuple[Fleet, Fleet]:
        state = operator_state()
        view = OperatorView(state)
        status_of_job = {
            **status_body(STATUS),
            "progress": {"samplesPerSecond": 8.0, "lastUpdateTime": stamp(datetime.now(UTC))},
        }
        for number, status in enumerate(({}, status_of_job)):
            metadata: dict[str, JsonValue] = {
                "name": f"job-{number}", "namespace": "team", "uid": f"uid-{number}", "resourceVersion": "7",
                "creationTimestamp": stamp(datetime.now(UTC)),
            }  # fmt: skip
            state.store.put(
                {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {}, "status": status}
            )
        long_ago = datetime.now(UTC) - timedelta(seconds=500)
        before = view.fleet()
        state.progress.note("uid-1", Stage.TRAIN, 1, ProgressStatus(step=1), "the same", long_ago)
        after = view.fleet()
        await state.kube.api.close()  # type: ignore[no-untyped-call]
        return before, after

    before, after = asyncio.run(reconcile())
    assert before.phases == {"Pending": 1, "Training": 1}
    assert before.samples_per_second == {"train": 8}
    assert before.progress_age_seconds < 60
    assert 500 <= after.progress_age_seconds < 560


@pytest.mark.parametrize(("stage", "step"), [(Stage.PREDICT, 40), (Stage.PREPARE, 40), (Stage.TRAIN, 592)])
def test_progress_is_that_of_the_pod_that_counts_all_rows(stage: Stage, step: int):
    async def reported() -> tuple[ProgressStatus | None, datetime | None]:
        state = operator_state()
        view, attempt = OperatorView(state), AttemptKey("team", "job", stage, 1)
        other = KnownPod("pod-1", "job-uid", attempt, index=1)
        state.progress.note("job-uid", stage, 1, ProgressStatus(step=40, total_steps=600), "a", NOON)
        view.report(other, ProgressStatus(step=592, total_steps=592), NO_FINDINGS, "a")
        await state.kube.api.close()  # type: ignore[no-untyped-call]
        return state.progress.of("job-uid", stage, 1), state.progress.last_progress_at("job-uid", stage, 1)

    progress, at = asyncio.run(reported())
    assert progress is not None
    assert progress.step == step
    # A report of any pod shows that the stage is alive.
    assert at is not None
    assert (at > NOON) is (stage is not Stage.TRAIN)


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


def test_all_problems_of_a_settings_file_are_reported(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("progres: {}\nlimits: {imagePullSeconds: 0}\nschemes: [http]\n")

    with pytest.raises(SettingsError) as raised:
        read_settings_file(file)
    fields = [problem.removeprefix(f"{file}: ").split()[0].rstrip(":") for problem in raised.value.problems]
    assert sorted(fields) == ["limits.imagePullSeconds", "progres", "schemes[0]"]


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
        logging.getLogger("kubernetes.aio").warning("not ours")
    finally:
        logging.root.handlers[:], level = before
        logging.root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()

    assert len(lines) == 1
    entry = json.loads(lines[0])
    assert (entry["level"], entry["message"]) == ("info", 'team/demo: "new"\n-> more')


def test_full_collections_leave_out_imported_code(tmp_path: Path) -> None:
    options = Options(CLUSTER_SETTINGS, "ops", kubeconfig=tmp_path / "absent")
    before = gc.get_freeze_count()
    new = [[] for _ in range(1000)]
    with pytest.raises(NoClusterError):
        asyncio.run(run(options, decide))
    assert gc.get_freeze_count() >= before + len(new)
