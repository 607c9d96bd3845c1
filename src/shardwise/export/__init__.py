"""Models as ONNX files: exported, compared with PyTorch in onnxruntime, and quantized. One process, no ranks."""
