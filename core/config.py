"""Strict, frozen configuration objects and TOML recipes with `--set section.key=value` overrides."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from penjing.core.errors import ConfigError, not_utf8
from penjing.core.recipes import named_recipe

C = TypeVar("C", bound="Config")


def _named(value: Path) -> Path:
    if not value.name or "\0" in str(value):
        raise ValueError(f"{str(value)!r} is no name of a folder of its own; give one, such as build/mine")
    return value


OutputFolder = Annotated[Path, AfterValidator(_named)]
"""A folder that a run makes: it has a name, beside which work folders take theirs."""


class Config(BaseModel):
    """Base of every configuration: frozen, and an unknown key is an error that lists the valid ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    OTHERS: ClassVar[tuple[str, ...]] = ()
    """Keys that are no fields, which a validator takes as another spelling or refuses with a reason."""


def parse_config(config_type: type[C], values: dict[str, Any], source: str, prefix: str = "") -> C:
    """Validate `values` as `config_type`.

    Args:
        prefix: stands before the names of keys, such as "steps.0." for a section of a larger file.

    Raises:
        ConfigError: one line for every wrong key or value, with the valid keys; `source` names the origin.
    """
    try:
        return config_type.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()
        # Which keys are right follows from a section's kind: while that is wrong, only it is told.
        wrong = [entry for entry in wrong if entry["type"].startswith("union_tag_")] or wrong
        # Entries of a list that are wrong are not counted, and the list seems too short for want of them.
        told = [entry["loc"] for entry in wrong]
        short = [entry for entry in wrong if entry["type"] == "too_short"]
        inside = [entry for entry in short if any(loc[: len(entry["loc"])] == entry["loc"] != loc for loc in told)]
        lines = [_explain(config_type, entry, prefix) for entry in wrong if entry not in inside]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def load_recipe(config_type: type[C], path: Path, overrides: list[str] | None = None) -> C:
    """Read a TOML recipe and apply `section.key=value` overrides (values are TOML; a bare word is a string).

    Raises:
        ConfigError: unreadable file, TOML syntax, unknown or invalid key.
    """
    return parse_config(config_type, read_recipe(path, overrides), str(path))


def read_recipe(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The values of a TOML recipe after its overrides, not validated yet.

    Where there is no such file, `path` may be the name of a recipe that comes with penjing.

    Raises:
        ConfigError: unreadable file, TOML syntax, an override of another form.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder, not a recipe; name a TOML file, or a recipe that 'penjing recipe list' shows"
        )
    try:
        # Editors of Windows begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig") if path.exists() else named_recipe(str(path))
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} cannot be read: {not_utf8(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
    for override in overrides or []:
        apply_override(values, override)
    return values


def key_of(*parts: Any) -> str:
    """Hexadecimal SHA-256 of JSON-ready values: equal for two runs exactly if they are made of the same."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def dump_toml(values: dict[str, Any]) -> str:
    """JSON-ready values as TOML that `read_recipe` gives back: sections for dictionaries, `[[name]]` for lists of them.

    Keys whose value is None are left out: TOML has none.
    """
    return "\n".join(_toml_lines(values, "")).strip("\n") + "\n"


def _toml_lines(values: dict[str, Any], prefix: str) -> list[str]:
    lines, later = [], []
    for name, value in values.items():
        key = _toml_key(name)
        if isinstance(value, dict):
            later += ["", f"[{prefix}{key}]", *_toml_lines(value, f"{prefix}{key}.")]
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for each in value:
                later += [
                    "",
                    f"[[{prefix}{key}]]",
                    *(f"{_toml_key(name)} = {inline_toml(part)}" for name, part in _present(each)),
                ]
        elif value is not None:
            lines.append(f"{key} = {inline_toml(value)}")
    return [*lines, *later]


def inline_toml(value: Any) -> str:
    """A JSON-ready value as TOML on one line, as it stands after `key =`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(name)} = {inline_toml(part)}" for name, part in _present(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline_toml, value)) + "]"
    # JSON's strings, numbers and booleans are TOML as they stand, but for surrogate pairs and the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else inline_toml(name)


