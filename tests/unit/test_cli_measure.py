"""Facts of this machine, the basis of plans without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from finetune_operator.cli.local.measure import MEMORY_STEP, free_part, own_hardware

GIB = 1024**3


@pytest.mark.parametrize(
    ("free", "planned", "noted"),
    [
        pytest.param(31.9 * GIB, 31.5 * GIB, False, id="nearly all is free"),
        pytest.param(20.3 * GIB, 20 * GIB, False, id="some is taken"),
        pytest.param(5 * GIB, 5 * GIB, True, id="little is left"),
        pytest.param(10_000, MEMORY_STEP, True, id="nothing is left"),
    ],
)
def test_plan_uses_only_free_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: float, planned: float, noted: bool
) -> None:
    memory = SimpleNamespace(total=32 * GIB, available=int(free))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert free_part(own_hardware()).memory_bytes == planned
    assert ("of memory is free" in " ".join(capsys.readouterr().err.split())) is noted


def test_all_of_the_memory_is_planned_with_when_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 32 * GIB - 12_345
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=total))
    assert free_part(own_hardware()).memory_bytes == total
