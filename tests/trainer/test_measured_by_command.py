"""`finetune plan` with the trainer, which measures the model in a process of its own."""

from __future__ import annotations

from pathlib import Path

from finetune_command import finetune

JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: first}
spec:
  task: text-classification
  model: {uri: file://model}
  dataset: {uri: file://rows}
  training: {learningRate: 2e-5}
"""


def test_unmeasurable_model_is_noted_without_log_prefix(tmp_path: Path) -> None:
    for name in ("model", "rows"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    (tmp_path / "job.yaml").write_text(JOB)
    note = finetune("plan", "job.yaml", folder=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stderr
    assert note.startswith("Note: the model could not be measured, so its size is assumed. model.uri is ")
