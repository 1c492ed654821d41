"""Where do workers keep what they have compiled, so that a restart has it at once?"""

import os
import stat
from pathlib import Path

import jax


def use_private_cache(folder: Path | None = None) -> None:
    """Keep compiled programs in a folder of this user's own, unless one is set.

    What is in it is run: others must not be able to write there.

    Args:
      folder: made if missing; None for jaxpar's in the user's cache.

    Raises:
      PermissionError: if others may write in it, or it is another user's.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(home, "jaxpar", "compiled").expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(
            f"the compilation cache {str(folder)!r} is another user's, or a link: move "
            "it away, or name another (JAX_COMPILATION_CACHE_DIR)"
        )
    if status.st_mode & 0o022:
        raise PermissionError(
            f"the compilation cache {str(folder)!r} can be written by others (mode "
            f"{status.st_mode & 0o777:o}): chmod 700 it, or move it away"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
