"""Make a random network with experts, of the form of Qwen3-MoE, and its INT8 artifact: their speed can be measured
where no published one fits. It has 382 million numbers, of which a token uses 85; with few, large experts 127.

    python benchmarks/make_experts.py                   # build/random-experts and build/random-experts-int8, 2 minutes
    python benchmarks/run_engine.py build/random-experts-int8 --checkpoint build/random-experts --peers llama_cpp
    python benchmarks/make_experts.py build/large-experts --experts 8 --per-token 2 --size 1536     # of Mixtral's shape

Its words mean nothing, and neither does its perplexity.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lib.models import CHECKPOINT, say

from penjing.compress.run import run_recipe
from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.cli import guarded
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.manifest import write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import progress_bar

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "qk_norm": True,
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_ids": [2],
}
RECIPE = """model = "{checkpoint}"
output = "{artifact}"
[data]
tokens = 2048
code = 0.0
window = 256
[evaluate]
prose_tokens = 512
code_tokens = 512
window = 256
[[steps]]
kind = "quantize"
transform = {{ search_steps = 4, rotate = false }}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/random-experts"), help="of the checkpoint")
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--per-token", type=int, default=4, help="to which a token goes")
    parser.add_argument("--size", type=int, default=384, help="inner width of one")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    moe = {
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.per_token,
        "moe_intermediate_size": arguments.size,
    }
    config = DecoderConfig.model_validate(SHAPE | {"moe": moe})
    if not folder.exists():
        with publish_folder(folder) as partial:
            save_checkpoint(partial, config, tensors(config), tokenizer_from=CHECKPOINT)
            write_manifest(partial, "checkpoint", {"command": "python benchmarks/make_experts.py"})
    artifact = folder.with_name(f"{folder.name}-int8")
    if not artifact.exists():
        recipe = folder.with_name(f"{folder.name}-int8.toml")
        atomic_write_text(recipe, RECIPE.format(checkpoint=folder, artifact=artifact))
        with progress_bar() as progress:
            run_recipe(recipe, progress=progress)
    say(f"{folder} and {artifact} are there")
    return 0


def tensors(config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights whose products keep the size of what they read; norms are 1."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in tensor_shapes(config).items():
        if "norm" in name:
            yield name, torch.ones(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * shape[-1] ** -0.5


if __name__ == "__main__":
    sys.exit(guarded(main))
