"""Text encoders in INT8: quantizers placed, an ONNX file written, quality measured by cosines and retrieval."""
