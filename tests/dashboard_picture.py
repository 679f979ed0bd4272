"""Pictures of the Grafana dashboards for the documentation, from the metrics of a real operator.

    python tests/dashboard_picture.py record RUN RUN RUN RUN   lets a fleet work for twenty minutes, keeps the samples
    python tests/dashboard_picture.py record-endpoint FOLDER   serves the model of a folder for ten minutes, likewise
    python tests/dashboard_picture.py draw                     draws docs/dashboard-*.svg from them

The samples are those of `tests/picture_support/fleet_recording.py`, and for endpoints of
`tests/picture_support/endpoint_recording.py`, which list their real and simulated parts. A
Prometheus server answers each panel's expressions, and the answers are laid out as by Grafana. There is no
Grafana in it: a picture that a browser makes of one is large, and could not be made again without one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from finetune_contract.inference_settings import Serving
from finetune_contract.trainer_job import TrainerJob
from monitoring import FILES, ROOT
from picture_support import endpoint_recording
from picture_support.fleet_recording import MINUTES, SHOWN, TEAM, metrics_of, record
from picture_support.panels import View, query_panel
from picture_support.replay import Run
from picture_support.samples import PROGRAMS, Engine, Samples, engine, missing_programs
from picture_support.svg import box_of, dashboard_svg

DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((FILES / "dashboards").glob("*.json"))
}
SAMPLES = Path(__file__).parent / "picture_support" / "samples.yaml"
ENDPOINT_SAMPLES = Path(__file__).parent / "picture_support" / "endpoint_samples.yaml"
FLEET_DASHBOARDS = {name: dashboard for name, dashboard in DASHBOARDS.items() if name != "endpoints"}
"""Dashboards whose pictures show the recorded fleet."""
DOCS = ROOT / "docs"
_BEFORE, _AFTER = 20, 40
"""Seconds in the picture of one job before its creation and after its end."""


def picture(name: str) -> Path:
    return DOCS / f"dashboard-{name}.svg"


def samples_of(name: str) -> Path:
    """Return the file with the samples of a dashboard's picture."""
    return ENDPOINT_SAMPLES if name == "endpoints" else SAMPLES


def view_of(name: str, samples: Samples) -> View:
    """Return the selection of a picture: one job's life, or the whole recording."""
    if name == "endpoints":
        chosen = {"namespace": endpoint_recording.TEAM, "endpoint": endpoint_recording.JOB}
        return View(samples.start, samples.end, chosen, {"Namespace": chosen["namespace"], "Job": chosen["endpoint"]})
    if name != "job":
        return View(samples.start, samples.end, {"namespace": ".*"}, {"Operator's namespace": "All"})
    there = [
        samples.start + number * samples.every
        for series, values in samples.series.items()
        if series.startswith("kube_finetunejob_created_time{")
        for number, value in enumerate(values)
        if value is not None
    ]
    ended = max(
        value
        for series, values in samples.series.items()
        if series.startswith("kube_finetunejob_completion_time{")
        for value in values
        if value is not None
    )
    start, end = max(samples.start, there[0] - _BEFORE), min(samples.end, ended + _AFTER)
    labels = {variable["name"]: variable["label"] for variable in DASHBOARDS["job"]["templating"]["list"]}
    chosen = {"namespace": TEAM, "job": SHOWN}
    return View(start, end, chosen, {labels[key]: value for key, value in chosen.items()})


def mark(name: str, samples: Path) -> str:
    """Return a digest of the picture's sources: if one of the two changes, it has to be drawn again."""
    dashboard = json.dumps(DASHBOARDS[name], sort_keys=True).encode()
    return " ".join(f"sha256:{hashlib.sha256(text).hexdigest()}" for text in (dashboard, samples.read_bytes()))


def draw(name: str, file: Path, samples: Samples, prometheus: Engine) -> str:
    """Return the dashboard as SVG, with the answers of `prometheus`, which has the samples of `file`."""
    dashboard, view = DASHBOARDS[name], view_of(name, samples)
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    shown = {panel["id"]: query_panel(prometheus, panel, view, box_of(panel).w) for panel in panels}
    return dashboard_svg(dashboard, shown, view, samples.source, mark(name, file))


def draw_all() -> Mapping[str, str]:
    """Return all pictures by the dashboard's name."""
    with ExitStack() as stack:
        files = {samples_of(name) for name in DASHBOARDS}
        read = {file: Samples.read(file) for file in files}
        engines = {file: stack.enter_context(engine(samples)) for file, samples in read.items()}
        return {
            name: draw(name, file, read[file], engines[file])
            for name, file in ((name, samples_of(name)) for name in DASHBOARDS)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser(
        "record",
        help="run a fleet, and record the metrics of its operator",
        description="Needs the programs of a control plane, as tests/cluster does (KUBEBUILDER_ASSETS).",
    )
    recording.add_argument(
        "runs",
        nargs=4,
        type=Path,
        metavar="RUN",
        help="folder of a job that `finetune run` has left, for pods to play again; of the fourth the short jobs",
    )
    recording.add_argument("--minutes", type=float, default=MINUTES)
    recording.add_argument("--every", type=int, default=5, metavar="SECONDS", help="time between two scrapes")
    recording.add_argument("--samples", type=Path, default=SAMPLES, help="file that they are written to")
    serving = commands.add_parser("record-endpoint", help="serve a model, and record the metrics of its servers")
    serving.add_argument("model", type=Path, help="folder of a model for text-classification")
    serving.add_argument("--minutes", type=float, default=endpoint_recording.MINUTES)
    serving.add_argument("--every", type=int, default=5, metavar="SECONDS", help="time between two scrapes")
    serving.add_argument("--samples", type=Path, default=ENDPOINT_SAMPLES, help="file that they are written to")
    drawing = commands.add_parser(
        "draw", help="draw the dashboards", description=f"Needs {' and '.join(PROGRAMS)} in PATH."
    )
    drawing.add_argument("--folder", type=Path, default=DOCS, help="where the pictures go")
    arguments = parser.parse_args()
    if arguments.command == "record":
        runs = [Run.read(folder) for folder in arguments.runs]
        record(runs, arguments.samples, arguments.minutes, arguments.every, metrics_of(FLEET_DASHBOARDS), _log)
        return
    if arguments.command == "record-endpoint":
        job, shown = _served_job(arguments.model), {"endpoints": DASHBOARDS["endpoints"]}
        endpoint_recording.record_endpoint(
            job, arguments.samples, arguments.minutes, arguments.every, metrics_of(shown), _log
        )
        return
    if missing := missing_programs():
        parser.error(f"{' and '.join(missing)} not in PATH (Debian's package prometheus has them)")
    for name, text in draw_all().items():
        path: Path = arguments.folder / picture(name).name
        path.write_text(text, encoding="utf-8")
        _log(f"{path}: {len(text) / 1024:.0f} KiB")


def _served_job(model: Path) -> TrainerJob:
    """Return a job that serves the model of a folder on one core."""
    serving = Serving(
        model_name=endpoint_recording.JOB, device="cpu", max_batch_tokens=2048, max_queue=endpoint_recording.QUEUE_ROWS
    )
    return TrainerJob.model_validate({
        "name": endpoint_recording.JOB,
        "task": "text-classification",
        "model": {"uri": f"file://{model.resolve()}"},
        "training": None,
        "serving": serving.model_dump(),
        "seed": 11,
    })  # fmt: skip


def _log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
