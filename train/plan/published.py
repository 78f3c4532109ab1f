"""Published runs that the cost and memory models are compared with.

torchtitan: https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB at 500 W,
tables 1–6) and llama3_8b_h200_2025-06_torchtitan.md; its pipelines have as many micro-batches as stages by default.
Megatron-LM: table 1 of https://arxiv.org/abs/2104.04473 (A100; its FLOP/s count the recomputed forward pass), with
micro-batches and chunks a rank of its script, examples/sc21/run_table_1.sh of https://github.com/NVIDIA/Megatron-LM;
three chunks (76.1B, 529.6B) are taken as one, since our interleaving has two.

Constants that were chosen with these rows in view: the efficiency of each GPU (rows marked `fitted`), the width at
which a model runs at half of it, the speed of attention, and float8's gain. All else is prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penjing.core.models.config import DecoderConfig
from penjing.train.numerics.recompute import Recompute
from penjing.train.parallel.config import ParallelConfig
from penjing.train.pipeline.shape import ModelShape, decoder_shape
from penjing.train.plan.cost import step_time
from penjing.train.plan.hardware import hardware
from penjing.train.plan.memory import TORCHTITAN, Run, parallel_memory

FLOAT8_GAIN = 1.45  # of products with weights; fitted to the second row


@dataclass(frozen=True)
class Published:
    """A row: what was run, and what was reported. `gib`: memory; `tokens`: a second and GPU; `teraflops`: a GPU."""

    name: str
    model: ModelShape
    device: str
    run: Run
    linear_gain: float = 1.0
    tokens: float | None = None
    teraflops: float | None = None
    gib: float | None = None
    fitted: bool = False

    def speed(self) -> tuple[float, float]:
        """(predicted, reported): tokens/s a GPU or TFLOP/s a GPU."""
        time = step_time(self.model, self.run, hardware(self.device), linear_gain=self.linear_gain)
        if self.tokens is not None:
            return time.tokens_per_gpu, self.tokens
        assert self.teraflops is not None
        return time.mfu * time.peak * 4 / 3 / 1e12, self.teraflops  # with full recomputation 4 passes for 3

    def memory(self) -> tuple[float, float] | None:
        """(predicted, reported) GiB of the largest rank; None where none was reported."""
        if self.gib is None:
            return None
        return parallel_memory(self.model, self.run, TORCHTITAN).total / 2**30, self.gib


def published() -> tuple[Published, ...]:
    """All rows."""
    return (*_torchtitan(), *_megatron())


def _torchtitan() -> list[Published]:
    small, medium, large = _llama(4096, 14336, 32), _llama(8192, 28672, 80), _llama(16384, 53248, 126)
    f8 = FLOAT8_GAIN
    rows = [
        Published("8B, 8 × H100", small, "h100", _run(8, 2, "selective"), 1.0, 6667, None, 77.0, True),
        Published(
            "8B float8, 8 × H100",
            small,
            "h100",
            _run(8, 2, "selective"),
            linear_gain=f8,
            tokens=8532,
            gib=76.8,
            fitted=True,
        ),
        Published("8B, 128 × H100", small, "h100", _run(128, 2, "selective"), tokens=6514, gib=62.0),
        Published(
            "8B float8, 128 × H100", small, "h100", _run(128, 2, "selective"), linear_gain=f8, tokens=8380, gib=61.8
        ),
        Published(
            "8B float8, 32 × H200", small, "h200", _run(32, 2, "selective"), linear_gain=f8, tokens=10938, fitted=True
        ),
        Published("8B float8, 64 × H200", small, "h200", _run(64, 2, "selective"), linear_gain=f8, tokens=10753),
    ]
    for dp, cp, tokens, gib in ((8, 1, 3890, 83.9), (4, 2, 2540, 84.2), (2, 4, 1071, 84.0), (1, 8, 548, 84.5)):
        run = _run(dp, 1, "full", length=32768 * cp, cp=cp)
        rows.append(
            Published(f"8B float8, context over {cp}", small, "h100", run, linear_gain=f8, tokens=tokens, gib=gib)
        )
    tensor = {"tp": 8, "sequence": True}
    run = _run(32, 16, "full", **tensor)
    rows.append(Published("70B float8, 256 × H100", medium, "h100", run, linear_gain=f8, tokens=829, gib=71.9))
    # Gradients stay whole until the last micro-batch: ZeRO 1 here
    run = _run(8, 4, "full", micro_batches=8, zero=1, pp=8, **tensor)
    rows.append(Published("405B float8 1F1B, 512 × H100", large, "h100", run, linear_gain=f8, tokens=100, gib=82.5))
    run = _run(8, 2, "full", micro_batches=16, zero=1, pp=8, schedule="interleaved", **tensor)
    rows.append(
        Published("405B float8 interleaved, 512 × H100", large, "h100", run, linear_gain=f8, tokens=128, gib=72.7)
    )
    return rows


def _megatron() -> list[Published]:
    table = (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
    )
    rows = []
    for billions, heads, hidden, layers, tp, pp, gpus, batch, micro_batch, chunks, teraflops in table:
        dp = gpus // (tp * pp)
        schedule = "interleaved" if chunks == 2 else "1f1b"
        micro_batches = batch // (dp * micro_batch)
        run = _run(
            dp, micro_batch, "full", micro_batches=micro_batches, length=2048, zero=0, tp=tp, pp=pp, schedule=schedule
        )  # fmt: skip
        rows.append(
            Published(
                f"GPT {billions:g}B, {gpus} × A100", _gpt(hidden, layers, heads), "a100", run,
                teraflops=teraflops, fitted=billions == 39.1,
            )
        )  # fmt: skip
    return rows


def _run(
    dp: int, micro_batch: int, recompute: Recompute, *, micro_batches: int = 1, length: int = 8192, zero: int = 3,
    **mesh: Any,
) -> Run:  # fmt: skip
    parallel = ParallelConfig.model_validate({"dp": dp, "zero": zero, **mesh})
    return Run(parallel, dp, micro_batch, micro_batches, length, recompute)


def _llama(hidden: int, inner: int, layers: int) -> ModelShape:
    """Llama 3.1 (https://arxiv.org/abs/2407.21783, table 3)."""
    return decoder_shape(
        DecoderConfig(
            vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=hidden // 128, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
        )
    )  # fmt: skip


def _gpt(hidden: int, layers: int, heads: int) -> ModelShape:
    """A GPT of the same size: its MLP of two products 4 × hidden wide as our three of 8/3."""
    return decoder_shape(
        DecoderConfig(
            vocab_size=51200, hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden // heads // 2 * 2,
            max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )  # fmt: skip
