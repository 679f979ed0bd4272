"""Tables of figures from outside, as files that are edited without Python:

    gpus.csv             products of GPUs, by the data sheet in `source`; columns: plan/hardware/gpu_table.py
    machine_types.csv    machine types of clouds by their documentation, their GPUs, and the product by whose types
                         nodes are selected
    models.jsonl         configs of well-known checkpoints; plan/models/known_models.py
    deepspeed_keys.yaml  keys of DeepSpeed's own configuration; spec/tables/deepspeed_keys.py
    foreign_names.yaml   names and values of other tools; spec/hints/foreign_table.py explains the rows

`entered` is the day of a row's last check against its source.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any, Literal


def text(
    name: Literal["gpus.csv", "machine_types.csv", "models.jsonl", "foreign_names.yaml", "deepspeed_keys.yaml"],
) -> str:
    """Return the content of a table."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def rows(name: Literal["gpus.csv", "machine_types.csv"]) -> list[dict[str, str]]:
    """Return the rows of a table, by the names in its first line."""
    return list(csv.DictReader(text(name).splitlines()))


@cache
def document(name: Literal["foreign_names.yaml", "deepspeed_keys.yaml"]) -> dict[str, Any]:
    """Return the content of a table in YAML, which has no values that YAML and Kubernetes read differently."""
    import yaml  # for a job with problems or with keys of DeepSpeed only

    loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    content: dict[str, Any] = yaml.load(text(name), Loader=loader)
    return content
