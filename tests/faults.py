"""A disk that fails: calls of the C library under a folder, in another process.

A library that is loaded before the C library's own fails some calls, by a seed. Files
of Orbax are those below ``arrays``; all others are the project's own.
"""

import ctypes
import dataclasses
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from jaxpar.offload.native import compiler

PRELOAD, SLOW_DISK = "LD_PRELOAD", "JAXPAR_SLOW_DISK"
"""The second is "seconds:folder": each call that writes there takes that long, in a
process that has it and in its children."""

SOURCE = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OTHER, OWN, ORBAX };
static const char *folder, *told;
static double rate, from_s = -1, for_s;
static int saves, reach;
static _Atomic uint64_t state;
static _Atomic int left = -1;  /* calls of Orbax until the one that fails */
static _Atomic unsigned char of_fd[65536];
static _Atomic double first = 0;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Called by the process itself, before each of its runs. */
void faults_set(const char *in, const char *tells, int seed, double share, int orbax,
                double from, double length) {
  static char names[2][4096];
  folder = 0;
  snprintf(names[0], sizeof names[0], "%s", in);
  told = snprintf(names[1], sizeof names[1], "%s", tells) ? names[1] : 0;
  rate = share, saves = reach = orbax, from_s = from, for_s = length;
  left = -1, first = 0, state = 2654435761u * (uint64_t)(seed + 1);
  folder = names[0];
}

/* A disk on which each call that writes takes so many seconds. */
static double slow[3];
void faults_slow(double own, double orbax) { slow[OWN] = own, slow[ORBAX] = orbax; }

/* Of a process and its children: NAME=seconds:folder. */
__attribute__((constructor)) static void of_environment(void) {
  const char *given = getenv("JAXPAR_SLOW_DISK"), *colon;
  static char named[4096];
  if (!given || !(colon = strchr(given, ':'))) return;
  snprintf(named, sizeof named, "%s", colon + 1);
  slow[OWN] = slow[ORBAX] = atof(given);
  folder = named;
}

static void take(double seconds) {
  struct timespec left = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
  while (nanosleep(&left, &left) && errno == EINTR);
}

