"""prompts.py TOKENIZER_FOLDER OUT: the prompts of the engine benchmark, from CPython's own help texts."""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer


def make_prompts(folder: Path) -> dict[str, list]:
    """`p32`, `p512`: one prompt of that length; `p16`: 16 prompts of 128 that share no prefix."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return {
        "p32": ids[2000:2032],
        "p512": ids[4000:4512],
        "p16": [ids[8000 + 300 * i : 8128 + 300 * i] for i in range(16)],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(make_prompts(Path(sys.argv[1]))))
