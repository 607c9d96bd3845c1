"""Pictures: read from files or from the bytes in a table when a batch is made, and classified."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from shardwise.errors import ConfigError, one_line
from shardwise.hub import local, shown
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config, ModelConfig
from shardwise.train.data.micro_batch import Draw, MicroBatch, Part, parts_in_words
from shardwise.train.data.tables import Table, read_table
from shardwise.train.tasks.examples import batch_of, counted
from shardwise.train.tasks.labels import labels_in_words, labels_of
from shardwise.train.tasks.objectives import OneLabel
from shardwise.train.tasks.processors import Pretrained
from shardwise.train.tasks.task import Task, shares

_SAMPLE_BYTES = 4096
"""Bytes of each picture that the digest covers, besides its size."""
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def image_classification(config: Config) -> Task:
    """Read rows of a picture with a label. Pictures are decoded by the rank and at the step that needs them. Not
    collective. Raises as `load_task`."""
    check_pillow("image-classification")
    table = read_table(config.data, "an image and a label")
    pictures = Pictures.of(table, table.column("image", "img"))
    label = table.column("label", "labels")
    values = table.rows[label][:]
    labels = labels_of(config.model, table.rows.features[label], values, label)
    ids = [labels.of(value, key, label) for value, key in zip(values, table.keys, strict=True)]
    for row, key in enumerate(table.keys):
        if (count := pictures.count(row)) != 1:
            raise ConfigError(
                f"{key}: has {count or 'no'} picture{'s' if count > 1 else ''}, and a label belongs to one"
            )
    processor = image_processor(config.model)
    split = table.split(config.data.eval_fraction)
    train, held_out = (
        LabelledPictures(pictures, rows, [ids[row] for row in rows], processor, parts)
        for rows, parts in ((split.train, split.parts), (split.held_out, ()))
    )
    said = f"{len(train):,} pictures to train on, {len(held_out):,} held out"
    return Task(
        objective=OneLabel(len(labels.names)),
        train=train,
        held_out=held_out,
        shape=TextShape(vocab_size=0, end_id=0, seq_len=1, labels=labels.names),
        processor=Pretrained(processor),
        reads=f"pictures through {type(processor).__name__}",
        says=(f"{shown(config.data.named)}: {said}{labels_in_words(labels.names)}", *shares(config.data, train)),
        words=f"{said} (digests {train.digest} and {held_out.digest}), with the labels {', '.join(labels.names)}",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The pictures of a table's column, one or several in a row, as they are stored."""

    stored: Any
    """A column of a `datasets.Dataset`: paths, bytes, or {"bytes", "path"}; or lists of them."""
    keys: Sequence[str]

    @classmethod
    def of(cls, table: Table, column: str) -> Pictures:
        import datasets

        rows = table.rows
        undecoded = datasets.Image(decode=False)
        feature = rows.features[column]
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, undecoded)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(column, datasets.List(undecoded))
        return cls(rows[column], table.keys)

    def count(self, row: int) -> int:
        """Return the number of pictures of a row."""
        return len(self._all(row))

    def open(self, row: int) -> list[Any]:
        """Return a row's pictures as `PIL.Image`s in RGB. Raises ConfigError, which begins with the row's name, for
        what is none."""
        from PIL import Image

        found = []
        for value in self._all(row):
            try:
                with Image.open(self._source(row, value)) as picture:
                    found.append(picture.convert("RGB"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.keys[row]}: not a picture that can be read: {one_line(error)}") from None
        return found

    def sample(self, row: int) -> bytes:
        """Return a part of the bytes of a row's pictures, and their numbers: enough to tell them from others."""
        return b"".join(self._sample(row, value) for value in self._all(row))

    def _all(self, row: int) -> list[Any]:
        value = self.stored[row]
        values = value if isinstance(value, list) else [value]
        return [one for one in values if one is not None]

    def _sample(self, row: int, value: Any) -> bytes:
        source = self._source(row, value)
        if isinstance(source, io.BytesIO):
            whole = source.getbuffer()
            return bytes(whole[:_SAMPLE_BYTES]) + str(len(whole)).encode()
        try:
            with source.open("rb") as file:
                return file.read(_SAMPLE_BYTES) + str(source.stat().st_size).encode()
        except OSError as error:
            raise ConfigError(f"{self.keys[row]}: {source} cannot be read: {error.strerror}") from None

    def _source(self, row: int, value: Any) -> io.BytesIO | Path:
        """Return where a picture's bytes are. A path may be relative to the working directory, or to the table's."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return io.BytesIO(value)
        if not isinstance(value, str):
            raise ConfigError(f"{self.keys[row]}: an image must be a path or bytes, not {str(value)[:80]!r}")
        path = Path(value)
        beside = Path(self.keys[row].rpartition(":")[0]).parent / path
        return path if path.exists() or not beside.exists() else beside


@dataclass(frozen=True, eq=False)
class PictureRows:
    """Rows of pictures and what is learnt about them."""

    pictures: Pictures
    rows: Sequence[int]
    """Their places in the table."""
    answers: Sequence[Any]
    """What is learnt about each row's pictures; its `str` is equal if and only if it is."""
    processor: Any
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        state = xxhash.xxh3_64(f"{len(self)}{parts_in_words(self.parts)}".encode())
        for row, answer in zip(self.rows, self.answers, strict=True):
            state.update(self.pictures.sample(row) + f" {answer}".encode(errors="surrogateescape"))
        return state.hexdigest()


class LabelledPictures(PictureRows):
    """Rows of a picture and the number of its label."""

    def micro_batch(self, draws: list[Draw]) -> MicroBatch:
        """Return the rows that were drawn, decoded and resized by the processor."""
        there, drawn = counted(draws, len(self))
        images = [self.pictures.open(self.rows[row])[0] for row in drawn]
        arrays = dict(self.processor(images=images, return_tensors="np"))
        return batch_of({**arrays, "labels": [self.answers[row] for row in drawn]}, there)


def check_pillow(task: str) -> None:
    """Raise ConfigError if pictures cannot be decoded here."""
    if find_spec("PIL") is None:
        raise ConfigError(f"model.task={task!r} needs Pillow, which is not installed: pip install pillow")


def image_processor(model: ModelConfig) -> Any:
    """Return the image processor beside the model's configuration or weights; without one, that of its type, with its
    size of pictures. Raises ConfigError if transformers has none for it."""
    from transformers import AutoConfig, AutoImageProcessor

    auto: Any = AutoImageProcessor  # untyped
    named: Iterator[str] = (name for name in (model.directory, model.pretrained) if name is not None)
    for name in named:
        if any((local(name) / file).is_file() for file in _PROCESSOR):
            try:
                return auto.from_pretrained(local(name), local_files_only=True)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{name}: its image processor cannot be loaded: {one_line(error)}") from None
    if model.config is not None:
        config: Any = AutoConfig.for_model(**model.config)
    elif model.path is not None:
        config = AutoConfig.from_pretrained(local(model.path), local_files_only=True)
    else:
        raise ConfigError("model.factory gives no image processor: name the model by path or config for pictures")
    return _of_type(config)


def _of_type(config: Any) -> Any:
    """Return the image processor that transformers has for a configuration's type."""
    from transformers import AutoImageProcessor

    auto: Any = AutoImageProcessor  # untyped
    size = getattr(config, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:  # the directory of a model that has settings alone
        config.save_pretrained(folder)
        Path(folder, _PROCESSOR[0]).write_text(json.dumps({}), encoding="utf-8")
        try:
            usual = auto.from_pretrained(folder, local_files_only=True)
            if size is None:
                return usual
            by_edge = getattr(usual.size, "shortest_edge", None) is not None  # its pictures keep their proportions
            whole = {"height": height, "width": width}
            wanted = {"size": {"shortest_edge": min(height, width)} if by_edge else whole}
            if getattr(usual, "crop_size", None):
                wanted["crop_size"] = whole
            return auto.from_pretrained(folder, local_files_only=True, **wanted)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"transformers has no image processor for the type {config.model_type!r}: {one_line(error)[:160]}"
            ) from None
