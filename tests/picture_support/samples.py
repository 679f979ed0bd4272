"""Samples in a readable file, and in a real Prometheus that answers queries about them.

The file is YAML with series in the notation of promtool's rule tests: `1x4` is five times 1, `_` a scrape without the
series. Most figures of an operator rarely change, so minutes of scrapes fit into a few dozen KB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import requests
import yaml

from cluster_support.api_access import new_session, wait_until
from cluster_support.control_plane import free_port
from suite_plugins.patience import patient

PROGRAMS = ("prometheus", "promtool")


@dataclass
class Samples:
    """Scrapes at even times. Each series has one value per scrape; None if the scrape lacks it."""

    start: float
    """Unix time of the first scrape."""
    every: int
    """Seconds from one scrape to the next."""
    source: str
    """Origin of the samples, in a sentence or two for the reader of the file."""
    scrapes: int = 0
    series: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """Unix time of the last scrape."""
        return self.start + (self.scrapes - 1) * self.every

    def add(self, number: int, found: Mapping[str, float]) -> None:
        """Add the scrape `number`; those between it and the one before were missed."""
        for name in {*self.series, *found}:
            column = self.series.setdefault(name, [])
            column.extend([None] * (number - len(column)))
            column.append(found.get(name))
        self.scrapes = number + 1

    # ---- as a file

    def write(self, path: Path) -> None:
        lines = [
            *(f"# {line}" for line in self.source.splitlines()),
            f"start: {datetime.fromtimestamp(self.start, UTC).isoformat()}",
            f"interval: {self.every}s",
            "input_series:",
        ]
        for name, values in sorted(self.series.items()):
            padded = [*values, *[None] * (self.scrapes - len(values))]
            lines += [f"  - series: '{name}'", f"    values: '{' '.join(_notation(padded))}'"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Samples:
        text = path.read_text(encoding="utf-8")
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        start: datetime = document["start"]
        source = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# "))
        found = cls(start.timestamp(), int(document["interval"].removesuffix("s")), source)
        found.series = {one["series"]: list(_values(one["values"])) for one in document["input_series"]}
        found.scrapes = max(map(len, found.series.values()))
        return found

    def open_metrics(self) -> Iterator[str]:
        """Yield lines of OpenMetrics with times."""
        for name, values in self.series.items():
            for number, value in enumerate(values):
                if value is not None:
                    yield f"{name} {value!r} {self.start + number * self.every:.3f}\n"
        yield "# EOF\n"


def notation(name: str, labels: Mapping[str, str]) -> str:
    """Return a series as text, with sorted labels."""
    quoted = (f'{key}="{_escaped(value)}"' for key, value in sorted(labels.items()))
    return f"{name}{{{','.join(quoted)}}}"


def _escaped(value: str) -> str:
    assert "'" not in value, "it is written between these in the file"
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _notation(values: Iterable[float | None]) -> Iterator[str]:
    for value, run in groupby(values):
        count = len(list(run))
        if value is None:
            yield "_" if count == 1 else f"_x{count}"
        else:
            text = f"{value:.10g}"  # Ten digits are enough for Unix times, and for visible differences of the rest.
            yield text if count == 1 else f"{text}x{count - 1}"


def _values(text: str) -> Iterator[float | None]:
    for part in text.split():
        value, _, times = part.partition("x")
        if value == "_":
            yield from [None] * int(times or 1)
        else:
            yield from [float(value)] * (int(times or 0) + 1)


# ------------------------------------------------------------------------------------------------------ the real engine


@dataclass(frozen=True)
class Answer:
    """One series of an answer: its labels, and values with their Unix times."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Engine:
    """A Prometheus server."""

    url: str
    session: requests.Session

    def at(self, expression: str, when: float) -> list[Answer]:
        return self._query("query", query=expression, time=f"{when:.3f}")

    def over(self, expression: str, start: float, end: float, step: float) -> list[Answer]:
        return self._query("query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:g}")

    def _query(self, endpoint: str, **parameters: str) -> list[Answer]:
        answer = self.session.get(f"{self.url}/api/v1/{endpoint}", params=parameters, timeout=patient(60))
        reply: dict[str, Any] = answer.json()
        assert reply["status"] == "success", (parameters["query"], reply)
        return [
            Answer(one["metric"], [(at, float(value)) for at, value in one.get("values") or [one["value"]]])
            for one in reply["data"]["result"]
        ]


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def engine(samples: Samples) -> Iterator[Engine]:
    """Run a Prometheus server with these samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, database = folder / "samples.om", folder / "data"
        with text.open("w", encoding="utf-8") as file:
            file.writelines(samples.open_metrics())
        made = subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", text, database], capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout + made.stderr
        # Prometheus marks the end of a series that a target no longer has, and text cannot have the marks: a series
        # that the last scrape lacks has ended.
        with prometheus(folder, "{}", f"--query.lookback-delta={samples.every}s") as found:
            yield found


@contextmanager
def prometheus(folder: Path, configuration: str, *options: str) -> Iterator[Engine]:
    """Run a Prometheus server with this configuration, whose database is `folder`/data."""
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(configuration + "\n", encoding="utf-8")
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=100y",
        "--log.level=warn",
        *options,
    ]
    # One thread: it has little to do, and other work runs beside it.
    environment = {**os.environ, "GOMAXPROCS": "1"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
    try:
        found = Engine(f"http://127.0.0.1:{port}", new_session())
        _wait(found, server, folder / "log")
        yield found
    finally:
        server.terminate()
        server.wait(patient(300))


def _wait(found: Engine, server: subprocess.Popen[bytes], log: Path) -> None:
    def ready() -> bool:
        assert server.poll() is None, log.read_text(errors="replace")
        return found.session.get(f"{found.url}/-/ready", timeout=patient(5)).ok

    wait_until(ready, "Prometheus is ready", 300, lambda: log.read_text(errors="replace"))
