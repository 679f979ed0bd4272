"""metrics.json, environment.json, model card, report.html: whole, self-contained, safe against hostile text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_contract.facts import DataFacts
from finetune_contract.job import TrainerJob
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.failures import StageError
from finetune_trainer.reporting import (
    loss_chart,
    merge_metrics,
    write_environment,
    write_model_card,
    write_report,
    write_samples,
)

HOSTILE = "</title></script><script>alert(1)</script>{{ 7*7 }}\"'><img src=x onerror=alert(1)> ünïcode"
TRAINING = {
    "max_steps": 40,
    "steps_per_epoch": 20,
    "learning_rate": 2e-5,
    "scheduler": "linear",
    "warmup_steps": 4,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "optimizer": "adamw",
    "seed": 42,
    "label_smoothing": 0.0,
    "precision": "fp32",
    "strategy": {"name": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu"},
    "batch": {"global_batch_size": 32, "micro_batch_size": 8, "gradient_accumulation": 2, "data_parallel": 2},
    "world": {"nodes": 1, "processes_per_node": 2, "device": "cpu", "threads_per_process": 1},
    "checkpoints": {"every_steps": 10, "keep": 1},
}
FACTS = DataFacts.model_validate(
    {
        "fingerprint": "ab" * 32,
        "splits": {"train": {"rows": 600, "tokens": 9000, "longest": 60}, "test": {"rows": 100, "tokens": 1500}},
        "labels": ["bad", HOSTILE],
        "label_counts": {"bad": 290, HOSTILE: 310},
        "max_length": 128,
        "validation_from_train": True,
    }
)
METRICS = {
    "evaluate": {"accuracy": 0.91, "f1": 0.9, "loss": 0.25, "rows": 100, "split": "test"},
    "majority": {"accuracy": 0.52, "f1": 0.34},
    "train": {
        "loss_first": 0.7,
        "loss_last": 0.2,
        "samples_per_second": 85.25,
        "peak_memory_bytes": 3 << 30,
        "strategy": "deepspeed",
    },
}
VOID = {"meta", "line", "br", "circle", "polyline", "img"}


def a_job(uri: str = "hf://org/model", data: str = "hf://org/data") -> TrainerJob:
    body = {"name": "reviews", "task": "text-classification", "model": {"uri": uri}, "training": TRAINING}
    return TrainerJob.model_validate({**body, "dataset": {"uri": data, "columns": {"text": "text", "label": "label"}}})


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    paths = JobPaths(tmp_path / "reviews")
    paths.prepared.mkdir(parents=True)
    (paths.prepared / "data.json").write_text(FACTS.to_json(), encoding="utf-8")
    merge_metrics(paths, METRICS)
    history = [{"step": i, "loss": 0.7 - i / 80} for i in range(1, 41)] + [{"step": 20, "eval_loss": 0.5}]
    paths.history.write_text("".join(json.dumps(row) + "\n" for row in history) + '{"step": 41, "lo', encoding="utf-8")
    rows = [
        {"row": 3, "text": [HOSTILE, "pair"], "label": "bad", "predicted": HOSTILE, "score": 0.99},
        {"row": 1, "text": ["fine"], "label": "bad", "predicted": "bad", "score": 0.8},
    ]
    write_samples(paths, rows)
    write_environment(paths)
    return paths


class Page(HTMLParser):
    """Tags balanced or an error, attributes and text kept."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def the_report(paths: JobPaths, plan: dict[str, Any] | None = None) -> Page:
    write_report(a_job(), plan, paths)
    return Page(paths.report.read_text(encoding="utf-8"))


def test_the_report_holds_every_part_that_the_stages_left(paths):
    plan = {
        "reasons": ["one rank is enough", HOSTILE],
        "assumptions": ["no data measured"],
        "memory": {
            "terms": [{"name": "gradients", "bytes": 1 << 30, "formula": "4 x parameters"}],
            "totalBytes": 1 << 30,
            "capacityBytes": 1 << 33,
        },
        "command": ["finetune", "run", "a b.yaml"],
    }
    page = the_report(paths, plan)
    expected = [
        "0.9100",
        "0.5200",
        "85.25",
        "3.00 GiB",
        "4 x parameters",
        "of 8.00 GiB",
        "no data measured",
        "one rank is enough",
        "finetune run 'a b.yaml'",
    ]
    expected += ["deepspeed, ZeRO stage 2, optimizer offloaded to cpu", "32 = micro-batch 8 x 2 accumulation x 2 ranks"]
    expected += [
        "Training loss from 0.6875 at step 1 to 0.2000 at step 40",
        "step 20: 0.5000",
        "optimizer step",
        "torch",
    ]
    assert [text for text in expected if text not in page.text] == []
    line = next(attributes["points"] for tag, attributes in page.tags if tag == "polyline")
    assert line is not None
    assert len(line.split()) == 40


def test_the_report_loads_nothing_and_runs_nothing(paths):
    page = the_report(paths)
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
    }
    assert [
        a for _, attributes in page.tags for a in attributes if a in ("src", "href", "srcset") or a.startswith("on")
    ] == []
    assert "url(" not in paths.report.read_text(encoding="utf-8")
    assert "default-src 'none'" in paths.report.read_text(encoding="utf-8")


def test_hostile_text_arrives_as_text(paths):
    page = the_report(paths, {"reasons": [HOSTILE]})
    assert page.text.count(HOSTILE) == 4  # a sample's text, its prediction, the labels, the reason


