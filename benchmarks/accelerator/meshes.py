"""Meshes of StreamCollectives, made by hand: `sw.shard` itself takes dry ones for one rank and in a fake world."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.accelerator.device import played
from shardwise.comm.backends.tree_channel import channel_of
from shardwise.comm.torch_channels import ChannelStreams
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.torch_collectives import DryCollectives

FAKE_WORLD = 8


def nccl_mesh(group: dist.ProcessGroup, device: torch.device) -> Mesh:
    """A shard group. Every rank of it must call this."""
    spans = (tuple(dist.get_process_group_ranks(group)), (dist.get_rank(),))
    return Mesh(ChannelStreams(group, device, channel=channel_of), DryCollectives(0, 1, device), device, spans)


@contextlib.contextmanager
def fake_world(device: torch.device) -> Iterator[Mesh]:
    """This process is rank 0 of 8; its collectives are enqueued as NCCL's would be, and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_WORLD)
    try:
        with played(device):
            group = dist.group.WORLD
            assert group is not None
            yield nccl_mesh(group, device)
    finally:
        dist.destroy_process_group()


def serves(device: torch.device) -> bool:
    """Whether StreamCollectives can be made for it: CUDA and ROCm; on CPUs their streams are played."""
    return device.type in {"cuda", "cpu"}
