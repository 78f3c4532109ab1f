"""`NAME=FOLDER`, `NAME:VERSION=FOLDER` and `--share NAME:VERSION=SHARE`: what several models are called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penjing.core.config import inline_toml
from penjing.core.errors import ConfigError
from penjing.serve.client.protocol import MODEL_NAME

UNSHARED = (
    "needs --openai PORT: requests are shared between versions where they come to one address, and each version has a "
    "gRPC port of its own"
)
HOW = "write NAME=FOLDER or NAME:VERSION=FOLDER, such as llm=build/smollm2-int8 or llm:2=build/b"
_ADAPTER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_NAME = re.compile(rf"(?P<name>{MODEL_NAME})(?::(?P<version>[1-9][0-9]{{0,8}}))?")


@dataclass(frozen=True)
class Named:
    """A model to serve. `version` is None where the name has one folder."""

    name: str
    version: int | None
    folder: Path
    share: float = 1.0
    """Of the requests for `name`."""

    @property
    def id(self) -> str:
        """What clients call just this one."""
        return self.name if self.version is None else f"{self.name}:{self.version}"


def are_named(arguments: Sequence[str]) -> bool:
    """Whether the arguments of `penjing serve` name their models; a single folder does not, even with a = in it."""
    return len(arguments) > 1 or ("=" in arguments[0] and not Path(arguments[0]).exists())


def read_names(arguments: Sequence[str], shares: Sequence[str]) -> list[Named]:
    """The models that the arguments of `penjing serve` name, each with its share of its name's requests.

    Raises:
        ConfigError: a text of another form, a name twice, versions beside a folder without one, impossible shares.
    """
    models: list[Named] = []
    for argument in arguments:
        name, equals, folder = argument.partition("=")
        if not equals or not folder:
            raise ConfigError(f"{argument!r} has no name, which each of several models needs; {HOW}")
        group, version = _parts(name, argument)
        models.append(Named(group, version, Path(folder)))
    seen: set[str] = set()
    for model in models:
        if model.id in seen:
            raise ConfigError(f"two models are called {model.id}; give each its own name or version")
        seen.add(model.id)
    for model in models:
        if model.version is not None and model.name in seen:
            raise ConfigError(f"{model.name} has versions and a folder without one; give that one a version too")
    return _with_shares(models, shares)


def adapter_settings(texts: Sequence[str], *, named: bool) -> list[str]:
    """The settings that `--adapter NAME=FOLDER` asks for, of models with names (`named`) `--adapter MODEL:NAME=FOLDER`.

    Raises:
        ConfigError: a text of another form, or a name twice.
    """
    how = "write --adapter MODEL:NAME=FOLDER, such as llm:alice=build/alice" if named else "write --adapter NAME=FOLDER"
    found: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        model, colon, adapter = name.rpartition(":")
        if not equals or not folder or bool(colon) != named:
            raise ConfigError(f"--adapter {text}: {how}")
        if not _ADAPTER.fullmatch(adapter):
            raise ConfigError(
                f"--adapter {text}: {adapter!r} cannot be an adapter's name, which has letters, digits, _ and - and "
                "begins with no digit, since numbers are versions"
            )
        if name in found:
            raise ConfigError(f"--adapter {text}: {name} is given twice; give each its own name")
        before = f"{model}." if named else ""
        found[name] = f"{before}adapters.{adapter}={inline_toml(str(Path(folder).absolute()))}"
    return list(found.values())


def changed_shares(shares: Mapping[str, float], given: Mapping[str, float]) -> dict[str, float]:
    """The shares of all versions of a model when some are `given`: the others keep their proportions in what is left.

    Args:
        shares: of each version now, by NAME:VERSION.

    Raises:
        ConfigError: no such version, or shares that are impossible.
    """
    for name, share in given.items():
        if name not in shares:
            raise ConfigError(f"{name!r} is no version that is served; those are {', '.join(shares)}")
        if not 0 <= share <= 1:  # also what is no number
            raise ConfigError(f"{name}={share:g}: a share lies between 0 and 1")
    taken = sum(given.values())
    others = [name for name in shares if name not in given]
    if taken > 1 + 1e-9 or (not others and taken < 1 - 1e-9):
        raise ConfigError(f"the shares are {taken:.10g} in all; make them 1, or leave one version out")
    before = sum(shares[name] for name in others)
    left = max(0.0, 1.0 - taken)
    found = dict(shares) | dict(given)
    for index, name in enumerate(others):
        found[name] = left * (shares[name] / before) if before else left * (index == 0)
    return found


def _parts(name: str, source: str) -> tuple[str, int | None]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"{source!r}: {name!r} cannot be a model's name; {HOW}")
    return found["name"], None if found["version"] is None else int(found["version"])


def _with_shares(models: list[Named], texts: Sequence[str]) -> list[Named]:
    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        versions = [model.id for model in models if model.version is not None]
        if name not in versions:
            known = f"those are {', '.join(versions)}" if versions else "no model has any"
            raise ConfigError(f"--share {text}: {name!r} is no version that is served; {known}")
        try:
            given[name] = float(value)
        except ValueError:
            raise ConfigError(f"--share {text}: {value!r} is no number; write --share {name}=0.1") from None
        if not 0 <= given[name] <= 1:
            raise ConfigError(f"--share {text}: a share lies between 0 and 1")
    return [Named(model.name, model.version, model.folder, _share(model, models, given)) for model in models]


def _share(model: Named, models: list[Named], given: dict[str, float]) -> float:
    """What was asked for; the first version without a share gets what the others leave."""
    group = [other.id for other in models if other.name == model.name]
    taken = sum(given.get(name, 0.0) for name in group)
    rest = [name for name in group if name not in given]
    if taken > 1 + 1e-9 or (not rest and taken < 1 - 1e-9):
        raise ConfigError(f"the shares of {model.name} are {taken:.10g} in all; make them 1, or leave one version out")
    if model.id in given:
        return given[model.id]
    return max(0.0, 1.0 - taken) if model.id == rest[0] else 0.0