def test_the_report_follows_light_and_dark(paths):
    the_report(paths)
    style = paths.report.read_text(encoding="utf-8")
    assert "color-scheme: light dark" in style
    assert "prefers-color-scheme: dark" in style


def test_a_job_that_only_predicts_has_a_report_without_the_missing_parts(tmp_path):
    paths = JobPaths(tmp_path / "empty")
    page = the_report(paths)
    assert not {"polyline", "svg"} & {tag for tag, _ in page.tags}
    assert "finetune run reviews.yaml --workspace" in page.text


@pytest.mark.parametrize(
    "losses", [[0.5, 0.5], [3.0, 1e-6], [1e6, 2e6], [0.7, float("nan"), 0.6], [-1.0, -2.0]], ids=str
)
def test_a_chart_stays_inside_its_frame(losses):
    chart = loss_chart({"step": i + 1, "loss": loss} for i, loss in enumerate(losses))
    assert chart is not None
    points = [tuple(map(float, point.split(","))) for point in chart.line.split()]
    assert all(chart.left <= x <= chart.right and chart.top - 1e-6 <= y <= chart.bottom for x, y in points)
    assert all(chart.left <= tick.at <= chart.right for tick in chart.x_ticks)
    assert all(chart.top - 1e-6 <= tick.at <= chart.bottom for tick in chart.y_ticks)
    assert len(chart.y_ticks) >= 2


def test_one_loss_makes_no_chart():
    assert loss_chart([{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")}]) is None


def test_after_a_resume_the_later_log_of_a_step_counts():
    rows = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 1, "loss": 5.0}]
    chart = loss_chart(rows)
    assert chart is not None
    assert chart.summary == "Training loss from 5.0000 at step 1 to 8.0000 at step 2"


# --------------------------------------------------------------------------------------------------------- other files


def test_sections_of_metrics_are_replaced_and_others_stay(tmp_path):
    paths = JobPaths(tmp_path)
    merge_metrics(paths, {"train": {"a": 1, "b": 2}, "evaluate": {"accuracy": 0.5}})
    assert merge_metrics(paths, {"train": {"a": 3}}) == {"train": {"a": 3}, "evaluate": {"accuracy": 0.5}}
    assert json.loads(paths.metrics.read_text()) == {"train": {"a": 3}, "evaluate": {"accuracy": 0.5}}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_damaged_metrics_are_an_error_and_stay(tmp_path):
    paths = JobPaths(tmp_path)
    paths.metrics.write_text('{"train": ')
    with pytest.raises(StageError) as caught:
        merge_metrics(paths, {"evaluate": {}})
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.PROGRAM, "DamagedFile")
    assert paths.metrics.read_text() == '{"train": '


def test_the_environment_names_versions_but_neither_host_nor_user(paths):
    import platform

    found = json.loads(paths.environment.read_text())
    assert {"python", "platform", "machine", "versions", "hardware"} <= set(found)
    assert {"torch", "transformers", "datasets"} <= set(found["versions"])
    assert platform.node() not in json.dumps(found).split('"')


def card(paths: JobPaths, job: TrainerJob) -> tuple[dict[str, Any], str]:
    write_model_card(paths, job, FACTS, METRICS)
    text = (paths.model / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_model_card_has_the_front_matter_that_the_hub_reads(paths):
    front, _ = card(paths, a_job())
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["fine-tuned", "text-classification"],
        "base_model": "org/model",
        "datasets": ["org/data"],
        "metrics": ["accuracy", "f1"],
        "model-index": [
            {
                "name": "reviews",
                "results": [
                    {
                        "task": {"type": "text-classification"},
                        "dataset": {"name": "data", "type": "org/data", "split": "test"},
                        "metrics": [{"type": "accuracy", "value": 0.91}, {"type": "f1", "value": 0.9}],
                    }
                ],
            }
        ],
    }


def test_the_hubs_own_library_reads_the_model_card(paths):
    from huggingface_hub import ModelCard

    write_model_card(paths, a_job(), FACTS, METRICS)
    data = ModelCard.load(paths.model / "README.md").data
    assert [(result.metric_type, result.metric_value) for result in data.eval_results] == [
        ("accuracy", 0.91),
        ("f1", 0.9),
    ]


def test_local_paths_are_not_given_out_as_hub_repositories(paths):
    front, body = card(paths, a_job("pkg://some_package/model", "file://data/reviews"))
    assert not {"base_model", "datasets"} & set(front)
    assert "pkg://some\\_package/model" in body


def test_folders_of_this_machine_do_not_appear_in_the_model_card(paths):
    write_model_card(paths, a_job(f"file://{paths.root}/base", f"file://{paths.root}/reviews"), FACTS, METRICS)
    text = (paths.model / "README.md").read_text(encoding="utf-8")
    assert str(paths.root.parent) not in text
    assert "fine-tuned from base." in text
    assert "type: reviews" in text


def test_hostile_labels_do_not_break_the_model_card(paths):
    _, body = card(paths, a_job())
    assert not re.search(r"<(script|img|/title)", body)
    assert "| accuracy | 0.9100 | 0.5200 |" in body
    assert "| Global batch | 32 = micro-batch 8 x 2 accumulation x 2 ranks |" in body


def test_the_first_card_without_metrics_has_no_results(paths):
    write_model_card(paths, a_job(), FACTS, {})
    text = (paths.model / "README.md").read_text(encoding="utf-8")
    assert "## Results" not in text
    assert "model-index" not in text
