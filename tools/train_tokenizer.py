"""Train the tokenizer `builtin:stories`, the quickstart's, or another one, on any source of text.

    python tools/train_tokenizer.py src/shardwise/train/data/stories [--source builtin:stories] [--size 2048]

Byte-level BPE: any bytes can be written with it, and the words of the source are one token each, as far as ids go.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardwise.train.data.sources import read_documents
from shardwise.train.data.tokenizer import END_OF_DOCUMENT


def main() -> None:
    """Train and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--source", default="builtin:stories", help="as data.source (%(default)s)")
    parser.add_argument("--size", type=int, default=2048, help="token ids (%(default)s)")
    options = parser.parse_args()
    documents = read_documents(options.source)
    texts = (document.segments[0].text.encode(errors="replace").decode() for document in documents)
    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=options.size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(texts, trainer)
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(tokenizer_object=pipeline, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False).save_pretrained(
        options.directory
    )


if __name__ == "__main__":
    main()
