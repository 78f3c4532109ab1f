"""What ONNX Runtime's own tools make of a text encoder: the graph that its transformer optimiser fuses, in FP32.

`onnxruntime.transformers.optimizer` looks for attention as BERT's first code writes it, step by step, so the encoder is
exported in that form: it becomes Attention, SkipLayerNormalization, BiasGelu and EmbedLayerNormalization.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from onnxruntime.transformers.optimizer import optimize_model
from torch import Tensor, nn

from penjing.core.artifact.onnx_encoder import IDS, MASK, OUTPUT
from penjing.core.models.encoder import Encoder, EncoderLayer

KINDS = ("Attention", "SkipLayerNormalization", "BiasGelu", "EmbedLayerNormalization")


class StepByStep(nn.Module):
    """An `Encoder` with attention written out; same inputs and output."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """(batch, seq) int64 both → (batch, hidden)."""
        encoder, (_, length) = self.encoder, ids_BT.shape
        places = torch.arange(length, device=ids_BT.device)[None]
        x = encoder.words(ids_BT) + encoder.positions(places) + encoder.types(torch.zeros_like(ids_BT))
        x, kept_BT = encoder.norm(x), mask_BT.float()
        bias_B11T = (1.0 - kept_BT[:, None, None, :]) * torch.finfo(torch.float32).min
        for layer in encoder.layers:
            assert isinstance(layer, EncoderLayer)
            x = self._layer(layer, x, bias_B11T)
        total = (x * kept_BT[..., None]).sum(1)
        return F.normalize(total / kept_BT.sum(1, keepdim=True).clamp(min=1e-9), dim=1)

    def _layer(self, layer: EncoderLayer, x: Tensor, bias_B11T: Tensor) -> Tensor:
        size = x.shape[-1] // layer.num_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(y.size(0), y.size(1), layer.num_heads, size).permute(0, 2, 1, 3)

        q, k, v = heads(layer.query(x)), heads(layer.key(x)), heads(layer.value(x))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(size) + bias_B11T, -1)
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        flat = mixed.view(mixed.size(0), mixed.size(1), layer.num_heads * size)
        x = layer.attention_norm(layer.output(flat) + x)
        return layer.norm(layer.down(F.gelu(layer.up(x))) + x)


def export_fused(encoder: Encoder, out: Path) -> None:
    """Write `encoder`, in evaluation mode, to `out` as ONNX Runtime's transformer optimiser fuses it.

    Raises:
        RuntimeError: a part was not recognised; the file would be no fair peer.
    """
    plain = out.with_suffix(".plain.onnx")
    example = torch.ones((3, 17), dtype=torch.int64)
    sizes = {IDS: {0: "batch", 1: "sequence"}, MASK: {0: "batch", 1: "sequence"}, OUTPUT: {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer: deprecated, and sizes it takes for constant, which are
        torch.onnx.export(
            StepByStep(encoder),
            (example, example),
            str(plain),
            dynamo=False,  # the optimiser's patterns are those of this exporter
            opset_version=17,
            input_names=[IDS, MASK],
            output_names=[OUTPUT],
            dynamic_axes=sizes,
        )
    config = encoder.config
    fused = optimize_model(
        str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=0
    )
    found = fused.get_fused_operator_statistics()
    if missing := [name for name in KINDS if not found[name]]:
        raise RuntimeError(f"ONNX Runtime's optimiser made no {', '.join(missing)} of the encoder")
    fused.save_model_to_file(str(out))
