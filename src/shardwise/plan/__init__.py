"""Planning: dry runs of the engine for one rank of any world, before a device is rented."""

from shardwise.plan.dry_run.job import Job
from shardwise.plan.hardware.devices import Hardware, find_device
from shardwise.plan.models.source import shapes
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.search import search
from shardwise.plan.simulate.forecast import Forecast, forecast
from shardwise.policy.settings import ENGINE_MODELS
from shardwise.registry import register

__all__ = ["Evaluator", "Forecast", "Hardware", "Job", "find_device", "forecast", "search", "shapes"]

register(ENGINE_MODELS, "shardwise.plan.simulate.other_engines.fsdp2:FSDP2")
