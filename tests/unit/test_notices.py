"""Notices about jobs that are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_operator.api.notices import notices
from finetune_operator.api.types import FineTuneJobSpec


def notices_of(uri: str = "hf://org/small", task: str = "text-generation", **model: Any) -> str:
    spec = {"task": task, "model": {"uri": uri, **model}, "dataset": {"uri": "hf://a/b"}, "training": {}}
    return "\n".join(notices(FineTuneJobSpec.model_validate_json(json.dumps(spec))))


def test_adapter_without_a_method_is_told() -> None:
    assert "spec.model.adapter has no method, so that all weights are trained" in notices_of(adapter={"rank": 16})


@pytest.mark.parametrize("adapter", [{}, {"method": "none"}, {"method": "lora", "rank": 16}])
def test_adapter_with_a_method_or_nothing_in_it_is_not_told(adapter: dict[str, Any]) -> None:
    assert notices_of(adapter=adapter) == ""


@pytest.mark.parametrize(
    "name", ["google-bert/bert-base-uncased", "microsoft/deberta-v3-base", "FacebookAI/roberta-large"]
)
def test_model_that_writes_no_text_is_told(name: str) -> None:
    assert f"hf://{name} is called after bert, whose models read text and write none" in notices_of(f"hf://{name}")
    assert notices_of(f"hf://{name}", task="text-classification") == ""


@pytest.mark.parametrize("name", ["openai-community/gpt2", "patrickvonplaten/bert2bert_cnn_daily_mail"])
def test_model_that_writes_text_is_not_told(name: str) -> None:
    assert notices_of(f"hf://{name}", task="summarization") == ""
