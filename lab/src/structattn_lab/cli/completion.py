"""Scripts with which shells complete command lines: they hold all words, so that completing takes no time."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from structattn_lab.cli.output import summary_of
from structattn_lab.tasks.registry import TASKS


def script(shell: str, kinds: Mapping[str, type[Any]]) -> str:
    """A script for bash, zsh or fish.

    Args:
        shell: its name.
        kinds: the dataclass of options of every command, by the words that name it.
    """
    commands = [_Words.of(name, kind) for name, kind in kinds.items()]
    if shell == "fish":
        return "\n".join(_fish(commands))
    return "\n".join([*_HEADS[shell], *_candidates(commands), _WRAPPERS[shell]])


@dataclass(frozen=True, kw_only=True)
class _Words:
    """What may follow a command.

    Attributes:
        name: of the command.
        about: the command in a sentence.
        flags: options without a value.
        values: the other options, with the words of their values: none where any text or file may follow.
        first: the words of the argument without a name.
    """

    name: str
    about: str
    flags: tuple[str, ...]
    values: dict[str, tuple[str, ...]]
    first: tuple[str, ...]

    @classmethod
    def of(cls, name: str, kind: type[Any]) -> _Words:
        hints = typing.get_type_hints(kind, include_extras=True)
        flags, values = ["--help"], dict[str, tuple[str, ...]]()
        first: tuple[str, ...] = ()
        for field in dataclasses.fields(kind):
            hint, option = hints[field.name], f"--{field.name.replace('_', '-')}"
            literals = _literals(hint)
            if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
                first = literals or (tuple(TASKS) if field.name == "task" else ())
            elif hint is bool:
                flags.append(f"--no-{option[2:]}" if field.default is True else option)
            else:
                values[option] = literals
        about = summary_of(kind).rstrip(".")
        return cls(name=name, about=about, flags=tuple(flags), values=values, first=first)


def _literals(hint: Any) -> tuple[str, ...]:
    """The words of a type, if it has some."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return next((words for argument in typing.get_args(hint) if (words := _literals(argument))), ())


def _by_task() -> dict[str, dict[str, tuple[str, ...]]]:
    """The words of the options whose values depend on the task."""
    from structattn_lab.settings.overrides import fields_of
    from structattn_lab.tasks.registry import presets_of

    by_task = {task: presets_of(task) for task in TASKS}
    settings = {
        task: tuple(f"{name}=" for name, _, _ in fields_of(presets["default"].recipe))
        for task, presets in by_task.items()
    }
    return {"--preset": {task: tuple(presets) for task, presets in by_task.items()}, "--set": settings}


# How the first lines differ: zsh knows by one which command it completes.
_HEADS = {"bash": ("# bash completion of structattn",), "zsh": ("#compdef structattn",)}
_WRAPPERS = {
    "bash": """_structattn() {
    local current="${COMP_WORDS[COMP_CWORD]}" word
    local -a before=()
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [ "$word" = "=" ] || before+=("$word")
    done
    [ "$current" = "=" ] && current=""
    COMPREPLY=($(compgen -W "$(_structattn_candidates "${before[@]}")" -- "$current"))
    case "${COMPREPLY[0]}" in *=) compopt -o nospace ;; esac
}
complete -o default -F _structattn structattn""",
    "zsh": """_structattn() {
    local -a before found
    before=("${(@)words[2,CURRENT-1]}")
    if [[ "$PREFIX" == --*=* ]]; then
        before+=("${PREFIX%%=*}")
        compset -P '*='
    fi
    found=(${=$(_structattn_candidates "${before[@]}")})
    if (( $#found )); then
        compadd -q -S '' -- ${(M)found:#*=}
        compadd -- ${found:#*=}
    else
        _files
    fi
}
if [ "$funcstack[1]" = "_structattn" ]; then
    _structattn "$@"
else
    compdef _structattn structattn
fi""",
}


