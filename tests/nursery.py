"""Processes that begin with all libraries imported: forks of a process that has them. A fresh import takes ten seconds.

Each is a process of its own and a child of the process that asked for it. It begins as ``python -c``, ``python -m`` or
``python FILE`` does, and ends as these do: with signals, exit handlers and, for ``Whole``, the end of the interpreter.
A process that must begin with nothing imported, or in a control group, has to be started by ``subprocess`` itself.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = os.environ.get(
    "OUTCORE_TEST_IMPORTED",
    "pytest torch._dynamo torch.distributed.fsdp outcore.api outcore.command.main outcore.command.train.run "
    "datasets peft "
    "transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama "
    "transformers.models.gpt2.modeling_gpt2 trl.trainer.sft_trainer trl.trainer.dpo_trainer",
).split()
"""Fewer imports would make starts and ends cheaper."""
SIMULATED = Path(__file__).parent / "simulated_gpu" / "run.py"
LARGEST_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36
_ONE_AT_A_TIME = threading.Lock()


class Popen(subprocess.Popen):
    """Like ``subprocess.Popen([sys.executable, ...])``, except for the very end.

    The process waits for its threads and calls its exit handlers, but does not finalize its interpreter: that takes
    0.4 s, most of the time of a small process. An uncaught error ends it as usual.
    """

    is_worker, is_taken_apart = False, False

    def _execute_child(self, args: Any, *more: Any) -> None:
        _, _, _, _, folder, environment, _, _, _, *ends = more[:15]
        reads, _, _, writes, _, errors = ends
        python, *arguments = map(str, args)
        assert python == sys.executable
        simulated = arguments[:1] == [str(SIMULATED)]
        job = {"arguments": arguments[simulated:], "folder": str(folder or Path.cwd())}
        job |= {"environment": dict(environment or os.environ), "is_worker": self.is_worker}
        job["is_taken_apart"] = self.is_taken_apart
        fds = [number if fd == -1 else fd for number, fd in enumerate((reads, writes, errors))]
        with _ONE_AT_A_TIME:
            nursery = _nursery(simulated=simulated)
            socket.send_fds(nursery, [json.dumps(job).encode()], fds)
            self.pid = int(nursery.recv(32))
        self._child_created = True
        self._close_pipe_fds(*ends)


def run(
    command: list[str],
    *,
    check: bool,
    capture_output: bool = False,
    timeout: float | None = None,
    kind: type[Popen] = Popen,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run([sys.executable, ...])``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    with kind(command, **options, **pipes) as process:
        try:
            done = subprocess.CompletedProcess(command, 0, *process.communicate(timeout=timeout))
        except BaseException:
            process.kill()
            raise
    done.returncode = process.returncode
    if check:
        done.check_returncode()
    return done


class Whole(Popen):
    """Finalizes its interpreter at the end."""

    is_taken_apart = True


class Worker(Whole):
    """Has a nursery of its own from the start, like the workers of pytest-xdist."""

    is_worker = True


def fork_workers() -> None:
    """Let pytest-xdist start its workers from a nursery, too."""
    from execnet import gateway_base, gateway_io

    class Gateway(gateway_io.Popen2IOMaster):
        def __init__(self, command: list[str], execmodel: Any) -> None:
            python, *_, code = command
            self.popen = Worker([python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster = Gateway


given: dict[bool, socket.socket] = {}
"""Nurseries that a worker was given, by whether they have a simulated GPU."""


@functools.cache
def _nursery(*, simulated: bool) -> socket.socket:
    """Return the nursery, starting it at the first call; it ends with this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # else its orphans would go to process 1
    if simulated in given:
        return given[simulated]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, *[str(SIMULATED)] * simulated, __file__, str(theirs.fileno())]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with theirs:
        started = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    atexit.register(lambda: (ours.close(), started.wait()))
    return ours


# The nursery's side.


def main() -> None:
    """Import the libraries, fork for each job that comes, and do the job in the child."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    job, fds = _born(socket.socket(fileno=int(sys.argv[1])))
    if job is not None and job["is_worker"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            for fd in fds:
                os.close(fd)
            job, fds = _born(theirs)
        else:
            theirs.close()
            importlib.import_module("nursery").given["simulator" in sys.modules] = ours
            atexit.register(ours.close)
    if job is not None:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        _do(job) if job["is_taken_apart"] else _do_and_end(job)


def _do_and_end(job: dict[str, Any]) -> NoReturn:
    status: Any = 0
    try:
        _do(job)
    except SystemExit as stop:
        status = stop.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _born(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the job and its file descriptors in each child; in the nursery no job, once its last caller is gone."""
    with channel:
        while True:
            message, fds, *_ = socket.recv_fds(channel, LARGEST_BYTES, 3)
            if not message:
                return None, []
            if (pid := _fork_an_orphan()) == 0:
                return json.loads(message), fds
            for fd in fds:
                os.close(fd)
            channel.send(str(pid).encode())


def _fork_an_orphan() -> int:
    """Fork a child whose parent exits at once; return its process id, or 0 in the child."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        if (pid := os.fork()) != 0:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        return 0
    os.close(write)
    with open(read) as told:
        pid = int(told.read())
    os.waitpid(between, 0)
    return pid


def _do(job: dict[str, Any]) -> None:
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    kind, *rest = job["arguments"]
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(program))
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, ""
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
