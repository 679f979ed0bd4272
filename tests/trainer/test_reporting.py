"""metrics.json, environment.json, model card, report.html: whole, self-contained, safe against hostile text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import browser
from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.plan_check import MeasuredTraining, PlannedTraining, check_plan
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.report.model_card import write_model_card
from finetune_trainer.report.reporting import (
    CONFUSION_FILE,
    SAMPLES_FILE,
    merge_generation,
    merge_metrics,
    write_confusion,
    write_environment,
    write_report,
    write_samples,
)
from finetune_trainer.tasks.class_metrics import Confusion

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
        "splits": {
            "train": {
                "rows": 600,
                "tokens": 9000,
                "longest": 60,
                "truncated_rows": 3,
                "length_histogram": {8: 100, 16: 400, 64: 100},
            },
            "test": {"rows": 100, "tokens": 1500},
        },
        "labels": ["bad", HOSTILE],
        "label_counts": {"bad": 290, HOSTILE: 310},
        "max_length": 128,
        "validation_from_train": True,
        "notes": [f"12 of 600 rows of train lose text: {HOSTILE}"],
    }
)
METRICS = {
    "evaluate": {"accuracy": 0.91, "f1": 0.9, "loss": 0.25, "rows": 100, "split": "test", "baseline": "saying bad"},
    "majority": {"accuracy": 0.52, "f1": 0.34},
    "train": {
        "loss_first": 0.7,
        "loss_last": 0.2,
        "samples_per_second": 85.25,
        "peak_memory_bytes": 3 << 30,
        "strategy": "deepspeed",
        "padding_share": 0.125,
        "peak_memory_bytes_by_rank": [3 << 30, 1 << 30],
        "time": {
            "total_seconds": 20.0,
            "parts": {"start": 2.0, "data": 1.0, "forward": 4.0, "backward": 10.0, "optimizer": 2.5, "rest": 0.5},
            "with_communication": ["backward", "optimizer"],
            "clock": "cuda-events",
        },
    },
}
VOID = {"meta", "line", "br", "polyline", "img"}


def a_job(uri: str = "hf://org/model", data: str = "hf://org/data") -> TrainerJob:
    body = {"name": "reviews", "task": "text-classification", "model": {"uri": uri}, "training": TRAINING}
    return TrainerJob.model_validate({**body, "dataset": {"uri": data, "columns": {"text": "text", "label": "label"}}})


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    paths = JobPaths(tmp_path / "reviews")
    paths.prepared.mkdir(parents=True)
    (paths.prepared / "data.json").write_text(FACTS.to_json(), encoding="utf-8")
    merge_metrics(paths, METRICS)
    history: list[dict[str, Any]] = [
        {"step": i, "loss": 0.7 - i / 80, "learning_rate": 2e-5 * (1 - i / 40), "tokens_per_second": 1000.0 + i}
        for i in range(1, 41)
    ]
    history += [{"step": 20, "eval_loss": 0.5, "eval_accuracy": 0.7}, {"step": 40, "eval_accuracy": 0.8}]
    paths.history.write_text("".join(json.dumps(row) + "\n" for row in history) + '{"step": 41, "lo', encoding="utf-8")
    rows = [
        {"row": 3, "text": [HOSTILE, "pair"], "label": "bad", "predicted": HOSTILE, "score": 0.99},
        {"row": 1, "text": ["fine"], "label": "bad", "predicted": "bad", "score": 0.8},
    ]
    write_samples(paths, rows)
    write_confusion(paths, Confusion(("bad", HOSTILE), np.array([[40, 9], [0, 51]]), "rows"))
    paths.state.mkdir()
    for stage, seconds in ((Stage.TRAIN, 3600.0), (Stage.EVALUATE, 40.0)):
        ended = TrainerReport(job="reviews", stage=stage, rank=0, world_size=1, outcome="succeeded", seconds=seconds)
        (paths.state / f"{stage}.json").write_text(ended.to_json(), encoding="utf-8")
    write_environment(paths)
    return paths


class Page(HTMLParser):
    """Parser that requires balanced tags, and keeps attributes and text."""

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


def the_report(
    paths: JobPaths, plan: dict[str, Any] | None = None, job: TrainerJob | None = None, command: str | None = None
) -> Page:
    write_report(job or a_job(), plan, paths, command)
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
    }
    page = the_report(paths, plan, command="finetune run 'a b.yaml'")
    expected = [
        "0.9100",
        "0.5200",
        "compared with saying bad",
        "85.25",
        "3.0 GiB",
        "4 x parameters",
        "of 8.0 GiB",
        "no data measured",
        "one rank is enough",
        "finetune run 'a b.yaml'",
        "12 of 600 rows of train lose text",
    ]
    expected += ["deepspeed, ZeRO stage 2, optimizer offloaded to cpu", "32 = micro-batch 8 x 2 accumulation x 2 ranks"]
    expected += [
        "validation, step 20: 0.5",
        "torch",
    ]
    assert [text for text in expected if text not in page.text] == []
    lines = [(attributes["points"] or "").split() for tag, attributes in page.tags if tag == "polyline"]
    assert [len(line) for line in lines[:2]] == [40, 40]  # the losses, and behind them their means


def test_the_report_has_a_curve_for_everything_that_the_history_has(paths):
    page = the_report(paths)
    expected = [
        "Loss: training from 0.6875 at step 1 to 0.2 at step 40; validation 0.5 at step 20",
        "Validation accuracy from 0.7 at step 20 to 0.8 at step 40",
        "Learning rate from 1.95e-05 at step 1 to 0 at step 40",
        "Throughput from 1,001 at step 1 to 1,040 at step 40",
    ]
    labels = [label for tag, attributes in page.tags if tag == "svg" and (label := attributes.get("aria-label"))]
    assert [text for text in labels if text in expected] == expected


def test_report_shows_the_share_of_each_part_and_unmeasured_parts(paths):
    page = the_report(paths)
    text = " ".join(page.text.split())
    expected = ["backward, with its communication10.000 s50.0%", "forward4.000 s20.0%", "total20.000 s100.0%"]
    expected += [
        "waiting for data1.000 s5.0%",
        "Measured with CUDA events",
        "is not measured separately",
        "Padding share12.5%",
    ]
    expected += ["Peak memory of each process", "1.0 GiB"]
    assert [each for each in expected if each not in text] == []
    bar = [
        float((attributes["width"] or "").rstrip("%"))
        for tag, attributes in page.tags
        if tag == "rect" and "part" in (attributes["class"] or "")
    ]
    assert sum(bar) == pytest.approx(100)


def test_report_compares_the_plan_with_the_measurements(paths):
    planned = PlannedTraining(memory_bytes=2 << 30, memory_terms={"process": 1 << 30}, step_seconds=0.5)
    terms = {"process": 3 << 29}
    measured = MeasuredTraining(memory_bytes=5 << 29, memory_terms=terms, step_seconds=0.25, steps=3)
    check = check_plan(planned, measured).model_dump(mode="json", exclude_none=True)
    merge_metrics(paths, {"train": {**METRICS["train"], "measured": measured.model_dump(), "plan_check": check}})
    text = " ".join(the_report(paths).text.split())
    expected = "memory of the fullest device2.0 GiB2.5 GiB1.25 of it process1.50 time of a step500 ms250 ms0.50"
    found = text[text.index("Plan and measurement") :].replace("of it", " of it").replace("time of a", " time of a")
    assert expected in " ".join(found.split())
    assert "plan check" not in text.lower()


def test_report_draws_each_term_from_the_end_of_the_one_before(paths):
    terms = {"parameters": 10 << 30, "activations": 20 << 30, "process": 10 << 30}
    planned = PlannedTraining(memory_bytes=40 << 30, memory_terms=terms)
    found = {"parameters": 12 << 30, "tensors": 24 << 30}
    measured = MeasuredTraining(memory_bytes=30 << 30, memory_terms=found, steps=3)
    section = {name: each.model_dump(mode="json") for name, each in (("planned", planned), ("measured", measured))}
    merge_metrics(paths, {"train": {**METRICS["train"], **section}})
    picture = {
        "parameters: 10.0 GiB planned, 12.0 GiB measured": [("0.0%", "12.5%"), ("0.0%", "15.0%")],
        "activations: 20.0 GiB planned": [("12.5%", "25.0%")],
        "process: 10.0 GiB planned": [("37.5%", "12.5%")],
        "tensors: 30.0 GiB planned, 24.0 GiB measured": [("0.0%", "37.5%"), ("0.0%", "30.0%")],
        "total: 40.0 GiB planned, 30.0 GiB measured": [("0.0%", "50.0%"), ("0.0%", "37.5%")],
    }
    # The device has twice the plan's memory.
    page = the_report(paths, {"memory": {"terms": [], "totalBytes": 40 << 30, "capacityBytes": 80 << 30}})
    assert bars_of(page) == picture
    assert "The whole width is 80.0 GiB, the memory of the device." in page.text
    # In a cluster there is no plan.json.
    assert bars_of(the_report(paths))["total: 40.0 GiB planned, 30.0 GiB measured"] == [
        ("0.0%", "100.0%"),
        ("0.0%", "75.0%"),
    ]


def bars_of(page: Any) -> dict[str, list[tuple[str, str]]]:
    """Return start and width of the bars of the memory's picture, by the text for screen readers."""
    found: dict[str, list[tuple[str, str]]] = {}
    for tag, attributes in page.tags:
        if tag == "svg":
            label = attributes.get("aria-label") or ""
        elif tag == "rect" and " planned" in label:
            found.setdefault(label, []).append((attributes["x"], attributes["width"]))
    return found


