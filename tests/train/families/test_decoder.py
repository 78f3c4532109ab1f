"""What decoders are judged by."""

from __future__ import annotations

from pathlib import Path

import torch

from penjing.core.config import load_recipe
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import Silent
from penjing.train.data.shards import TokenShards
from penjing.train.data.tokens import held_out_rows
from penjing.train.families.decoder import LanguageModeling
from penjing.train.processes.world import World
from penjing.train.recipe.data import TextData
from penjing.train.recipe.model import DecoderModel
from penjing.train.recipe.recipe import TrainRecipe


def test_an_evaluation_takes_text_from_everywhere(recipe: Path) -> None:
    found = load_recipe(TrainRecipe, recipe, ["evaluation.samples=3", "data.sequence_length=16"])
    assert isinstance(found.model, DecoderModel | DecoderConfig)
    assert isinstance(found.data, TextData)
    task = LanguageModeling(found, found.model, found.data, Silent())
    rows = held_out_rows(TokenShards(task.folder, "held_out"), 16)
    taken = torch.cat([batch["tokens"] for batch in task.held_out(1, World())])
    assert len(rows) >= 6
    assert torch.equal(taken, rows.read([0, len(rows) // 3, 2 * len(rows) // 3])["tokens"])
