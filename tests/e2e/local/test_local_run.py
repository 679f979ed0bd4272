"""`finetune run` as a user meets it: results, resuming, refusals, failures, signals, and nothing left
behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_trainer.predict.prediction_parts import is_facts
from process_support.command_lines import trainer_arguments
from process_support.left import left
from process_support.signals import waits_for
from suite_plugins.waiting import wait_until


def last_step(job_folder: Path) -> int:
    try:
        lines = (job_folder / "logs/train.progress.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def files_under(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def weights(job_folder: Path) -> bytes:
    return (job_folder / "model/model.safetensors").read_bytes()


def wait_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not left(processes), lambda: f"gone: {left(processes)}", 60)


LONG = {"epochs": 20, "learningRate": 0.0005}
"""320 steps: enough time to interrupt."""


@pytest.fixture(scope="module")
def undisturbed(quick: Any) -> tuple[Path, dict[str, Any], str]:
    """Return the job's folder after a run from start to end, its result as data, and the messages."""
    job = quick.job("whole", **LONG)
    job["spec"]["checkpoints"] = {"every": {"steps": 80}, "keep": 2}
    quick.write("whole.yaml", job)
    code, out, err = quick("run", "whole.yaml", "--no-measure", "-o", "json")
    assert code == 0, err
    return quick.folder / "runs/whole", json.loads(out), err


def test_a_run_writes_everything_that_it_promises(undisturbed: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, err = undisturbed
    promised = {
        "job.json",
        "plan.json",
        "estimate.json",
        "inputs.json",
        "metrics.json",
        "history.jsonl",
        "predictions.jsonl",
        "report.html",
        "environment.json",
        "model/model.safetensors",
        "model/config.json",
        "model/README.md",
        "model/tokenizer.json",
        "prepared/data.json",
        "state/prepare.json",
        "state/train.json",
        "state/evaluate.json",
        "state/predict.json",
        "reports/train-0.json",
        "logs/train.log",
    }
    written = files_under(folder)
    assert promised <= written, promised - written
    assert not {"deepspeed.json", "failure.json"} & written
    assert result["outcome"] == "succeeded"
    assert [stage["name"] for stage in result["stages"]] == ["prepare", "train", "evaluate", "predict"]
    assert result["metrics"] == json.loads((folder / "metrics.json").read_text())
    assert result["metrics"]["evaluate"]["accuracy"] >= 0.9 > result["metrics"]["majority"]["accuracy"]
    assert {name: Path(path).exists() for name, path in result["artifacts"].items()} == dict.fromkeys(
        ("model", "predictions", "metrics", "report", "plan"), True
    )
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert all(row["text"] for row in rows)
    assert json.loads((folder / "job.json").read_text())["training"]["maxSteps"] == 320
    assert "planned again with the prepared data" in err
    assert "of checkpoints because all stages have succeeded; to keep them, set spec.checkpoints.afterSuccess" in err
    assert not (folder / "checkpoints").exists()
    assert "\x1b" not in err


def test_run_compares_its_plan_with_the_measurements(undisturbed: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, _ = undisturbed
    plan, train = json.loads((folder / "plan.json").read_text()), result["metrics"]["train"]
    check, measured = train["plan_check"], train["measured"]
    memory, step = check["memory"], check["step_time"]
    assert memory["planned"] == plan["memory"]["totalBytes"]
    assert memory["measured"] == measured["memory_bytes"] == train["peak_memory_bytes"]
    assert memory["ratio"] == pytest.approx(memory["measured"] / memory["planned"], abs=1e-4)
    planned = {term["name"]: term["bytes"] for term in plan["memory"]["terms"]}
    for name in ("parameters", "optimizer state"):  # of the model that the plan assumes, as it was not measured
        assert memory["terms"][name] == pytest.approx(measured["memory_terms"][name] / planned[name], abs=1e-4)
    assert 2 * measured["memory_terms"]["parameters"] == pytest.approx(
        measured["memory_terms"]["optimizer state"], rel=0.01
    )
    assert measured["memory_terms"]["parameters"] == pytest.approx(
        (folder / "model/model.safetensors").stat().st_size, rel=0.1
    )
    assert step["planned"] == plan["estimate"]["stepSeconds"]
    assert step["measured"] == measured["step_seconds"]
    assert measured["steps"] == train["steps"] == 320
    assert "Plan and measurement" in (folder / "report.html").read_text()


def test_predict_writes_predictions_of_a_run_without_a_job_file(undisturbed: Any, quick: Any) -> None:
    whole, _, _ = undisturbed
    rows = (quick.folder / "data/test.jsonl").read_bytes()
    (quick.folder / "new.jsonl").write_bytes(b'{"text": "cut\n' + rows)
    call = ("predict", str(whole), "new.jsonl", "-o", "new/out.jsonl", "--copy", "label")
    code, out, err = quick(*call, "--max-bad-rows", "0")
    assert (code, out) == (1, "")
    assert "1 of 33 rows cannot be answered, and predict.maxBadRows allows 0" in " ".join(err.split())
    code, out, err = quick(*call, "--max-bad-rows", "1")
    assert code == 0, err
    place = quick.folder / "new/out.jsonl"
    assert out.split() == ["33", "rows", "->", str(place)]
    assert "rows without a prediction: 1;" in " ".join(err.split())
    found, earlier = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in (place, whole / "predictions.jsonl")
    )
    assert [(row["row"] - 1, row["label"]) for row in found] == [(row["row"], row["label"]) for row in earlier]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in earlier], abs=1e-5)
    assert files_under(place.parent) == {"out.jsonl", "out.bad-rows.jsonl"}
    for wrong, error in (
        (("predict", "nowhere", "new.jsonl", "-o", "x.jsonl"), "nowhere does not exist"),
        (("predict", str(whole), "nothing.jsonl", "-o", "x.jsonl"), "nothing.jsonl does not exist"),
        (("predict", str(whole), "none/*.jsonl", "-o", "x.jsonl"), "DATA: none/*.jsonl matches no file"),
        (("predict", str(whole), "new.jsonl", "-o", "x.txt"), "x.txt must end in .jsonl or .parquet"),
        ((*call, "--column", "text"), "'text' must be ROLE=NAME"),
    ):
        code, out, err = quick(*wrong)
        assert (code, out) == (2, "")
        assert error in " ".join(err.split())
    assert not list(quick.folder.glob("*x.*"))


