"""Eyes of random weights before a decoder: what they cost does not depend on what they have learnt."""

from __future__ import annotations

import shutil
from pathlib import Path

from penjing.compress.sight.rounding import RoundedSight, round_sight
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.sight import save_sight
from penjing.core.manifest import read_manifest, write_manifest
from penjing.core.progress import Silent
from penjing.core.vision.projector import build_projector
from penjing.core.vision.sight import Sight, SightConfig
from penjing.core.vision.vit import VisionTransformer, ViTConfig, initialize_vit

IMAGE_ID = 5  # a token of SmolLM2 that no text has
SMOLVLM_256M = ViTConfig(
    image_size=512, patch_size=16, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
    num_attention_heads=12,
)  # fmt: skip
SCALE = 4  # of SmolVLM-256M: 64 rows an image


def random_eyes(width: int, vision: ViTConfig = SMOLVLM_256M, scale: int = SCALE, token: int = IMAGE_ID) -> Sight:
    """A vision transformer and a projection to rows of `width` numbers, which stand in place of `token`."""
    config = SightConfig(vision=vision, scale_factor=scale, image_token_id=token, width=width)
    inner = scale**2 * vision.hidden_size
    eyes = Sight(config, VisionTransformer(vision), build_projector(config.projector, inner, width))
    initialize_vit(eyes)
    return eyes.requires_grad_(False).eval()


def rounded(eyes: Sight) -> RoundedSight:
    """The same in INT8, which nothing calibrates."""
    return round_sight(eyes, None, 0.0, False, Silent())


def seeing_artifact(artifact: Path, folder: Path, vision: ViTConfig = SMOLVLM_256M, scale: int = SCALE) -> Path:
    """`folder`, a copy of a decoder's INT8 artifact that has random eyes in INT8."""
    shutil.copytree(artifact, folder)
    eyes = rounded(random_eyes(open_checkpoint(artifact).config.hidden_size, vision, scale))
    save_sight(folder, eyes.sight, eyes.tensors)
    manifest = read_manifest(artifact)
    write_manifest(folder, "artifact", manifest.created_by, manifest.extra)
    return folder
