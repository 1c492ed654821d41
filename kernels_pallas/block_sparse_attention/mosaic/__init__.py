"""Block-sparse attention for Hopper GPUs, in Pallas for Mosaic GPU."""
