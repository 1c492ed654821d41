"""Reading and evaluating traced functions."""
