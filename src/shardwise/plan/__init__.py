"""Planning: the engine, run dry, on one rank of any world, before a device is rented."""

from shardwise.plan.evaluate import Evaluator
from shardwise.plan.forecast import Forecast, forecast
from shardwise.plan.hardware import Hardware, find_device
from shardwise.plan.job import Job
from shardwise.plan.planner import search
from shardwise.plan.source import shapes

__all__ = ["Evaluator", "Forecast", "Hardware", "Job", "find_device", "forecast", "search", "shapes"]
