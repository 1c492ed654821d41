"""Models in parts: what a pipeline can cut."""
