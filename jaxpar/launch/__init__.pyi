"""Names for scripts; each is loaded when it is first used."""

from .devices import choose_mesh, choose_meshes, cpu_devices, scaled_accumulation

__all__ = ["choose_mesh", "choose_meshes", "cpu_devices", "scaled_accumulation"]
