"""Models of engines that published runs used. They attach to the planner when this package is imported."""

from shardwise.policy.settings import ENGINE_MODELS
from shardwise.registry import register

register(ENGINE_MODELS, "benchmarks.plans.published.other_engines.engines:FSDP1")
register(ENGINE_MODELS, "benchmarks.plans.published.other_engines.engines:DEEPSPEED")
