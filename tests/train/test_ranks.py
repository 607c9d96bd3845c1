import pytest
import torch

from shardwise.errors import PeerError
from shardwise.train.ranks import Ranks, started
from tests.ranks import RankPools


def exchange() -> None:
    rank = torch.distributed.get_rank()
    with started() as ranks:
        assert (ranks.rank, ranks.world_size, ranks.device.type) == (rank, 3, "cpu")
        assert ranks.sum([rank + 0.5, 1.0]) == [3 * 0.5 + 3, 3.0]
        assert ranks.count(2**53 + rank) == 3 * 2**53 + 3  # float64 would lose the last bit
        assert ranks.gather([rank, -rank]) == [[0.0, 0.0], [1.0, -1.0], [2.0, -2.0]]
        assert ranks.hear(f"I am {rank}") == ["I am 0", "I am 1", "I am 2"]
        assert ranks.first_says(rank == 0) is True
        assert ranks.first_says(rank != 0) is False
        with ranks.together():
            pass
        with pytest.raises(ValueError if rank == 1 else PeerError, match=r"^(rank 1 failed: )?no cheese$"):
            fail(ranks)
        assert ranks.count(1) == 3  # nobody was left in a collective
    assert torch.distributed.is_initialized(), "a process group that was there before is left alone"


def fail(ranks: Ranks) -> None:
    with ranks.together():
        if ranks.rank == 1:
            raise ValueError("no cheese")


def test_three_ranks_agree(ranks: RankPools) -> None:
    ranks(3).run(exchange)


def test_alone_there_is_no_process_group() -> None:
    with started() as ranks:
        assert not torch.distributed.is_initialized()
        assert ranks == Ranks(0, 1, torch.device("cpu"))
        assert ranks.sum([1.5]) == [1.5]
        assert ranks.count(3) == 3
        assert ranks.gather([1.0]) == [[1.0]]
        assert ranks.hear("I") == ["I"]
        assert ranks.first_says(True)
