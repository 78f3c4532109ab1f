"""What compression asks of a family of networks: one table of callables, of which a family may lack some.

A family's own module fills the table and calls it `FAMILY`; the code behind it stays in the folders of what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from penjing.compress.distill.training import Training
from penjing.compress.export.record import ExportRecord, Form
from penjing.compress.measure.answers import Questions, Score
from penjing.compress.measure.cost import Calls, MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings, Quality, QualityName
from penjing.compress.measure.skeleton import Skeleton
from penjing.compress.prune.graph import Group
from penjing.compress.prune.importance import Scores
from penjing.compress.prune.subject import Subject
from penjing.compress.quantize.targets import TargetName
from penjing.compress.samples.data import DataSettings, Samples
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.parity import Difference
from penjing.core.config import Config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES, FamilyName, family_of, names_of, table_of
from penjing.core.graph.network import Network
from penjing.core.progress import Progress
from penjing.core.work import Places


@dataclass(frozen=True)
class Needs:
    """What a step takes, estimated from shapes: bytes of memory, bytes on disk that stay until the run is published and
    that only its own run takes, and multiply-accumulates."""

    memory: int
    disk: int
    scratch: int = 0
    macs: int = 0


DepthChoice = Literal["influence", "trials"]
OneByOne = Callable[[Subject, Sequence[Group], Samples, Progress], Scores]
Reconstruct = Callable[[Path, Path, Path, Sequence[int], Samples, Progress, bool], list[dict[str, Any]]]


@dataclass(frozen=True)
class Pruner:
    """How networks of a family lose units.

    Attributes:
        parts: what a step may name in `parts`; empty where everything is pruned alike.
        open: (checkpoint, parts, dropped layers, progress) → the subject.
        depth: (checkpoint, how many, how they are chosen, samples, progress) → the layers that leave, ascending, and
            the record of why; None: no layer leaves as a whole.
        reconstruct: (checkpoint, the same as it was cut, a folder, dropped layers, samples, progress, whether each
            layer is fitted to its own output) writes the cut one with fitted weights into the folder; its record.
            None: nothing is fitted.
        obs: (subject, groups, samples, progress) → how important units are, if those that stay are corrected for what
            left. None: the method is not there.
        zero_weights: (checkpoint, a folder, method, share, pattern, samples, progress) writes it with zeros into the
            folder; its record. None: single weights stay.
        finish: what is done to the pruned checkpoint, not yet published, with samples; its record. None: nothing.
        num_layers: how many layers a checkpoint has that may leave as a whole; None: it is not known in advance.
    """

    parts: tuple[str, ...]
    open: Callable[[Path, Sequence[str], Sequence[int], Progress], Subject]
    depth: Callable[[Path, int, DepthChoice, Samples, Progress], tuple[list[int], dict[str, Any]]] | None = None
    reconstruct: Reconstruct | None = None
    obs: OneByOne | None = None
    zero_weights: Callable[..., list[dict[str, Any]]] | None = None
    finish: Callable[[Path, DataSettings, Progress], dict[str, Any]] | None = None
    num_layers: Callable[[Path], int] | None = None


@dataclass(frozen=True)
class Quantizer:
    """How a network of a family becomes an INT8 artifact.

    Attributes:
        settings: what a `quantize` step is told, beside what every step is.
        check: (checkpoint, settings, samples' settings) refuses what does not fit before anything is done.
        run: (places, settings, samples' settings, the model that the run began with, progress) fills
            `places.partial` with an artifact that has passed its parity gate; its record.
        needs: (checkpoint, settings, samples' settings) → what that takes; None: as training, or twice the weights.
        fitting: of a checkpoint, the settings without which the step would refuse it, for `penjing compress quantize`,
            which has no recipe to name them; None: defaults fit every one.
    """

    settings: type[Config]
    check: Callable[[Path, Any, DataSettings], None]
    run: Callable[[Places, Any, DataSettings, Path, Progress], dict[str, Any]]
    needs: Callable[[Path, Any, DataSettings], Needs] | None = None
    fitting: Callable[[Path], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Exporter:
    """In which forms an artifact of a family is written for other engines.

    Attributes:
        forms: of `penjing export --to`; `folders`: those of them that are folders, the others are files.
        write: (artifact, form, path, target, whether what is there may be replaced, progress) → the record.
    """

    forms: tuple[Form, ...]
    folders: tuple[Form, ...]
    write: Callable[[Path, Form, Path, TargetName | None, bool, Progress], ExportRecord]


@dataclass(frozen=True)
class Asker:
    """How networks of a family are asked what [measure] asks.

    Attributes:
        questions: (model, [measure], [evaluate]) → everything that is asked, once files and lengths are right.
        answer: (folder, questions, what the model answered that the run began with, or None for it itself, progress) →
            the answers, JSON-ready.
        scores: (questions, answers, those of that model or None, [evaluate]) → figures.
    """

    questions: Callable[[Path, MeasureSettings, EvaluateSettings], Questions]
    answer: Callable[[Path, Questions, dict[str, Any] | None, Progress], dict[str, Any]]
    scores: Callable[[Questions, dict[str, Any], dict[str, Any] | None, EvaluateSettings], list[Score]]


@dataclass(frozen=True)
class Family:
    """Everything that compression does with networks of one family; None or empty: it cannot.

    Attributes:
        hashes: SHA-256 of the files of a checkpoint by name, once names, shapes and formats are right; InputError if it
            is damaged, quantized already, or holds what compression does not handle.
        skeleton: the network of a checkpoint or an artifact without storage.
        samples: what a network is looked at with.
        quality: the name of what evaluation finds: "accuracy", "perplexity" or "similarity".
        evaluate: (folder, the model that the run began with, settings, progress) → how good it is.
        held_out: how many images or tokens evaluation runs.
        calls: what is timed.
        asker: what it answers to questions.
        pruner, training, quantizer: for steps that prune, train and quantize.
        rerun: (artifact, progress) → its parity measured again here; InputError where that exceeds the record's bound.
        exporter: for `penjing export`.
        as_graph: (checkpoint, its network as pruning takes it) → the same as a graph, which shares the weights; what
            is searched needs it.
        sees: whether rows with images are samples and questions for it.
    """

    name: FamilyName
    said: str
    hashes: Callable[[Path], dict[str, str]]
    skeleton: Callable[[Path], Skeleton]
    samples: Callable[[Path, DataSettings, Progress], Samples]
    quality: QualityName
    evaluate: Callable[[Path, Path, EvaluateSettings, Progress], Quality]
    held_out: Callable[[EvaluateSettings], int]
    calls: Callable[[Sequence[Path], MeasureSettings], Calls]
    asker: Asker | None = None
    pruner: Pruner | None = None
    training: Training | None = None
    quantizer: Quantizer | None = None
    rerun: Callable[[Path, Progress], tuple[Difference, ...]] | None = None
    exporter: Exporter | None = None
    as_graph: Callable[[Path, nn.Module], Network] | None = None
    sees: bool = False

    def need(self, part: str, what: str) -> Any:
        """The entry `part`, for `what`, such as "pruned".

        Raises:
            ConfigError: the family has none; says which families have.
        """
        found = getattr(self, part)
        if not found:
            others = [FAMILIES.get(name, name) for name in names_of("compress") if getattr(family(name), part)]
            raise ConfigError(f"{self.said} cannot be {what}; {', '.join(others) or 'no network'} can")
        return found


def family(name: FamilyName) -> Family:
    """The table of the family `name`."""
    return table_of("compress", name)


def family_at(folder: Path) -> Family:
    """The table of the family whose network `folder` holds.

    Raises:
        InputError: there is no `config.json`, or it names no family that can be compressed.
    """
    return family(family_of(folder))


def refuse_artifact(folder: Path) -> None:
    """What is compressed is a checkpoint.

    Raises:
        InputError: `folder` holds an artifact.
    """
    if is_artifact(folder):
        raise InputError(f"{folder} is quantized already; compress the checkpoint it was made from")
