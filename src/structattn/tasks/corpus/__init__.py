"""Text for language models: documents from files or data sets, made into token shards that training maps into memory."""

from structattn.tasks.corpus.corpus import Corpus, Tokens, Windows, is_corpus
from structattn.tasks.corpus.documents import Document, Source
from structattn.tasks.corpus.preparation import PrepareConfig, prepare
from structattn.tasks.corpus.tokenizers import BytePairs, Bytes, Characters, Tokenizer, text_units, tokenizer_from

__all__ = [
    "BytePairs",
    "Bytes",
    "Characters",
    "Corpus",
    "Document",
    "PrepareConfig",
    "Source",
    "Tokenizer",
    "Tokens",
    "Windows",
    "is_corpus",
    "prepare",
    "text_units",
    "tokenizer_from",
]
