"""Files that other engines read: ONNX with explicit Q/DQ, GGUF."""
