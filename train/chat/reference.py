"""What the reference model says of pairs of answers: asked once, and kept in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from penjing.core.cache import cache_dir
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_bytes, holding, sha256_file, writing
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import read_backend
from penjing.train.adapter.int8 import read_int8_base
from penjing.train.chat.preferences import pair_batch
from penjing.train.chat.tokens import Pair
from penjing.train.objective.preference import answer_logprobs
from penjing.train.state.initial import checkpoint_weights, fill_weights

_TOGETHER = 4  # pairs in one pass


def reference_logprobs(
    reference: Path, tokenizer: Path, pairs: Sequence[Pair], device: torch.device, progress: Progress
) -> Tensor:
    """The log-probabilities of both answers of each pair by the checkpoint `reference`, (N, 2) float32.

    Args:
        tokenizer: the folder of the tokenizer that wrote the pairs.

    Raises:
        ConfigError: the reference has another tokenizer, or a context shorter than a pair.
        InputError: it is missing or damaged, or its log-probabilities are not finite.
        SetupError: the cache cannot be written.
    """
    theirs, ours = (read_backend(folder / "tokenizer.json").to_str() for folder in (reference, tokenizer))
    if theirs != ours:
        raise ConfigError(
            f"objective.reference = {reference} has another tokenizer than initial = {tokenizer}, so that its tokens "
            "mean something else; name a checkpoint of the same one"
        )
    longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
    if (sees := open_checkpoint(reference).config.max_position_embeddings) < longest:
        raise ConfigError(
            f"objective.reference = {reference} sees {sees} tokens, and a pair has {longest}; name another checkpoint, "
            f"or set data.sequence_length = {sees}"
        )
    path = cache_dir() / "reference" / f"{_key(reference, pairs)}.safetensors"
    with holding(path.with_suffix(".lock")):
        if not path.exists():
            found = _asked(reference, pairs, device, progress)
            with writing(path):
                atomic_write_bytes(path, save({"logprobs": found}))
    try:
        return load_file(path)["logprobs"]
    except (SafetensorError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}); delete it, and the reference answers anew") from error


@torch.no_grad()
def _asked(reference: Path, pairs: Sequence[Pair], device: torch.device, progress: Progress) -> Tensor:
    checkpoint = open_checkpoint(reference)
    model, weights = Decoder(checkpoint.config).eval(), checkpoint_weights(reference, "objective.reference")
    if checkpoint.quantization is not None:  # rounds as beside an adapter that learns there
        base = read_int8_base(reference, checkpoint.config)
        base.apply(model)
        weights = base.weights()
    fill_weights(model, weights)
    model.to(device)
    progress.start("asking the reference", len(pairs))
    found = []
    for begin in range(0, len(pairs), _TOGETHER):
        some = pairs[begin : begin + _TOGETHER]
        batch = {name: tensor.to(device) for name, tensor in pair_batch(some, pad=0).items()}
        found.append(answer_logprobs(model, batch)[0].to("cpu", torch.float32))
        progress.advance(len(some))
    logprobs = torch.cat(found)
    if not bool(logprobs.isfinite().all()):
        raise InputError(f"objective.reference = {reference} gives log-probabilities that are not finite")
    return logprobs


def _key(reference: Path, pairs: Sequence[Pair]) -> str:
    digest = hashlib.sha256()
    for file in sorted([*reference.glob("*.safetensors"), reference / "config.json"]):
        digest.update(sha256_file(file).encode())
    for pair in pairs:
        for part in (pair.prompt, pair.chosen, pair.rejected):
            digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    return digest.hexdigest()[:32]
