"""What keeps code of the policy from everything else: namespaces or Landlock, seccomp, and limits of resources.

The code runs in one process of one thread that can start no other, has no network, and sees Python's own library, read
only. With namespaces, that is all it sees, and it may write into an empty directory in memory. With Landlock, it may
write nowhere.

This module runs in a bare Python: it uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import struct
from collections.abc import Sequence

NAMESPACES, LANDLOCK = "namespaces", "landlock"
WORK = "/program"
"""The directory that the code may write to."""
_USER = 1000  # in the namespace

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_CLONE_ALL = _CLONE_NEWNS | _CLONE_NEWPID | 0x10000000 | 0x40000000 | 0x08000000 | 0x04000000  # user, net, ipc, uts
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 1, 38, 4
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, (444, 445, 446)  # the same on all architectures
_LANDLOCK_VERSION = 3  # the first that knows truncation
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION = 0x20080522
_ALLOW, _MASKED_EQUAL = 0x7FFF0000, 7  # of libseccomp

_SYSCALLS = """
read write readv writev pread64 pwrite64 open openat close lseek stat fstat lstat newfstatat statx access faccessat
faccessat2 getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat
symlink symlinkat readlink readlinkat ftruncate fallocate fsync fdatasync umask dup dup2 dup3 pipe pipe2 select
pselect6 poll ppoll sendfile copy_file_range fadvise64 mmap munmap mprotect mremap madvise brk futex set_robust_list
rseq sched_yield sched_getaffinity rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack setitimer getitimer alarm
pause restart_syscall exit exit_group getpid gettid getppid getpgrp getuid geteuid getgid getegid getresuid getresgid
getrlimit getrusage times uname sysinfo getrandom clock_gettime clock_getres clock_nanosleep nanosleep
gettimeofday time
"""
"""The calls of the kernel that the code may make. Any other fails with EPERM: sockets, processes, threads, signals."""
_CHECKED: dict[str, list[dict[int, tuple[int, int]]]] = {
    "prlimit64": [{0: (0xFFFFFFFF, 0)}],  # of this process, not of others
    "ioctl": [{1: (0xFFFFFFFF, request)} for request in (0x5450, 0x5451)],  # FIONCLEX, FIOCLEX: Python's files use them
    "fcntl": [
        *(
            {1: (0xFFFFFFFF, command)}
            for command in (
                *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),
                *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW),  # of sqlite3
            )
        ),
        {1: (0xFFFFFFFF, fcntl.F_SETFL), 2: (os.O_ASYNC, 0)},
    ],
}
"""Calls that the code may make with some arguments alone: by the argument's position, its mask and its value then.

