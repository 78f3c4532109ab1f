"""ONNX files become networks: each node is computed by torch and traced as any module is."""
