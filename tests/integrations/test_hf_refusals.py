"""The page on transformers lists what is refused: every error that the integration raises is found in its
tables.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import structattn
from structattn import errors

ROOT = Path(__file__).parents[2]
SOURCE = Path(structattn.__file__).parent / "integrations" / "transformers"
OURS = {name for name in vars(errors) if name.endswith("Error")} | {"_ForeignUseError"}


def rows() -> list[list[str]]:
    """What the rows of the tables of errors have in their first column, as code."""
    page = (ROOT / "docs" / "huggingface-errors.md").read_text(encoding="utf-8")
    section = page[page.index("## Errors") : page.index("## Limits")]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    found = [re.findall(r"`([^`]+)`", cell) for cell in cells]
    return [phrases for phrases in found if phrases]


def text(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """The text that an expression makes, with ``...`` for what is not in the source; of a choice both."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part, known) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.IfExp):
        return f"{text(node.body, known)} {text(node.orelse, known)}"
    name = node.func if isinstance(node, ast.Call) else node
    found = known.get(name.id) if isinstance(name, ast.Name) else None
    return "..." if found is None else text(found, known)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the message of each of our errors in a file."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    known: dict[str, ast.expr] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = node.value
        elif isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return) and node.body[-1].value:
            known[node.name] = node.body[-1].value
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OURS and node.args:
            message = text(node.args[0], known)
            yield node.lineno, f"cannot be structurized: {message}" if path.name == "discovery.py" else message


def is_in(phrase: str, message: str) -> bool:
    """Whether a message has the words of a phrase in their order, where ``...`` is anything."""
    return re.search(".*".join(re.escape(part.strip()) for part in phrase.split("...")), message, re.DOTALL) is not None


def test_every_refusal_is_listed() -> None:
    phrases, missing, count = [phrase for row in rows() for phrase in row], [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, message in messages(path):
            count += 1
            names_wrong_value = re.search(r"\bgot\b", message) is not None
            if not names_wrong_value and not any(is_in(phrase, message) for phrase in phrases):
                missing.append(f"{path.name}:{line}: {message}")
    assert count > 80
    assert not missing, "\n".join(missing)


def test_no_row_is_of_an_error_that_is_gone() -> None:
    own = [message for path in SOURCE.rglob("*.py") for _, message in messages(path)]
    masks = (SOURCE / "masks" / "structured_mask.py").read_text(encoding="utf-8")  # what only a compiled program raises
    gone = [row for row in rows() if not any(is_in(one, message) for one in row for message in (*own, masks))]
    assert not gone
