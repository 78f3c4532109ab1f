"""bench_penjing_server.py MODEL PROMPTS RUNS THREADS: the engine through a Triton server started here.

One asyncio client streams all answers over gRPC, on the same cores as the server.
"""

import asyncio
import sys
import time
from pathlib import Path

from figures import measure, read_prompts, report

from penjing.core.info import versions
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.client.client import AsyncClient
from penjing.serve.supervisor.temporary import temporary_server


async def answer(client: AsyncClient, text: str, num_prompt: int, new: int) -> None:
    chunks = [chunk async for chunk in client.stream(text, max_tokens=new, temperature=0.0, ignore_eos=True)]
    num_input, num_output = chunks[-1].num_input_tokens, sum(chunk.num_tokens for chunk in chunks)
    # a prompt cut from a token sequence may encode to a token or two fewer as text
    if num_output != new or abs(num_input - num_prompt) > num_prompt // 50:
        raise SystemExit(f"error: {num_prompt} + {new} tokens were asked for, {num_input} + {num_output} counted")


def main(model: str, prompts_path: str, runs: int) -> None:
    prompts = read_prompts(prompts_path)
    tokenizer = Tokenizer.from_folder(Path(model))
    engine = ["enable_prefix_caching=false", f"max_num_sequences={len(prompts['p16'])}"]

    async def all_answers(address, batch, new) -> float:
        texts = [tokenizer.decode(ids, skip_special=False) for ids in batch]
        client = AsyncClient(address)
        start = time.perf_counter()
        await asyncio.gather(*(answer(client, text, len(ids), new) for text, ids in zip(texts, batch, strict=True)))
        seconds = time.perf_counter() - start
        await client.close()
        return seconds

    with temporary_server(Path(model), engine) as address, asyncio.Runner() as runner:
        figures = measure(lambda batch, new: runner.run(all_answers(address, batch, new)), prompts, runs)
    report(f"penjing {versions()['penjing']} through Triton server", figures)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))  # threads: OMP_NUM_THREADS, which run_engine.py sets
