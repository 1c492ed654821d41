"""What `benchmarks/kernels_gpu.py` measures, a file a kind of kernel."""
