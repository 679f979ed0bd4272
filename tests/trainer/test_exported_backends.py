"""Backends of batch inference that export the model, compared with the model itself on batches of many shapes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from finetune_trainer.predict.backends.backend_protocol import Machine, NotAvailable
from finetune_trainer.predict.backends.exported import onnx_graph
from finetune_trainer.predict.backends.exported.onnxruntime_backends import ONNX, ONNX_INT8, ONNX_INT8_STATIC
from finetune_trainer.predict.backends.exported.openvino_backends import OPENVINO, OPENVINO_BF16, OPENVINO_INT8

pytestmark = [
    # Found, not imported: nncf reports its use when anything but the trainer imports it.
    pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} of the trainer's extra fast-inference is not installed",
    )
    for package in ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
]

VOCABULARY_SIZE = 64
BACKENDS = {
    backend.name: backend for backend in (ONNX, ONNX_INT8, ONNX_INT8_STATIC, OPENVINO, OPENVINO_BF16, OPENVINO_INT8)
}
TASKS = {
    "text-classification": (BertForSequenceClassification, ("logits",)),
    "token-classification": (BertForTokenClassification, ("logits",)),
    "question-answering": (BertForQuestionAnswering, ("start_logits", "end_logits")),
    "masked-lm": (BertForMaskedLM, ("logits",)),
}


def bert(kind: type[PreTrainedModel] = BertForSequenceClassification) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    torch.manual_seed(1)
    return kind(config).eval()


def batch(rows: int, tokens: int, seed: int = 0, *, types: bool = True) -> dict[str, torch.Tensor]:
    """Return a batch in which every second row is padded."""
    drawn = torch.Generator().manual_seed(seed + 100 * rows + tokens)
    ids = torch.randint(1, VOCABULARY_SIZE, (rows, tokens), generator=drawn)
    mask = torch.ones_like(ids)
    mask[1::2, max(1, tokens // 2) :] = 0
    found = {"input_ids": ids * mask, "attention_mask": mask}
    return {**found, "token_type_ids": torch.zeros_like(ids)} if types else found


SAMPLE = [batch(8, 12), batch(4, 7), batch(2, 30)]
OTHER_SHAPES = [batch(1, 1), batch(1, 9), batch(5, 5), batch(17, 3), batch(3, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for artefacts of the model from `bert`."""
    return tmp_path_factory.mktemp("artefacts")


def _answers_tokens(model: PreTrainedModel) -> bool:
    return "SequenceClassification" not in type(model).__name__


def difference(
    model: PreTrainedModel, forward: Any, given: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
) -> float:
    """Return the largest difference at tokens that are not padding."""
    with torch.inference_mode():
        wanted = model(**given)
    computed, kept = forward(**given), given["attention_mask"].bool()
    found = []
    for name in outputs:
        ours, theirs = getattr(computed, name), wanted[name]
        assert (ours.shape, ours.dtype) == (theirs.shape, torch.float32)
        if given["input_ids"].shape == ours.shape[:2] and _answers_tokens(model):
            ours, theirs = ours[kept], theirs[kept]
        found.append(float((ours - theirs).abs().max()))
    return max(found)


@pytest.mark.parametrize("task", TASKS)
def test_exported_model_answers_as_torch_for_any_shape(task: str, tmp_path: Path) -> None:
    kind, outputs = TASKS[task]
    model = bert(kind)
    for backend in (ONNX, OPENVINO):
        assert backend.unavailable(model, Machine(bf16=True)) is None
        forward = backend.prepare(model, SAMPLE, tmp_path)
        for given in [*SAMPLE, *OTHER_SHAPES]:
            assert difference(model, forward, given, outputs) < 1e-5


@pytest.mark.parametrize("backend", [name for name, backend in BACKENDS.items() if backend.lossy])
def test_lossy_backend_stays_close_to_torch(backend: str, folder: Path) -> None:
    model = bert()
    forward = BACKENDS[backend].prepare(model, SAMPLE, folder)
    for given in [*SAMPLE, *OTHER_SHAPES]:
        assert difference(model, forward, given, ("logits",)) < 0.05


