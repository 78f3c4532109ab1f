"""Files of tensors."""

from __future__ import annotations

import stat
from pathlib import Path

import torch

from penjing.core.checkpoint.safetensors_writer import save_tensors


def test_others_may_read_what_they_may_read_of_any_file(tmp_path: Path) -> None:
    """A server runs as another user than the one who made the folder, in containers for example."""
    (tmp_path / "any").touch()
    for _ in range(2):  # the second replaces the first
        save_tensors({"x": torch.ones(2)}, tmp_path / "x.safetensors")
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("any", "x.safetensors")]
        assert modes[0] == modes[1] != 0o600
