"""Running a program that nobody has read: namespaces, limits and a root folder of its own. Linux; standard library.

The program gets an empty file system (the interpreter and system libraries, read-only, and a small scratch folder in
memory), no network, no other process in sight, an unprivileged user, and limits on CPU, wall time, memory, processes,
and output. It is the second process of a PID namespace: when the first one ends or is killed, the kernel kills
whatever the program started. `why_not` says why a system cannot do this; then nothing is run at all.

This file is also the launcher: `run` starts it as a script in a process group of its own.
"""

import ctypes
import functools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

_MIB = 2**20
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = -100, 0x8000, 442  # the number is the same on every architecture
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
PASSED, FAILED, TIMEOUT = "passed", "failed", "timeout"


@dataclass(frozen=True)
class Limits:
    """Seconds of CPU (per process) and of wall time; bytes of address space per process, of files and of output.

    CPU time decides, whatever else the machine does; wall time is for programs that sleep. ``processes`` counts
    threads, and one that waits for the program.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory_bytes: int = 512 * _MIB
    file_bytes: int = 4 * _MIB
    output_bytes: int = _MIB
    processes: int = 8


@dataclass(frozen=True)
class Outcome:
    """``status``: "passed" (exit status 0), "failed" or "timeout" (CPU or wall); the last output; wall seconds."""

    status: str
    exit_code: int
    stdout: str
    stderr: str
    seconds: float


class SandboxError(RuntimeError):
    """The isolation could not be set up: the program was not run."""


def run(program: str, limits: Limits | None = None) -> Outcome:
    """Run Python source text; it cannot outlive this call. Raises SandboxError where it cannot be isolated."""
    reason = why_not()
    if reason is not None:
        raise SandboxError(reason)
    return _run(program, limits or Limits())


@functools.cache
def why_not() -> str | None:
    """Why programs cannot be isolated here; None if they can. Found out by running one."""
    if not sys.platform.startswith("linux") or not hasattr(os, "unshare"):
        return f"generated code is run in Linux namespaces, this is {sys.platform} (Python {sys.version.split()[0]})"
    try:
        found = _run("print(6 * 7)", Limits())
    except SandboxError as error:
        return str(error)
    return None if (found.status, found.stdout) == (PASSED, "42\n") else f"a first program failed: {found}"


def _run(program: str, limits: Limits) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="ready-jax-code-"))
    try:
        (folder / "root").mkdir()
        (folder / "root").chmod(0o755)
        (folder / "program.py").write_text(program, encoding="utf-8", errors="surrogateescape")
        reads, writes = os.pipe()  # what the launcher says; closed when the program begins
        order = json.dumps(asdict(limits) | {"folder": str(folder), "parent": os.getpid(), "report": writes})
        begun = time.monotonic()
        with (folder / "out").open("w+b") as out, (folder / "err").open("w+b") as err:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, order], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={}, cwd=folder, start_new_session=True, pass_fds=(writes,),
            )  # fmt: skip
            os.close(writes)
            try:
                code = process.wait(limits.wall_seconds + 10)  # the launcher itself keeps the time
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            seconds = time.monotonic() - begun
            with os.fdopen(reads, "rb") as report:
                trouble = report.read().decode(errors="replace")
            texts = [_tail(file, limits.output_bytes) for file in (out, err)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if trouble:
        raise SandboxError(f"a program cannot be isolated on this system: {trouble}")
    over = code in (-signal.SIGALRM, 128 + signal.SIGXCPU)
    return Outcome(TIMEOUT if over else PASSED if code == 0 else FAILED, code, texts[0], texts[1], seconds)


def _tail(file, count: int) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - count))
    return file.read().decode("utf-8", errors="replace")


# The launcher: what happens in the new process


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, place: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, place, kind)]
    _checked(_libc().mount(*words, ctypes.c_ulong(flags), data.encode() if data else None), f"mount {place}")


def _read_only(place: str) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]

    wanted = Attributes(set=_MS_RDONLY | _MS_NOSUID)
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, place.encode(), ctypes.c_uint(_AT_RECURSIVE))
    _checked(_libc().syscall(*call, ctypes.byref(wanted), ctypes.c_size_t(32)), f"mount {place} read-only")


def _interpreter() -> tuple[str, list[str]]:
    """The executable behind any virtual environment, and the folders that it needs."""
    executable = os.path.realpath(sys.executable)
    wanted = ["/usr", "/lib", "/lib64", "/bin", os.path.realpath(sys.base_prefix), os.path.dirname(executable)]
    return executable, [place for place in dict.fromkeys(wanted) if os.path.exists(place)]


def _build_root(root: str, folders: list[str], program: str, size: int) -> None:
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=4096,mode=755")
    done: list[str] = []
    for place in folders:
        inside = root + place
        if any(place == other or place.startswith(other + "/") for other in done):
            continue
        if os.path.islink(place):
            os.symlink(os.readlink(place), inside)
            continue
        os.makedirs(inside, exist_ok=True)
        _mount(place, inside, None, _MS_BIND | _MS_REC)
        _read_only(inside)
        done.append(place)
    os.makedirs(f"{root}/dev")
    for device in ("null", "urandom"):
        os.close(os.open(f"{root}/dev/{device}", os.O_CREAT))
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, _MS_BIND)
    os.makedirs(f"{root}/work")
    os.chmod(f"{root}/work", 0o1777)
    shutil.copyfile(program, f"{root}/program.py")
    os.chmod(f"{root}/program.py", 0o644)


def _limit(order: dict) -> None:
    cpu, memory = order["cpu_seconds"], order["memory_bytes"]
    pairs = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (order["output_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_NPROC: (order["processes"],) * 2,
    }
    for kind, pair in pairs.items():
        resource.setrlimit(kind, pair)


def _first_process(order: dict, executable: str, root: str, nobody: int | None) -> int:
    """Process 1 of the namespace: gives up every right, starts the program, waits for it alone."""
    libc = _libc()
    os.chroot(root)
    os.chdir("/work")
    if nobody is not None:
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    program = os.fork()
    if program == 0:
        _limit(order)
        words = [executable, "-I", "-S", "-B", "/program.py"]
        _reporting(order["report"], lambda: os.execve(executable, words, {"HOME": "/work", "TMPDIR": "/work"}))
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _launch(order: dict) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != order["parent"]:
        raise ProcessLookupError("whoever asked for the program is gone")
    user, group, nobody = os.getuid(), os.getgid(), None
    if user == 0:
        nobody = 2_000_000_000 + os.getpid()  # nobody else's: the limit on processes counts by user
    else:
        os.unshare(os.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS)
    root = f"{order['folder']}/root"
    executable, folders = _interpreter()
    _build_root(root, folders, f"{order['folder']}/program.py", order["file_bytes"])
    first = os.fork()
    if first == 0:
        _reporting(order["report"], lambda: _first_process(order, executable, root, nobody))
    watch = os.pidfd_open(first)
    if not select.select([watch], [], [], order["wall_seconds"])[0]:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)  # the kernel lets it be found only when its namespace is empty
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGALRM)  # an end that no program can bring about
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    return code if code >= 0 else 128 - code


def _reporting(report: int, work) -> NoReturn:
    """Exit with what ``work`` gives; an error is told through the pipe."""
    code = 1
    try:
        code = work()
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(code)


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    os.set_inheritable(_order["report"], False)
    _reporting(_order["report"], lambda: _launch(_order))
