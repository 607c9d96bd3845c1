"""Ray Train: python ray_train.py run.toml --workers 16 [section.key=value ...]

Each worker is one rank of `shardwise train`. If one fails, Ray starts all workers again, up to --restarts times, and
they resume from the newest checkpoint. Start the line again with another number of workers, and the run goes on with so
many. All nodes need the same data and a shared directory for runs (log.directory), under the same paths."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(asked: dict[str, Any]) -> None:
    """Train as one rank. Ray has made the process group."""
    os.environ.setdefault("SHARDWISE_HANG_TIMEOUT_S", "60")
    from shardwise.train import trainer
    from shardwise.train.config.files import load

    os.chdir(asked["directory"])  # paths in the configuration are relative to it
    config = load(Path(asked["config"]), asked["overrides"])
    trainer.run(config.for_ranks(torch.distributed.get_world_size()))


def main() -> None:
    """Train on a cluster of Ray's, or on this machine if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="ranks without GPUs")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="where Ray keeps its own files")
    options = parser.parse_intermixed_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "config": str(options.config.resolve()),
            "overrides": options.overrides,
            "directory": str(Path.cwd()),
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(
            storage_path=str(options.storage.resolve()), failure_config=FailureConfig(max_failures=options.restarts)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
