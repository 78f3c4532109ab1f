"""A step by the model's own layers: for decoders that no fused step takes."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.core.models.attention import Attend
from penjing.core.models.decoder import Decoder
from penjing.core.models.latent_attention import pad_values
from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention
from penjing.kernels.row_pages import rows_before, write_rows
from penjing.serve.runner.kv_pool import PagedCache
from penjing.serve.runner.step_inputs import StepTensors


class ModelStep:
    """Runs `model` over a paged cache."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        config = model.config
        self._scale = config.head_dim**-0.5
        self._windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
        places = {layer: place for place, layer in enumerate(config.attention_layers)}
        attending = [layer for layer in range(config.num_hidden_layers) if not config.is_conv(layer)]
        self._attending = {layer: places[config.keys_of(layer)] for layer in attending}
        convolving = [layer for layer in range(config.num_hidden_layers) if config.is_conv(layer)]
        self._convolving = {layer: place for place, layer in enumerate(convolving)}

    def __call__(self, tensors: StepTensors, cache: PagedCache, seen_XE: Tensor | None = None) -> Tensor:
        """Logits (R, V); what the step's tokens leave to others is written into `cache`.

        seen_XE: see `DecoderStep.step`.
        """
        rows = tensors.logit_rows.long()
        with torch.inference_mode():
            ids, positions, embedded = tensors.token_ids.long(), tensors.positions.long(), None
            if seen_XE is not None:
                beyond = ids - self.model.config.vocab_size
                ids = torch.where(beyond >= 0, 0, ids)
                embedded = self.model.model.embed(ids).to(seen_XE.dtype)
                embedded[beyond >= 0] = seen_XE[beyond[beyond >= 0]]
            return self.model(ids, positions, pad_values(self._attend(tensors, cache)), rows, embedded=embedded)

    def _attend(self, tensors: StepTensors, cache: PagedCache) -> Attend:
        lengths = tensors.cu_query, tensors.context_len, tensors.block_table

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sinks_H: Tensor | None) -> Tensor:
            place = self._attending[layer]
            k_cache, v_cache = cache.pool[place]
            k_scale, v_scale = (None, None) if cache.scale is None else cache.scale[place]
            write_kv(k_TKD, v_TKD, k_cache, v_cache, tensors.slots, k_scale, v_scale)
            sees = self._scale, self._windows[layer], k_scale, v_scale
            cap = self.model.config.attention_cap
            return paged_attention(q_THD, k_cache, v_cache, *lengths, *sees, cap=cap, sinks_H=sinks_H)

        def before(layer: int, x_TE: Tensor, count: int) -> list[Tensor]:
            assert cache.rows is not None, "the model has convolutions"
            pages = cache.rows[self._convolving[layer]]
            write_rows(x_TE, pages, tensors.slots)
            return [far_TE.to(x_TE.dtype) for far_TE in rows_before(pages, *lengths, count)]

        return Attend(attend, before)