def _present(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in values.items() if value is not None]


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one value of a nested dictionary from the text `section.key=value`; entries of a list count from 0, as in
    `steps.0.ratio=0.2`, and a name with a dot is quoted.

    Raises:
        ConfigError: the text has another form.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: write section.key=value, for example --set quantize.alpha=0.5")
    *sections, name = _parts_of(key.strip())
    inner: Any = values
    for section in sections:
        inner = inner[_place(inner, section, override)] if isinstance(inner, list) else inner.setdefault(section, {})
        if not isinstance(inner, dict | list):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
    if isinstance(inner, list):
        inner[_place(inner, name, override)] = _parse_value(text)
    else:
        inner[name] = _parse_value(text)


def _parts_of(key: str) -> list[str]:
    """The names of a dotted key; one that holds a dot itself stands in quotes, as in `space."clip.norm"`."""
    outside_quotes = r'\.(?=(?:[^"]*"[^"]*")*[^"]*$)'
    return [re.sub(r'^"(.*)"$', r"\1", part) for part in re.split(outside_quotes, key)]


def _place(entries: list[Any], text: str, override: str) -> int:
    if not text.isdecimal() or int(text) >= len(entries):
        raise ConfigError(f"--set {override!r}: {text!r} is no place in a list of {len(entries)}; they count from 0")
    return int(text)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(config_type: type[BaseModel], entry: Any, prefix: str) -> str:
    where, owner, forms = _locate(config_type, entry["loc"])
    where = f"{prefix}{where}" if where else prefix.rstrip(".")
    if entry["type"].startswith("union_tag_"):
        return _explain_kind(forms, entry, where)
    if entry["type"] != "extra_forbidden":
        if entry["type"] == "value_error":  # what a validator of ours says, behind pydantic's "Value error, "
            message = str(entry["ctx"]["error"])
        else:
            message = entry["msg"][:1].lower() + entry["msg"][1:].replace("a valid tuple", "a list")
            message = re.sub("^tuple ", "list ", message)  # as TOML calls it
        if not where:  # of all values together, which nobody wants to read again
            return message
        return f"{where}: {message}" + ("" if entry["type"] == "missing" else f" (got {_short(entry['input'])})")
    valid = sorted(owner.model_fields) if owner is not None else []
    near = difflib.get_close_matches(where.rpartition(".")[2], valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown key {where!r}{hint} Valid keys: {', '.join(valid)}"


def _explain_kind(forms: list[type[BaseModel]], entry: Any, where: str) -> str:
    """The key that tells the forms of a section apart is wrong or missing."""
    key, tag = entry["ctx"]["discriminator"].strip("'"), entry["ctx"].get("tag")
    valid = [str(value) for form in forms for value in _literals(form.model_fields[key])]
    if tag is None:
        return f"{where}.{key}: field required; choose one of {', '.join(valid)}"
    near = difflib.get_close_matches(tag, valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{where}.{key}: {tag!r} is unknown{hint} Choose one of {', '.join(valid)}"


def _locate(
    config_type: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[str, type[BaseModel] | None, list[type[BaseModel]]]:
    """The dotted name of a key as the recipe spells it, the section that holds it, and the forms it may have if it is a
    section itself.

    Where a section has several forms, told apart by one of its keys, pydantic puts that key's value into the location.
    """
    names: list[str] = []
    forms: list[type[BaseModel]] = [config_type]
    owner: type[BaseModel] | None = None
    for part in location:
        if isinstance(part, int):  # a place in a list
            names.append(str(part))
            continue
        if len(forms) > 1:
            forms = [form for form in forms if any(part in _literals(field) for field in form.model_fields.values())]
            continue
        names.append(part)
        owner = forms[0] if forms else None
        field = owner.model_fields.get(part) if owner is not None else None
        forms = _sections(field.annotation) if field is not None else []
    return ".".join(names), owner, forms


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The configuration classes that an annotation allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [form for argument in getattr(annotation, "__args__", ()) for form in _sections(argument)]


def _literals(field: FieldInfo) -> tuple[Any, ...]:
    return getattr(field.annotation, "__args__", ())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
