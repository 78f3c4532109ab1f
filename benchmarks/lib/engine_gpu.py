"""The whole engine on a GPU, scheduler, sampling and detokenization included: INT8 SmolLM2-135M at 256 streams.

The weights are random in that model's shape, since such a machine may download nothing: the kernels do the same work.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from penjing.core.checkpoint.load import LoadedModel

STREAMS, PROMPT, NEW = 256, 128, 64
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
METRICS = tuple(f"engine INT8 SmolLM2-135M {STREAMS} streams, {cache} cache" for cache in ("bf16", "INT8"))


def engine_rows(reason: str | None, runs: int = 3) -> Iterator[dict[str, Any]]:
    """Tokens per second of decode; without a device, or without what the engine imports, the reason."""
    if reason is None:
        try:
            loaded = random_model(SMOLLM2)
        except ImportError as error:  # a bare machine: torch and the Triton language alone
            reason = f"the engine needs {error.name}, which is not installed"
        else:
            for metric, kv_dtype in zip(METRICS, ("auto", "int8"), strict=True):
                rate = decode_rate(loaded, runs, device="cuda", kv_dtype=kv_dtype)
                yield {"metric": metric, "unit": "tok/s", "value": round(rate, 1), "runs": runs}
            return
    for metric in METRICS:
        yield {"metric": metric, "unit": "tok/s", "value": None, "reason": f"not measured: {reason}", "runs": 0}


def random_model(shape: dict[str, Any]) -> LoadedModel:
    """A decoder of `shape` with random INT8 layers, and a tokenizer whose words are letters and numbers."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from penjing.core.checkpoint.load import LoadedModel
    from penjing.core.models.config import DecoderConfig
    from penjing.core.models.decoder import Decoder
    from penjing.core.runtime.batch_invariant import apply_batch_invariance
    from penjing.core.runtime.quantized import apply_quantized
    from penjing.core.runtime.schemes import INT8
    from penjing.core.text.tokenizer import Tokenizer

    config = DecoderConfig.model_validate(shape)
    torch.manual_seed(0)
    model = Decoder(config).requires_grad_(False).eval()
    sizes = {
        name: tuple(layer.weight.shape)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }

    def tensor(name: str) -> torch.Tensor:
        layer, _, kind = name.rpartition(".")
        if kind == "weight":
            return torch.randint(-127, 128, sizes[layer], dtype=torch.int8)
        return torch.full((sizes[layer][0], 1), sizes[layer][1] ** -0.5 / 73)  # 73: deviation of the codes

    apply_quantized(model, dict.fromkeys(sizes, INT8), tensor)
    apply_batch_invariance(model)
    backend: Any = Backend(models.BPE(vocab={f"t{i}": i for i in range(config.vocab_size)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return LoadedModel(model, config, Tokenizer(backend, eos_token_ids=()), None, None, "int8")


def decode_rate(
    loaded: LoadedModel, runs: int, streams: int = STREAMS, prompt: int = PROMPT, new: int = NEW, **settings: Any
) -> float:
    """Tokens per second of `streams` answers after their first tokens: streams × (new − 1) ÷ (time of `new` tokens −
    time of one), medians of `runs` after a warm-up."""
    from penjing.serve.bench.engine import run_prompts
    from penjing.serve.engine.config import EngineConfig
    from penjing.serve.runner.load import make_engine

    config = EngineConfig.model_validate(
        {"max_num_sequences": streams, "max_num_batched_tokens": max(2048, streams), "enable_prefix_caching": False}
        | settings
    )
    engine = make_engine(loaded, config)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, loaded.config.vocab_size, (streams, prompt), generator=generator).tolist()
    first, whole = [], []
    for turn in range(runs + 1):
        seconds = [run_prompts(engine, prompts, count).seconds for count in (1, new)]
        if turn > 0:
            first.append(seconds[0])
            whole.append(seconds[1])
    return streams * (new - 1) / (median(whole) - median(first))
