"""Backends that export the model: ONNX Runtime and OpenVINO on a CPU.

One export serves all of them: `onnx/model.onnx` in the folder of artefacts, in float32, for any number of rows and any
length. Conversions of it (int8, OpenVINO) are beside it and load with onnxruntime or openvino alone.
"""
