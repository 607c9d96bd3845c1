"""A published row as a forecast's inputs, by the rules of `benchmarks/data/README.md`."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks import HERE
from benchmarks.plans.published.encoder import EncoderShape, SimpleTransformer
from benchmarks.plans.published.llama import Block as LlamaBlock
from benchmarks.plans.published.llama import Llama, LlamaLoss, LlamaShape, NeoX, NeoXBlock, NeoXLoss
from benchmarks.plans.published.mpt import MPT, MPTShape
from benchmarks.plans.published.mpt import Block as MPTBlock
from benchmarks.plans.published.other_engines.job import PublishedJob
from benchmarks.plans.published.tensor_parallel import cut_llama
from shardwise.errors import PlanError, ShardwiseError
from shardwise.fsdp.strategy import Precision
from shardwise.plan.models.adapted import with_adapters
from shardwise.plan.models.source import resolve
from shardwise.policy.adapters import Adapters

DATA = HERE / "data" / "published.jsonl"
OUT_OF_MEMORY = DATA.parent / "out_of_memory.jsonl"
"""Runs that are published because they did not fit, in the same form."""

_DEVICES = {
    "A100-SXM-80GB": "a100-sxm-80gb",
    "A100-SXM-40GB": "a100-sxm-40gb",
    "H100-SXM-80GB": "h100-sxm-80gb",
    "H100-SXM-96GB-HBM2e-500W": "h100-sxm-96gb-500w",
    "H100-95GB": "h100-sxm-96gb-500w",
    "H200-SXM-141GB": "h200-sxm",
    "MI300X-192GB": "mi300x",
    "L40S": "l40s",
    "RTX-4090": "rtx-4090",
}
_PREFIXES = (("A100", "a100-sxm-80gb"), ("H100", "h100-sxm-80gb"), ("H200", "h200-sxm"), ("B200", "b200-sxm"))
"""For names that leave the variant open."""
_ON_500_W = ("torchtitan", "torchtitan-tp", "torchtitan-cp", "torchao")
"""Sources that call their H100 by name only where it is the part of 96 GB and 500 W."""
_INTERCONNECTS = (
    ("GCP A3 Ultra", "8x400gbps"),
    ("GCP A3", "gcp-a3"),
    ("400 Gb/s per GPU", "8x400gbps"),
    ("1600 Gbps", "8x200gbps"),
    ("800 Gbps", "800gbps"),
    ("400 Gbps", "400gbps"),
)
_STRATEGIES = (
    (r"FULL_SHARD|ZeRO-3|zero3", "full_shard"),
    (r"SHARD_GRAD_OP|ZeRO-2|zero2", "shard_grad_op"),
    (r"ZeRO-1|zero1", "shard_optimizer"),
    (r"HYBRID_SHARD", "hybrid_shard"),
    (r"DDP|NO_SHARD", "no_shard"),
    (r"FSDP", "full_shard"),
)
_MIXED = ("amp_bf16/DEFAULT", "DEFAULT", "bf16", "bf16 mixed", "bf16 (fp32 params, fp32 reduce-scatter)")
_PRECISIONS = (
    ("PURE", ("bf16", "bf16", None)),
    (r"bf16-true|master\+grads\+states", ("bf16", "bf16", "bf16")),
    (r"fp32 master\+states", ("bf16", "bf16", "fp32")),
    ("^bf16 parameters", ("bf16", "fp32", "bf16")),
    ("^fp16", ("fp16", "fp32", None)),
    ("^fp32", ("fp32", "fp32", "fp32")),
)
"""Of words in a row: (param, reduce, master)."""
_AUTOCAST = "autocast"
"""In words about precision: torch's own over fp32 parameters, which are gathered in fp32."""
_FLOAT8 = r"float8|fp8"
FLOAT8 = "float8"
"""The reason why a row is scored apart."""
_BUILT_WHOLE = ("ds-bf16mw",)
"""Sources of before 2026 whose models are built outside `deepspeed.zero.Init`, so that linear layers stay torch's."""
_SUMMER_2025 = ("2c8b594", "6fc499f", "775a486")
"""torchtitan's commits from August 2025 on that rows name. By then its loss is compiled with the model, and embeddings
and head are units of their own (pytorch/torchtitan#1094), which the root held before."""
_WINTER_2024 = ("torchtitan 0.0.2", *_SUMMER_2025)
"""torchtitan's releases since `run_train.sh` asks for expandable segments (pytorch/torchtitan#643) that rows name."""
ADAPTED = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
"""The layers of the Llama beside this file that get adapters: all linear ones of its blocks."""
_STABLECODE = {"n_heads": 32, "n_kv_heads": 32, "d_ff": 4 * 2560}


