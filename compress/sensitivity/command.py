"""`penjing compress sensitivity`: to pruning, or to bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.measure.data import is_classifier
from penjing.core.progress import progress_bar


def run_sensitivity(
    checkpoint: Path, flags: dict[str, Any], *, bits: bool, out: Path | None, force: bool
) -> dict[str, Any]:
    """Measure, and show the table on standard error.

    Args:
        flags: of the command line by name; each of the studies takes its own.

    Raises:
        PenjingError: as `sensitivity` and both `sensitivity_to_bits` say.
    """
    if not bits:
        return _pruning(checkpoint, flags, out, force)
    return (_classifier_bits if is_classifier(checkpoint) else _decoder_bits)(checkpoint, flags, out, force)


def _pruning(checkpoint: Path, flags: dict[str, Any], out: Path | None, force: bool) -> dict[str, Any]:
    from penjing.compress.sensitivity.pruning import sensitivity, settings_of
    from penjing.compress.sensitivity.pruning_page import print_sensitivity

    settings = settings_of({name: value for name, value in flags.items() if name != "widths"})
    with progress_bar() as progress:
        result = sensitivity(checkpoint, settings, out=out, force=force, progress=progress)
    print_sensitivity(result)
    return result


def _classifier_bits(checkpoint: Path, flags: dict[str, Any], out: Path | None, force: bool) -> dict[str, Any]:
    from penjing.compress.sensitivity.classifier_bits import ClassifierBits, sensitivity_to_bits
    from penjing.compress.sensitivity.classifier_bits_page import print_classifier_bits
    from penjing.compress.sensitivity.widths import parse_widths

    settings = parse_widths(ClassifierBits, {name: flags[name] for name in ("data", "images", "widths")})
    with progress_bar() as progress:
        result = sensitivity_to_bits(checkpoint, settings, out=out, force=force, progress=progress)
    print_classifier_bits(result)
    return result


def _decoder_bits(checkpoint: Path, flags: dict[str, Any], out: Path | None, force: bool) -> dict[str, Any]:
    from penjing.compress.sensitivity.decoder_bits import DecoderBits, sensitivity_to_bits
    from penjing.compress.sensitivity.decoder_bits_page import print_decoder_bits
    from penjing.compress.sensitivity.widths import parse_widths

    settings = parse_widths(DecoderBits, {name: flags[name] for name in ("data", "windows", "widths")})
    with progress_bar() as progress:
        result = sensitivity_to_bits(checkpoint, settings, out=out, force=force, progress=progress)
    print_decoder_bits(result)
    return result
