"""What the server's process is started with: stacks that no request fills, files and shared memory for its user alone.

Triton server 2.51 keeps a request's pieces on its stack: a body of 5 MB in small chunks, or JSON nested 120,000 deep,
ends it with a segmentation fault on the usual 8 MiB. And it gives its shared memory, which holds prompts and answers,
the mode 0644, whatever the umask is.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

STACK_BYTES = 1 << 30  # of each of some 60 threads, as address space: memory is taken when it is touched
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_X86_64, _FCHMOD = 0xC000003E, 91
_ALLOW, _PRETEND = 0x7FFF0000, 0x00050000  # the latter: not done, and success is reported
_FILTER = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (_LOAD, 0, 0, 4),  # the architecture
        (_JUMP_EQUAL, 0, 3, _X86_64),
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_EQUAL, 0, 1, _FCHMOD),
        (_RETURN, 0, 0, _PRETEND),
        (_RETURN, 0, 0, _ALLOW),
    )
)
_libc = ctypes.CDLL(None)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_PROGRAM = _Program(len(_FILTER) // 8, _FILTER)


def confine(file_bytes: int | None = None) -> None:
    """Confine this process and all that it starts; for `preexec_fn`.

    Triton server inflates a gRPC message of up to 2 GiB and hands it to the model's process, which copies it under the
    lock that all its threads share: for 1 GB, a megabyte of gzip, it showed no life for twenty seconds. Nothing of the
    server bounds that but its shared memory. Where that would grow beyond `file_bytes`, the request is refused.

    Boost's shared memory sets its mode with fchmod, behind the umask's back. So that call does nothing here, where the
    kernel lets us say so; elsewhere `restrict` follows when the server is ready.
    """
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    if file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # its default ends the process; else the call fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.umask(0o077)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_PROGRAM), 0, 0)