def _candidates(commands: Iterable[_Words]) -> Iterator[str]:
    """A function of bash and of zsh: from the words before the cursor to those that may come; nothing where a
    file may.
    """
    commands = list(commands)
    heads = list(dict.fromkeys(command.name.split()[0] for command in commands))
    every = {
        head: [command.name.split()[1] for command in commands if command.name.startswith(f"{head} ")] for head in heads
    }
    single = {command.name for command in commands}
    groups = {head: seconds for head, seconds in every.items() if seconds and head not in single}
    # Words behind a command that make it another one: compare caches.
    others = {head: seconds for head, seconds in every.items() if seconds and head in single}
    longer = [(head, "|".join(f'"{head} {second}"' for second in seconds)) for head, seconds in others.items()]
    yield from (
        "_structattn_candidates() {",
        '    local word name="" task="" previous=""',
        '    for word in "$@"; do',
        '        case "$name" in',
        '            "") name="$word" ;;',
        f'            {"|".join(groups)}) name="$name $word" ;;',
        *(
            f'            {head}) case "$previous $word" in {words}) name="$name $word" ;; esac ;;'
            for head, words in longer
        ),
        "        esac",
        f'        case "$word" in {"|".join(TASKS)}) task="$word" ;; esac',
        '        previous="$word"',
        "    done",
        '    case "$name" in',
        f'        "") echo "{" ".join([*heads, "--help", "--version"])}"; return ;;',
    )
    for head, seconds in groups.items():
        yield f'        "{head}") echo "{" ".join(seconds)}"; return ;;'
    yield "    esac"
    yield '    case "$name $previous" in'
    by_task = _by_task()
    for command in commands:
        for option, words in command.values.items():
            if option not in by_task:
                yield f'        "{command.name} {option}") echo "{" ".join(words)}"; return ;;'
    yield "    esac"
    for option, words_of in by_task.items():
        yield '    case "$previous:$task" in'
        for task, words in words_of.items():
            yield f'        "{option}:{task}") echo "{" ".join(words)}"; return ;;'
        yield "    esac"
    yield '    case "$name" in'
    for command in commands:
        options = " ".join([*command.values, *command.flags])
        if command.first:
            is_first = f'[ "$previous" = "{command.name.split()[-1]}" ]'
            first = " ".join([*command.first, *others.get(command.name, [])])
            yield f'        "{command.name}") {is_first} && echo "{first}" || echo "{options}" ;;'
        else:
            yield f'        "{command.name}") echo "{options}" ;;'
    yield from ("    esac", "}")


def _fish(commands: Iterable[_Words]) -> Iterator[str]:
    """The lines of a script of fish."""
    commands = list(commands)
    yield from (
        "# fish completion of structattn",
        "function __structattn_has",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = "$argv[1]"; or return 1',
        '    test (count $argv) -eq 1; or test "$words[3]" = "$argv[2]"',
        "end",
        "function __structattn_at",
        "    test (count (commandline -opc)) -eq (math (count $argv) + 1); and __structattn_has $argv",
        "end",
    )
    by_task = _by_task()
    for command in commands:
        head, _, second = command.name.partition(" ")
        at = f'-n "__structattn_at {head}"' if second else "-n __fish_use_subcommand"
        yield f"complete -c structattn -f {at} -a {second or head} -d {_quoted(command.about)}"
        if second:
            yield f"complete -c structattn -f -n __fish_use_subcommand -a {head}"
        longer = [x.name for x in commands if x.name.startswith(f"{command.name} ")]
        only = "".join(f"; and not __structattn_has {name}" for name in longer)
        has = f'-n "__structattn_has {command.name}{only}"'
        if command.first:
            yield f'complete -c structattn -f -n "__structattn_at {command.name}" -a "{" ".join(command.first)}"'
        for flag in command.flags:
            yield f"complete -c structattn {has} -l {flag[2:]}"
        for option, words in command.values.items():
            if option not in by_task:
                what = f'-x -a "{" ".join(words)}"' if words else "-r"
                yield f"complete -c structattn {has} -l {option[2:]} {what}"
                continue
            for task, words_of in by_task[option].items():
                both = f'-n "__structattn_has {command.name}; and contains -- {task} (commandline -opc)"'
                yield f'complete -c structattn {both} -l {option[2:]} -x -a "{" ".join(words_of)}"'


def _quoted(text: str) -> str:
    """A text of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
