"""The studies that `penjing compress sensitivity` makes, and of which networks."""

from __future__ import annotations

from functools import partial

from penjing.compress.sensitivity.bits import ClassifierBits, DecoderBits, calibrated_on, classifier_bits, decoder_bits
from penjing.compress.sensitivity.graphs import GraphBits, GraphPruning, named_files, to_bits, to_pruning
from penjing.compress.sensitivity.pruning import PruningSettings, by_images, by_text, study_of
from penjing.compress.sensitivity.study import Measure, Sensitivity

_FLAGS = ("data", "ratios", "method", "images", "windows")
TO_PRUNING = Sensitivity(
    "pruning",
    "sensitivity",
    ("ratios", float),
    "pruning",
    {
        "decoder": Measure(PruningSettings, _FLAGS, partial(study_of, by_text)),
        "classifier": Measure(PruningSettings, _FLAGS, partial(study_of, by_images)),
        "graph": Measure(GraphPruning, ("data", "ratios", "method", "images", "source"), to_pruning, named_files),
    },
)
"""Cells have `removed`, how many units left."""
TO_BITS = Sensitivity(
    "bits",
    "bits",
    ("widths", int),
    "rounding",
    {
        "decoder": Measure(DecoderBits, ("data", "windows", "widths"), decoder_bits, calibrated_on),
        "classifier": Measure(ClassifierBits, ("data", "images", "widths"), classifier_bits),
        "graph": Measure(GraphBits, ("data", "images", "widths", "source"), to_bits, named_files),
    },
)
"""Cells of decoders have a `score`, those of classifiers a `divergence`, in nats; records of decoders have `linears`
[{name, parameters, scores: {width: score}}] besides. Cells of graphs have an `agreement` where there are classes."""
