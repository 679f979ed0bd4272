"""The backend `vllm`: texts of a server over HTTP equal those of the job's own process, and its errors lose no row."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.backends import choosing, text_server
from finetune_trainer.predict.backends.backend_table import BackendTable
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from trainer_support.openai_peer import OpenAIPeer, listening, peer_of
from trainer_support.tasks import WORDS, read_lines, write_decoder, write_lines

ROWS = 24
PROMPTS = [" ".join(WORDS[(at + step * 3) % len(WORDS)] for step in range(1 + at % 7)) for at in range(ROWS)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder") / "m", initializer_range=0.3)


@pytest.fixture
def peer(decoder: Path) -> OpenAIPeer:
    return peer_of(decoder)


@pytest.fixture
def url(peer: OpenAIPeer) -> Iterator[str]:
    with listening(peer) as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_server, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(text_server, "MOST_WAIT_SECONDS", 0.05)


def job_of(decoder: Path, folder: Path, task: str = "text-generation", **changes: Any) -> TrainerJob:
    role = "prompt" if task == "preference-tuning" else "text"
    data = write_lines(folder / "rows.jsonl", [{role: text} for text in PROMPTS])
    generation = changes.pop("generation", {})
    source = {"uri": f"file://{data}", "columns": {role: role}}
    predicts = {"device": "cpu", "batch_tokens": 512, "dataset": source, **changes}
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": task,
            "model": {"uri": f"file://{decoder}"},
            "generation": {"max_new_tokens": 8, **generation},
            "predict": predicts,
        }
    )


def texts(paths: JobPaths) -> list[str]:
    return [row["generated_text"] for row in read_lines(paths.predictions_jsonl)]


@pytest.mark.parametrize("task", ["text-generation", "preference-tuning"])
def test_texts_of_a_server_equal_those_of_the_own_process(
    task: str, decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path
) -> None:
    plain, by_server = JobPaths(tmp_path / "plain"), JobPaths(tmp_path / "server")
    predict(job_of(decoder, tmp_path, task), plain, NoProgress())
    result = predict(job_of(decoder, tmp_path, task, optimization="vllm", server=f"{url}/v1"), by_server, NoProgress())
    assert (result["optimization"], result["rows"]) == ("vllm", ROWS)
    assert by_server.predictions_jsonl.read_bytes() == plain.predictions_jsonl.read_bytes()
    assert len(set(texts(plain))) > ROWS / 2
    assert sum(body["max_tokens"] == 8 for body in peer.requests) == ROWS
    assert BackendTable.model_validate_json(by_server.optimization.read_bytes()).chosen == "vllm"


def test_drawn_texts_differ_by_row_and_repeat_with_the_seed(
    decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path
) -> None:
    found = []
    for name in ("one", "other"):
        paths = JobPaths(tmp_path / name)
        drawn = {"temperature": 1.0, "top_p": 0.9}
        predict(job_of(decoder, tmp_path, optimization="vllm", server=url, generation=drawn), paths, NoProgress())
        found.append(texts(paths))
    assert found[0] == found[1]
    assert len(set(found[0])) > ROWS / 2
    seeds = [body["seed"] for body in peer.requests if body["max_tokens"] == 8]
    assert len(set(seeds)) == ROWS


def test_rows_that_the_server_rejects_go_to_the_side_file(
    decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path
) -> None:
    plain, paths = JobPaths(tmp_path / "plain"), JobPaths(tmp_path / "server")
    predict(job_of(decoder, tmp_path), plain, NoProgress())
    lengths = {3: 400, 5: 500}
    seen: dict[tuple[int, ...], int] = {}

    def fault(body: Any) -> tuple[int, object] | None:
        row = seen.setdefault(tuple(body["prompt"]), len(seen)) if body["max_tokens"] == 8 else -1
        return (lengths[row], {"error": {"message": "no room for it"}}) if row in lengths else None

    peer.fault = fault
    job = job_of(decoder, tmp_path, optimization="vllm", server=url, max_bad_rows=2)
    result = predict(job, paths, NoProgress())
    assert result["bad_rows"] == 2
    bad = read_lines(Path(result["bad_rows_path"]))
    assert {row["reason"] for row in bad} == {"ServerRefusedRow"}
    assert sorted(message.partition("status")[2] for message in (row["message"] for row in bad)) == [
        " 400: no room for it",
        " 500: no room for it",
    ]
    lost = {row["row"] for row in bad}
    rows = read_lines(paths.predictions_jsonl)
    assert [row["row"] for row in rows] == [at for at in range(ROWS) if at not in lost]
    assert rows == [row for row in read_lines(plain.predictions_jsonl) if row["row"] not in lost]
    seen.clear()
    job = job_of(decoder, tmp_path, optimization="vllm", server=url, max_bad_rows=1)
    with pytest.raises(StageError) as caught:
        predict(job, paths, NoProgress())
    assert caught.value.reason == "TooManyBadRows"


def test_a_server_that_is_away_for_a_while_costs_no_row(decoder: Path, peer: OpenAIPeer, tmp_path: Path) -> None:
    plain, paths = JobPaths(tmp_path / "plain"), JobPaths(tmp_path / "server")
    predict(job_of(decoder, tmp_path), plain, NoProgress())
    away, over = threading.Event(), threading.Event()
    states = iter([503, 429, 502, 500])

    def fault(body: Any) -> tuple[int, object] | None:
        if body["max_tokens"] == 8 and sum(each["max_tokens"] == 8 for each in peer.requests) == ROWS // 2:
            away.set()
        status = next(states, None) if body["max_tokens"] == 8 else None
        return None if status is None else (status, {"error": {"message": "busy"}})

    peer.fault = fault

    def served() -> None:
        with listening(peer) as found:
            places.append(found)
            started.set()
            away.wait()
        port = int(found.rpartition(":")[2])
        with listening(peer, port):
            over.wait()

    places: list[str] = []
    started = threading.Event()
    thread = threading.Thread(target=served, daemon=True)
    thread.start()
    started.wait()
    try:
        result = predict(job_of(decoder, tmp_path, optimization="vllm", server=places[0]), paths, NoProgress())
    finally:
        away.set()
        over.set()
        thread.join()
    assert "bad_rows" not in result
    assert paths.predictions_jsonl.read_bytes() == plain.predictions_jsonl.read_bytes()


@pytest.mark.parametrize("optimization", ["vllm", "measured"])
def test_a_server_that_never_answers_ends_the_worker_or_the_trial(
    optimization: str, decoder: Path, tmp_path: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_server, "OUTAGE_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "MEASURING_SHARE", 1e9)
    job = job_of(decoder, tmp_path, optimization=optimization, server="http://127.0.0.1:9", tolerance=0.9)
    if optimization == "vllm":
        with pytest.raises(StageError, match=r"127.0.0.1:9 has not answered") as caught:
            predict(job, paths, NoProgress())
        assert (caught.value.failure_class, caught.value.reason) == (FailureClass.HUB_UNAVAILABLE, "ServerUnavailable")
        return
    assert predict(job, paths, NoProgress())["optimization"] in ("none", "continuous-batching")
    (row,) = [each for each in table(paths).backends if each.name == "vllm"]
    assert "not available: predict.server http://127.0.0.1:9 has not answered" in row.why


def one_wrong_token(body: Any) -> tuple[int, object] | None:
    """Answer any row with the same token."""
    return (200, {"choices": [{"token_ids": [5], "stop_reason": None}]}) if body["max_tokens"] == 8 else None


def test_auto_takes_a_faster_server_within_the_tolerance(
    decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "MEASURING_SHARE", 1e9)
    predict(job_of(decoder, tmp_path, optimization="measured", server=url, tolerance=0.9), paths, NoProgress())
    (row,) = [each for each in table(paths).backends if each.name == "vllm"]
    assert [each.name for each in table(paths).backends] == ["none", "continuous-batching", "vllm"]
    assert (row.agreement, row.rows_per_second is not None) == (1.0, True)

    peer.fault = one_wrong_token
    job = job_of(decoder, tmp_path, optimization="vllm", server=url, tolerance=0.9)
    with pytest.raises(StageError, match="of its labels are equal, less than 90") as caught:
        predict(job, paths, NoProgress())
    assert caught.value.reason == "BackendNotRightEnough"


def another_model(peer: OpenAIPeer) -> None:
    peer.fault = lambda body: (200, {"choices": [{"token_ids": [5], "stop_reason": None}]})


def several_models(peer: OpenAIPeer) -> None:
    peer.others = ("second",)


def no_ids(peer: OpenAIPeer) -> None:
    peer.returns_ids = False


def a_key(peer: OpenAIPeer) -> None:
    peer.key = "secret"


def rejected_field(peer: OpenAIPeer) -> None:
    peer.fault = lambda body: (422, {"detail": "return_token_ids is not supported"})


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        (another_model, "BackendNotAvailable", "continues 0 of 16 rows as the job's model does"),
        (several_models, "BackendNotAvailable", "has the models served, second; start it with the job's model alone"),
        (no_ids, "BackendNotAvailable", r"returns no token ids \(return_token_ids\)"),
        (rejected_field, "BackendNotAvailable", "rejects a row: status 422: .*return_token_ids is not supported"),
        (a_key, "ServerRefused", "answers /v1/completions with status 401: Unauthorized"),
    ],
)
def test_unsuitable_server_is_refused_before_the_first_row(
    change: Any, reason: str, text: str, decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path, paths: JobPaths
) -> None:
    change(peer)
    with pytest.raises(StageError, match=text) as caught:
        predict(job_of(decoder, tmp_path, optimization="vllm", server=url), paths, NoProgress())
    assert caught.value.reason == reason
    assert not any(body["max_tokens"] == 8 for body in peer.requests)


def test_token_of_the_server_is_read_from_the_environment(
    decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.key = "secret"
    monkeypatch.setenv(text_server.ENV_KEY, "secret")
    result = predict(job_of(decoder, tmp_path, optimization="vllm", server=url), paths, NoProgress())
    assert result["rows"] == ROWS
    assert "secret" not in json.dumps(result)


def test_vllm_without_a_server_gives_the_reason(decoder: Path, tmp_path: Path, paths: JobPaths) -> None:
    with pytest.raises(StageError, match=r"predict\.server names no server, and the image has no vLLM") as caught:
        predict(job_of(decoder, tmp_path, optimization="vllm"), paths, NoProgress())
    assert caught.value.reason == "BackendNotAvailable"


def test_metric_of_texts_with_references_judges_a_server(
    decoder: Path, peer: OpenAIPeer, url: str, tmp_path: Path, paths: JobPaths
) -> None:
    """The references are the texts of the model itself."""
    predict(job_of(decoder, tmp_path), JobPaths(tmp_path / "plain"), NoProgress())
    pairs = zip(PROMPTS, texts(JobPaths(tmp_path / "plain")), strict=True)
    write_lines(tmp_path / "known" / "test.jsonl", [{"text": one, "target": other} for one, other in pairs])

    def judged(*roles: str) -> TrainerJob:
        body = job_of(decoder, tmp_path, optimization="vllm", server=url, metric_tolerance=0.2).model_dump(mode="json")
        columns = {role: "target" if role == "target" else "text" for role in roles}
        body["dataset"] = {"uri": f"file://{tmp_path}/known", "columns": columns}
        body["predict"]["dataset"]["columns"] = {roles[0]: "text"}
        return TrainerJob.model_validate(body)

    prepare(judged("source", "target"), paths, NoProgress())
    assert predict(judged("source", "target"), paths, NoProgress())["optimization"] == "vllm"
    (row,) = [each for each in table(paths).backends if each.name == "vllm"]
    assert (row.metric_worse_by, row.chosen) == (0.0, True)

    peer.fault, other = one_wrong_token, JobPaths(tmp_path / "other")
    prepare(judged("source", "target"), other, NoProgress())
    with pytest.raises(StageError, match=r"(rouge[12L]|exact_match) is [01]\.\d+ worse, more than 0\.2000") as caught:
        predict(judged("source", "target"), other, NoProgress())
    assert caught.value.reason == "BackendNotRightEnough"

    alone = JobPaths(tmp_path / "alone")
    prepare(judged("text"), alone, NoProgress())
    with pytest.raises(StageError, match="the test split has none") as missing:
        predict(judged("text"), alone, NoProgress())
    assert missing.value.reason == "NoReferences"


def table(paths: JobPaths) -> BackendTable:
    return BackendTable.model_validate_json(paths.optimization.read_bytes())
