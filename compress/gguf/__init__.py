"""A decoder artifact as a GGUF file, for llama.cpp."""
