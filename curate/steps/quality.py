"""Quality as examples show it: a text encoder and a head on few labels judge, and a fastText student that has learnt
from them takes the clear cases off them (as FineWeb-Edu, https://arxiv.org/abs/2406.17557, with a cascade)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress
from penjing.curate.documents.document import Document
from penjing.curate.learned.encoder import DocumentEncoder, encoder_files
from penjing.curate.learned.facts import Learned, StudentFacts, histogram
from penjing.curate.learned.heads import area_under_curve, calibration_error, learn_head, load_head, reliability
from penjing.curate.learned.labels import Judge, Label, read_labels
from penjing.curate.learned.student import Student, fit_student, sure_band
from penjing.curate.steps.base import Judging, LearningStep
from penjing.curate.steps.language import detect, language_model

LABELS_FILE = "labels.jsonl"
_HEAD, _STUDENT, _RULE = "head.json", "student.bin", "rule.json"
_FEWEST_LABELS, _FEWEST_OF_A_KIND, _FEWEST_OF_A_LANGUAGE = 20, 5, 5
_FEWEST_FOR_STUDENT = 300  # documents of the sample
_KNOTS = 33  # of the map from a student's score to a probability


class QualityStep(LearningStep):
    """Keep documents that are like those judged good."""

    kind: Literal["quality"] = Field(description="Quality as examples show it.")
    encoder: Path = Field(
        default=Path("build/minilm-int8"),
        description="The artifact of a text encoder, as recipes/minilm-int8.toml makes it.",
    )
    labels: Path | None = Field(
        default=None,
        description='Judged examples: lines such as {"text": "…", "label": 1}, at least 20 and of both kinds.',
    )
    label_with: str = Field(
        default="",
        description="In place of `labels`, the address of a model that judges, by OpenAI's interface, such as "
        "http://localhost:8080/v1; its key is read from OPENAI_API_KEY. Its judgements are kept in the corpus's "
        "`labels/`.",
    )
    label_model: str = Field(default="", description="The name of that model; by default the only one there is.")
    wanted: str = Field(
        default="clear, informative text that is whole and well written", description="What that model is asked for."
    )
    num_labels: int = Field(default=200, ge=_FEWEST_LABELS, description="Documents that it judges.")
    label_seconds: float = Field(default=120, gt=0, description="Seconds that one of its answers may take.")
    good: float | None = Field(
        default=None, description="A label from which a document is good: by default 3 of label_with, else 1."
    )
    least: float = Field(default=0.5, ge=0, le=1, description="The least probability of being good that is kept.")
    keep: float | None = Field(
        default=None, gt=0, lt=1, description="In place of `least`: the share of documents that is kept, about."
    )
    precision: float | None = Field(
        default=None, gt=0, lt=1, description="In place of `least`: the share of good ones among what is kept, about, "
        "as far as the labels tell.",
    )  # fmt: skip
    windows: int = Field(
        default=1, ge=1, le=64, description="Pieces of 1000 characters of a document that the encoder reads: the "
        "first, the last and some between; 1 is the first alone.",
    )  # fmt: skip
    student_errors: float = Field(
        default=0.03,
        ge=0,
        lt=0.5,
        description="Share of the documents that the student decides alone which the encoder would judge otherwise; at "
        "0 the encoder judges all.",
    )

    @model_validator(mode="after")
    def _one_source_of_labels(self) -> QualityStep:
        if (self.labels is None) == (not self.label_with):
            raise ValueError("quality needs `labels`, a file, or `label_with`, the address of a model: give one")
        if self.keep is not None and self.precision is not None:
            raise ValueError("keep and precision both choose the threshold; give one")
        if self.label_with and self.num_labels > self.sample:
            raise ValueError(
                f"num_labels={self.num_labels} are to be judged of sample={self.sample} documents that the step looks "
                "at; raise sample"
            )
        return self

    def files(self) -> tuple[Path, ...]:
        """See `StepConfig`."""
        if self.labels is not None and not self.labels.is_file():
            read_labels(self.labels)  # refuses it
        return encoder_files(self.encoder) + (() if self.labels is None else (self.labels,))

    def filter(self, folder: Path) -> Quality:
        """See `StepConfig`."""
        return Quality(self, folder)

    def learn(self, folder: Path, documents: list[Document], kept: Path, progress: Progress) -> Learned:
        """See `LearningStep`."""
        labels, good = self._labels(documents, kept, progress)
        y = np.array([each.value >= good for each in labels])
        if len(y) < _FEWEST_LABELS or min(y.sum(), (~y).sum()) < _FEWEST_OF_A_KIND:
            raise InputError(
                f"steps.quality: of {len(y)} labels {int(y.sum())} are {good:g} and more, which counts as good; "
                f"at least {_FEWEST_LABELS} are needed, {_FEWEST_OF_A_KIND} of each kind. Judge more, or change `good`"
            )
        languages = _languages(labels)
        mine = [each for each in documents if not each.language or each.language in languages]
        if not languages and documents and not mine:
            raise InputError(
                f"steps.quality: no language has {_FEWEST_OF_A_LANGUAGE} labels, so that no document would be judged. "
                "Judge more texts of one language"
            )
        encoder = DocumentEncoder(self.encoder, self.windows)
        progress.start("learning from labels", len(labels) + len(documents))
        vectors = _embedded(encoder, [each.text for each in labels], progress)
        head, held = learn_head(vectors, y)
        sample = head(_embedded(encoder, [each.text for each in mine], progress)) if mine else np.empty(0)
        progress.advance(len(documents) - len(mine))
        threshold, chosen = self._threshold(sample, held, y)
        student, knots = None, None
        if self.student_errors and len(mine) >= _FEWEST_FOR_STUDENT:
            student, knots = self._student(folder, [each.text for each in mine], sample, threshold)
        rows = reliability(held, y)
        head.save(folder / _HEAD)
        rule = {"threshold": threshold, "languages": languages, "knots": knots}
        rule |= {"low": student.low, "high": student.high} if student else {}
        (folder / _RULE).write_text(json.dumps(rule), encoding="utf-8")
        if self.label_with:
            with open(folder / LABELS_FILE, "w", encoding="utf-8") as file:
                for each in labels:
                    row = {"text": each.text, "label": each.value, "language": each.language}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return Learned(
            speaks_of="good", examples=len(y), positive=int(y.sum()), sample=len(mine), auc=area_under_curve(held, y),
            calibration_error=calibration_error(rows), reliability=rows, thresholds={"": threshold}, chosen=chosen,
            histogram=histogram(sample), student=student,
        )  # fmt: skip

    def _labels(self, documents: list[Document], kept: Path, progress: Progress) -> tuple[list[Label], float]:
        """The labels, and the one from which a document is good."""
        if self.labels is None:
            judge = Judge(self.label_with, self.label_model, self.wanted, self.label_seconds)
            labels, good = judge.labels(documents, self.num_labels, kept, progress), 3.0
        else:
            labels, good = read_labels(self.labels), 1.0
        return labels, good if self.good is None else self.good

    def _threshold(
        self, sample: NDArray[np.float64], held: NDArray[np.float64], y: NDArray[np.bool_]
    ) -> tuple[float, str]:
        if self.keep is not None:
            if not len(sample):
                raise InputError(
                    "steps.quality: no document of a language of the labels; keep has nothing to choose by"
                )
            return float(np.quantile(sample, 1 - self.keep)), f"keeps {self.keep:.0%} of the sample"
        if self.precision is None:
            return self.least, "least, as the recipe says"
        order = np.argsort(-held, kind="stable")
        right = np.cumsum(y[order]) / np.arange(1, len(y) + 1)
        fine = np.flatnonzero((right >= self.precision) & (np.arange(1, len(y) + 1) >= _FEWEST_OF_A_KIND))
        if not len(fine):
            raise InputError(
                f"steps.quality: no threshold has a precision of {self.precision:g} on the labels that were held back; "
                "the best five have "
                f"{right[_FEWEST_OF_A_KIND - 1]:.2f}. Judge more texts, or ask for less"
            )
        return float(held[order[fine[-1]]]), f"precision {right[fine[-1]]:.3f} on labels that were held back"

    def _student(
        self, folder: Path, texts: list[str], sample: NDArray[np.float64], threshold: float
    ) -> tuple[StudentFacts, list[list[float]]]:
        """Half of the sample teaches, a quarter says where the student is sure, a quarter how well that ends."""
        yes, turn = sample >= threshold, np.random.default_rng(0).permutation(len(sample)) % 4
        taught = np.flatnonzero(turn < 2)
        student = fit_student(folder / _STUDENT, [texts[place] for place in taught], yes[taught])
        scores = np.array([student(texts[place]) if turn[place] >= 2 else 0.0 for place in range(len(texts))])
        low, high = sure_band(scores[turn == 2], yes[turn == 2], self.student_errors)
        told, held = scores[turn == 3], yes[turn == 3]
        sure = (told < low) | (told >= high)
        points = np.linspace(0, 1, _KNOTS)
        knots = [np.quantile(each[turn >= 2], points).tolist() for each in (scores, sample)]
        agreement = float((np.where(sure, told >= high, held) == held).mean())
        return StudentFacts(low=low, high=high, decided=float(sure.mean()), agreement=agreement), knots


class Quality(Judging):
    """See `QualityStep`."""

    def __init__(self, config: QualityStep, folder: Path) -> None:
        super().__init__()
        rule = read_json_object(folder / _RULE)
        self._threshold, self._languages = float(rule["threshold"]), frozenset(rule["languages"])
        self._head = load_head(folder / _HEAD)
        self._encoder = DocumentEncoder(config.encoder, config.windows)
        self._student = None if rule["knots"] is None else Student(folder / _STUDENT)
        self._low, self._high = float(rule.get("low", -1.0)), float(rule.get("high", 2.0))
        self._knots: list[list[float]] = rule["knots"] or []

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        if document.language and document.language not in self._languages:
            self.decided[f"nothing: no labels in {document.language}"] += 1
            return None
        score = -1.0 if self._student is None else self._student(document.text)
        if self._student is None or self._low <= score < self._high:
            self.decided["encoder"] += 1
            document.quality = float(self._head(self._encoder(document.text)[None])[0])
            good = document.quality >= self._threshold
        else:
            self.decided["student"] += 1
            good = score >= self._high
            bounds = (self._threshold, 1.0) if good else (0.0, float(np.nextafter(self._threshold, 0)))
            document.quality = float(np.clip(np.interp(score, self._knots[0], self._knots[1]), *bounds))
        return None if good else "low quality"


def _embedded(encoder: DocumentEncoder, texts: list[str], progress: Progress) -> NDArray[np.float32]:
    vectors = []
    for text in texts:
        vectors.append(encoder(text))
        progress.advance()
    return np.stack(vectors)


def _languages(labels: list[Label]) -> list[str]:
    """Languages that have labels enough; those that no label names are told by lid.176."""
    model = None
    counts: Counter[str] = Counter()
    for each in labels:
        if not each.language and model is None:
            model = language_model()
        counts[each.language or detect(model, each.text)[0]] += 1
    return sorted(language for language, count in counts.items() if language and count >= _FEWEST_OF_A_LANGUAGE)
