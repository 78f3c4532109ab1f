"""A random model of a few thousand parameters with a byte-level tokenizer: every mode of the engine in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penjing.core.checkpoint.load import LoadedModel
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.batch_invariant import apply_batch_invariance
from penjing.core.runtime.quantized import apply_quantized
from penjing.core.runtime.schemes import INT8, Scheme
from penjing.core.text.tokenizer import Tokenizer
from penjing.kernels.int4_linear import pack_int4
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.runner.load import make_engine
from penjing.serve.sampling.params import SamplingParams

EOS = 256
VOCAB_SIZE = 258
CONTEXT = 256
CONVOLUTIONS: dict[str, Any] = {
    "model_type": "penjing",
    "num_hidden_layers": 4,
    "layer_types": ("short_conv", "full_attention", "short_conv", "short_conv"),
    "conv_taps": 4,
    "conv_bias": True,
    "qk_norm": True,
}
"""Of `tiny_model`: layers with short convolutions."""
DEFAULTS = {"block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 64, "max_num_sequences": 32}


def tiny_config(**changes: Any) -> DecoderConfig:
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_ids": (EOS,),
    }
    return DecoderConfig.model_validate(values | changes)


def byte_tokenizer(marks: Sequence[str] = ()) -> Tokenizer:
    """Token i is byte i; 256 ends a text, 257 is another control token, and so are `marks` behind it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend: Any = Backend(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|pad|>", *marks)])
    return Tokenizer(backend, eos_token_ids=(EOS,))


def tiny_model(seed: int = 0, int8: bool = False, **changes: Any) -> LoadedModel:
    config = tiny_config(**changes)
    torch.manual_seed(seed)
    model = Decoder(config).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(std=0.3)  # the default is so small that every row has nearly the same logits
    if int8:
        names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            weight = model.get_parameter(f"{name}.weight")
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[f"{name}.weight"] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}.weight_scale"] = scale
            if (bias := model.get_submodule(name).bias) is not None:
                tensors[f"{name}.bias"] = bias  # type: ignore[assignment]
        apply_quantized(model, dict.fromkeys(names, INT8), tensors.__getitem__)
    apply_batch_invariance(model)
    return LoadedModel(model, config, byte_tokenizer(), None, None, "int8" if int8 else "fp32")


def tiny_int4_model(
    offsets: bool = False, group: int = 32, eight: tuple[str, ...] = (), activation_bits: Any = 8, **changes: Any
) -> LoadedModel:
    """Every linear layer in 4 bits, but in 8 those whose name ends with one of `eight`."""
    loaded = tiny_model(intermediate_size=64, **changes)
    tensors, schemes = dict[str, torch.Tensor](), dict[str, Scheme]()
    for name, layer in loaded.model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        weight = layer.weight
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias
        if eight and name.endswith(eight):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors |= {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}
            schemes[name] = INT8
            continue
        parts = weight.unflatten(1, (-1, group))
        low, high = (parts.amin(2), parts.amax(2)) if offsets else (-parts.abs().amax(2), parts.abs().amax(2))
        scale = (high - low) / 15
        codes = ((parts - low[..., None]) / scale[..., None]).round().clamp(0, 15).flatten(1) - 8
        tensors |= {f"{name}.weight_packed": pack_int4(codes.to(torch.int8)), f"{name}.weight_scale": scale}
        tensors |= {f"{name}.weight_shape": torch.tensor(weight.shape)}
        if offsets:
            tensors[f"{name}.weight_offset"] = low
        schemes[name] = Scheme(4, group, offsets, activation_bits=activation_bits)
    apply_quantized(loaded.model, schemes, tensors.__getitem__)
    return replace(loaded, scheme="int4")


def tiny_engine(loaded: LoadedModel | None = None, **settings: Any) -> LLMEngine:
    return make_engine(loaded or tiny_model(), EngineConfig.model_validate(DEFAULTS | settings))


def run_all(engine: LLMEngine, requests: Iterable[Request]) -> dict[tuple[str, int], list[RequestOutput]]:
    """Add every request, step to the end, and give the outputs of each sequence in order."""
    outputs: dict[tuple[str, int], list[RequestOutput]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        assert engine.broken_invariants() == []
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def generate(engine: LLMEngine, prompt: str | list[int], **params: Any) -> list[RequestOutput]:
    """The outputs of one request, alone."""
    (outputs,) = run_all(engine, [Request("only", prompt, SamplingParams(**params))]).values()
    return outputs
