"""Files of settings, for ``--config``: YAML or TOML, with the names and values of ``--set``.

    task: text                          task = "text"
    attention: "mlr:8|8|8|8"            attention = "mlr:8|8|8|8"
    training:                           [training]
      steps: 500                        steps = 500
    task.num_layers: 2                  learning_rate = 1e-3

Every value is read as the text that ``--set`` would take, by the type of its setting: ``1e-3`` is a number,
and ``no`` a word, which YAML 1.1 takes for a text and for false. Nothing but texts, lists and tables is ever
built from a file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from structattn.checks import quoted
from structattn.errors import ConfigError
from structattn.files import write_atomic
from structattn_lab.settings.overrides import Change, Value, as_text, convert, fields_of, full_name

CONFIG = "config.yaml"  # the settings of a folder, for people and for ``--config``
_NOTHING = ("", "~", "null", "Null", "NULL")
_PLAIN = "tag:yaml.org,2002:"
_TAGS = {
    f"{_PLAIN}{name}" for name in ("bool", "float", "int", "map", "merge", "null", "seq", "str", "timestamp", "value")
}


@dataclass(frozen=True)
class ConfigFile:
    """The settings of a file.

    Attributes:
        path: of the file.
        values: by name in full, such as ``training.steps``; ``None`` for nothing.
        lines: of the names, as far as they are known.
    """

    path: Path
    values: dict[str, Value]
    lines: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Reads a file, by its suffix: ``.yaml``, ``.yml`` or ``.toml``.

        Raises:
            ConfigError: another suffix, text that is neither, a name twice, or nothing at all.
            OSError: it cannot be read.
        """
        readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml}
        if path.suffix.lower() not in readers:
            raise ConfigError(f"{path}: expected a file that ends with .yaml, .yml or .toml")
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: expected text in UTF-8, got other bytes at {error.start}") from None
        values: dict[str, Value] = {}
        lines: dict[str, int] = {}
        for written, value, line in readers[path.suffix.lower()](path, text):
            name = full_name(written)
            if name in values:
                raise ConfigError(f"{_place(path, line)}: {quoted(name)} is given twice")
            values[name] = value
            if line:
                lines[name] = line
        if not values:
            raise ConfigError(f"{path} is empty: expected settings, such as training.steps: 500")
        return cls(path, values, lines)

    @property
    def task(self) -> str | None:
        """The name of the task: ``task``, or ``name`` in its section; ``None`` where the file does not
        say.
        """
        named = self.values.get("task", self.values.get("task.name"))
        if isinstance(named, tuple):
            raise ConfigError(f"{self.path}: task: expected one name, got a list")
        return named or None

    def changes(self, *, without: Iterable[str]) -> list[Change]:
        """The settings, but for some names and that of the task."""
        named = "task" if "task" in self.values else "task.name"
        return [Change(name, value) for name, value in self.values.items() if name not in (*without, named)]

    def texts(self, *, without: Iterable[str]) -> tuple[str, ...]:
        """The same as ``--set`` takes them."""
        return tuple(f"{change.name}={as_text(change.text)}" for change in self.changes(without=without))

    def options(self, names: Iterable[str], kind: type) -> dict[str, Any]:
        """The values of the options of a command that the file gives, by name.

        Args:
            names: of the options.
            kind: the class of the command, whose annotations say how they are written.

        Raises:
            ConfigError: a value cannot be read.
        """
        hints = get_type_hints(kind)
        with self.reading():
            return {name: convert(self.values[name], hints[name], name) for name in names if name in self.values}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within it, an error names the file, and the line of the setting that it begins with or quotes."""
        try:
            yield
        except ConfigError as error:
            words = str(error)
            names = (name for name in self.lines if words.startswith((name, f"{name!r}")) or f" {name!r}" in words)
            line = self.lines.get(next(names, ""), 0)
            raise type(error)(f"{_place(self.path, line)}: {words}") from error


def _place(path: Path, line: int) -> str:
    return f"{path}, line {line}" if line else str(path)


_Found = Iterator[tuple[str, Value, int]]  # name, value and line


def _read_yaml(path: Path, text: str) -> _Found:
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{_place(path, line)}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: expected settings, got too many brackets in each other") from None
    if len(nodes) > 1:
        raise ConfigError(f"{path}: expected one document, got {len(nodes)}")
    root = next(iter(nodes), None)
    if root is None or (isinstance(root, yaml.ScalarNode) and _yaml_text(path, root) is None):
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected settings, such as training.steps: 500, got {_kind(root)}")
    yield from _yaml_section(path, root, "", set())


def _yaml_section(path: Path, section: Any, prefix: str, seen: set[int]) -> _Found:
    if id(section) in seen:
        raise ConfigError(f"{_place(path, _line(section))}: a section is in two places: write it out")
    seen.add(id(section))
    _check_tag(path, section)
    for key, node in section.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{_place(path, _line(key))}: expected the name of a setting, got {_kind(key)}")
        name, line = prefix + key.value.strip(), _line(key)
        if isinstance(node, yaml.MappingNode):
            yield from _yaml_section(path, node, f"{name}.", seen)
        elif isinstance(node, yaml.SequenceNode):
            _check_tag(path, node)
            yield name, tuple(_yaml_item(path, name, item) for item in node.value), line
        else:
            yield name, _yaml_text(path, node), line


def _yaml_item(path: Path, name: str, node: Any) -> str:
    text = _yaml_text(path, node) if isinstance(node, yaml.ScalarNode) else None
    if text is None:
        raise ConfigError(
            f"{_place(path, _line(node))}: {name}: expected a list of single values, got {_kind(node)} in it"
        )
    return text


def _yaml_text(path: Path, node: Any) -> str | None:
    _check_tag(path, node)
    is_plain = node.style is None
    return None if is_plain and node.value in _NOTHING else str(node.value)


def _check_tag(path: Path, node: Any) -> None:
    if node.tag not in _TAGS:
        tag = node.tag.replace(_PLAIN, "!!")
        raise ConfigError(
            f"{_place(path, _line(node))}: expected plain values, got the tag {quoted(tag)}: leave it out"
        )


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: Any) -> str:
    kinds = {yaml.MappingNode: "a section", yaml.SequenceNode: "a list"}
    return kinds.get(type(node), "nothing" if node.value in _NOTHING else f"the text {quoted(node.value)}")


def _read_toml(path: Path, text: str) -> _Found:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: expected settings, got too many brackets in each other") from None
    yield from _toml_section(path, content, "")


def _toml_section(path: Path, section: Mapping[str, Any], prefix: str) -> _Found:
    for key, value in section.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _toml_section(path, value, f"{name}.")
        elif isinstance(value, list):
            if any(isinstance(item, dict | list) for item in value):
                raise ConfigError(f"{path}: {name}: expected a list of single values")
            yield name, tuple(map(as_text, value)), 0
        else:
            yield name, as_text(value), 0


def settings_of(**sections: Any) -> dict[str, Any]:
    """The settings of dataclasses by name in full, each after the name of its section."""
    return {name: value for key, section in sections.items() for name, _, value in fields_of(section, f"{key}.")}


def write_config(folder: Path, command: str, values: Mapping[str, Any]) -> None:
    """Writes ``config.yaml``, which ``structattn COMMAND --config`` takes, into a folder, unless it is there
    with the same content.

    Args:
        folder: of a run.
        command: such as "train".
        values: by name in full, in their order.

    Raises:
        CheckpointError: it cannot be written.
    """
    lines = [f"# structattn {command} --config {CONFIG} does this again: these are all of its settings."]
    section = ""
    for name, value in values.items():
        head = name.rpartition(".")[0]
        if head != section:
            lines.append("")
            section = head
        lines.append(f"{name}: {_written(value)}")
    text = "\n".join([*lines, ""])
    path = folder / CONFIG
    try:
        if path.read_text(encoding="utf-8") == text:
            return
    except (OSError, UnicodeDecodeError):
        pass
    write_atomic(path, text)


def _written(value: Any) -> str:
    """A value in YAML, as this file and others read it."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, bool | int):
        return as_text(value)
    if isinstance(value, float):
        digits, e, power = as_text(value).partition("e")
        return digits + (f"{'' if '.' in digits else '.0'}e{power}" if e else "")
    return str(yaml.safe_dump(str(value), default_style='"', allow_unicode=True, width=2**30)).strip()
