"""`penjing export`: an artifact in the form that another engine reads, which passes the parity gate there."""

from __future__ import annotations

from pathlib import Path

from penjing.compress.export.record import ExportRecord, Form
from penjing.compress.families.base import Exporter, family_at
from penjing.compress.quantize.targets import TargetName
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import check_writable
from penjing.core.progress import Progress, megabytes


def export_artifact(
    folder: Path, form: Form, out: Path, *, target: TargetName | None = None, force: bool, progress: Progress
) -> ExportRecord:
    """Write the artifact in `folder` as `form` to `out`, which appears when it is complete and has passed its gate.

    A form is a file, with a record beside it (`OUT.json`), or a folder that holds the record: "onnx" of a decoder,
    "compressed-tensors" and "compressed-tensors-weights".

    Args:
        target: the engine that an ONNX file is for; None takes the artifact's own, for a decoder a form that is exact
            on every processor.

    Raises:
        ConfigError: the target cannot express the artifact, or the form has no targets.
        InputError: damaged, of a family that has no such form, beyond its parity bound, or `out` exists.
        SetupError: TensorRT or a GPU is missing; disk full, no permission.
    """
    family = family_at(folder)
    exporter: Exporter = family.need("exporter", f"written as {form}")
    if form not in exporter.forms:
        known = ", ".join(exporter.forms)
        raise InputError(f"{folder} is {family.said}, which is not written as {form}; {known} or model-repository is")
    if target is not None and form != "onnx":
        raise ConfigError(f"--target is for '--to onnx'; {form} has one form")
    if out.absolute().is_relative_to(folder.absolute()):
        raise InputError(f"{out} lies in the artifact, whose files are fixed by their hashes; choose another place")
    if form not in exporter.folders:
        _check_file(out, force, form)
    return exporter.write(folder, form, out, target, force, progress)


def _check_file(out: Path, force: bool, form: Form) -> None:
    if out.is_dir():
        name = {"tensorrt": "model.engine"}.get(form, f"model.{form}")
        raise InputError(f"{out} is a folder; give the name of the file to write, such as {out / name}")
    check_writable(out)
    if out.exists() and not force:
        raise InputError(f"{out} already exists; replace it with --force, or choose another file")


def print_export(out: Path, record: ExportRecord) -> None:
    """Say on standard error what was written, how far it is, and what it needs."""
    from rich.console import Console

    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.print(f"wrote {out} ({megabytes(sum(path.stat().st_size for path in files))})")
    for each in record.differences:
        end = "" if each.same is None else f", {each.same:.1%} the same"
        console.print(f"  {each.between[1]} against {each.between[0]}, {each.quantity}: mean {each.mean:.2g}{end}")
    for note in record.notes:
        console.print(f"  {note}")
    for name, reason in record.unmeasured.items():
        console.print(f"  {name}: not measured here: {reason}")
    for key, value in record.session_options.items():
        console.print(f"  session option {key} = {value}: exact integers on x64 processors without VNNI")
