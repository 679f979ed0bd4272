"""Time that the cluster costs: one job through each launcher, against `finetune run` of the same job.

Baseline: `finetune run` on this machine, one node with two processes. Arms: PyTorchJob, MPIJob and Indexed Job on two
nodes with a process each, on a cluster in a box on the same machine, with the images as they are built. All arms train
the same model on the same rows with the same global batch and seed; the accuracy on the test split is printed with the
times, and has to agree within a point. Arms run in turn, `--rounds` times, so that a machine that slows down meets all.

    python tests/benchmarks/cluster_overhead.py --rounds 2
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from box_support.box import CONTROLLERS, running_box
from box_support.box_inputs import ROTTEN_TOMATOES, copy_real_inputs, readable_by_all
from box_support.team import INPUTS, Team, stage_of
from cluster_support.api_access import Object
from finetune_operator.spec.launcher_rows import TRAINING
from finetune_operator.spec.status_times import seconds_since
from finetune_operator.spec.types import API_VERSION, KIND, StageStatus

BASELINE = "finetune run"
LAUNCHERS = TRAINING
STAGES = ("prepare", "train", "evaluate", "predict")


@dataclass(frozen=True)
class Measured:
    """One run of one arm, in seconds."""

    whole: float
    stages: dict[str, float]
    accuracy: float


def spec(model: str, data: str, launcher: str, steps: int | None) -> Object:
    """Return the job's spec; the arms differ in the placement of the two processes and the place of the inputs."""
    local = launcher == BASELINE
    length = {"maxSteps": steps} if steps else {"epochs": 1}
    return {
        "task": "text-classification",
        "model": {"uri": model},
        "dataset": {"uri": data},
        "preparation": {"maxLength": 64},
        "training": {**length, "globalBatchSize": 32, "learningRate": 1.0e-4, "precision": "fp32"},
        "parallelism": {"strategy": "ddp"},
        "resources": {
            "nodes": 1 if local else 2, "processesPerNode": 2 if local else 1,
            "cpu": "2" if local else "1", "memory": "8Gi" if local else "4Gi",
        },
        "launcher": "auto" if local else launcher,
        "checkpoints": {"every": {"steps": 100}},
        "evaluation": {},
        "predict": {"columns": ["text"]},
    }  # fmt: skip


def job(name: str, content: Object) -> Object:
    """Return the job as applied."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": content}


def run_here(inputs: Path, work: Path, name: str, steps: int | None) -> Measured:
    """Run the baseline."""
    file = work / f"{name}.yaml"
    content = spec(f"file://{inputs}/minilm", f"file://{inputs}/rotten_tomatoes", BASELINE, steps)
    file.write_text(yaml.safe_dump(job(name, content)))
    finetune = Path(sys.executable).with_name("finetune")
    began, at = time.monotonic(), time.time()
    ran = subprocess.run(
        [str(finetune), "run", str(file), "--workspace", str(work / "runs"), "-o", "json"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    whole = time.monotonic() - began
    if ran.returncode != 0:
        raise SystemExit(f"the baseline failed:\n{ran.stdout}\n{ran.stderr}")
    folder = work / "runs" / name
    stages: dict[str, float] = {}
    for stage in STAGES:
        ended = (folder / "state" / f"{stage}.json").stat().st_mtime
        stages[stage], at = ended - at, ended
    accuracy = float(json.loads((folder / "metrics.json").read_text())["evaluate"]["accuracy"])
    shutil.rmtree(folder)
    return Measured(whole, stages, accuracy)


def run_there(team: Team, launcher: str, steps: int | None) -> Measured:
    """Run an arm, timed from `kubectl apply` until the job is Succeeded."""
    name = team.new_name(f"over-{launcher}")
    content = spec(f"pvc://{INPUTS}/minilm", f"pvc://{INPUTS}/rotten_tomatoes", launcher, steps)
    began = time.monotonic()
    team.apply(name, {**content, "storage": {"size": "2Gi"}})
    status = team.succeeds(name, 1800)
    whole = time.monotonic() - began
    stages = {stage: seconds(stage_of(status, stage)) for stage in STAGES}
    return Measured(whole, stages, float(status["artifacts"]["metrics"]["accuracy"]))


def seconds(stage: Object) -> float:
    """Return the stage's duration by its own times, which are whole seconds."""
    times = StageStatus.model_validate(stage)
    assert times.completion_time is not None
    return seconds_since(times.start_time, times.completion_time)


def table(rounds: list[dict[str, Measured]]) -> str:
    """Return a line for each arm and round; the overhead is relative to the baseline of the same round."""
    lines = [f"{'round':>5} {'arm':14} {'all s':>7} {'over s':>7} {'over %':>7} {'accuracy':>9}  stages"]
    for number, found in enumerate(rounds, start=1):
        base = found[BASELINE].whole
        for arm, one in found.items():
            stages = " ".join(f"{stage} {took:.0f}" for stage, took in one.stages.items())
            over = one.whole - base
            lines.append(
                f"{number:>5} {arm:14} {one.whole:7.1f} {over:7.1f} {100 * over / base:7.1f} {one.accuracy:9.4f}"
                f"  {stages}"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="optimizer steps instead of one epoch")
    options = parser.parse_args()
    if not ROTTEN_TOMATOES.is_dir():
        raise SystemExit(f"{ROTTEN_TOMATOES} is not there")
    with tempfile.TemporaryDirectory(prefix="overhead-") as made:
        work = Path(made)
        inputs, state = work / "inputs", work / "box"
        state.mkdir()
        copy_real_inputs(inputs)
        readable_by_all(inputs)
        with running_box(state) as box:
            box.install_operator(work)
            for name in CONTROLLERS:
                box.install_controller(name)
            box.kubectl("create", "namespace", "team")
            box.fill_claim("team", INPUTS, inputs)
            rounds: list[dict[str, Measured]] = []
            for number in range(options.rounds):
                found = {BASELINE: run_here(inputs, work, f"here-{number}", options.steps)}
                for launcher in LAUNCHERS:
                    found[launcher] = run_there(Team(box, "team"), launcher, options.steps)
                    print(f"round {number + 1}: {launcher} {found[launcher].whole:.1f} s", flush=True)
                rounds.append(found)
    print(table(rounds))
    accuracies = [one.accuracy for found in rounds for one in found.values()]
    if max(accuracies) - min(accuracies) > 0.01:
        raise SystemExit(f"the arms do not agree on the quality: {accuracies}")


if __name__ == "__main__":
    main()
