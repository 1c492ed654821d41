"""What `benchmarks/gpu_day.py` measures, and how it gets through its list.

Read `items` (the list), `day` (which case is next), `processes` (a case in a process of
its own), `lines` (what is written at once, and what is done), then what the cases call:
`ceilings`, `training`, `kernels`, `kernel_tests`. `imports` says what they may import.
"""
