"""CPU time of a short `finetune` command, most of which Python spends on imports.

    python tests/benchmarks/command_start.py [--other CHECKOUT] [--rounds 20] [-- validate job.yaml]

Baseline: a Python that imports Typer, pydantic and PyYAML, which the command is built on. Arms, in turn: the baseline,
the other checkout, and this one; user and system time of each process, the first of each arm not counted, as it
compiles the modules. The other checkout runs with this one's packages. Checked: both checkouts print the same.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata:
  name: sentiment
spec:
  task: text-classification
  model:
    uri: hf://distilbert/distilbert-base-uncased
    adapter:
      method: lora
      rank: 8
  dataset:
    uri: hf://cornell-movie-review-data/rotten_tomatoes
  training:
    epochs: 2
    globalBatchSize: 32
    learningRate: 2e-5
    seed: 1
  evaluation: {}
  resources: {gpusPerNode: 1}
"""
COMMAND = "from finetune_operator.cli.main import main; main()"
BASELINE = "import typer, pydantic, yaml; pydantic.BaseModel"


def cpu_seconds(program: str, arguments: list[str], checkout: Path, folder: Path) -> tuple[float, str]:
    """Run the program with the checkout's code; return its CPU seconds and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(
        str(checkout / part) for part in ("operator", "trainer_image", "trainer_image/contract")
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ran.stdout


def main() -> None:
    """Measure the arms in turn, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("command", nargs="*", default=["validate", "job.yaml"])
    options = parser.parse_args()
    arms = {"Python with Typer, pydantic and PyYAML (baseline)": (BASELINE, ROOT)}
    if options.other is not None:
        arms[str(options.other)] = (COMMAND, options.other.resolve())
    arms["this checkout"] = (COMMAND, ROOT)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    printed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(JOB)
        for each in range(options.rounds + 1):
            for arm, (program, checkout) in arms.items():
                taken, printed[arm] = cpu_seconds(program, options.command, checkout, Path(folder))
                seconds[arm] += [taken] if each else []
    outputs = {printed[arm] for arm, (program, _) in arms.items() if program == COMMAND}
    print(f"finetune {' '.join(options.command)}, {options.rounds} rounds, outputs equal: {len(outputs) == 1}\n")
    print("| | CPU s, median (lowest to highest) |\n|---|---|")
    for arm, taken_by in seconds.items():
        print(f"| {arm} | {statistics.median(taken_by):.3f} ({min(taken_by):.3f} to {max(taken_by):.3f}) |")


if __name__ == "__main__":
    main()
