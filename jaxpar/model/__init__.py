"""What jaxpar knows of a Flax model.

`bridge` makes pure functions of NNX modules, `linen` of Linen ones; `blocks` is a model
that a pipeline can cut, run by `network` and recorded by `proxies`.
"""
