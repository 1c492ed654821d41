"""Kernels in Pallas, each with a plain JAX twin for devices that it does not run on.

Imports nothing of jaxpar: any JAX program can use it.
"""
