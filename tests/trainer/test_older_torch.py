"""Calls of torch that the oldest supported version has with fewer arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from finetune_trainer.launching.elastic import _time_to_end
from finetune_trainer.training.passes import packed_attention


@dataclass
class OlderConfig:
    run_id: str = ""


@dataclass
class NewerConfig:
    shutdown_timeout: int = 30


@pytest.mark.parametrize(
    ("config", "grace", "arguments", "printed"),
    [
        pytest.param(NewerConfig, 600, {"shutdown_timeout": 600}, "", id="newer"),
        pytest.param(OlderConfig, 30, {}, "", id="older, long enough"),
        pytest.param(OlderConfig, 600, {}, "kills processes 30 s after SIGTERM, not 600 s", id="older, too short"),
    ],
)
def test_time_to_end_is_set_where_torch_takes_it(
    config: type[Any], grace: int, arguments: dict[str, int], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _time_to_end(config, grace) == arguments
    text = capsys.readouterr().err
    assert printed in text
    assert bool(printed) == bool(text)


@pytest.mark.parametrize("checks", [True, False], ids=["newer", "older"])
def test_shared_keys_are_announced_where_torch_takes_that(checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[dict[str, Any]] = []

    def varlen(query: torch.Tensor, *_: Any, **settings: Any) -> torch.Tensor:
        passed.append(settings)
        return query

    monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
    monkeypatch.setattr(packed_attention, "_CHECKS_SHARED_KEYS", checks)
    monkeypatch.setattr(packed_attention, "why_not_varlen", lambda *_: "")
    query, key, value = (torch.ones(1, heads, 6, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    rows = packed_attention.packed_rows(torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.device("cpu"))
    assert packed_attention.attend_rows(rows, query, key, value).shape == (1, 6, 4, 8)
    (settings,) = passed
    assert settings.get("enable_gqa") == (True if checks else None)
