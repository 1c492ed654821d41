"""Pipelines: schedules as tables, and the one executor that runs any of them."""
