"""Kernels in Pallas, each with a plain JAX reference for unsupported devices.

Imports nothing of jaxpar: any JAX program can use it.
"""
