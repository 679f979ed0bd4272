"""Tables of figures from outside, as files that are edited without Python:

    gpus.csv           products of GPUs, by the data sheet in `source`; planning/gpu_table.py explains the columns
    machine_types.csv  machine types of clouds by their documentation, their GPUs, and the product by whose types nodes
                       are selected
    models.jsonl       configs of well-known checkpoints; planning/known_models.py
    foreign_names.yaml names and values of other tools; api/hints/foreign_table.py explains the rows

`entered` is the day of a row's last check against its source.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal


def text(name: Literal["gpus.csv", "machine_types.csv", "models.jsonl", "foreign_names.yaml"]) -> str:
    """Return the content of a table."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def rows(name: Literal["gpus.csv", "machine_types.csv"]) -> list[dict[str, str]]:
    """Return the rows of a table, by the names in its first line."""
    return list(csv.DictReader(text(name).splitlines()))