@dataclass(frozen=True)
class Row:
    """One published measurement and what is forecast for it."""

    published: dict[str, Any]
    build: Callable[[], nn.Module]
    job: PublishedJob
    attention: str = "flash2"
    """The generation of the fused attention kernel that the source's software had."""
    reasons: tuple[str, ...] = field(default=())
    """Why it is not scored, if it is not."""

    @property
    def name(self) -> str:
        return str(self.published["id"])

    @property
    def source(self) -> str:
        return str(self.published["source_key"])

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Equal for rows that merge: everything that was chosen, nothing that was measured."""
        keys = ("model", "n_layers", "d_model", "seq_len", "gpu", "n_gpus", "gpus_per_node", "strategy")
        keys += ("micro_batch_per_gpu", "grad_accum", "precision", "act_ckpt", "compile", "offload", "shard_group")
        keys += ("interconnect", "flash_attention", "optimizer", "source_key", "tp", "cp", "lora_rank")
        keys += ("sequence_parallel",)
        return (*(self.published.get(key) for key in keys), self.job.activation_checkpointing)

    def scored(self, metric: str) -> bool:
        """`metric`: throughput, memory or feasibility."""
        if metric not in self.published["usable_for"] or self.reasons:
            return False
        if metric == "throughput":
            return "tokens_per_s_per_gpu" in self.published
        return metric != "memory" or self.memory_metric is not None

    def scored_apart(self, metric: str) -> bool:
        """Whether it would be scored if it did not compute in float8."""
        return self.reasons == (FLOAT8,) and replace(self, reasons=()).scored(metric)

    @property
    def memory_metric(self) -> str | None:
        """allocated or reserved; None where the source does not say."""
        text = self.published.get("mem_metric", "")
        if "reserved" in text:
            return "reserved"
        return "allocated" if "max_memory_allocated" in text else None


def read(path: Path = DATA) -> list[Row]:
    """Every row of a file of published measurements. Raises PlanError for a row that says too little."""
    with path.open(encoding="utf-8") as lines:
        return [row_of(json.loads(line)) for line in lines if line.strip()]


def read_what_can_be(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and a line for each that says too little, or names what nobody knows."""
    rows, failed = [], []
    with path.open(encoding="utf-8") as lines:
        for published in (json.loads(line) for line in lines if line.strip()):
            try:
                rows.append(row_of(published))
            except ShardwiseError as error:
                failed.append(f"{published.get('id')}: {error}")
    return rows, failed


def row_of(published: dict[str, Any]) -> Row:
    """One row of the file. Raises PlanError where it says too little."""
    try:
        return _row_of(published)
    except KeyError as error:
        raise PlanError(f"the row does not say {error}") from error


