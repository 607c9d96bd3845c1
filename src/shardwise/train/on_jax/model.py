"""`[model]` in JAX: the function that builds the model from a random key; the loss; the optimizer; bytes per device."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwise.errors import ConfigError, one_line
from shardwise.fsdp.strategy import dtype_name
from shardwise.hub import local
from shardwise.jax import models
from shardwise.jax.checkpoint.leaves import leaves_of
from shardwise.jax.checkpoint.name_map import NameMap
from shardwise.suggest import did_you_mean
from shardwise.train.config.schedule import LearningRateSchedule
from shardwise.train.config.schema import Config, ModelConfig, TrainConfig
from shardwise.train.data.data_checks import check_fits
from shardwise.train.data.micro_batch import IGNORED
from shardwise.train.data.tokenizer import Tokenizer

Builder = Callable[[Any], Any]


def builder_of(config: Config, tokenizer: Tokenizer) -> Builder:
    """Return the function that builds the configured model from a `jax.random.key`.

    Raises ConfigError for a path, a model type or a factory that does not exist, an unknown key, or a model too small
    for the vocabulary or the sequences.
    """
    if config.model.factory is not None:
        return _factory(config.model.factory)
    described = _described(config.model, tokenizer, config.data.seq_len)
    positions = described.get("max_position_embeddings", described.get("n_positions"))
    check_fits(described.get("vocab_size"), positions, tokenizer.vocab_size, config.data.seq_len)
    dtype = dtype_name(config.model.dtype, "model.dtype")
    return lambda key: models.from_config(described, key, dtype)


def builder_from(model: Mapping[str, Any] | str, dtype: str) -> Builder:
    """Return the function that builds a model from a `jax.random.key`: by a transformers configuration, or by a factory
    `module:function`.

    Raises ConfigError for a factory that cannot be imported. The returned function raises it if the model cannot be
    built.
    """
    return _factory(model) if isinstance(model, str) else lambda key: models.from_config(model, key, dtype)


def _described(config: ModelConfig, tokenizer: Tokenizer, seq_len: int) -> dict[str, Any]:
    """Return the transformers configuration. Keys that an inline one leaves out are taken from the data."""
    if config.path is not None:
        return models.read_config(local(config.path))
    assert config.config is not None, "ModelConfig must have exactly one of path, config and factory"
    inline = copy.deepcopy(config.config)
    kind = inline["model_type"]
    if kind not in models.FAMILIES:
        raise ConfigError(
            f"model.config.model_type={kind!r}: must be one of the JAX models {', '.join(models.FAMILIES)}"
        )
    known = models.known_keys(kind)
    for key in inline:
        if key not in known:
            raise ConfigError(
                f"model.config.{key} is not a key of model_type {kind!r} in JAX{did_you_mean(key, known)}"
            )
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        inline.setdefault(key, tokenizer.end_id)
    inline.setdefault("vocab_size", tokenizer.vocab_size)
    positions, usual = ("n_positions", 1024) if kind == "gpt2" else ("max_position_embeddings", 2048)
    inline.setdefault(positions, max(usual, seq_len))
    return inline


def _factory(name: str) -> Builder:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.factory={name!r} cannot be imported: {one_line(error)}") from error
    if not callable(found):
        raise ConfigError(f"model.factory={name!r} is a {type(found).__name__}, not a function of a jax.random.key")

    def build(key: Any) -> Any:
        try:
            return found(key)
        except Exception as error:
            raise ConfigError(
                f"model.factory={name!r} failed when it was called with a jax.random.key: "
                f"{one_line(error, with_type=True)}"
            ) from error

    return build


def check_logits(model: Any, config: Config, vocab_size: int) -> None:
    """Raise ConfigError if a factory's model does not turn ids into logits over at least the tokenizer's vocabulary.

    Args:
        model: the abstract model.
        config: the run's configuration.
        vocab_size: the tokenizer's vocabulary size.
    """
    name, shape = config.model.factory, (1, config.data.seq_len)
    if name is None:
        return
    try:
        found = jax.eval_shape(lambda model, ids: model(ids), model, jax.ShapeDtypeStruct(shape, jnp.int32))
    except Exception as error:
        raise ConfigError(
            f"model.factory={name!r}: its model failed when it was called with ids of shape {shape}: "
            f"{one_line(error, with_type=True)}"
        ) from error
    got = getattr(found, "shape", None)
    if got is None or got[:-1] != shape or got[-1] < vocab_size:
        raise ConfigError(
            f"model.factory={name!r}: its model returns {got or type(found).__name__} for ids of shape {shape}; "
            f"it must return logits of shape (1, {shape[1]}, at least {vocab_size})"
        )


def loss_of(model: Any, batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood of every target given the tokens before it, summed, in nats; and the number of
    targets.

    Args:
        model: called with ids [rows, seq_len]; returns logits [rows, seq_len, vocab], which are used in float32.
        batch: "ids" and "labels", int32 [rows, seq_len]; labels are not shifted, and -100 is no target.
        rng: not used; modules have their own random streams.
    """
    logits = model(batch["ids"]).astype(jnp.float32)[:, :-1]
    labels = batch["labels"][:, 1:]
    is_target = labels != IGNORED
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(is_target, labels, 0))
    return jnp.sum(jnp.where(is_target, nll, 0.0)), jnp.sum(is_target)


def optimizer_of(train: TrainConfig, names: NameMap, params: Any) -> optax.GradientTransformation:
    """Return AdamW with the configured schedule. Weight decay applies only to parameters that have two or more dims in
    files, where layers are not stacked."""
    schedule = LearningRateSchedule.of(train)
    rates = jnp.asarray([schedule(step) for step in range(train.steps)], jnp.float32)
    decays = [
        len(part.shape_in_file(leaf.shape)) >= 2
        for leaf in leaves_of(params)
        for part in names.parts(leaf.path, leaf.shape)[:1]
    ]
    mask = jax.tree.unflatten(jax.tree.structure(params), decays)
    return optax.adamw(
        lambda count: rates[jnp.minimum(count, train.steps - 1)],
        *train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        mask=mask,
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of a tree's arrays on one device: on that of this process's devices which holds the most."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def bytes_whole(tree: Any) -> int:
    """Return the bytes of a tree's whole arrays, which every device would hold under plain data parallelism."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