Other commands of `fcntl` send signals, to any process.
"""
_CHANGES = "chmod fchmod fchmodat utimensat truncate"
"""Calls that change files. Landlock does not know all of them, so they are for programs with files of their own."""


class IsolationError(Exception):
    """A layer of the isolation is not available here. The message says which, and what to do."""


def _call(name: str, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = getattr(libc, name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def _text(value: str | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call("mount", _text(source), _text(target), _text(kind), ctypes.c_ulong(flags), _text(data))


def die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


class Namespaces:
    """Namespaces of users, processes, mounts, network and IPC. The file system holds `directories`, read only.

    The directories `hidden` within them are empty.
    """

    syscalls = _CHANGES
    """Calls of the kernel that it makes harmless."""

    def __init__(self, directories: Sequence[str], hidden: Sequence[str] = ()):
        self._directories = directories
        self._hidden = hidden
        self._own = -1

    def enter(self) -> None:
        """Enter the namespaces. The next process that is forked is the first of its namespace.

        Raises:
            IsolationError: the kernel does not allow it.
        """
        user, group = os.geteuid(), os.getegid()
        try:
            _call("unshare", _CLONE_ALL)
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{_USER} {user} 1"),
                ("gid_map", f"{_USER} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError as error:
            raise IsolationError(
                f"this kernel or container allows no namespaces ({error.strerror}). Allow them (sysctl "
                "kernel.unprivileged_userns_clone=1, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0; "
                "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined), or choose "
                f"isolation={LANDLOCK}"
            ) from error

    def prepare(self) -> None:
        """Build the file system, in the first process of the namespace.

        Raises:
            IsolationError: the kernel does not allow it.
        """
        try:
            self._own = os.open("/proc/self/ns/pid", os.O_RDONLY)
            self._change_root()
        except OSError as error:
            raise IsolationError(
                f"a file system of its own cannot be made ({error.strerror}); choose isolation={LANDLOCK}"
            ) from error

    def _change_root(self) -> None:
        root = "/proc"  # a directory that there is, and that holds none of the others
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=64k")
        os.mkdir(root + WORK)
        for directory in self._directories:
            os.makedirs(os.path.dirname(root + directory), exist_ok=True)
            if os.path.islink(directory):  # /lib -> usr/lib
                os.symlink(os.readlink(directory), root + directory)
            else:
                os.makedirs(root + directory, exist_ok=True)
                _mount(directory, root + directory, None, _MS_BIND | _MS_REC)
        for directory in self._hidden:
            _mount("tmpfs", root + directory, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=555,size=4k")
        os.chdir(root)
        _call("pivot_root", b".", b".")
        _call("umount2", b".", _MNT_DETACH)
        os.chdir("/")
        read_only = (ctypes.c_uint64 * 4)(1 | 2 | 4, 0, 0, 0)  # also no set-user-ID and no devices
        _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, ctypes.c_size_t(32))

    def before_fork(self) -> None:
        """Let the next process be the first of a new namespace."""
        _call("unshare", _CLONE_NEWPID)

    def after_fork(self) -> None:
        _call("setns", self._own, _CLONE_NEWPID)

    def close_in(self, files_mb: int, files: int) -> None:
        """Close this process in, with an empty directory in memory as its working directory."""
        _call("unshare", _CLONE_NEWNS)
        size = f"mode=700,size={files_mb}m,nr_inodes={files + 1}"
        _mount("tmpfs", WORK, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, size)
        os.chdir(WORK)


class Landlock:
    """Rules of the kernel's module Landlock: the process may read `directories`, and write nowhere.

    Of the directories `hidden` within them it may read the names of files alone.
    """

    syscalls = ""

    _FILES = (1 << 16) - 1  # all rights of files that version 5 knows: execute, write, read, make, remove, ioctl …
    _READ_FILES, _READ_NAMES = 1 << 2, 1 << 3

    def __init__(self, directories: Sequence[str], hidden: Sequence[str] = ()):
        self._directories = directories
        self._hidden = hidden
        self._rules = -1

    def enter(self) -> None:
        """Check that the kernel has Landlock.

        Raises:
            IsolationError: it has not, or an old one.
        """
        try:
            self._version = _call("syscall", _SYS_LANDLOCK[0], None, ctypes.c_size_t(0), 1)
        except OSError as error:
            raise IsolationError(
                f"this kernel has no Landlock ({error.strerror}). Boot it with lsm=landlock,… (Linux 6.2 or later), "
                f"or choose isolation={NAMESPACES}"
            ) from error
        if self._version < _LANDLOCK_VERSION:
            raise IsolationError(
                "the Landlock of this kernel lets programs empty files that they may read. Take Linux 6.2 or later, "
                f"or choose isolation={NAMESPACES}"
            )

    def prepare(self) -> None:
        """Make the rules, which all programs share.

        Raises:
            IsolationError: the kernel does not allow it.
        """
        known = self._FILES & ((1 << (15, 15, 16)[min(self._version, 5) - 3]) - 1)
        network, scoped = (3 if self._version >= 4 else 0), (3 if self._version >= 6 else 0)
        size = 8 if self._version < 4 else 16 if self._version < 6 else 24
        attributes = (ctypes.c_uint64 * 3)(known, network, scoped)
        try:
            self._rules = _call("syscall", _SYS_LANDLOCK[0], attributes, ctypes.c_size_t(size), 0)
            for directory in self._directories:
                self._allow(os.path.realpath(directory))
        except OSError as error:
            raise IsolationError(
                f"the rules of Landlock cannot be made ({error.strerror}); choose isolation={NAMESPACES}"
            ) from error

    def _allow(self, path: str) -> None:
        """Let programs read a file, or a directory with all in it that is not hidden."""
        if not os.path.isdir(path):
            self._add_rule(path, self._READ_FILES)
        elif not any(hidden.startswith(f"{path}/") for hidden in self._hidden):
            self._add_rule(path, self._READ_FILES | self._READ_NAMES)
        else:
            self._add_rule(path, self._READ_NAMES)
            for entry in os.scandir(path):
                if not entry.is_symlink() and entry.path not in self._hidden:  # a link may lead anywhere
                    self._allow(entry.path)

    def _add_rule(self, path: str, rights: int) -> None:
        at = os.open(path, os.O_PATH)
        _call("syscall", _SYS_LANDLOCK[1], self._rules, 1, struct.pack("=Qi", rights, at), 0)
        os.close(at)

    def before_fork(self) -> None:
        """A new process has the same namespaces."""

    after_fork = before_fork

    def close_in(self, files_mb: int, files: int) -> None:
        """Close this process in."""
        os.chdir("/")
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", _SYS_LANDLOCK[2], self._rules, 0)
        os.close(self._rules)


class SyscallFilter:
    """The filter of seccomp that lets `_SYSCALLS`, `_CHECKED` and `more` pass, made by libseccomp.

    Raises:
        IsolationError: there is no libseccomp.
    """

    def __init__(self, more: str) -> None:
        try:
            self._library = library = ctypes.CDLL("libseccomp.so.2")
        except OSError as error:
            raise IsolationError(
                "the library libseccomp is missing, which makes the filter of system calls; install it "
                "(apt-get install libseccomp2)"
            ) from error
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_init.argtypes = [ctypes.c_uint32]
        library.seccomp_rule_add_array.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_void_p,
        ]
        library.seccomp_load.argtypes = [ctypes.c_void_p]
        self._filter = library.seccomp_init(0x00050000 | 1)  # EPERM
        for name in (*_SYSCALLS.split(), *more.split()):
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:
                code = library.seccomp_rule_add_array(self._filter, _ALLOW, number, 0, None)
                assert code == 0, f"{name}: {os.strerror(-code)}"
        for name, allowed in _CHECKED.items():
            number = library.seccomp_syscall_resolve_name(name.encode())
            for arguments in allowed:
                checks = [struct.pack("=IiQQ", at, _MASKED_EQUAL, *check) for at, check in arguments.items()]
                code = library.seccomp_rule_add_array(self._filter, _ALLOW, number, len(checks), b"".join(checks))
                assert code == 0, f"{name}: {os.strerror(-code)}"

    def load(self) -> None:
        """Filter the calls of this process from now on."""
        code = self._library.seccomp_load(self._filter)  # with no_new_privs
        if code != 0:
            raise OSError(-code, f"seccomp: {os.strerror(-code)}")


def drop_rights() -> None:
    """Give up the capabilities that a namespace has given."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def memory_in_use() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_resources(cpu_s: int, memory: int, files_mb: int) -> None:
    """Limit this process, for good.

    Args:
        memory: bytes of address space.
    """
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, files_mb << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))
