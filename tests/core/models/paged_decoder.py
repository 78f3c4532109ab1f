"""Step a decoder over a paged cache without the serving engine."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.core.models.attention import Attend
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.latent_attention import pad_values
from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention
from penjing.kernels.row_pages import rows_before, write_rows


class Pages:
    """A paged cache for every layer, and the `Attend` of one step over it."""

    def __init__(self, config: DecoderConfig, num_blocks: int, block_size: int):
        self.config = config
        places = {layer: place for place, layer in enumerate(config.attention_layers)}
        attending = [layer for layer in range(config.num_hidden_layers) if not config.is_conv(layer)]
        self.attending = {layer: places[config.keys_of(layer)] for layer in attending}
        convolving = [layer for layer in range(config.num_hidden_layers) if config.is_conv(layer)]
        self.convolving = {layer: place for place, layer in enumerate(convolving)}
        self.rows = torch.full((len(convolving), num_blocks, block_size, config.hidden_size), torch.nan)
        shape = (len(places), 2, num_blocks, config.num_key_value_heads, block_size, config.head_dim)
        self.pool = torch.full(shape, torch.nan)

    def run(self, model: Decoder, steps: list[tuple[Tensor, int, list[int]]]) -> Tensor:
        """Logits of all rows of one step; each sequence gives (new ids, tokens before them, blocks)."""
        block_size = self.pool.shape[4]
        positions = [torch.arange(past, past + len(ids)) for ids, past, _ in steps]
        tables = [torch.tensor(blocks) for _, _, blocks in steps]
        slots = torch.cat(
            [table[p // block_size] * block_size + p % block_size for table, p in zip(tables, positions, strict=True)]
        )
        cu_query = torch.tensor([0] + [len(ids) for ids, _, _ in steps]).cumsum(0).to(torch.int32)
        context = torch.tensor([past + len(ids) for ids, past, _ in steps], dtype=torch.int32)
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            k_cache, v_cache = self.pool[self.attending[layer]]
            write_kv(k, v, k_cache, v_cache, slots)
            window = self.config.layer_window(layer)
            lengths, scale, cap = (cu_query, context, table), q.shape[-1] ** -0.5, self.config.attention_cap
            return paged_attention(q, k_cache, v_cache, *lengths, scale, window, cap=cap, sinks_H=sinks)

        def before(layer: int, x: Tensor, count: int) -> list[Tensor]:
            rows = self.rows[self.convolving[layer]]
            write_rows(x, rows, slots)
            return rows_before(rows, cu_query, context, table, count)

        sees = pad_values(Attend(attend, before))
        return model(torch.cat([ids for ids, _, _ in steps]), torch.cat(positions), sees)
