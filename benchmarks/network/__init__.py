"""Training steps over links of a limited rate: the network, its processes, the fit."""
