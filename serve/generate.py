"""Generation in this process: `penjing generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError
from penjing.serve.engine.config import EngineConfig, with_defaults
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sight.images import ImageError
from penjing.serve.sight.wire import read_image

NUM_SEQUENCES = 16


def generate_stream(
    folder: Path,
    prompt: str,
    params: SamplingParams | None = None,
    engine_config: EngineConfig | None = None,
    chat: bool = False,
    images: Sequence[bytes] = (),
) -> Iterator[RequestOutput]:
    """Load `folder` and yield outputs as they come; `chat` wraps the prompt in the model's template. `images` come
    before a prompt that does not say where they stand.

    Raises:
        InputError: the folder is not a model, or has no chat template and `chat` is set.
        RequestError: the prompt or the parameters do not fit the model, or the answer's form is too complex.
        ServerError: the model failed on this request.
    """
    engine = load_engine(folder, engine_config or EngineConfig(max_num_sequences=NUM_SEQUENCES))
    prompt = engine.preparer.images.begin(prompt, len(images))
    if chat:
        if engine.chat_template is None:
            raise InputError(f"{folder} has no chat template; leave out --chat or use an instruct model")
        prompt = engine.chat_template.render([{"role": "user", "content": prompt}])
    engine.add(Request("generate", prompt, params or SamplingParams(), add_special=not chat, images=images))
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            yield output


def generate_to_terminal(
    model: Path,
    text: str,
    sampling: dict[str, Any],
    chat: bool = False,
    engine_config: EngineConfig | None = None,
    images: Sequence[Path] = (),
) -> None:
    """Stream the answer to standard output; speed and the reason of its end to standard error.

    Raises:
        InputError: a file of `images` cannot be read, or is no image; names it.
        PenjingError: see `generate_stream`.
    """
    files = [read_image(path) for path in images]
    params = SamplingParams.from_json(sampling)
    started = time.monotonic()
    first_token_time, last = None, None
    config = with_defaults(engine_config, max_num_sequences=NUM_SEQUENCES)
    try:
        for output in generate_stream(model, text, params, config, chat=chat, images=files):
            first_token_time = first_token_time or time.monotonic()
            last = output
            sys.stdout.write(output.text)
            sys.stdout.flush()
    except ImageError as error:
        raise InputError(f"the image {images[error.number]} {error.why}") from None
    sys.stdout.write("\n")
    if last is not None and first_token_time is not None:
        seconds = time.monotonic() - first_token_time
        rate = f"{(last.num_output_tokens - 1) / seconds:.1f} tokens/s" if last.num_output_tokens > 1 else "one token"
        print(
            f"[{last.num_prompt_tokens} prompt + {last.num_output_tokens} new tokens, {rate}, first after "
            f"{first_token_time - started:.2f} s with loading, ended by {last.finish_reason}]",
            file=sys.stderr,
        )