def test_report_without_a_plan_has_no_comparison(paths):
    page = the_report(paths)
    assert "Plan and measurement" not in page.text
    assert "Memory by term" not in page.text


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        pytest.param({"steps": 3}, "Not known: an earlier version of the trainer trained.", id="no split"),
        pytest.param({}, None, id="no training"),
    ],
)
def test_a_time_that_is_not_known_is_left_out_with_the_reason(section, reason, paths):
    merge_metrics(paths, {"train": section})
    page = the_report(paths)
    assert ("Where the time went" in page.text) == (reason is not None)
    assert reason is None or reason in page.text


def test_recomputed_activations_are_named_with_the_backward_pass(paths):
    strategy = {**TRAINING["strategy"], "activation_checkpointing": "full"}
    job = a_job().model_dump()
    job["training"]["strategy"] = {**job["training"]["strategy"], **strategy}
    page = the_report(paths, job=TrainerJob.model_validate(job))
    assert "backward, with recomputed activations, with its communication" in page.text


def test_environment_of_a_training_outlives_that_of_a_later_stage(tmp_path):
    paths = JobPaths(tmp_path)
    write_environment(paths, {"device": "GPU of the training", "threads per process": 4})
    write_environment(paths)
    assert "GPU of the training" in the_report(paths).text