FILLER = "-" * 8000
"""Text of a column that nobody reads: a few rows make several shards, of 64 KiB."""


@pytest.fixture(scope="module")
def many_shards(undisturbed: Any, quick: Any) -> bytes:
    """Write shards.jsonl, rows of 40 shards; return their predictions by one process with one thread, as each of two
    has on two cores: sums in fp32 depend on the threads.
    """
    rows = [json.loads(line) for line in (quick.folder / "data/test.jsonl").read_text().splitlines()]
    lines = [json.dumps({"text": rows[at % len(rows)]["text"], "filler": FILLER}) + "\n" for at in range(330)]
    (quick.folder / "shards.jsonl").write_text("".join(lines))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])  # inherited by the command
    try:
        code, _, err = quick("predict", str(undisturbed[0]), "shards.jsonl", "-o", "alone.jsonl")
    finally:
        os.sched_setaffinity(0, cores)
    assert code == 0, err
    return (quick.folder / "alone.jsonl").read_bytes()


def test_several_processes_predict_the_bytes_of_one(many_shards: bytes, undisturbed: Any, quick: Any) -> None:
    if len(os.sched_getaffinity(0)) != 2:
        pytest.skip("two processes have one thread each on a machine with two cores")
    code, out, err = quick("predict", str(undisturbed[0]), "shards.jsonl", "-o", "two.jsonl", "--workers", "2")
    assert code == 0, err
    assert out.split()[:3] == ["330", "rows", "->"]
    assert (quick.folder / "two.jsonl").read_bytes() == many_shards
    code, out, _ = quick("predict", str(undisturbed[0]), "shards.jsonl", "-o", "x.jsonl", "--workers", "2", "--dry-run")
    assert (code, "workers: 2" in out) == (0, True)


def finished_parts(folder: Path) -> set[str]:
    """Return the parts with facts, which are written last."""
    return {file.stem for file in folder.glob("predict/predictions.parts/*/*.json") if is_facts(file.name)}


@pytest.mark.slow
def test_ctrl_c_keeps_the_parts_of_all_processes(
    many_shards: bytes, undisturbed: Any, finetune: Any, quick: Any
) -> None:
    if len(os.sched_getaffinity(0)) != 2:
        pytest.skip("two processes have one thread each on a machine with two cores")
    call = ("predict", str(undisturbed[0]), "shards.jsonl", "-o", "stopped.jsonl", "--workers")
    state = finetune.folder / ".stopped.jsonl.predict"
    run = finetune.start(*call, "2")
    run.wait_until(lambda: finished_parts(state))
    descendants = run.descendants()
    for process in descendants:
        process.suspend()
    started = {process.pid: trainer_arguments(process.cmdline()) for process in descendants}
    workers = [each for each in descendants if started[each.pid][:1] == ["predict"]]
    assert len(workers) == 2, started
    kept = finished_parts(state)
    run.process.send_signal(signal.SIGINT)
    # The launcher's processes forward it: the workers go on with the signal, before they can answer the last rows.
    run.wait_until(lambda: waits_for(descendants[0].pid, signal.SIGTERM))
    for process in (*(each for each in descendants if each not in workers), *workers):
        if process in workers:
            run.wait_until(lambda process=process: waits_for(process.pid, signal.SIGTERM))
        process.resume()
    code, out, err = run.end()
    assert (code, out) == (130, "")
    assert f"stopped; the same call resumes from the state in {state}" in " ".join(err.split())
    wait_gone(descendants)
    assert kept
    assert kept <= finished_parts(state), (err, sorted(str(path) for path in state.rglob("*")))
    assert not (finetune.folder / "stopped.jsonl").exists()
    code, out, err = quick(*call, "1", "--verbose")
    assert code == 0, err
    assert re.search(r"([1-9]\d*) of 330 rows were answered by an earlier attempt", err)
    assert (finetune.folder / "stopped.jsonl").read_bytes() == many_shards
    assert not state.exists()


