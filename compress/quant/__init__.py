"""Quantization that is trained or calibrated: formats, observers, fake quantization, placement."""
