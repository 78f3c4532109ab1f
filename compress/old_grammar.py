"""Recipes once had other sections: an error prints what they are called now."""

from __future__ import annotations

from typing import Any

from penjing.core.config import dump_toml
from penjing.core.errors import ConfigError

SECTIONS = ("transform", "quantize", "calibration", "calibrate", "texts", "bounds")

OLDER = (*SECTIONS, "int8")  # keys of it, at any depth


def refuse_old_sections(values: dict[str, Any], source: str) -> None:
    """Refuse a recipe of the older grammar.

    Raises:
        ConfigError: it is one; the message holds the same settings in today's spelling.
    """
    found = [f"[{name}]" for name in SECTIONS if name in values]
    steps = values.get("steps", [])
    found += [
        f"[steps.{place}.int8]"
        for place, step in enumerate(steps if isinstance(steps, list) else [])
        if isinstance(step, dict) and "int8" in step
    ]
    if found:
        raise ConfigError(
            f"{source}: {', '.join(found)} are sections of an older grammar. Today the same is written\n\n"
            f"{dump_toml(_today(values))}"
        )


def _today(values: dict[str, Any]) -> dict[str, Any]:
    old = {name: dict(_table(values.get(name))) for name in SECTIONS}
    new = {name: value for name, value in values.items() if name not in (*SECTIONS, "steps")}
    data = _table(new.pop("data", None)) | old["calibrate"] | _calibration(old["calibration"])
    evaluate, guard = _table(new.pop("evaluate", None)), _table(new.pop("guard", None))
    steps = [dict(step) for step in values.get("steps", []) if isinstance(step, dict)]
    for step in steps:
        int8 = _table(step.pop("int8", None))
        step |= {"transform": _table(int8.get("transform"))} if "transform" in int8 else {}
        step |= _table(int8.get("quantize"))
        data |= _calibration(_table(int8.get("calibration")))
    if "calibrate" in old["texts"]:
        data["texts"] = old["texts"]["calibrate"]
    if "evaluate" in old["texts"]:
        evaluate["texts"] = old["texts"]["evaluate"]
    settings = old["quantize"]
    if "parity" in old["bounds"]:
        settings["parity_bound"] = round(1 - old["bounds"]["parity"], 9)
    if not steps or settings or old["transform"]:
        found = [step for step in steps if step.get("kind") == "quantize"]
        step: dict[str, Any] = found[0] if found else {"kind": "quantize"}
        steps += [] if found else [step]
        step |= settings
        if old["transform"]:
            step["transform"] = _table(step.get("transform")) | old["transform"]
    if "cosine" in old["bounds"]:
        guard["similarity_loss"] = round(1 - old["bounds"]["cosine"], 9)
    sections = {"data": data, "evaluate": evaluate, "guard": guard}
    return new | {name: section for name, section in sections.items() if section} | {"steps": steps}


def _calibration(values: dict[str, Any]) -> dict[str, Any]:
    return {"tokens" if name == "num_tokens" else name: value for name, value in values.items()}


def _table(values: Any) -> dict[str, Any]:
    return dict(values) if isinstance(values, dict) else {}
