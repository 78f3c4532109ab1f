"""Noise: text that is garbled, shuffled, machine-made or repeated. Nobody labels it: clean documents are corrupted in
known ways, and two heads learn to tell a document from what became of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress
from penjing.core.text.documents import read_documents
from penjing.core.text.source_files import files_below
from penjing.curate.documents.document import Document
from penjing.curate.learned.conformal import enough_for, upper_threshold
from penjing.curate.learned.corruptions import CORRUPTIONS
from penjing.curate.learned.encoder import WINDOW_CHARS, DocumentEncoder, encoder_files
from penjing.curate.learned.facts import Learned, histogram
from penjing.curate.learned.heads import area_under_curve, calibration_error, reliability
from penjing.curate.learned.surface import Usual, load_usual, usual_of
from penjing.curate.learned.twoheads import Looks, TwoHeads, learn_two_heads, load_two_heads
from penjing.curate.steps.base import Judging, LearningStep

_HEADS, _USUAL, _RULE = "heads.json", "usual.npz", "rule.json"
_FEWEST = 200  # clean documents
_SHORTEST = 200  # characters of a piece that shows what is usual
_OF_A_LANGUAGE = 20  # documents of the sample, else what is usual in it is not known
_OF_EACH = 3  # corruptions of a document
_KEPT_BACK = 3  # one document in so many sets the threshold, and nothing is learned from it


class NoiseStep(LearningStep):
    """Drop documents that look like corrupted ones."""

    kind: Literal["noise"] = Field(description="No garbled, shuffled, machine-made or repeated text.")
    encoder: Path = Field(
        default=Path("build/minilm-int8"),
        description="The artifact of a text encoder, as recipes/minilm-int8.toml makes it.",
    )
    clean: tuple[Path, ...] = Field(
        default=(),
        description="Files and folders of texts that are known to be clean, like the documents in language and kind; "
        "by default the documents themselves, most of which must be clean then.",
    )
    sample: int = Field(default=1000, ge=_FEWEST, description="Clean documents that are corrupted to learn from.")
    flagged: float = Field(
        default=0.01,
        gt=0,
        lt=0.5,
        description="Share of clean documents that may be dropped, of each domain. Where the documents themselves are "
        "taken for clean, it is about the share that is dropped.",
    )
    windows: int = Field(
        default=1, ge=1, le=64, description="Pieces of 1000 characters of a document that are looked at; the noisiest "
        "counts.",
    )  # fmt: skip

    def files(self) -> tuple[Path, ...]:
        """See `StepConfig`."""
        found = (file for path in self.clean if path.exists() for file in files_below(path))
        return (*encoder_files(self.encoder), *found)

    def filter(self, folder: Path) -> Noise:
        """See `StepConfig`."""
        return Noise(self, folder)

    def learn(self, folder: Path, documents: list[Document], kept: Path, progress: Progress) -> Learned:
        """See `LearningStep`."""
        texts, domains = self._clean(documents)
        counts = Counter(each.language for each in documents if not self.clean)
        languages = sorted(language for language, count in counts.items() if language and count >= _OF_A_LANGUAGE)
        if counts and not languages and "" not in counts:
            raise InputError(
                f"steps.noise: of no language there are {_OF_A_LANGUAGE} documents to learn from, so that none would "
                "be judged. Raise `sample`, name texts that are clean by `clean`, or leave the step out"
            )
        places = [place for place, text in enumerate(texts) if len(text) >= _SHORTEST]
        if len(places) < _FEWEST:
            raise InputError(
                f"steps.noise: {len(places)} clean documents of {_SHORTEST} characters and more; {_FEWEST} are needed. "
                "Name texts that are clean by `clean`, or leave the step out"
            )
        back = list(range(0, len(texts), _KEPT_BACK))
        kept_back = [(texts[place], domains[place]) for place in back]
        texts = [texts[place] for place in sorted(set(places) - set(back))]
        encoder = DocumentEncoder(self.encoder, 1)
        pieces = [_piece(text, place) for place, text in enumerate(texts)]
        usual = usual_of([(piece, encoder.num_tokens(piece)) for piece in pieces], texts)
        looks, kinds = [], []
        progress.start("learning from made-up noise", len(texts))
        for place, piece in enumerate(pieces):
            dice = np.random.default_rng([1, place])
            chosen = ["", *dice.choice(list(CORRUPTIONS), _OF_EACH, replace=False).tolist()]
            for kind in chosen:
                text = CORRUPTIONS[kind](piece, pieces, dice)[:WINDOW_CHARS] if kind else piece
                looks.append(Looks(encoder(text), usual.features(text, encoder.num_tokens(text), texts[place])))
                kinds.append(kind)
            progress.advance()
        noisy, of = np.array([bool(kind) for kind in kinds]), np.repeat(np.arange(len(texts)), _OF_EACH + 1)
        heads, held = learn_two_heads(looks, noisy, of)
        judge = NoiseHeads(DocumentEncoder(self.encoder, self.windows), heads, usual)
        scores = np.array([judge(text) for text, _ in kept_back])
        thresholds, promised = self._thresholds(scores, np.array([domain for _, domain in kept_back]))
        heads.save(folder / _HEADS)
        usual.save(folder / _USUAL)
        rule = {"thresholds": thresholds, "languages": None if self.clean else languages}
        (folder / _RULE).write_text(json.dumps(rule), encoding="utf-8")
        rows = reliability(held, noisy)
        aucs = {kind: _auc_of(kind, np.array(kinds), held) for kind in CORRUPTIONS}
        return Learned(
            speaks_of="noise", examples=len(kinds), positive=int(noisy.sum()), sample=len(texts),
            auc=area_under_curve(held, noisy), calibration_error=calibration_error(rows), reliability=rows, kinds=aucs,
            thresholds=thresholds, chosen=f"{promised} of clean documents are expected above",
            histogram=histogram(scores),
        )  # fmt: skip

    def _clean(self, documents: list[Document]) -> tuple[list[str], list[str]]:
        """Clean texts and their domains ("" where `clean` names them)."""
        if not self.clean:
            return [each.text for each in documents], [each.domain for each in documents]
        records = list(read_documents(list(self.clean), "steps.clean"))
        texts = [record.text for record in records if record.text is not None]
        order = np.random.default_rng(0).permutation(len(texts))[: self.sample]
        return [texts[place] for place in order], [""] * len(order)

    def _thresholds(self, scores_N: NDArray[np.float64], domains_N: NDArray[np.str_]) -> tuple[dict[str, float], str]:
        """By domain, where it has documents enough to promise the share; of all of them as "". And what is promised."""
        threshold, share = upper_threshold(scores_N, self.flagged)
        found = {"": threshold}
        for domain in sorted(set(domains_N.tolist()) - {""}):
            mine = scores_N[domains_N == domain]
            if len(mine) >= enough_for(self.flagged):
                found[domain] = upper_threshold(mine, self.flagged)[0]
        promised = f"{share:.1%}"
        if few := sorted(set(domains_N.tolist()) - {""} - found.keys()):
            promised += (
                f" (over all domains: {', '.join(few)} have fewer than the {enough_for(self.flagged)} documents that a "
                "threshold of their own needs)"
            )
        return found, promised


class NoiseHeads:
    """How noisy a document is: as the noisiest of its windows."""

    def __init__(self, encoder: DocumentEncoder, heads: TwoHeads, usual: Usual) -> None:
        self._encoder, self._heads, self._usual = encoder, heads, usual

    def __call__(self, text: str) -> float:
        """0 to 1."""
        looks = [
            Looks(vector, self._usual.features(piece, self._encoder.num_tokens(piece)))
            for piece, vector in self._encoder.pieces(text)
        ]
        return float(self._heads(looks).max())


class Noise(Judging):
    """See `NoiseStep`."""

    def __init__(self, config: NoiseStep, folder: Path) -> None:
        super().__init__()
        encoder = DocumentEncoder(config.encoder, config.windows)
        self._judge = NoiseHeads(encoder, load_two_heads(folder / _HEADS), load_usual(folder / _USUAL))
        rule = read_json_object(folder / _RULE)
        self._thresholds: dict[str, float] = rule["thresholds"]
        self._languages: list[str] | None = rule["languages"]  # None: all, as `clean` says nothing of them

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        if document.language and self._languages is not None and document.language not in self._languages:
            self.decided[f"nothing: too few documents in {document.language}"] += 1
            return None
        document.noise = self._judge(document.text)
        self.decided["heads"] += 1
        threshold = self._thresholds.get(document.domain, self._thresholds[""])
        return "looks like noise" if document.noise > threshold else None


def _piece(text: str, place: int) -> str:
    """A window of `text`, not always its beginning."""
    begin = int(np.random.default_rng([0, place]).integers(max(1, len(text) - WINDOW_CHARS)))
    return text[begin : begin + WINDOW_CHARS]


def _auc_of(kind: str, kinds: NDArray[np.str_], held: NDArray[np.float64]) -> float:
    chosen = (kinds == kind) | (kinds == "")
    return area_under_curve(held[chosen], kinds[chosen] == kind)
