"""From a checked configuration to a model, its shards and its optimizer, and to the job that the planner forecasts."""
