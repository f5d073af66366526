"""Text for a teacher that looks things up: ``python docs/results/lookup_text.py TEXT OUT.jsonl [--keys]``.

TEXT holds documents that start with "PEP: ". OUT gets them as JSON lines, and among them lookup documents:
passages of random words that come again later, with lines of the text between. With ``--keys`` all documents
have pass keys, as the windows of train_teacher.py have them: text to calibrate and heal on. Both are for
training alone: the validation and test splits of ``structattn data prepare text`` get none.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from structattn_lab.data.corpus.preparation import split_of
from structattn_lab.tasks.uptraining.presets import PRESETS

START, HELD_OUT = "PEP: ", 0.05
SHARE = 1 / 3  # of all characters
CHARACTERS = 4000  # of a lookup document, about
PASSAGE = PRESETS["result"].recipe.task
KEYS = [PASSAGE.recall_text.replace("{}", word) for word in PASSAGE.recall_values.split()]
GAPS = (12, 48, 192, 576)  # characters between two keys, on average
SECTION = 1500  # characters, about a window of 512 tokens


def lookup_document(made: random.Random, words: list[str], lines: list[str]) -> str:
    """Passages of 8 to 24 random words, half of them new and half of them repeated, with up to 8 lines of
    text between.
    """
    passages, parts = [], []
    while sum(map(len, parts)) < CHARACTERS:
        if not passages or made.random() < 0.4:
            passages.append(" ".join(made.choices(words, k=made.randint(8, 24))))
            parts.append(passages[-1])
        else:
            parts.append(made.choice(passages[-4:]))
        if made.random() < 0.5:
            start = made.randrange(len(lines))
            parts.extend(lines[start : start + made.randint(1, 8)])
    return START + "\n".join(parts)


def in_training(change: Callable[[str], str], document: str) -> str:
    """A document of training text, changed so that it stays there; others as they are."""
    if split_of(document, HELD_OUT, HELD_OUT) != "train":
        return document
    while split_of(changed := change(document), HELD_OUT, HELD_OUT) != "train":
        pass
    return changed


def with_keys(made: random.Random, document: str) -> str:
    """The document with a passage of the preset ``result`` at many places; every ``SECTION`` characters it is
    another one.
    """
    parts, place, end = [], 0, 0
    while place < len(document):
        if place >= end:
            passage, gap = made.choice(KEYS), made.choice(GAPS)
            end = place + SECTION
        step = made.randint(0, 2 * gap)
        parts += [document[place : place + step], passage]
        place += step
    return "".join(parts)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--keys", action="store_true")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    documents = [START + part for part in text.split("\n" + START)]
    documents[0] = documents[0].removeprefix(START)
    known = [document for document in documents if split_of(document, HELD_OUT, HELD_OUT) == "train"]
    lines = [line for document in known for line in document.splitlines() if line]
    words = sorted({word for line in lines for word in line.split() if word.isalpha()})
    made = random.Random(0)
    wanted = len(text) * SHARE / (1 - SHARE)
    lookups: list[str] = []
    while sum(map(len, lookups)) < wanted:
        document = lookup_document(made, words, lines)
        if split_of(document, HELD_OUT, HELD_OUT) == "train":
            lookups.append(document)
    everything = documents + lookups
    made.shuffle(everything)
    if args.keys:
        everything = [in_training(partial(with_keys, made), document) for document in everything]
    unfinished = args.out.with_suffix(".partial")
    unfinished.write_text("".join(json.dumps({"text": document}) + "\n" for document in everything), encoding="utf-8")
    unfinished.replace(args.out)


if __name__ == "__main__":
    main()
