"""What a run goes on from, and whether it is still the same run: its settings are kept with its state and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.train.state.checkpoint import Checkpoints
from penjing.train.state.state import Tree

# What a run may change and stay the same: how far it goes, what is kept and told of it, and who computes what. The
# names of settings and of whole sections.
FREE = (
    "output", "run", "steps", "epochs", "device", "compile", "checkpoint", "evaluation", "monitor", "alarms", "memory",
    "parallel", "data.micro_batch", "data.prefetch", "data.servers", "optimizer.fused",
)  # fmt: skip
_BOUND = ("parallel.gradients",)  # but for these: gradients of 8 bits are others


def find_state(
    checkpoints: Checkpoints,
    resume: str,
    recipe: Config,
    asked: Config,
    accept_changes: bool,
    note: Callable[[str], None],
) -> tuple[int, Tree] | None:
    """The state that a run of `recipe` goes on from, as (step, tree); None for one that starts.

    Args:
        resume: "never", "auto" (the newest intact one in `checkpoints`, if there is any) or a checkpoint's path.
        asked: the recipe before each "auto" in it became what suits the machine.
        accept_changes: go on although settings, which is noted, or the data have changed.

    Raises:
        InputError: what is to be resumed is missing or damaged.
        ConfigError: settings beyond `FREE` are not those that the state was made with; lists them.
    """
    if resume == "never":
        return None
    saved = checkpoints.load_newest(note) if resume == "auto" else checkpoints.load(Path(resume), checkpoints.world)
    if saved is None:
        return None
    step, tree = saved
    if "recipe" not in tree["run"]:
        note(f"the state of step {step} was saved without its settings; whether they have changed is not known")
        return saved
    changes = changed_settings(tree["run"]["recipe"], recipe, asked)
    if changes and not accept_changes:
        raise ConfigError(
            f"the state of step {step} was made with other settings: {'; '.join(changes)}. Set them as they were, go "
            "on with the new ones by --accept-changes, or start another run (another output, or --force without "
            "--resume)"
        )
    if changes:
        note(f"goes on from step {step} with other settings: {'; '.join(changes)}")
    if accept_changes:
        tree["stream"].pop("content", None)  # other data are accepted too
    if any(change.startswith(("optimizer.name ", "optimizer.not_muon ")) for change in changes):
        note("what the optimiser before remembered is of no use to the new one, which starts without")
        tree["optimizer"] = {}
    return saved


def changed_settings(saved: dict[str, Any], recipe: Config, asked: Config) -> list[str]:
    """A line for every setting, other than `FREE` ones, that is not what it was.

    Args:
        saved: `model_dump(mode="json")` of a recipe of the same class; settings that it lacks, since they are newer,
            had their defaults.
        asked: see `find_state`.
    """
    try:
        before = type(recipe).model_validate(saved).model_dump(mode="json")
    except ValidationError:  # of a version with other settings
        before = saved
    now = recipe.model_dump(mode="json")
    chosen = {key for key, _, wanted in _differences(now, asked.model_dump(mode="json"), "") if wanted == "auto"}
    return [
        f"{key} was {_show(old)}, is {_show(new)}" + (' (of "auto")' if key in chosen else "")
        for key, old, new in _differences(before, now, "")
        if _matches(key, _BOUND) or not _matches(key, FREE)
    ]


def _differences(old: Any, new: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield prefix, old, new


def _matches(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _show(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