def _row_of(published: dict[str, Any]) -> Row:
    build, block = _builder(published)
    adapters = _adapters(published)
    job = PublishedJob.of(
        **_cluster(published),
        strategy=_strategy(published),
        shard_group=_shard_group(published),
        units=_ends_apart if _is_of(published, _SUMMER_2025) else {block},
        precision=_precision(published),
        float8=_float8(published),
        autocast="bf16" if _AUTOCAST in published["precision"] else None,
        seq_len=published["seq_len"],
        micro_batch=published["micro_batch_per_gpu"],
        accumulation=published.get("grad_accum") or 1,
        activation_checkpointing=_recomputation(published),
        compile=bool(published.get("compile")),
        optimizer="adamw-foreach" if published["source_key"] in ("fms-fsdp", "foundry") else "adamw",
        loss=_loss(published),
        segments=_segments(published),
        engine=_engine(published),
        keeps_gathered_weights=published["source_key"] in _BUILT_WHOLE,
        lora=adapters,
    )
    if adapters is not None:
        build = partial(adapted_model, build, adapters, job.compute_dtype, job.tp)
    attention = "flash1" if published["source_key"] == "foundry" else "flash2"
    return Row(published, build, job, attention, tuple(_reasons(published)))


def _builder(published: dict[str, Any]) -> tuple[Callable[[], nn.Module], type[nn.Module]]:
    take = _STABLECODE | {key: value for key, value in published.items() if value is not None}
    layers, width, vocab, seq_len = (take[key] for key in ("n_layers", "d_model", "vocab", "seq_len"))
    if published["source_key"] == "foundry" or re.search("MPT|GPT-2", published["model"]):
        shape = MPTShape(layers, width, take["n_heads"], vocab, seq_len)
        return partial(MPT, shape), MPTBlock
    if "SimpleTransformer" in published["model"]:
        encoder = EncoderShape(layers, width, take["n_heads"], take["d_ff"], vocab, seq_len)
        return partial(_typed, partial(SimpleTransformer, encoder), torch.bfloat16), nn.TransformerEncoderLayer
    llama = LlamaShape(layers, width, take["n_heads"], take["n_kv_heads"], take["d_ff"], vocab, seq_len)
    neox = "stablecode" in published["model"]
    litgpt = published["source_key"] == "thunder" and "torchtitan" not in published["model"]
    if (published.get("tp") or 1) > 1:
        return partial(cut_llama, llama, published.get("sequence_parallel", True)), LlamaBlock
    if published["source_key"] == "torchtitan-cp" or (published.get("cp") or 1) > 1:
        # only attention of transformers' models can reach across ranks
        return partial(transformers_llama, published["model"].lower()), LlamaDecoderLayer
    plain, scored = (NeoX, NeoXLoss) if neox else (Llama, LlamaLoss)
    model: Callable[[], nn.Module] = partial(scored if litgpt else plain, llama)
    if "bf16-true" in published["precision"]:
        model = partial(_typed, model, torch.bfloat16)
    return model, NeoXBlock if neox else LlamaBlock


def transformers_llama(shape: str) -> nn.Module:
    """A packaged shape as transformers builds it."""
    return resolve(shape).builder()()


def adapted_model(build: Callable[[], nn.Module], adapters: Adapters, computed: str, tp: int) -> nn.Module:
    """A model with adapters beside its frozen weights, as plans have them."""
    return with_adapters(build, adapters, computed, tp)()


def _adapters(published: dict[str, Any]) -> Adapters | None:
    rank = published.get("lora_rank")
    return None if rank is None else Adapters(rank, ADAPTED)


