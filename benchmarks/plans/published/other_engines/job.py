"""A published run as a job: with what other engines have and shardwise has not."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from benchmarks.plans.published.other_engines.autocast import autocast
from benchmarks.plans.published.other_engines.float8 import GATHERS
from shardwise.engine.extensions.autocast import allow_autocast
from shardwise.errors import ConfigError
from shardwise.fsdp.engine import Engine
from shardwise.plan.dry_run.job import Job
from shardwise.policy.checks import check_choice

AUTOCASTS = ("bf16", "fp16")
FLOAT8 = ("compute", GATHERS)


@dataclass(frozen=True)
class PublishedJob(Job):
    """A job of any engine. Raises ConfigError for an invalid value."""

    autocast: str | None = None
    """Dtype of a `torch.autocast` around forward. Parameters are gathered as `precision` says, and cast where they are
    used."""
    float8: str | None = None
    """Linear layers in torchao's 8-bit floats, with dynamic scaling. "gathers": parameters of blocks are gathered in 8
    bits as well (FSDP2)."""
    keeps_gathered_weights: bool = False
    """For DeepSpeed's ZeRO-3: whether linear layers keep gathered weights from forward to backward, unless they
    recompute. They did until the summer of 2026 if the model was built outside `deepspeed.zero.Init`, and still do with
    `memory_efficient_linear=false`."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        for name, choices in (("autocast", AUTOCASTS), ("float8", FLOAT8)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), choices, or_none=True)
        if self.autocast is not None and (self.compile or self.engine == "shardwise"):
            raise ConfigError(f"autocast={self.autocast!r}: neither shardwise nor compile=True can be forecast with it")
        if self.float8 is not None and self.engine == "shardwise":
            raise ConfigError(f"float8={self.float8!r}: engine 'shardwise' does not compute in 8 bits")
        if self.float8 == GATHERS and self.engine != "fsdp2":
            raise ConfigError(f"float8='gathers': engine {self.engine!r} cannot gather in 8 bits")
        if self.float8 is not None and "fp8" not in self.hardware.peak_flops:
            raise ConfigError(f"float8={self.float8!r}: {self.hardware.title} has no 8-bit matrix products")

    @property
    def compute_dtype(self) -> str:
        return self.autocast or super().compute_dtype

    @property
    def keeps_casts(self) -> bool:
        """Whether autocast caches casts of parameters for a whole forward. It does so for leaves; FSDP1's are views."""
        return self.engine != "fsdp1" or not self.strategy.sharded

    def around_forward(self, engine: Engine) -> AbstractContextManager[None]:
        if self.autocast is None:
            return nullcontext()
        allow_autocast(engine)
        return autocast(self.autocast, self.keeps_casts, self.on_cpu)