def test_report_holds_the_job_document_of_the_trainer(paths):
    assert json.loads(a_job().to_json()) == json.JSONDecoder().raw_decode(job_text(the_report(paths)))[0]


def job_text(page: Page) -> str:
    return page.text[page.text.index("{", page.text.index("Input of the trainer")) :]


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
    # A sample's text, its prediction, the labels of data and matrix, a note on the data, the reason.
    assert page.text.count(HOSTILE) == 7


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


def gated(**gate: Any) -> TrainerJob:
    body = {**a_job().model_dump(), "evaluation": {"gate": gate, "device": "cpu", "batch_tokens": 64}}
    return TrainerJob.model_validate(body)


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        pytest.param({"metric": "accuracy", "minimum": 0.8}, "of at least 0.8 is required, 0.9100 was reached: passed"),
        pytest.param({"metric": "f1", "minimum": 0.95}, "of at least 0.95 is required, 0.9000 was reached: not met"),
        pytest.param({"metric": "loss", "maximum": 0.2}, "of at most 0.2 is required, 0.2500 was reached: not met"),
    ],
)
def test_report_shows_requirement_and_result_of_the_gate(gate, text, paths):
    assert f"Gate: {gate['metric']} {text}" in the_report(paths, job=gated(**gate)).text


def test_a_metric_that_is_no_number_passes_no_gate(paths):
    merge_metrics(paths, {"evaluate": {"accuracy": float("nan"), "rows": 1, "split": "test"}})
    assert "nan was reached: not met" in the_report(paths, job=gated(metric="accuracy", minimum=0.1)).text