def test_the_same_job_again_keeps_every_stage_and_shows_the_result(
    quick: Any, undisturbed: tuple[Path, dict[str, Any], str]
) -> None:
    folder, result, _ = undisturbed
    before = weights(folder)
    code, out, err = quick("run", "whole.yaml", "--no-measure")
    assert code == 0, err
    assert err.count("done in an earlier run, kept") == 4
    assert f"{result['metrics']['evaluate']['accuracy']:.4f}" in out
    assert weights(folder) == before


def test_different_job_under_the_same_name_is_refused_with_the_differences(
    finetune: Any, undisturbed: tuple[Path, dict[str, Any], str]
) -> None:
    folder, _, _ = undisturbed
    before = files_under(folder)
    job = finetune.job("whole", **LONG | {"learningRate": 0.1})
    finetune.write("other.yaml", job)
    code, out, err = finetune("run", "other.yaml", "--no-measure")
    assert (code, out) == (1, "")
    assert "spec.training.learningRate was 0.0005 and is 0.1" in err
    assert "--restart" in err
    assert files_under(folder) == before


def test_restart_of_one_stage_keeps_the_others_and_renames_its_results(
    quick: Any, undisturbed: tuple[Path, dict[str, Any], str]
) -> None:
    folder, _, _ = undisturbed
    predicted = (folder / "predictions.jsonl").read_bytes()
    before = weights(folder)
    code, _, err = quick("run", "whole.yaml", "--no-measure", "--restart", "--stage", "predict")
    assert code == 0, err
    previous = folder.with_name("whole.previous-1")
    assert str(previous) in err
    assert files_under(previous) == {"metrics.json", "predictions.jsonl", "state/predict.json"}
    assert (previous / "predictions.jsonl").read_bytes() == predicted == (folder / "predictions.jsonl").read_bytes()
    assert weights(folder) == before


def test_a_gate_and_metrics_may_change_after_training_and_are_judged_again(
    quick: Any, undisturbed: tuple[Path, dict[str, Any], str]
) -> None:
    folder, result, _ = undisturbed
    before = weights(folder)
    job = quick.job("whole", **LONG)
    job["spec"]["evaluation"] = {"gate": {"metric": "loss", "maximum": 1e-9}}
    quick.write("gated.yaml", job)
    code, _, err = quick("run", "gated.yaml", "--no-measure")
    assert code != 0
    assert 'spec.evaluation.gate.metric was not set and is "loss"' in err
    assert "evaluation.gate.maximum is 1e-09" in err
    assert f"the measured metrics are in {folder / 'report.html'}" in err
    assert "loss of at most 1e-09 is required" in (folder / "report.html").read_text(encoding="utf-8")
    assert err.count("done in an earlier run, kept") == 2

    job["spec"]["evaluation"] = {"gate": {"metric": "accuracy", "minimum": 0.01}}
    quick.write("gated.yaml", job)
    code, out, err = quick("run", "gated.yaml", "--no-measure")
    assert code == 0, err
    assert "It runs again; prepared data and the trained model are kept." in err
    assert err.count("done in an earlier run, kept") == 3
    assert f"{result['metrics']['evaluate']['accuracy']:.4f}" in out
    assert weights(folder) == before


