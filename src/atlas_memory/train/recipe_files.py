"""Recipes as YAML: found by path or name, overridden field by field, with errors that name the file and the line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from atlas_memory.data import DataConfig, ExerciseConfig, RowsConfig, SourceConfig
from atlas_memory.files import write_whole
from atlas_memory.train.recipe import MODEL_FIELDS, Recipe, Section, UnknownFieldError

Location = tuple[str | int, ...]
# What a step of a location can lead to, where it is not a section of the recipe.
_DATACLASSES: dict[Location, Any] = {
    ("data",): DataConfig,
    ("data", "source"): SourceConfig,
    ("data", "rows"): RowsConfig,
    ("data", "exercises"): ExerciseConfig,  # of each item
}


class RecipeError(ValueError):
    """What is wrong with a recipe: one line for each fault, with its place."""


def shipped_recipes() -> dict[str, Path]:
    folder = Path(str(resources.files("atlas_memory") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by its name, or a file; overrides: `section.field=value`, the value as in YAML."""
    path = _find(name_or_path)
    text = path.read_text(encoding="utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {error}") from error
    if not isinstance(fields, dict):
        raise RecipeError(f"{path}: {type(fields).__name__} instead of a mapping of sections.")
    duplicates = [f"{path}:{line}: {name} is given twice." for name, line in _duplicates(root)]
    if duplicates:
        raise RecipeError("\n".join(duplicates))
    given = dict(_parsed(override) for override in overrides)
    for location, (value, override) in given.items():
        _put(fields, location, value, override)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        places = _Places(path, root, {location: override for location, (_, override) in given.items()})
        raise RecipeError("\n".join(places.line(fault) for fault in error.errors())) from error


def save_recipe(recipe: Recipe, path: Path) -> None:
    write_whole(path, yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, old, new) of every field that differs between two resolved recipes."""
    before, after = dict(leaves(old)), dict(leaves(new))
    fields = dict.fromkeys([*before, *after])
    return [(f, before.get(f), after.get(f)) for f in fields if before.get(f) != after.get(f)]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _find(name_or_path: str | Path) -> Path:
    path, shipped = Path(name_or_path), shipped_recipes()
    if path.is_file():
        return path
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    raise RecipeError(f"recipe={str(name_or_path)!r} is neither a file nor a shipped recipe: {', '.join(shipped)}.")


def _parsed(override: str) -> tuple[Location, tuple[Any, str]]:
    name, equals, value = override.partition("=")
    if not equals or not all(name.split(".")):
        raise RecipeError(f"--set {override}: must be section.field=value, such as optimizer.lr=3e-4.")
    try:
        return tuple(name.split(".")), (yaml.safe_load(value), override)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override}: the value is not YAML: {error}") from error


def _put(fields: dict[str, Any], location: Location, value: Any, override: str) -> None:
    for name in location[:-1]:
        inner = fields.get(str(name))
        if inner is None:
            inner = fields[str(name)] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"--set {override}: {name} is {inner!r}, and has no fields.")
        fields = inner
    fields[str(location[-1])] = value


def _duplicates(node: yaml.Node) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item)
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if key.value in seen:
            yield key.value, key.start_mark.line + 1
        seen.add(key.value)
        yield from _duplicates(value)


class _Places:
    """Where in the file, or in which override, a field stands."""

    def __init__(self, path: Path, root: yaml.Node, overrides: Mapping[Location, str]) -> None:
        self.path, self.root, self.overrides = path, root, overrides

    def line(self, fault: Any) -> str:
        """One fault, as a line for a person."""
        location, cause = self._known(fault["loc"]), fault.get("ctx", {}).get("error")
        if isinstance(cause, UnknownFieldError):
            location = (*location, cause.name)
        unknown = isinstance(cause, UnknownFieldError) or fault["type"] in (
            "extra_forbidden",
            "unexpected_keyword_argument",
        )
        message = str(cause) if cause is not None else fault["msg"]
        if unknown:
            message = self._suggestion(location)
        elif fault["type"] == "missing":
            message = "must be given."
        elif cause is None:
            message = f"{_shown(fault['input'])}: {fault['msg'][0].lower()}{fault['msg'][1:]}."
        else:  # our own messages begin with the field they speak of
            location = (*location, *self._named_first(location, message))
        name = ".".join(map(str, location))
        return f"{self._where(location)}: {f'{name}: ' if name else ''}{message}"

    def _named_first(self, location: Location, message: str) -> Location:
        """The way from there to the field that a message begins with, where it stands in the file."""
        field = re.match(r"(\w+)=", message)
        ways: list[Location] = [(field[1],), ("options", field[1])] if field else []
        return next((way for way in ways if self._node((*location, *way))), ())

    def _known(self, location: Location) -> Location:
        """Without what pydantic adds for unions and the like: steps that lead nowhere in the file."""
        known: Location = ()
        for step in location:
            if self._node((*known, step)) is not None or step == location[-1]:
                known = (*known, step)
        return known

    def _where(self, location: Location) -> str:
        for length in range(len(location), 0, -1):
            if location[:length] in self.overrides:
                return f"--set {self.overrides[location[:length]]}"
            below = [text for place, text in self.overrides.items() if place[:length] == location[:length]]
            if below and self._node(location[:length]) is None:
                return f"--set {below[0]}"
            node = self._node(location[:length])
            if node is not None and not any(o[:length] == location[:length] for o in self.overrides):
                return f"{self.path}:{node.start_mark.line + 1}"
        return f"{self.path}:{self.root.start_mark.line + 1}"

    def _node(self, location: Location) -> yaml.Node | None:
        """The key of a mapping, or the item of a list, that stands there."""
        node: yaml.Node = self.root
        found: yaml.Node | None = None
        for step in location:
            if isinstance(node, yaml.MappingNode):
                pairs = {key.value: (key, value) for key, value in node.value}
                if step not in pairs:
                    return None
                found, node = pairs[step]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                found = node = node.value[step]
            else:
                return None
        return found

    @staticmethod
    def _suggestion(location: Location) -> str:
        known = _fields_of(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        return f"is unknown; did you mean {near[0]}?" if near else f"is unknown; known: {', '.join(known)}."


def _fields_of(location: Location) -> list[str]:
    """The fields a section may have."""
    location = tuple(step for step in location if isinstance(step, str))
    if location == ("model",):
        return list(MODEL_FIELDS)
    if location in _DATACLASSES:
        return list(_DATACLASSES[location].__dataclass_fields__)
    section: type[Section] = Recipe
    for step in location:
        kind = section.model_fields[str(step)].annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            return []
        section = kind
    return list(section.model_fields)


def _shown(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