def test_report_has_confusion_matrix_and_recall_of_each_label(paths):
    text = " ".join(the_report(paths).text.split())
    assert "Confusion matrix" in text
    assert "bad40981.6%" in text  # of 49 rows


def test_many_labels_show_the_largest_and_the_most_frequent_mistakes(paths):
    names = [f"label-{i}" for i in range(40)]
    counts = np.diag(np.arange(40)) + np.eye(40, k=1, dtype=np.int64) * 2
    counts[0, 39] = 77
    write_confusion(paths, Confusion(tuple(names), counts, "words"))
    kept = json.loads((paths.root / CONFUSION_FILE).read_text())
    assert kept["labels"] == ["label-0", *names[32:], "31 others"]
    assert sum(map(sum, kept["counts"])) == counts.sum()
    assert kept["mistakes"][0] == ["label-0", "label-39", 77]
    text = the_report(paths).text
    assert "31 others" in text
    assert "The most frequent mistakes" in text


def test_kept_labels_and_texts_are_bounded(paths):
    endless = "x" * 100_000
    write_confusion(paths, Confusion(tuple(f"{endless}{i}" for i in range(500)), np.ones((500, 500), np.int64), "rows"))
    write_samples(paths, [{"row": 1, "text": [endless], "label": endless, "predicted": endless, "score": 1.0}] * 20)
    assert max((paths.root / name).stat().st_size for name in (CONFUSION_FILE, SAMPLES_FILE)) < 30_000


def test_a_task_without_classes_leaves_no_matrix_of_an_earlier_evaluation(paths):
    write_confusion(paths, None)
    assert "Confusion matrix" not in the_report(paths).text


def test_wrong_examples_show_the_expected_label(paths):
    text = " ".join(the_report(paths).text.split())
    assert "Wrong answers" in text
    assert "Some right answers textexpectedpredictedconfidence finebadbad0.8" in text
    write_samples(paths, [{"row": 1, "text": ["fine"], "label": "bad", "predicted": "bad", "score": 0.8}])
    assert "None: every answer is right." in the_report(paths).text


def test_tasks_that_answer_with_nothing_show_the_rows_that_went_worst(paths):
    write_samples(paths, [{"row": 5, "text": ["odd words"], "score": 812.5}])
    job = TrainerJob.model_validate({**a_job().model_dump(), "task": "text-generation"})
    text = " ".join(the_report(paths, job=job).text.split())
    assert "Worst rows" in text
    assert "textperplexity odd words812.5" in text


def test_report_shows_truncated_rows_and_row_lengths(paths):
    page = the_report(paths)
    assert "longer than 128 tokens: train 0.5%" in page.text
    assert "Lengths in train: most, 400 of 600 rows, have 9 to 16 tokens" in page.text


def test_report_without_a_price_shows_the_billable_time(paths):
    text = " ".join(the_report(paths).text.split())
    assert "total1:00:401:00:40 No price of a node is known" in text


def test_report_with_a_price_shows_the_cost(paths):
    estimate = {"seconds": 1800.0, "cost": 6.0, "currency": "EUR"}
    text = " ".join(the_report(paths, {"estimate": estimate}).text.split())
    assert "Cost12.13 EUR1:00:40 of nodes" in text
    assert "12.13 EUR at 12.00 EUR per node-hour" in text


