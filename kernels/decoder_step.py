"""A whole decoder step in one call of the C++ extension: embedding, layers over the paged cache, norm, LM head.

One call releases the GIL once and dispatches nothing from Python: at 135M parameters a step is a few milliseconds, of
which some hundred calls of torch would be most.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from penjing.kernels.cpu import library as abi
from penjing.kernels.cpu.checks import check, float_linear
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.key_blocks import StepBlocks
from penjing.kernels.cpu.kv_layout import check_int8_head_dim, page_dtype
from penjing.kernels.hadamard import check_block
from penjing.kernels.int8_linear import PackedInt8
from penjing.kernels.low_rank import StepAdapters
from penjing.kernels.rotary import rotary_cos_sin
from penjing.kernels.screen import Screen
from penjing.kernels.step_checks import check_layers
from penjing.kernels.step_fill import describe_screen, fill_layers, optional_vector
from penjing.kernels.step_layers import (
    AnyLinear,
    FloatLinear,
    Int8Table,
    LayerWeights,
    Packer,
    groups_of,
    projections,
    size,
    widest_expert,
)

# Rows of the rotary table at first; it doubles when a position lies beyond.
FIRST_POSITIONS = 4096
MAX_TOP = 1024


class DecoderStep:
    """A decoder laid out for the C++ extension: quantized weights are packed into one block, float ones used in place.

    Not for two threads at once. After a fork the child may use it too, unless a step was running in the parent.
    """

    def __init__(
        self,
        extension: CpuExtension,
        layers: Sequence[LayerWeights],
        embedding_VE: Tensor | Int8Table,
        final_norm: Tensor | None,
        lm_head: AnyLinear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        inverse_frequency_F: Tensor,
        max_positions: int,
        positions_PE: Tensor | None = None,
        rotary_scale: float = 1.0,
        attention_cap: float | None = None,
        logit_cap: float | None = None,
        table_hadamard: int = 0,
        token_table: Tensor | None = None,
    ):
        """Pack the weights.

        Args:
            embedding_VE: (vocab, hidden) float32, bfloat16, float16 or INT8; tied in INT8, the rows are read from the
                packed LM head.
            final_norm: (hidden,); None: what leaves the last layer enters the head.
            inverse_frequency_F: (head_dim / 2,) float32, radians a token, or a row for each way that layers rotate.
            max_positions: positions 0 … max_positions − 1 may occur.
            positions_PE: (max_positions, hidden) what is added at each position to what enters the first layer.
            rotary_scale: by what queries and keys that the first row rotates grow, as YaRN does it.
            attention_cap, logit_cap: scores and logits become cap × tanh(score / cap); None: they stay.
            table_hadamard: block of the transform behind the embedding and before the head; 0: none.
            token_table: (vocab × layers, width) floating, what each layer takes of each token; it is used in place.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        eight = isinstance(embedding_VE, Int8Table)
        self.vocab, self.hidden = (embedding_VE.weight_VE if eight else embedding_VE).shape
        self.num_layers, self.max_positions, self._num_heads = len(layers), max_positions, num_heads
        self._extension, self._inverse_frequency = extension, inverse_frequency_F.detach().float()
        self._rotary_scale = rotary_scale
        self._kept: list[object] = []  # whatever the structures point to
        num_convs = sum(layer.taps is not None for layer in layers)
        num_borrowing = sum(layer.keys_of is not None for layer in layers)
        self._pool_shape = (self.num_layers - num_convs - num_borrowing, 2, None, num_kv_heads, None, head_dim)
        self._rows_shape = (num_convs, None, None, self.hidden)
        check_layers(layers, self.hidden, num_heads, num_heads * head_dim, num_kv_heads * head_dim)
        if size(lm_head) != (self.vocab, self.hidden):
            raise ValueError(f"the LM head has shape {size(lm_head)}; {(self.vocab, self.hidden)} is needed")
        rows = inverse_frequency_F.shape[0] if inverse_frequency_F.dim() == 2 else 1
        if inverse_frequency_F.shape[-1] != head_dim // 2 or any(not 0 <= layer.rotary < rows for layer in layers):
            raise ValueError(f"inverse_frequency_F has shape {tuple(inverse_frequency_F.shape)}")

        groups = [*groups_of(layers), [lm_head]]
        packer = Packer(extension, self._kept, groups)
        c_layers = fill_layers(layers, packer, self.hidden, num_heads, head_dim)
        model = abi.Model(
            layers=c_layers,
            final_norm=optional_vector(final_norm, self.hidden, self._kept),
            head=packer.pack([lm_head]),
            num_layers=len(layers),
            vocab=self.vocab,
            hidden=self.hidden,
            intermediate=max(widest_expert(layer) for layer in layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=eps,
            attention_scale=head_dim**-0.5,
            attention_cap=attention_cap or 0.0,
            logit_cap=logit_cap or 0.0,
            table_hadamard=table_hadamard,
        )
        if table_hadamard:
            check_block(table_hadamard, self.hidden)
        self._set_embedding(model, embedding_VE, lm_head)
        token = layers[0].token
        if (token is None) != (token_table is None):
            raise ValueError("token_table is of layers that take something of a token, and of no others")
        if token is not None and token_table is not None:
            width = size(token[0])[0]
            if token_table.shape != (self.vocab * self.num_layers, width):
                raise ValueError(f"token_table has shape {tuple(token_table.shape)}")
            table = float_linear(token_table.detach(), None)
            model.token_table, model.token_dtype, model.token_inputs = table.weight, table.dtype, width
            self._kept.append(token_table)
        if positions_PE is not None:
            table = positions_PE.detach().float().contiguous()
            model.positions = _address("positions_PE", table, torch.float32, (max_positions, self.hidden))
            self._kept.append(table)
        # Of a tied table the packed head has a copy.
        in_head = isinstance(embedding_VE, Int8Table) and embedding_VE.channel_E is not None
        self._kept += [c_layers] if in_head else [c_layers, embedding_VE]
        floats = [linear for group in groups for linear in group if isinstance(linear, FloatLinear)]
        self.weight_bytes = packer.used + sum(linear.weight_NK.nbytes for linear in floats)
        """Bytes of weights that a step reads at least."""
        self.adapters = StepAdapters([projections(layer) for layer in layers], extension.empty_pages)
        """Low-rank adapters that rows of a step may name."""
        self.seconds = 0.0
        """Wall time that calls of the extension have taken so far."""
        self._model = model
        self._logits = torch.empty(0, self.vocab)
        self.hidden_RE: Tensor | None = None
        """(rows, hidden) float32, first what the head read for the last step's logits; see `keep_hidden`."""
        self._decoder: int | None = None
        self._release: weakref.finalize | None = None
        self._grow_positions(min(FIRST_POSITIONS, max_positions))

    def _set_embedding(self, model: abi.Model, embedding_VE: Tensor | Int8Table, lm_head: AnyLinear) -> None:
        if not isinstance(embedding_VE, Int8Table):
            embedding = float_linear(embedding_VE.detach(), None)
            model.embedding, model.embedding_dtype = embedding.weight, embedding.dtype
            return
        model.embedding_dtype, factors = abi.DTYPES["int8"], embedding_VE.channel_E
        if factors is None:
            model.embedding, factors = embedding_VE.weight_VE.data_ptr(), embedding_VE.scale_V
        elif not isinstance(lm_head, PackedInt8) or lm_head.group:
            raise ValueError("an embedding that is tied in INT8 needs an LM head in INT8")
        model.embedding_scale = factors.data_ptr()
        self._kept.append(factors)

    def screen(self, screen: Screen) -> None:
        """From now on `step_top` of one logit and few rows finds it by what `make_screen` made of the LM head."""
        self._model.screen = ctypes.pointer(describe_screen(screen, self._extension, self._kept))
        self._make_decoder()

    def keep_hidden(self) -> None:
        """From now on `hidden_RE` is filled."""
        self.hidden_RE = torch.empty(1, self.hidden)

    def step(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slot_T: Tensor,
        cu_query_S1: Tensor,
        context_len_S: Tensor,
        block_table_SB: Tensor,
        logit_rows_R: Tensor,
        kv_pool: Tensor,
        kv_scale: Tensor | None = None,
        adapter_T: Tensor | None = None,
        seen_XE: Tensor | None = None,
        key_blocks: StepBlocks | None = None,
        row_pool: Tensor | None = None,
    ) -> Tensor:
        """Compute T tokens of S sequences: store their keys and values, return the logits of R of them.

        Each row's logits are bit-equal whatever rows, sequences, chunks and blocks share the step.

        Args:
            token_ids_T, positions_T: (T,) int32.
            slot_T: (T,) int64, block × block_size + offset where the token's key is stored; −1: not stored.
            cu_query_S1: (S + 1,) int32, first row of each sequence, then T.
            context_len_S: (S,) int32, keys of each sequence, its new tokens included.
            block_table_SB: (S, B) int32; entries no row sees are not read.
            logit_rows_R: (R,) int32, rows whose logits are wanted; R may be 0.
            kv_pool: (layers with attention, 2, num_blocks, num_kv_heads, block_size, head_dim) float32, float16 or
                bfloat16, or int8 with scales; written in place. Keys of pages of a multiple of 16 lie by dimension, see
                `library.Pages`.
            kv_scale: float32 of an INT8 pool, without its last dimension, see `kv_layout`.
            adapter_T: (T,) int32, each row's slot in `adapters`, −1: none; neighbours of one adapter are computed
                together. None: no row has one.
            seen_XE: (X, hidden) float32: what token vocab + i enters the first layer with, such as a row of an image.
            key_blocks: rows of layers that are not among its `full_layers` choose what they read; these have no window.
            row_pool: (convolutions, num_blocks, block_size, hidden) float32, see `row_pages`; None without any.

        Returns:
            logits_RV float32, valid until the next call.

        Raises:
            ValueError: a wrong shape, dtype, layout or value; nothing was computed.
        """
        num_logits = logit_rows_R.shape[0]
        if num_logits > self._logits.shape[0]:
            self._logits = torch.empty(num_logits, self.vocab)
        inputs = token_ids_T, positions_T, slot_T, cu_query_S1, context_len_S, block_table_SB, logit_rows_R, kv_pool
        self._run(inputs, kv_scale, 0, self._logits, None, adapter_T, seen_XE, key_blocks, row_pool)
        return self._logits[:num_logits]

    def step_top(
        self,
        top: int,
        *inputs: Tensor,
        kv_scale: Tensor | None = None,
        adapter_T: Tensor | None = None,
        seen_XE: Tensor | None = None,
        key_blocks: StepBlocks | None = None,
        row_pool: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`step`, but only the `top` largest logits of each row; the others are compared and not written down.

        Args:
            top: 1 … 1024.
            inputs, kv_scale, adapter_T, seen_XE, key_blocks, row_pool: the arguments of `step`, in its order.

        Returns:
            logits_RK float32 in descending order and ids_RK int32, K = top; equal logits by ascending id, (−inf, −1)
            beyond the vocabulary. A row with a NaN anywhere has a NaN first.

        Raises:
            ValueError: see `step`.
        """
        if not 1 <= top <= MAX_TOP:
            raise ValueError(f"top={top}: 1 to {MAX_TOP} is possible")
        num_logits = inputs[6].shape[0]
        logits_RK, ids_RK = torch.empty(num_logits, top), torch.empty(num_logits, top, dtype=torch.int32)
        self._run(inputs, kv_scale, top, logits_RK, ids_RK, adapter_T, seen_XE, key_blocks, row_pool)
        return logits_RK, ids_RK

    def _run(
        self,
        inputs: tuple[Tensor, ...],
        kv_scale: Tensor | None,
        top: int,
        logits: Tensor,
        top_ids_RK: Tensor | None,
        adapter_T: Tensor | None,
        seen_XE: Tensor | None,
        key_blocks: StepBlocks | None,
        row_pool: Tensor | None,
    ) -> None:
        token_ids_T, positions_T, slot_T, cu_query_S1, context_len_S, block_table_SB, logit_rows_R, kv_pool = inputs
        num_rows, num_sequences, num_logits = token_ids_T.shape[0], context_len_S.shape[0], logit_rows_R.shape[0]
        pool_dtype = page_dtype(kv_pool, kv_scale)
        addresses = [
            _address("token_ids_T", token_ids_T, torch.int32, (num_rows,)),
            _address("positions_T", positions_T, torch.int32, (num_rows,)),
            _address("slot_T", slot_T, torch.int64, (num_rows,)),
            _address("logit_rows_R", logit_rows_R, torch.int32, (num_logits,)),
            _address("cu_query_S1", cu_query_S1, torch.int32, (num_sequences + 1,)),
            _address("context_len_S", context_len_S, torch.int32, (num_sequences,)),
            _address("block_table_SB", block_table_SB, torch.int32, (num_sequences, None)),
            _address("kv_pool", kv_pool, pool_dtype, self._pool_shape),
        ]
        if kv_scale is not None:
            check_int8_head_dim(kv_pool.shape[-1])
            addresses.append(_address("kv_scale", kv_scale, torch.float32, tuple(kv_pool.shape[:-1])))
        if num_rows == 0 or 0 in kv_pool.shape[1:]:
            raise ValueError(f"a step of {num_rows} tokens on a cache of shape {tuple(kv_pool.shape)}")
        tokens, positions, slots, rows, cu_query, context_len, table, pool, *scales = addresses
        step = abi.StepInput(
            tokens=tokens,
            positions=positions,
            slots=slots,
            logit_rows=rows,
            rows=num_rows,
            num_logits=num_logits,
            sequences=abi.Sequences(cu_query, context_len, table, block_table_SB.shape[1], num_sequences),
            pool=pool,
            pool_scale=scales[0] if scales else None,
            pool_dtype=abi.DTYPES[str(pool_dtype).removeprefix("torch.")],
            num_blocks=kv_pool.shape[2],
            block_size=kv_pool.shape[4],
            top=top,
            logits=logits.data_ptr(),
            top_ids=None if top_ids_RK is None else top_ids_RK.data_ptr(),
        )
        if adapter_T is not None:
            step.adapter = _address("adapter_T", adapter_T, torch.int32, (num_rows,))
            step.adapters, step.num_adapters = ctypes.addressof(self.adapters.table), len(self.adapters.table)
        if seen_XE is not None:
            if self._model.token_inputs:
                raise ValueError("rows of images are of no token, of which the layers take something")
            step.seen = _address("seen_XE", seen_XE, torch.float32, (None, self.hidden))
            step.num_seen = seen_XE.shape[0]
        if self._rows_shape[0]:
            if row_pool is None or row_pool.shape[1:3] != (step.num_blocks, step.block_size):
                raise ValueError("row_pool must be given, with the blocks of kv_pool: the decoder has convolutions")
            step.gated = _address("row_pool", row_pool, torch.float32, self._rows_shape)
        if key_blocks is not None:
            self._add_key_blocks(step, key_blocks, kv_pool)
        if self.hidden_RE is not None:
            if num_logits > self.hidden_RE.shape[0]:
                self.hidden_RE = torch.empty(num_logits, self.hidden)
            step.hidden = self.hidden_RE.data_ptr()
        result = self._call(step)
        if result == -4 and self._model.num_positions < self.max_positions:
            longest = int(positions_T.max()) + 1
            if self._model.num_positions < longest <= self.max_positions:
                self._grow_positions(min(max(longest, 2 * self._model.num_positions), self.max_positions))
                result = self._call(step)
        if result == -1:
            raise MemoryError(abi.STEP_PROBLEMS[result])
        if result:
            raise ValueError(abi.STEP_PROBLEMS[result])

    def _add_key_blocks(self, step: abi.StepInput, key_blocks: StepBlocks, kv_pool: Tensor) -> None:
        blocks, (_, _, num_blocks, kv_heads, block_size, head_dim) = key_blocks.blocks, kv_pool.shape
        blocks.check(block_size)
        choosing = [layer for layer in range(self.num_layers) if layer not in key_blocks.full_layers]
        shape = (len(choosing), *blocks.summary_shape(num_blocks, kv_heads, block_size, head_dim))
        step.summary = _address("summary", key_blocks.summary, torch.int8, shape)
        step.summary_scale = _address("summary_scale", key_blocks.summary_scale, torch.float32, shape[:-1])
        summary_of = [choosing.index(layer) if layer in choosing else -1 for layer in range(self.num_layers)]
        step.choosing, step.num_choosing = (ctypes.c_int32 * self.num_layers)(*summary_of), len(choosing)
        step.selection = abi.Selection(blocks.block, blocks.sink, blocks.window, blocks.budget)

    def _call(self, step: abi.StepInput) -> int:
        started = time.perf_counter()
        result = self._extension.library.pj_step(self._decoder, ctypes.byref(step))
        self.seconds += time.perf_counter() - started
        return result

    def _grow_positions(self, count: int) -> None:
        frequency = self._inverse_frequency.unsqueeze(-2)  # with rows: (rows, 1, head_dim / 2)
        cos, sin = rotary_cos_sin(frequency, torch.arange(count))
        for table in (cos, sin):
            (table if table.dim() == 2 else table[0]).mul_(self._rotary_scale)
        self._tables = (cos.contiguous(), sin.contiguous())
        self._model.cos, self._model.sin = (table.data_ptr() for table in self._tables)
        self._model.num_positions = count
        self._make_decoder()

    def _make_decoder(self) -> None:
        if self._release is not None:
            self._release()
        library = self._extension.library
        self._decoder = library.pj_make_decoder(ctypes.byref(self._model))
        if not self._decoder:
            raise MemoryError("no memory for the decoder")
        self._release = weakref.finalize(self, library.pj_free_decoder, self._decoder)


def _address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> int:
    check(name, tensor, dtype, shape)
    return tensor.data_ptr()
