"""GGUF files: what llama.cpp computes of each architecture, and how they are read."""