def test_no_section_of_the_report_is_empty(paths):
    html = (the_report(paths), paths.report.read_text(encoding="utf-8"))[1]
    sections = re.findall(r"<section[^>]*>\s*<h2>([^<]+)</h2>(.*?)</section>", html, re.DOTALL)
    assert len(sections) >= 10
    assert [name for name, body in sections if not re.sub(r"<[^>]+>", "", body).strip()] == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_fits_telephones_and_screens_and_shows_no_empty_section(dark, paths, tmp_path):
    endless = "x" * 500
    names = (*(f"label number {i}" for i in range(30)), endless)
    write_confusion(paths, Confusion(names, np.full((31, 31), 12_345, np.int64), "rows"))
    rows = [{"row": 1, "text": [endless, HOSTILE], "label": endless, "predicted": HOSTILE, "score": 0.5}]
    write_samples(paths, rows)
    job = gated(metric="accuracy", minimum=0.95)
    write_report(job, {"reasons": [endless], "estimate": {"seconds": 9.0, "cost": 6.0, "currency": "EUR"}}, paths)
    folder = tmp_path / "browser"
    folder.mkdir()
    for seen in browser.seen(paths.report, folder, dark=dark):
        assert seen.scroll <= seen.width, seen.wide
        assert (seen.wide, seen.empty, seen.flat) == ([], [], [])
        assert seen.charts == 5


# --------------------------------------------------------------------------------------------------------- other files


def test_sections_of_metrics_are_replaced_and_others_stay(tmp_path):
    paths = JobPaths(tmp_path)
    merge_metrics(paths, {"train": {"a": 1, "b": 2}, "evaluate": {"accuracy": 0.5}})
    assert merge_metrics(paths, {"train": {"a": 3}}) == {"train": {"a": 3}, "evaluate": {"accuracy": 0.5}}
    assert json.loads(paths.metrics.read_text()) == {"train": {"a": 3}, "evaluate": {"accuracy": 0.5}}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_report_shows_generated_tokens_of_the_latest_run(paths):
    merge_generation(paths, Stage.EVALUATE, {"generated_tokens": 5})
    merge_generation(paths, Stage.PREDICT, {"generated_tokens": 12_345, "tokens_per_second": 67.89})
    page = the_report(paths)
    assert "Generatedtextsstagetokenstokens/sevaluate5predict12,34567.9" in "".join(page.text.split())
    merge_generation(paths, Stage.PREDICT, {})
    assert json.loads(paths.metrics.read_text())["generation"] == {"evaluate": {"generated_tokens": 5}}


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


CARD = (
    "---\nlicense: other\nlicense_name: terms\nlicense_link: https://a.example/terms\nbase_model: org/first\n---\n# A\n"
)


@pytest.mark.parametrize(
    ("readme", "config", "front"),
    [
        (
            CARD,
            {"_name_or_path": "org/second", "license": "mit"},
            {
                **{"base_model": "org/first", "license": "other", "license_name": "terms"},
                "license_link": "https://a.example/terms",
            },
        ),
        (None, {"_name_or_path": "org/second", "license": "mit"}, {"base_model": "org/second", "license": "mit"}),
        ("---\nbase_model: [org/a, org/b]\n---\n", {}, {"base_model": ["org/a", "org/b"]}),
        ("# no front matter", {"_name_or_path": "/models/base"}, {}),
        ("---\nlicense: [\n---\n", {}, {}),
        ("---\n- a\n---\n", {"license": {"a": 1}}, {}),
    ],
    ids=["card", "config", "several bases", "nothing", "broken card", "no texts"],
)
def test_model_card_repeats_origin_and_license_of_a_local_base(readme: str | None, config: Any, front: Any, paths):
    base = paths.root / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    if readme is not None:
        (base / "README.md").write_text(readme)
    found, _ = card(paths, a_job(f"file://{base}"))
    names = ("base_model", "license", "license_name", "license_link")
    assert {name: found[name] for name in names if name in found} == front


def test_model_card_has_the_license_that_the_hub_model_declares(paths, monkeypatch):
    import huggingface_hub

    cache, commit = paths.root / "cache", "a" * 40
    snapshot = cache / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/before\n---\n")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (cache / "models--org--model" / "refs").mkdir()
    (cache / "models--org--model" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    front, _ = card(paths, a_job())
    assert (front["base_model"], front["license"]) == ("org/model", "apache-2.0")


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
