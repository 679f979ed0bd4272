"""Programs start without the libraries that their layers do not need. `make lint` checks the imports themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from suite_plugins.patience import patient


def test_the_finetune_command_starts_without_a_deep_learning_library() -> None:
    program = (
        "import sys; from finetune_operator.cli.main import COMMANDS, load; [load(name) for name in COMMANDS]; "
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'datasets', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300))
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


READERS_OF_STATUS = (
    "cli.cluster.jobview", "cli.cluster.watching", "jobs.observed", "jobs.fleet_metrics", "controller.store.store",
)  # fmt: skip


def test_readers_of_a_status_import_no_template_engine() -> None:
    imports = "".join(f"import finetune_operator.{name}\n" for name in READERS_OF_STATUS)
    program = f"import sys\n{imports}print([name for name in ('jinja2', 'torch') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300))
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


def test_a_task_is_compared_by_its_name_in_its_own_folder_only() -> None:
    trainer = Path(__file__).parents[2] / "trainer_image" / "finetune_trainer"
    texts = {path: path.read_text(encoding="utf-8") for path in trainer.rglob("*.py") if path.parent.name != "tasks"}
    assert [path for path, text in texts.items() if "job.task ==" in text] == []
