"""Tensor parallelism of the Llama beside this file: torchtitan's plan, and the same without sequence parallelism."""

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from benchmarks.plans.published.llama import Llama, LlamaShape


def torchtitans_plan() -> dict[str, ParallelStyle]:
    """The styles of its `apply_tp` by names of modules. Logits stay cut, as for its loss in parallel, whose few sums
    over ranks are left out."""
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"layers.*.{name}": style for name, style in block.items()},
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1)),
    }


def plan_of_whole_activations() -> dict[str, ParallelStyle]:
    """The same with activations that are whole on every rank between layers, as NeMo AutoModel's plan of Qwen2."""
    columns = {f"layers.*.{name}": ColwiseParallel() for name in ("attention.wq", "attention.wk", "attention.wv")}
    columns |= {f"layers.*.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    rows = {f"layers.*.{name}": RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")}
    ends = {"tok_embeddings": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel()}
    return columns | rows | ends


def cut_llama(shape: LlamaShape, along_sequence: bool = True) -> nn.Module:
    """The Llama with one of these plans."""
    model = Llama(shape)
    model.tp_plan = torchtitans_plan() if along_sequence else plan_of_whole_activations()
    return model
