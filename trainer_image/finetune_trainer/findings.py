"""Measurements of a running stage that belong into its progress reports, and into its last report however it ends."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import Communication


@dataclass
class Findings:
    """Measurements so far; None: none, or not known."""

    devices: MeasuredDevices | None = None
    communication: Communication | None = None
