"""torchtitan's tensor parallelism with sequence parallelism, as a plan of the Llama beside this file."""

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


def cut_llama(shape: LlamaShape) -> nn.Module:
    """The Llama with this plan."""
    model = Llama(shape)
    model.tp_plan = torchtitans_plan()
    return model
