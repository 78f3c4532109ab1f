"""Model files compute, and pass their tests, where torch.distributed cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCK = "tests.core.models.without_distributed"
TESTED = tuple(f"tests/core/models/test_{name}.py" for name in ("decoder", "decoder_variants", "encoder", "resnet"))
COMPUTES = f"""
import importlib
import pkgutil
import {BLOCK}
import torch
import penjing.core.models
for module in pkgutil.iter_modules(penjing.core.models.__path__, "penjing.core.models."):
    importlib.import_module(module.name)
from penjing.core.models.decoder import Decoder
from penjing.core.models.encoder import Encoder
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import cifar_resnet
from tests.conftest import tiny_config
tokens = torch.arange(6)[None]
sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
encoder = Encoder(EncoderConfig(**sizes, max_position_embeddings=8, type_vocab_size=1, layer_norm_eps=1e-5))
for answer in (
    Decoder(tiny_config())(tokens),
    encoder(tokens, torch.ones_like(tokens)),
    ResNet(cifar_resnet(8))(torch.zeros(2, 3, 8, 8)),
):
    answer.sum().backward()
    print(tuple(answer.shape))
"""


def test_models_compute_without_torch_distributed() -> None:
    done = subprocess.run([sys.executable, "-c", COMPUTES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["(1, 6, 320)", "(1, 8)", "(2, 10)"]


@pytest.mark.full
def test_models_pass_their_tests_without_torch_distributed() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", BLOCK, *TESTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_it_really_is_blocked() -> None:
    command = [sys.executable, "-c", f"import {BLOCK}, penjing.train.processes.world"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ImportError: torch.distributed is blocked, and penjing.train.processes.world imports it" in done.stderr