def _typed(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def _cluster(published: dict[str, Any]) -> dict[str, Any]:
    ranks = published["n_gpus"]
    per_node = min(ranks, published.get("gpus_per_node") or 8)
    stated = published.get("interconnect") or ""
    interconnect = next((name for words, name in _INTERCONNECTS if words in stated), None)
    return {
        "gpu": device_of(published),
        "gpus_per_node": per_node,
        "nodes": ranks // per_node,
        "interconnect": interconnect,
        "tp": published.get("tp") or 1,
        "cp": published.get("cp") or 1,
    }


def device_of(published: dict[str, Any]) -> str:
    """The hardware data's name for a row's GPU. Where a row states none, which only memory rows do not, an A100."""
    gpu = published.get("gpu") or "A100"
    if gpu in _DEVICES:
        return _DEVICES[gpu]
    if gpu.startswith("H100") and published["source_key"] in _ON_500_W:
        return "h100-sxm-96gb-500w"
    known = next((name for prefix, name in _PREFIXES if gpu.startswith(prefix)), None)
    if known is None:
        raise PlanError(f"gpu {gpu!r} is not among the hardware data")
    return known


def _strategy(published: dict[str, Any]) -> str:
    return next((name for words, name in _STRATEGIES if re.search(words, published["strategy"])), "full_shard")


def _shard_group(published: dict[str, Any]) -> int | None:
    if _strategy(published) != "hybrid_shard":
        return None
    return int(published.get("shard_group") or 8)


def _precision(published: dict[str, Any]) -> Precision:
    """Where nothing else is said, as of float8 compute: masters and reductions as in bf16."""
    text = published["precision"]
    if _AUTOCAST in text:
        return Precision()
    if text in _MIXED:
        return Precision(param="bf16", reduce="fp32")
    param, reduce, master = next(
        (dtypes for words, dtypes in _PRECISIONS if re.search(words, text)), ("bf16", "fp32", None)
    )
    return Precision(param=param, reduce=reduce, master=master)


def _float8(published: dict[str, Any]) -> str | None:
    text = published["precision"]
    if not re.search(_FLOAT8, text):
        return None
    return "gathers" if "fp8 all-gather" in text else "compute"


def _recomputation(published: dict[str, Any]) -> str:
    mode = published.get("act_ckpt") or "unknown"
    if mode == "unknown":
        return "none"
    if mode != "selective":
        return str(mode)
    notes = published.get("notes", "")
    if "selective layer" in notes or "every n-th block" in notes:
        return "every-2"
    return "selective-ops"


def _segments(published: dict[str, Any]) -> str:
    """AMD's allocator has no expandable ones."""
    asks = _is_of(published, _WINTER_2024) and not (published.get("gpu") or "").startswith("MI")
    return "expandable" if asks else "fixed"


def _is_of(published: dict[str, Any], releases: tuple[str, ...]) -> bool:
    return any(release in published.get("notes", "") for release in releases)


def _ends_apart(fqn: str, module: nn.Module) -> bool:
    """Blocks, embeddings and head."""
    return isinstance(module, LlamaBlock) or fqn in {"tok_embeddings", "output"}


def _loss(published: dict[str, Any]) -> str:
    """foundry's cross entropy is a fused kernel; where torchtitan compiles its own, fp32 logits are never in memory."""
    if published["source_key"] == "foundry":
        return "fused"
    return "fused" if published.get("compile") and _is_of(published, _SUMMER_2025) else "model"


def _engine(published: dict[str, Any]) -> str:
    source, strategy = published["source_key"], published["strategy"]
    if source.startswith("ds-") or "ZeRO" in strategy:
        return "deepspeed"
    if "FSDP1" in strategy:
        return "fsdp1"
    if "FSDP2" in strategy or source in (
        "torchtitan",
        "torchtitan-tp",
        "torchtitan-cp",
        "torchao",
        "torchtune",
        "maxtext-gpu",
        "jax-gpu",
    ):
        return "fsdp2"
    return "fsdp1"


def _reasons(published: dict[str, Any]) -> list[str]:
    reasons = []
    if published["tier"] not in ("A", "B"):
        reasons.append(f"tier {published['tier']}")
    if re.search(_FLOAT8, published["precision"]):
        reasons.append(FLOAT8)
    if (published.get("offload") or "none") != "none":
        reasons.append("offload")
    if "JAX" in published["strategy"]:
        reasons.append("JAX")
    if "not stated" in published["strategy"]:
        reasons.append("unknown ZeRO stage")
    if "power limited" in (published.get("gpu") or ""):
        reasons.append("power limited")
    if (published.get("act_ckpt") or "unknown") == "unknown":
        reasons.append("what recomputes is not stated")
    if published.get("act_ckpt") == "selective" and "p not stated" in published.get("notes", ""):
        reasons.append("which blocks recompute is not stated")
    return reasons
