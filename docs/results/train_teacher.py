"""Trains a small Llama as a teacher for ``structattn compare uptraining``:
``python docs/results/train_teacher.py CORPUS OUT``.

CORPUS is a folder of ``structattn data prepare text --tokens bpe --vocab-size 1024``, of the text that
lookup_text.py wrote; OUT gets the model and its tokenizer, as transformers saves them. Training goes on from
its last checkpoint if it is started again.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from lookup_text import KEYS  # beside this file
from tokenizers import Tokenizer
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from structattn_lab.data.corpus import Corpus
from structattn_lab.data.corpus.corpus import SplitTokens

LENGTH, BATCH = 512, 16
KEYS_FROM = 405  # steps on text alone: what text is like comes first
GAPS = (4, 16, 64, 192)  # tokens between two keys, on average


class Windows(Dataset):
    """Windows of a split: ``count`` at random places, or, without a seed, spread evenly.

    Attributes:
        keys: passages, (N, size) tokens: if there are any, each window gets one of them, several times.
    """

    keys: torch.Tensor | None = None

    def __init__(self, tokens: SplitTokens, count: int, seed: int | None = None) -> None:
        self.tokens, last = tokens, len(tokens) - LENGTH
        made = torch.Generator().manual_seed(seed or 0)
        self.starts = (
            torch.linspace(0, last, count).long() if seed is None else torch.randint(last, (count,), generator=made)
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.tokens.windows(self.starts[index : index + 1], LENGTH).tokens[0]
        if self.keys is not None:
            made = random.Random(index)
            key, gap = self.keys[made.randrange(len(self.keys))], made.choice(GAPS)
            place = made.randint(0, gap)
            while place + len(key) <= LENGTH:
                ids[place : place + len(key)] = key
                place += len(key) + made.randint(0, 2 * gap)
        return {"input_ids": ids, "labels": ids}


class KeysLater(TrainerCallback):
    """From ``KEYS_FROM`` steps on, windows have keys: what text is like comes first."""

    def __init__(self, windows: Windows, keys: torch.Tensor) -> None:
        self.windows, self.keys = windows, keys

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.windows.keys = self.keys if state.global_step >= KEYS_FROM else None


def main() -> None:
    """Trains and saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    args = parser.parse_args()
    corpus = Corpus(args.corpus)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=corpus.tokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    every = max(1, args.steps // 20)
    settings = TrainingArguments(
        output_dir=str(args.out / "training"),
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 20,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        logging_steps=every,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0,
        seed=0,
    )
    windows = Windows(corpus.splits["train"], args.steps * BATCH, seed=1)
    keys = torch.tensor([corpus.tokenizer.encode(key).tolist() for key in KEYS])
    trainer = Trainer(
        model,
        settings,
        callbacks=[KeysLater(windows, keys)],
        train_dataset=windows,
        eval_dataset=Windows(corpus.splits["validation"], 128),
    )
    folder = args.out / "training"
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    model.save_pretrained(args.out)
    trainer.state.save_to_json(str(args.out / "trainer_state.json"))
    own = Tokenizer.from_str(json.dumps(corpus.tokenizer.description()["definition"]))
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(args.out)


if __name__ == "__main__":
    main()
