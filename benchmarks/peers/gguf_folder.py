"""gguf_folder.py GGUF OUT: what transformers makes of a GGUF file, as a folder in FP32, without a tokenizer."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def main(gguf: Path, out: Path) -> None:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    floating: Any = transformers.GgufConfig(dequantize=True)
    load(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, quantization_config=floating).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
