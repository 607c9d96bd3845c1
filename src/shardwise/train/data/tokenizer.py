"""Text to token ids and back: bytes, or any tokenizer that transformers loads from a local directory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.errors import ConfigError
from shardwise.hub import local, shown
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import Config
from shardwise.train.data.documents import TEXT_ERRORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
BUILTIN_TOKENIZERS = {"builtin:stories": Path(__file__).parent / "stories"}
"""Directories of the tokenizers that belong to built-in corpora."""
END_OF_DOCUMENT, PADDING, MASK = "<|endofdocument|>", "<|padding|>", "<|mask|>"
_BYTE_VALUES = 256
_PADDED_TO = 64
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + '\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}"
    "{% endfor %}"
    "{{ '### assistant\n' if add_generation_prompt else '' }}"
)
"""A conversation as it is rendered for training where the tokenizer has no chat template."""


class Saved(Protocol):
    """What turned rows into arrays: a tokenizer, an image processor, or both."""

    def save(self, directory: Path) -> None:
        """Write the files with which transformers loads it again."""


class Tokenizer(Saved, Protocol):
    """The interface of a tokenizer that the data layer needs."""

    vocab_size: int
    """All token ids are below this. A model's embedding must have at least as many rows."""
    end_id: int
    """The end-of-document token."""
    renders_plainly: bool
    """Whether conversations are rendered in `PLAIN_TEMPLATE`. Then `save` writes that too, so that whatever loads the
    tokenizer renders them in the same way."""

    def encode(self, text: str) -> list[int]:
        """Return token ids without any special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return readable text. Never raises on ids below `vocab_size`."""


class ByteTokenizer:
    """A tokenizer of bytes: ids 0..255 are byte values and 256 ends a document. The vocabulary is padded to a multiple
    of 64, so it has 320 ids."""

    end_id = _BYTE_VALUES
    vocab_size = -(-(_BYTE_VALUES + 1) // _PADDED_TO) * _PADDED_TO

    def __init__(self) -> None:
        self.renders_plainly = False

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text; bytes that were not UTF-8 in the source are restored."""
        return list(text.encode(errors=TEXT_ERRORS))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the bytes as UTF-8, with replacement characters for invalid ones; ids above 255 are dropped."""
        return bytes(token for token in ids if token < _BYTE_VALUES).decode(errors="replace")

    def save(self, directory: Path) -> None:
        """Write the files of a byte-level BPE without merges, which gives the same ids."""
        _save(_byte_level_tokenizer(), self.renders_plainly, directory)


class HuggingFaceTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        end_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end_id is None:
            raise ConfigError(
                f"data.tokenizer={where!r} has neither an eos_token nor a sep_token to separate documents"
            )
        self.inner = tokenizer
        self.end_id: int = end_id
        self.vocab_size = len(tokenizer)
        self.renders_plainly = False

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that renders conversations; None if the tokenizer has none."""
        template = self.inner.chat_template
        return template if isinstance(template, str) else None

    def encode(self, text: str) -> list[int]:
        """Return token ids without special tokens. Bytes that were not UTF-8 become replacement characters."""
        readable = text.encode(errors=TEXT_ERRORS).decode(errors="replace")  # Rust strings hold no lone surrogates
        ids: list[int] = self.inner.encode(readable, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        text: Any = self.inner.decode(list(ids), skip_special_tokens=True)
        return str(text)

    def save(self, directory: Path) -> None:
        """Write the tokenizer with `save_pretrained`."""
        _save(self.inner, self.renders_plainly, directory)


def _save(tokenizer: PreTrainedTokenizerBase, renders_plainly: bool, directory: Path) -> None:
    tokenizer.save_pretrained(directory)
    if renders_plainly:
        (directory / "chat_template.jinja").write_text(PLAIN_TEMPLATE, encoding="utf-8")


def load_tokenizer(name: str | None) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names: "bytes" (or None), "builtin:stories", a directory, or a name of a
    hub that is in the cache.

    Raises:
        ConfigError: the directory does not exist, has no tokenizer, or has one without an end-of-document token.
    """
    if name is None or name == BYTES:
        return ByteTokenizer()
    return HuggingFaceTokenizer(pretrained_tokenizer(name), name)


def tokenizer_directory(name: str) -> Path:
    """Return the directory of a tokenizer: a built-in one, or as `hub.local` finds it."""
    return BUILTIN_TOKENIZERS.get(name) or local(name)


def pretrained_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory, or of a name of a hub that is in the cache. Raises ConfigError as
    `load_tokenizer`."""
    path = tokenizer_directory(name)
    with reading("data.tokenizer", name):
        if not path.is_dir():
            hint = nearest_path(path) or '; give a directory with a tokenizer, a name on a hub, or "bytes"'
            raise ConfigError(f"data.tokenizer={name!r}: no such directory{hint}")
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"data.tokenizer={name!r}: transformers finds no tokenizer in it ({cause[:160]})") from None
    return tokenizer


def sources_in_words(config: Config, reads: str, resumes: bool) -> str:
    """Return the line that says what a run starts from.

    reads: its tokenizer or image processor, in words.
    resumes: whether trained weights are loaded from the run's checkpoint.
    """
    weights = f"random numbers of train.seed={config.train.seed}"
    if config.model.pretrained is not None:
        weights = shown(config.model.pretrained)
    if resumes:
        weights = f"the checkpoint's, beside {weights}" if config.lora.r else "the checkpoint's"
    return f"weights: {weights}; {reads}"


def in_words(name: str | None, tokenizer: Tokenizer) -> str:
    """Return what a user is told of a tokenizer and, if it has rendered conversations without one of its own, of their
    template. name: `data.tokenizer`."""
    plain = '; it has no chat template: "### role" above each message' if tokenizer.renders_plainly else ""
    return f"tokenizer: {shown(name or BYTES)}, {tokenizer.vocab_size:,} ids{plain}"


def files_of(processor: Saved) -> dict[str, bytes]:
    """Return the contents of the files that `save` writes, by name, without sub-directories. Some MiB if the vocabulary
    is large."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        processor.save(Path(directory))
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return the byte tokenizer for tasks that pad and mask: ids 257 and 258 of its vocabulary are the tokens for
    that."""
    tokenizer = _byte_level_tokenizer()
    tokenizer.add_special_tokens({"pad_token": PADDING, "mask_token": MASK})
    return tokenizer


def _byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """Return the byte tokenizer as a Hugging Face tokenizer: a byte-level BPE without merges, its alphabet in byte
    order."""
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: value for value, character in enumerate(_byte_alphabet())}
    pipeline = Pipeline(models.BPE(vocab={**vocab, END_OF_DOCUMENT: ByteTokenizer.end_id}, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.decoder = decoders.ByteLevel()
    wrapper: Any = PreTrainedTokenizerFast  # untyped
    tokenizer: PreTrainedTokenizerBase = wrapper(
        tokenizer_object=pipeline, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False
    )
    return tokenizer


def _byte_alphabet() -> list[str]:
    """Return the printable character by which byte-level BPE represents each byte value: the character itself, or the
    next free code point."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    alphabet, free = [], _BYTE_VALUES
    for value in range(_BYTE_VALUES):
        alphabet.append(chr(value if value in printable else free))
        free += value not in printable
    return alphabet
