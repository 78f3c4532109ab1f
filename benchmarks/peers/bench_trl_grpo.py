"""bench_trl_grpo.py JOB: TRL's GRPOTrainer on the steps that JOB, a JSON file, describes; prints one JSON line.

JOB has "checkpoint", "prompts" (a list of messages each), "batch" (prompts of a step), "samples", "max_tokens",
"steps", "threads" and "precision" (fp32 or bf16). `trl.sh` makes the environment. Printed are the seconds of each step
behind the first, from the end of one to the end of the next, and the mean length of the answers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": str(job["threads"])}
    import datasets.fingerprint  # pyright: ignore[reportMissingImports]
    import torch
    import trl  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(job["threads"])
    # datasets 5.2 cannot hash its own tables on this torch; nothing here is read from its cache.
    datasets.fingerprint.Hasher.hash = staticmethod(lambda value: uuid.uuid4().hex)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ends.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"])
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=job["steps"],
            per_device_train_batch_size=job["batch"] * job["samples"],
            num_generations=job["samples"],
            max_completion_length=job["max_tokens"],
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="dapo",
            mask_truncated_completions=False,
            gradient_checkpointing=False,
            bf16=job["precision"] == "bf16",
            use_cpu=True,
            seed=1,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        lengths: list[int] = []

        def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
            lengths.extend(map(len, completion_ids))
            return [float(place % 2) for place in range(len(completion_ids))]

        rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]])
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=rows, processing_class=tokenizer,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    seconds = [after - before for before, after in pairwise(ends)]
    name = f"TRL {trl.__version__} {job['precision']}"
    found = {"name": name, "seconds": seconds, "length": sum(lengths) / len(lengths)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
