"""A step by the model's own layers: for decoders that no fused step takes."""

from __future__ import annotations

import torch

from penjing.core.models.decoder import Decoder
from penjing.core.models.latent_attention import pad_values
from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention
from penjing.serve.runner.step_inputs import StepTensors


class ModelStep:
    """Runs `model` over a paged KV cache."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._scale = model.config.head_dim**-0.5
        self._windows = [model.config.layer_window(layer) for layer in range(model.config.num_hidden_layers)]

    def __call__(
        self,
        tensors: StepTensors,
        kv_pool: torch.Tensor,
        kv_scale: torch.Tensor | None,
        seen_XE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (R, V); the step's keys and values are written into the pool (see `penjing.serve.runner.kv_pool`).

        seen_XE: see `DecoderStep.step`.
        """
        lengths = tensors.cu_query, tensors.context_len, tensors.block_table

        def attend(
            layer: int,
            q_THD: torch.Tensor,
            k_TKD: torch.Tensor,
            v_TKD: torch.Tensor,
            sinks_H: torch.Tensor | None = None,
        ) -> torch.Tensor:
            k_cache, v_cache = kv_pool[layer]
            k_scale, v_scale = (None, None) if kv_scale is None else kv_scale[layer]
            write_kv(k_TKD, v_TKD, k_cache, v_cache, tensors.slots, k_scale, v_scale)
            sees = self._scale, self._windows[layer], k_scale, v_scale
            cap = self.model.config.attention_cap
            return paged_attention(q_THD, k_cache, v_cache, *lengths, *sees, cap=cap, sinks_H=sinks_H)

        rows = tensors.logit_rows.long()
        with torch.inference_mode():
            ids, positions, embedded = tensors.token_ids.long(), tensors.positions.long(), None
            if seen_XE is not None:
                beyond = ids - self.model.config.vocab_size
                ids = torch.where(beyond >= 0, 0, ids)
                embedded = self.model.model.embed(ids).to(seen_XE.dtype)
                embedded[beyond >= 0] = seen_XE[beyond[beyond >= 0]]
            return self.model(ids, positions, pad_values(attend), rows, embedded=embedded)