@pytest.mark.parametrize(
    "given", [batch(1, 1), batch(1, 2), batch(3, 3)], ids=lambda each: str(tuple(each["input_ids"].shape))
)
def test_sample_of_few_rows_gives_a_graph_for_all_shapes(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = bert()
    labelled = {**given, "labels": torch.zeros(len(given["input_ids"]), dtype=torch.int64)}
    forward = ONNX.prepare(model, [labelled], tmp_path)
    for other in OTHER_SHAPES:
        assert difference(model, forward, other, ("logits",)) < 1e-5


def test_model_without_token_types_is_exported(tmp_path: Path) -> None:
    config = DistilBertConfig(vocab_size=VOCABULARY_SIZE, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    torch.manual_seed(1)
    model = DistilBertForSequenceClassification(config).eval()
    forward = ONNX.prepare(model, [batch(4, 7, types=False)], tmp_path)
    assert difference(model, forward, batch(5, 11, types=False), ("logits",)) < 1e-5


def test_bfloat16_model_is_exported_in_float32(tmp_path: Path) -> None:
    model = bert().to(torch.bfloat16)
    forward = ONNX.prepare(model, SAMPLE, tmp_path)
    assert model.dtype == torch.bfloat16
    assert difference(model.float(), forward, OTHER_SHAPES[2], ("logits",)) < 1e-5


def test_graph_is_exported_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    ONNX.prepare(model, SAMPLE, folder)
    monkeypatch.setattr(torch.onnx, "export", None)
    for backend in BACKENDS.values():
        backend.prepare(model, SAMPLE, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "model-int8",
        "model-int8-static",
        "onnx",
        "openvino",
        "openvino-int8",
    ]


def test_artefacts_load_without_this_project(folder: Path) -> None:
    model = bert()
    for backend in BACKENDS.values():
        backend.prepare(model, SAMPLE, folder)
    program = """
import sys, numpy, onnxruntime
sys.modules["openvino_telemetry"] = None
import openvino
ids = numpy.array([[5, 6, 7, 8, 9]])
given = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
for path in sys.argv[1:]:
    if path.endswith(".onnx"):
        said = onnxruntime.InferenceSession(path).run(["logits"], given)[0]
    else:
        said = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(given)["logits"]
    print(*said[0])
assert not [name for name in sys.modules if name.startswith(("finetune", "torch"))]
"""
    paths = sorted(map(str, [*folder.glob("*/*.onnx"), *folder.glob("*/*.xml")]))
    assert len(paths) == 5
    command = [sys.executable, "-c", program, *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.inference_mode():
        wanted = model(input_ids=ids).logits[0].tolist()
    for line in ran.stdout.splitlines():
        assert [float(value) for value in line.split()] == pytest.approx(wanted, abs=0.05)


def test_conversion_reports_nothing_to_others(tmp_path: Path) -> None:
    """nncf and OpenVINO's converter report to Google Analytics, and keep an identity in the home folder."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import os
os.environ["HOME"] = sys.argv[1]
from pathlib import Path
from finetune_trainer.predict.backends.exported.openvino_backends import _openvino
_openvino()
import nncf
from openvino.tools.ovc.convert_impl import tm
print(sys.modules["openvino_telemetry"], type(nncf.telemetry.wrapper.telemetry).__name__, tm.__name__.split(".")[-1])
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "None MagicMock telemetry_stub"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_absent_package_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"onnx-int8": "onnxruntime", "openvino-int8": "nncf"}.get(backend, "onnxscript")
    there = onnx_graph.importlib.util.find_spec
    monkeypatch.setattr(onnx_graph.importlib.util, "find_spec", lambda name: None if name == missing else there(name))
    assert BACKENDS[backend].unavailable(bert(), Machine(bf16=True)) == (
        f"the package {missing} is not installed: it is in the image for CPUs and in finetune-trainer[fast-inference]"
    )


def test_bfloat16_needs_units() -> None:
    without = Machine(bf16=False, amx=False)
    assert OPENVINO_BF16.unavailable(bert(), without) == "the CPU has no bfloat16 units (AMX or AVX512-BF16)"
    assert OPENVINO.unavailable(bert(), without) is None


def test_model_that_writes_texts_is_not_exported() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=32, n_layer=1, n_head=2))
    assert (
        ONNX.unavailable(model, Machine(bf16=True)) == "the model generates text, and a graph computes one forward pass"
    )


class Reading(BertForSequenceClassification):
    """A model that branches on values, which no graph can."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> Any:
        if int(input_ids[0, 0]) == 7:
            raise ValueError("seven")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **more)


def test_model_that_cannot_be_exported_gives_the_reason_in_one_line(tmp_path: Path) -> None:
    model = bert(Reading)
    with pytest.raises(NotAvailable) as raised:
        ONNX.prepare(model, [batch(4, 7, types=False)], tmp_path)
    reason = str(raised.value)
    assert reason.startswith("the model cannot be exported: ")
    assert "\n" not in reason
    assert len(reason) < 200
    assert list(tmp_path.iterdir()) == []
