"""Pipelines: schedules as tables, and the executor that runs any of them."""
