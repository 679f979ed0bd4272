"""Pods that predict at the pace a test sets: a module that their interpreter imports first slows their shards, and
obeys marks in the job's folder.
"""

from __future__ import annotations

from pathlib import Path

from box_support.team import Team
from cluster_support.api_access import Object

NAME = "steered-predictions"
OUTAGE = "outage"
"""Mark: parts cannot be written."""
HOLD = "hold"
"""Mark: parts are not written before the mark is removed."""
RELEASED = "released"
"""Mark: parts are written, with `held`."""

_SITE = """
# Imported by every interpreter of the pod before its program.
import errno, importlib.util, os, sys, time


def slowed(module):
    answers = module.Answerer.answers

    def slow(self, *given):
        time.sleep(float(os.environ["SHARD_SECONDS"]))
        return answers(self, *given)

    module.Answerer.answers = slow


def steered(module):
    write = module.Parts.write

    def held(folder):
        job = folder.parents[1]
        first = "HELD" in os.environ and not (job / "released").exists() and any(folder.glob("*.arrow"))
        return first or (job / "hold").exists()

    def written(self, *given):
        while held(self.folder):
            time.sleep(0.1)
        if (self.folder.parents[1] / "outage").exists():
            raise OSError(errno.EIO, "the workspace does not respond")
        return write(self, *given)

    module.Parts.write = written


CHANGES = {
    "finetune_trainer.predict.answering": slowed,
    "finetune_trainer.predict.prediction_parts": steered,
}


class AfterImport:
    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            change(module)

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, AfterImport())
"""


def steered_template(team: Team, seconds: float = 0.0, held: bool = False) -> Object:
    """Return `spec.template` of pods that obey the marks, and store the module in the team's namespace.

    `seconds`: least time of a shard. `held`: after the first part, parts are not written before `RELEASED`.
    """
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}}
    team.apply_manifest({**config_map, "data": {"sitecustomize.py": _SITE}})
    variables = {"PYTHONPATH": f"/mnt/{NAME}", "SHARD_SECONDS": str(seconds), **({"HELD": "1"} if held else {})}
    return {
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumes": [{"name": NAME, "configMap": {"name": NAME}}],
        "volumeMounts": [{"name": NAME, "mountPath": f"/mnt/{NAME}", "readOnly": True}],
    }


def parts_folder(team: Team, name: str) -> Path | None:
    """Return the folder of a job's parts; None before it has a claim."""
    folder = team.box.bound_folder(team.namespace, f"{name}-workspace")
    return None if folder is None else folder / name / "predictions.parts"
