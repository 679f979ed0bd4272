"""Rungs that export the model: ONNX Runtime and OpenVINO on a CPU.

One export serves all of them: `onnx/model.onnx` in the folder of artefacts, in float32, for any number of rows and any
length. What is made of it (int8, OpenVINO) lies beside it and loads with onnxruntime or openvino alone.
"""

from finetune_trainer.inference.optimization.exported.onnxruntime_rungs import ONNX, ONNX_INT8, ONNX_INT8_STATIC
from finetune_trainer.inference.optimization.exported.openvino_rungs import OPENVINO, OPENVINO_BF16, OPENVINO_INT8
from finetune_trainer.inference.optimization.rung_protocol import Rung

EXPORTED: tuple[Rung, ...] = (OPENVINO, ONNX, OPENVINO_BF16, OPENVINO_INT8, ONNX_INT8, ONNX_INT8_STATIC)
"""All of them: exact ones first, then by speed on a CPU with AMX."""