def test_ctrl_c_saves_and_resuming_ends_with_the_same_weights(
    finetune: Any, undisturbed: tuple[Path, dict[str, Any], str]
) -> None:
    whole, _, _ = undisturbed
    job = finetune.job("disturbed", **LONG)
    job["spec"]["checkpoints"] = {"every": {"steps": 80}, "keep": 2}
    finetune.write("disturbed.yaml", job)
    folder = finetune.folder / "runs/disturbed"
    run = finetune.start("run", "disturbed.yaml", "--no-measure")
    # By its history, which has each step at once: the first progress may be reported when most steps are done.
    run.wait_until(lambda: (folder / "history.jsonl").exists() and (folder / "history.jsonl").read_text())
    descendants = run.descendants()
    for process in descendants:
        process.suspend()
    code, _, err = finetune("run", "disturbed.yaml", "--no-measure")
    assert code == 1
    assert f"process {run.process.pid} is running this job" in err

    run.process.send_signal(signal.SIGINT)
    # First the launcher, which forwards it, then the stage: it gets the signal before it makes another step.
    for process in descendants[:2]:
        run.wait_until(lambda process=process: waits_for(process.pid, signal.SIGTERM))
        process.resume()
    for process in descendants[2:]:
        process.resume()
    code, out, err = run.end()
    stopped_at = last_step(folder)
    assert (code, out) == (130, "")
    assert "saving a checkpoint" in err
    assert "finetune run disturbed.yaml --workspace runs --no-measure --resume" in err
    assert 1 <= stopped_at < 320
    wait_gone(descendants)
    assert not (folder / "state/train.json").exists()

    code, _, err = finetune("run", "disturbed.yaml", "--no-measure", "--resume", "--stage", "train")
    assert code == 0, err
    first = json.loads((folder / "logs/train.progress.jsonl").read_text().splitlines()[0])
    assert first["step"] >= stopped_at
    assert weights(folder) == weights(whole)
    assert "they are deleted after all stages have succeeded" in err
    assert (folder / "checkpoints").exists()


def test_stage_with_missing_inputs_names_the_stage_to_run_first(finetune: Any) -> None:
    finetune.write("alone.yaml", finetune.job("alone"))
    code, out, err = finetune("run", "alone.yaml", "--no-measure", "--stage", "train")
    assert (code, out) == (1, "")
    assert "add --stage prepare" in err
    assert not (finetune.folder / "runs/alone").exists()


def test_failed_stage_prints_class_message_hint_and_log(quick: Any) -> None:
    job = quick.job("wrong")
    job["spec"]["dataset"]["columns"] = {"text": "review"}
    quick.write("wrong.yaml", job)
    code, out, err = quick("run", "wrong.yaml", "--no-measure")
    folder = quick.folder / "runs/wrong"
    failure = json.loads((folder / "failure.json").read_text())
    assert (code, out) == (1, "")
    assert "prepare failed on rank 0: DataError (MissingColumn), exit code 10" in err
    assert failure["message"] in err
    assert failure["hint"] in err
    assert "review" in failure["message"]
    assert str(folder / "logs/prepare.log") in err
    assert (failure["class"], failure["stage"], failure["rank"], failure["exitCode"]) == ("DataError", "prepare", 0, 10)
    assert not (folder / "state").exists() or files_under(folder / "state") == set()


@pytest.fixture(scope="module")
def two_processes(finetune: Any) -> Callable[[], tuple[Any, Path, list[psutil.Process]]]:
    """Return a function: start a run with two training processes; return it mid-training, its folder, its workers."""
    job = finetune.job("pair", epochs=20_000)  # outlasts the test
    job["spec"]["parallelism"] = {"strategy": "ddp"}
    job["spec"]["resources"] = {"processesPerNode": 2}
    job["spec"]["checkpoints"] = {"every": {"steps": 1_000_000}}
    job["spec"]["preparation"] = {"maxLength": 64}
    finetune.write("pair.yaml", job)
    folder = finetune.folder / "runs/pair"

    def start() -> tuple[Any, Path, list[psutil.Process]]:
        shutil.rmtree(folder / "logs", ignore_errors=True)
        # Measured: the assumptions for an unread model may not fit beside the machine's other work.
        run = finetune.start("run", "pair.yaml")
        run.wait_until(lambda: last_step(folder) >= 3)
        workers = sorted(
            (p for p in run.descendants() if "RANK" in p.environ()), key=lambda p: int(p.environ()["RANK"])
        )
        assert [worker.environ()["RANK"] for worker in workers] == ["0", "1"]
        return run, folder, workers

    return start


def test_a_killed_rank_is_named_with_its_signal_and_the_others_do_not_stay(two_processes: Any) -> None:
    run, folder, workers = two_processes()
    descendants = run.descendants()
    workers[1].kill()
    code, out, err = run.end()
    assert (code, out) == (1, "")
    assert "train failed on rank 1: Killed (Killed), exit code 137" in err
    assert "SIGKILL" in err
    assert (folder / "state/prepare.json").exists()
    assert not (folder / "state/train.json").exists()
    wait_gone(descendants)


def test_no_process_outlives_a_command_that_was_killed_outright(two_processes: Any) -> None:
    run, _, workers = two_processes()
    descendants = run.descendants()
    assert set(workers) < set(descendants)
    run.process.kill()
    run.process.communicate()
    wait_gone(descendants)
