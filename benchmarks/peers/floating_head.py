"""floating_head.py ARTIFACT OUT: a W8A8 artifact with its LM head as floating weights, as vLLM's loader wants it.

The weights are the artifact's integers times their scales, rounded to bfloat16; nothing else changes.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEAD = "lm_head"


def main(artifact: Path, out: Path) -> None:
    tensors = load_file(artifact / "model.safetensors")
    scale_N1 = tensors.pop(f"{HEAD}.weight_scale")
    tensors[f"{HEAD}.weight"] = (tensors[f"{HEAD}.weight"].float() * scale_N1).to(torch.bfloat16)
    config = json.loads((artifact / "config.json").read_text())
    config["quantization_config"]["ignore"].append(HEAD)
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in artifact.glob("tokenizer*.json"):
        shutil.copy(path, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
