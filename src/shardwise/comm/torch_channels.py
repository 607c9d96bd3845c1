"""torch's collectives with messages between hosts through a channel, so that a rank that raises is heard of at once; on
devices perhaps with a second communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.store_channel import StoreChannel
from shardwise.fsdp.collectives import Combine
from shardwise.fsdp.torch_collectives import StreamCollectives, TorchCollectives


class Channel(Protocol):
    """Exchanges messages between the ranks of a group. The methods are those of `Collectives`."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """See `Collectives.exchange`."""

    def abandon(self, reason: str = "") -> None:
        """See `Collectives.abandon`."""

    def close(self) -> None:
        """See `Collectives.close`."""


MakeChannel = Callable[[dist.ProcessGroup, dict[int, str]], Channel]
"""Makes a channel from a group and the labels in words. Every rank of the group calls it."""


class _Messages:
    """The methods of `Collectives` that go through a channel."""

    _channel: Channel

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Exchange through the channel."""
        return self._channel.exchange(message, combine, label)

    def abandon(self, reason: str = "") -> None:
        """Tell peers through the channel."""
        self._channel.abandon(reason)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class ChannelCollectives(_Messages, TorchCollectives):
    """Those of CPU ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        poison: bool | None = None,
        channel: MakeChannel = StoreChannel,
    ) -> None:
        """As that of the base class. `channel`: makes the channel. Every rank of the group must call this."""
        super().__init__(group, device, poison)
        self._channel = channel(group, self.labels)


class ChannelStreams(_Messages, StreamCollectives):
    """Those of ranks on accelerators."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        separate_reductions: bool = False,
        poison: bool | None = None,
        channel: MakeChannel = StoreChannel,
    ) -> None:
        """As that of `ChannelCollectives`. `separate_reductions`: use a second communicator for reductions, so that
        they and gathers do not queue behind one another. It costs memory for the communicator's buffers a second time.
        """
        super().__init__(group, device, poison)
        self._channel = channel(group, self.labels)
        if separate_reductions:
            ranks = dist.get_process_group_ranks(group)
            backend = dist.get_backend(group)
            self._reduce_group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)

    def close(self) -> None:
        """Close the channel and the second communicator, if there is one."""
        super().close()
        if self._reduce_group is not self._group:
            dist.destroy_process_group(self._reduce_group)
            self._reduce_group = self._group
