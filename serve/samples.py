"""Many sampled texts into a folder: what a network distils from where its own training data is not at hand.

`OUT/sample-000000.txt` … hold prompt and answer (of a chat the answer alone); the folder is a `sources` entry of a
training recipe or of a step of `penjing compress`. A sample depends on its number and the seed alone, so a run that was
killed goes on where it stopped, and more samples can be added later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.core.artifact.lora import SETTINGS, TENSORS
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, sha256_file
from penjing.core.progress import Progress
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.adapters import open_adapters
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams

_FACTS = "samples.json"


def sample_texts(
    folder: Path,
    prompt: str,
    sampling: dict[str, Any],
    count: int,
    out: Path,
    progress: Progress,
    *,
    chat: bool = False,
    engine_config: EngineConfig | None = None,
) -> int:
    """Write samples 0 … count - 1 of the model in `folder` to `out`; those that are there already stay.

    Args:
        sampling: see `SamplingParams`; its seed (0 if absent) plus a sample's number is the sample's seed.

    Returns:
        How many were written now.

    Raises:
        ConfigError: greedy decoding, which gives one text.
        InputError: the folder is not a model, or `out` holds samples of another model, adapter, prompt or setting.
        RequestError: the prompt or the settings do not fit the model, or the texts' form is too complex.
        SetupError: disk full, no permission.
    """
    if sampling.get("temperature", 1.0) == 0:
        raise ConfigError("temperature = 0 gives the same text each time; add --temperature 1.0")
    first_seed = sampling.get("seed", 0)
    engine_config = engine_config or EngineConfig()
    facts: dict[str, Any] = {"model": _identity(folder), "prompt": prompt, "chat": chat, "sampling": sampling}
    if engine_config.adapters:
        open_adapters(open_checkpoint(folder), engine_config)
        facts["adapters"] = {
            name: {file: sha256_file(path / file) for file in (SETTINGS, TENSORS)}
            for name, path in engine_config.adapters.items()
        }
    _claim(out, facts)
    missing = [index for index in range(count) if not _path(out, index).exists()]
    progress.start("sampling texts", count)
    progress.advance(count - len(missing))
    if not missing:
        return 0
    engine = load_engine(folder, engine_config)
    text = prompt
    if chat:
        if engine.chat_template is None:
            raise InputError(f"{folder} has no chat template; leave out --chat or use an instruct model")
        text = engine.chat_template.render([{"role": "user", "content": prompt}])
    waiting, answers = list(reversed(missing)), dict[int, str]()
    while waiting or answers:
        while waiting and len(answers) < engine_config.max_num_sequences:
            index = waiting.pop()
            params = SamplingParams.from_json(sampling | {"seed": first_seed + index})
            engine.add(Request(str(index), text, params, add_special=not chat))
            answers[index] = ""
        for output in engine.step():
            if output.error is not None:
                raise output.error
            index = int(output.request_id)
            answers[index] += output.text
            if output.finish_reason is not None:
                atomic_write_text(_path(out, index), ("" if chat else prompt) + answers.pop(index))
                progress.advance()
    return len(missing)


def _path(out: Path, index: int) -> Path:
    return out / f"sample-{index:06d}.txt"


def _claim(out: Path, facts: dict[str, Any]) -> None:
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    path = out / _FACTS
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise InputError(f"{out} holds samples of another model, adapter, prompt or setting; choose another --out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and holds something else; choose another --out")
    else:
        atomic_write_text(path, text)


def _identity(folder: Path) -> str:
    """The hash of the manifest, or, of a plain Hugging Face folder, of its config."""
    manifest = folder / "penjing.json"
    return sha256_file(manifest if manifest.exists() else folder / "config.json")
