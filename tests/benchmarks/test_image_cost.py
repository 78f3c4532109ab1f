"""What images cost other answers: the rows of known phases, and a round before a real server of a tiny network."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from lib import image_cost
from lib.image_cost import Phase, cost_rows, measure, named_processes, picture
from lib.random_eyes import seeing_artifact
from PIL import Image

from penjing.core.checkpoint.load import load_model, load_sight_of
from penjing.core.errors import SetupError
from penjing.core.vision.vit import ViTConfig
from tests.core.artifact.int8_artifact import write_int8_artifact

SIDE = 16
VISION = ViTConfig(
    image_size=SIDE, patch_size=4, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
)


@pytest.fixture(scope="module")
def seeing(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    artifact = write_int8_artifact(tiny_checkpoint, folder / "int8")
    return seeing_artifact(artifact, folder / "seeing", VISION, scale=2)


def phase(gap: float, sent: int, llm: float, sight: float) -> Phase:
    return Phase(
        (gap, gap, gap, 3 * gap),
        (0.1,) * sent,
        (gap / 10,) * sent,
        8.0,
        70,
        {"llm": llm, "sight": sight, "server": 0.0},
    )


def phases(slower: float = 1.0) -> Mapping[str, Phase]:
    return {
        "images": phase(30 * slower, 4, 0.04, 3.2),
        "texts": phase(20, 4, 0.02, 0.0),
        "nothing": phase(10, 0, 0.01, 0.0),
    }


def test_images_stand_beside_texts_and_texts_beside_nothing() -> None:
    rows = {row.metric: row for row in cost_rows("tiny", [phases(), phases(), phases(slower=100.0)])}
    half = rows["tiny/beside_images/gap_p50"]
    assert (half.value, half.ratio, half.baseline, half.runs) == (30, 1.5, "as many texts of as many tokens", 3)
    assert (rows["tiny/beside_texts/gap_p50"].value, rows["tiny/beside_texts/gap_p50"].ratio) == (20, 2)
    assert rows["tiny/beside_images/gap_p95"].value == pytest.approx(30 + 0.85 * 60)
    assert rows["tiny/beside_images/gap_longest"].value == 90
    assert rows["tiny/beside_images/decoder_a_token"].value == 10
    assert rows["tiny/beside_images/eyes_a_picture"].value == 800
    assert rows["tiny/beside_images/pictures"].value == 12
    waited = rows["tiny/beside_images/first_token"]
    assert (waited.value, waited.ratio) == (3000, 1.5)


def test_an_artifact_gets_eyes(seeing: Path) -> None:
    sight = load_sight_of(seeing)
    assert (sight.config.rows, sight.config.linears) == (4, "int8")
    assert load_model(seeing).sight is not None


def test_pictures_are_files_that_differ() -> None:
    assert Image.open(io.BytesIO(picture(1, 40))).size == (40, 40)
    assert picture(1, 40) == picture(1, 40) != picture(2, 40)


def test_a_port_without_a_server_has_no_processes() -> None:
    with pytest.raises(SetupError, match="no server of this machine has gRPC port 1"):
        named_processes(1)


@pytest.mark.server
@pytest.mark.xdist_group("sight")
def test_a_round_has_as_many_texts_of_as_many_tokens(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cost, "SETTINGS", ["stream_interval=0", "num_blocks=256"])
    (found,) = measure(seeing, SIDE, length=0.4, rounds=1)
    assert list(found) == ["images", "texts", "nothing"]
    images, texts, nothing = found.values()
    assert len(images.sent) == len(texts.sent) > 0
    assert not nothing.sent
    assert texts.lasted >= images.lasted >= 0.4
    assert sum(images.answered) <= images.lasted
    assert images.prompt_tokens == texts.prompt_tokens > 4
    assert all(len(each.gaps) > 1 for each in found.values())
    assert images.spent["sight"] > texts.spent["sight"]
    assert min(each.spent["llm"] for each in found.values()) > 0
