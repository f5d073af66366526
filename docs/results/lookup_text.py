"""Text for a teacher that looks things up: ``python docs/results/lookup_text.py TEXT OUT.jsonl``.

TEXT holds documents that start with "PEP: ". OUT gets them as JSON lines, and among them lookup documents: passages of random words that come
again later, with lines of the text between. Such a teacher needs keys that are far away. Lookup documents are for training alone: the
validation and test splits of ``structattn data prepare text`` get none.
"""

import argparse
import json
import random
from pathlib import Path

from structattn.studies.data.corpus.preparation import split_of

START, HELD_OUT = "PEP: ", 0.05
SHARE = 1 / 3  # of all characters
CHARACTERS = 4000  # of a lookup document, about


def lookup_document(made: random.Random, words: list[str], lines: list[str]) -> str:
    """Passages of 8 to 24 random words, half of them new and half of them repeated, with up to 8 lines of text between."""
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


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
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
    partial = args.out.with_suffix(".partial")
    partial.write_text("".join(json.dumps({"text": document}) + "\n" for document in everything), encoding="utf-8")
    partial.replace(args.out)


if __name__ == "__main__":
    main()
