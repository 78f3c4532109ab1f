"""The main job end to end: import SmolLM2-135M-Instruct, compress it to INT8, serve it from Triton server, stream answers.

Writes build/demo/summary.json. Finished steps are kept: a second run takes seconds, and says what it kept.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from penjing.compress.pipeline import compress
from penjing.core.cli import run_guarded
from penjing.core.errors import PenjingError
from penjing.core.files import atomic_write_text
from penjing.core.importer import import_model
from penjing.core.info import processor, versions
from penjing.core.progress import progress_bar
from penjing.serve.bench_engine import bench_engine
from penjing.serve.bench_server import bench_server
from penjing.serve.client import Client
from penjing.serve.triton.install import install_to_terminal
from penjing.serve.triton.supervisor import ServeConfig, serve, stop

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about a small tree in a pot.",
    "Count from one to one hundred in words.",  # cancelled halfway
)
CHECKPOINT, RECIPE, ARTIFACT = Path("build/smollm2"), Path("recipes/smollm2-int8.toml"), Path("build/smollm2-int8")
console = Console(highlight=False)
