"""What is offloaded, and where to: what users pass as ``offload=``."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Offload:
    """What of a run's state is stored in the host's memory, not in the devices'.

    Attributes:
      optimizer: "host" stores the fp32 masters and the optimizer's state in the host's
        memory, pinned; each step streams them through the device, a piece at a time.
        "disk" stores them in files of `path`, which the host updates; a run that is
        killed goes on from its last step (`Engine.resume`). None stores them on the
        device.
      fraction: of the bytes of these, the part that is on the host; the other part
        stays on the device (Twin-Flow). It goes by whole leaves.
      piece_mb: size of a piece of an array, in MB. A device holds three pieces of every
        array of a leaf's state at a time.
      update: where the update of what is on the host is computed: on the "device", or
        on the "host", which gets the gradients and sends parameters in the compute
        dtype back: of Adam's state a quarter of the bytes or less. It needs a host
        whose memory is fast for the number of parameters. "auto" measures both
        when the engine is made, takes the faster one and says so. What is on disk is
        always updated by the host.
      params: where the parameters are that loops over layers compute with: on the
        "host" or on "disk", from which each layer is fetched when it is used, in both
        passes; gradients leave layer by layer. None keeps them, in the compute dtype,
        on the device. "host" needs an update by the host, "disk" an optimizer on disk.
      path: the folder of what is on disk, which a run has for itself. A local disk is
        best: twice the state is stored, and once read and written a step.
      delayed: whether the host's update is a step late: it works while the devices
        compute the next gradients, with the parameters of before. Saving applies what
        is pending.
      delay_after: steps that are taken without delay before.

    Raises:
      ValueError: if a word is not one of its choices, or a number is out of range.

    Sources: Ren et al., "ZeRO-Offload" (2021); Rajbhandari et al., "ZeRO-Infinity"
    (2021), for disk and for parameters.

    Example:
      >>> Offload(optimizer="host", fraction=0.6).fraction
      0.6
    """

    optimizer: str | None = "host"
    fraction: float = 1.0
    piece_mb: float = 8.0
    update: str = "device"
    params: str | None = None
    path: str | None = None
    delayed: bool = False
    delay_after: int = 40

    def __post_init__(self) -> None:
        if self.optimizer not in ("host", "disk", None):
            raise ValueError(
                f"offload: optimizer={self.optimizer!r} must be 'host', 'disk' or None."
            )
        if (self.optimizer == "disk") != (self.path is not None):
            raise ValueError(
                f"offload: path={self.path!r} must be the folder for optimizer='disk', "
                f"and None for any other; optimizer={self.optimizer!r}."
            )
        if self.update not in ("device", "host", "auto"):
            raise ValueError(
                f"offload: update={self.update!r} must be 'device', 'host' or 'auto'."
            )
        if self.update != "device" and self.optimizer is None:
            raise ValueError(
                f"offload: update={self.update!r} needs optimizer='host': the host "
                "updates the state that it holds."
            )
        self._check_params()
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"offload: fraction={self.fraction} must be from 0 to 1.")
        if self.delayed and (self.update != "host" or self.path is not None):
            raise ValueError(
                "offload: delayed=True needs optimizer='host' and update='host': it "
                "delays the host's update, and gradients that wait are not on disk."
            )
        if self.delay_after < 0:
            raise ValueError(
                f"offload: delay_after={self.delay_after} must be at least 0."
            )
        if not self.piece_mb > 0:
            raise ValueError(f"offload: piece_mb={self.piece_mb} must be positive.")

    def _check_params(self) -> None:
        if self.params not in ("host", "disk", None):
            raise ValueError(
                f"offload: params={self.params!r} must be 'host', 'disk' or None."
            )
        if self.params == "disk" and self.optimizer != "disk":
            raise ValueError(
                f"offload: params='disk' needs optimizer='disk', which writes them; "
                f"optimizer={self.optimizer!r}."
            )
        if self.params and self.optimizer != "disk" and self.update != "host":
            raise ValueError(
                "offload: params='host' needs optimizer='host' and update='host', or "
                "optimizer='disk': the host, which has them, writes them."
            )
        if self.params and self.delayed:
            raise ValueError(
                f"offload: params={self.params!r} can't be delayed: the devices would "
                "read parameters while the host writes them. Use delayed=False."
            )

    @classmethod
    def nothing(cls) -> "Offload":
        """Everything stays on the devices."""
        return cls(optimizer=None)
