"""Seconds of a step that another compiler made, from its matrix products and its collectives.

Neither the order of events nor the other kernels are known, so the result is a range: from products and collectives
that overlap completely to products and collectives one after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.plan.simulate.network import Cluster, bytes_sent
from shardwise.plan.simulate.roofline import DEFAULT


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of one array, and how often it runs in a step."""

    op: str
    """all_gather, reduce_scatter or all_reduce."""
    group: str
    """shard or replicate."""
    ranks: int
    nbytes: int
    """Bytes of the whole buffer."""
    times: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one step."""

    products_s: float
    collectives_s: float
    bytes_sent: float
    """Bytes that one rank sends."""

    @property
    def ends(self) -> tuple[float, float]:
        """The shortest and the longest time that products and collectives take together."""
        return max(self.products_s, self.collectives_s), self.products_s + self.collectives_s


def seconds(product_flops: float, dtype: str, sent: Iterable[Sent], cluster: Cluster) -> Seconds:
    """Return how long a step takes on one rank of a cluster.

    Args:
        product_flops: operations of the rank's matrix products; a multiply-add counts as two.
        dtype: the dtype of the products: bf16, fp16 or fp32.
        sent: the rank's collectives.
        cluster: the devices.
    """
    sent = list(sent)
    return Seconds(
        product_flops / (cluster.hardware.sustained(dtype) * DEFAULT.matmul),
        sum(one.times * cluster.seconds(one.op, one.nbytes, one.group, one.ranks) for one in sent),
        sum(one.times * bytes_sent(one.op, one.nbytes, one.ranks) for one in sent),
    )