static double draw(void) {  /* splitmix64 */
  uint64_t z = atomic_fetch_add(&state, 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return ((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

static int kind(const char *path) {
  if (!folder || !path || strncmp(path, folder, strlen(folder))) return OTHER;
  return strstr(path, "/arrays") ? ORBAX : OWN;
}

static int at(int fd, const char *path) {
  if (path && path[0] == '/') return kind(path);
  if (path && !path[0] && fd < 0) return OTHER;
  if (fd < 0 || fd >= 65536) return OTHER;
  return of_fd[fd] == OWN && path && !strncmp(path, "arrays", 6) ? ORBAX : of_fd[fd];
}

static void tell(const char *what, const char *path, int number) {
  char line[600];
  int fd, n;
  if (!told) return;
  n = snprintf(line, sizeof line, "%s %s %d\n", what, path ? path : "-", number);
  fd = syscall(SYS_openat, AT_FDCWD, told, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (fd < 0) return;
  syscall(SYS_write, fd, line, n);
  syscall(SYS_close, fd);
}

static int fails(int which, const char *what, const char *path, int writes) {
  static const int numbers[] = {EIO, ESTALE, EINTR, ENOSPC};
  int number = 0;
  double zero = 0;
  if (which == OTHER) return 0;
  if (writes && slow[which] > 0) take(slow[which]);
  atomic_compare_exchange_strong(&first, &zero, now());
  if (from_s >= 0 && now() - first >= from_s && now() - first < from_s + for_s)
    number = EIO;
  else if (which == OWN && rate > 0 && draw() < rate)
    number = numbers[(int)(draw() * (writes ? 4 : 3))];
  else if (which == ORBAX && left >= 0 && atomic_fetch_sub(&left, 1) == 0)
    number = numbers[(int)(draw() * 2)];
  if (!number) return 0;
  tell(what, path, number);
  errno = number;
  return 1;
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)
#define KEEP(fd, which) ((fd) >= 0 && (fd) < 65536 ? (of_fd[fd] = (which), fd) : (fd))

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list more; int mode, which = kind(path), fd; \
    REAL(int, #name, const char *, int, ...); \
    va_start(more, flags); mode = va_arg(more, int); va_end(more); \
    if (fails(which, "open", path, flags & O_CREAT)) return -1; \
    fd = real(path, flags, mode); \
    return KEEP(fd, which); \
  }
OPEN(open) OPEN(open64)

#define OPENAT(name) \
  int name(int dir, const char *path, int flags, ...) { \
    va_list more; int mode, which = at(dir, path), fd; \
    REAL(int, #name, int, const char *, int, ...); \
    va_start(more, flags); mode = va_arg(more, int); va_end(more); \
    if (fails(which, "open", path, flags & O_CREAT)) return -1; \
    fd = real(dir, path, flags, mode); \
    return KEEP(fd, which); \
  }
OPENAT(openat) OPENAT(openat64)

int close(int fd) {
  REAL(int, "close", int);
  if (fd >= 0 && fd < 65536) of_fd[fd] = OTHER;
  return real(fd);
}

#define ON_FD(type, name, what, writes, args, ...) \
  type name(int fd, __VA_ARGS__) { \
    REAL(type, #name, int, __VA_ARGS__); \
    if (fails(at(fd, 0), what, 0, writes)) return -1; \
    return real args; \
  }
ON_FD(ssize_t, read, "read", 0, (fd, b, n), void *b, size_t n)
ON_FD(ssize_t, pread, "read", 0, (fd, b, n, o), void *b, size_t n, off_t o)
ON_FD(ssize_t, pread64, "read", 0, (fd, b, n, o), void *b, size_t n, off_t o)
ON_FD(ssize_t, pwrite, "write", 1, (fd, b, n, o), const void *b, size_t n, off_t o)
ON_FD(ssize_t, pwrite64, "write", 1, (fd, b, n, o), const void *b, size_t n, off_t o)

ssize_t write(int fd, const void *b, size_t n) {
  REAL(ssize_t, "write", int, const void *, size_t);
  int which = at(fd, 0);
  if (which == OWN && n > 1 && rate > 0 && draw() < rate) n /= 2;  /* a part of it */
  if (fails(which, "write", 0, 1)) return -1;
  return real(fd, b, n);
}

#define SYNC(name) \
  int name(int fd) { \
    REAL(int, #name, int); \
    return fails(at(fd, 0), #name, 0, 1) ? -1 : real(fd); \
  }
SYNC(fsync) SYNC(fdatasync)

#define ON_PATH(type, name, what, writes, bad, args, ...) \
  type name(const char *path __VA_ARGS__) { \
    REAL(type, #name, const char * __VA_ARGS__); \
    if (fails(kind(path), what, path, writes)) return bad; \
    return real args; \
  }
#define COMMA ,
ON_PATH(int, unlink, "unlink", 0, -1, (path))
ON_PATH(int, rmdir, "rmdir", 0, -1, (path))
ON_PATH(int, rename, "rename", 1, -1, (path, to), COMMA const char *to)
ON_PATH(int, link, "link", 1, -1, (path, to), COMMA const char *to)
ON_PATH(int, stat, "stat", 0, -1, (path, s), COMMA struct stat *s)
ON_PATH(int, lstat, "stat", 0, -1, (path, s), COMMA struct stat *s)
ON_PATH(int, stat64, "stat", 0, -1, (path, s), COMMA struct stat64 *s)
ON_PATH(int, lstat64, "stat", 0, -1, (path, s), COMMA struct stat64 *s)
ON_PATH(DIR *, opendir, "opendir", 0, 0, (path))

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  if (saves && kind(path) == OWN && strstr(path, ".saving"))
    left = draw() < 0.5 ? (int)(draw() * reach) : -1;
  if (fails(kind(path), "mkdir", path, 1)) return -1;
  return real(path, mode);
}

#define AT(type, name, what, writes, args, ...) \
  type name(int dir, const char *path, __VA_ARGS__) { \
    REAL(type, #name, int, const char *, __VA_ARGS__); \
    if (fails(at(dir, path), what, path, writes)) return -1; \
    return real args; \
  }
AT(int, unlinkat, "unlink", 0, (dir, path, f), int f)
AT(int, mkdirat, "mkdir", 1, (dir, path, m), mode_t m)
AT(int, fstatat, "stat", 0, (dir, path, s, f), struct stat *s, int f)
AT(int, fstatat64, "stat", 0, (dir, path, s, f), struct stat64 *s, int f)
"""


@dataclasses.dataclass(frozen=True)
class Faults:
    """What fails under a folder.

    Attributes:
      folder: of the run.
      seed: of what fails.
      rate: fraction of the calls on the project's own files that fail.
      orbax: in half of the saves, one of the first so many calls of Orbax fails.
      outage: (seconds after the first call, seconds) in which every call fails.
    slow: seconds that each call which writes takes: the project's own, and Orbax's.
    """

    folder: Path
    seed: int = 0
    rate: float = 0.0
    orbax: int = 0
    outage: tuple[float, float] | None = None
    slow: tuple[float, float] = (0.0, 0.0)

    @property
    def told(self) -> Path:
        """A file with a line of each call that failed."""
        return self.folder.with_name(self.folder.name + ".faults")

    def begin(self) -> None:
        """Let this process's calls fail; the library was loaded before all others."""
        numbers = [ctypes.c_double(x) for x in (self.rate, *(self.outage or (-1, 0)))]
        names = os.fsencode(self.folder), os.fsencode(self.told)
        loaded = ctypes.CDLL(os.environ[PRELOAD])
        loaded.faults_slow(*map(ctypes.c_double, self.slow))
        loaded.faults_set(*names, self.seed, numbers[0], self.orbax, *numbers[1:])


@functools.cache
def library() -> Path:
    """The library, compiled for this process's tests; `PRELOAD` has its path."""
    cc = compiler()
    if cc is None or os.uname().sysname != "Linux":
        pytest.skip("faults are injected on Linux, by a library that cc compiles")
    place = Path(tempfile.mkdtemp(prefix="jaxpar-faults-"))
    code, made = place / "faults.c", place / "faults.so"
    code.write_text(SOURCE)
    command = [cc, "-O1", "-shared", "-fPIC", "-o", str(made), str(code), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{cc} can't compile the library: {done.stderr.strip()[:300]}")
    return made
