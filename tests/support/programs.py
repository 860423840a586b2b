"""Programs run by processes that are forked from one that has imported what they need: seconds saved for each."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest.mock import patch

__all__ = ["BARE", "Kernel", "Program", "program"]

INLINE = "module://matplotlib_inline.backend_inline"
"""Where a kernel's figures go."""
IMPORTED = (
    *("capture.workloads.forked", "capture.cli"),
    *("gradstats.cli", "gradstats.plots", "gradstats.report"),
    *("scipy.stats", "xarray", "zarr"),
)
"""What programs come to need."""
BARE = "SUPPORT_PROGRAMS_BARE"
"""A variable: where it is set, nothing of these is imported before, for tests of this file alone."""
READ_ONCE = (
    BARE, "PYTHONPATH", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "MPLBACKEND"
)  # fmt: skip
"""Variables that Python and libraries read as they start: a process is shared by programs that have them alike."""


def program(*arguments, cwd=None, path=(), env=(), ranks=0, trains=False, check=True, imports=()):
    """Run Python with these arguments; return what `subprocess.run` would.

    After ``-`` comes what Python would read from stdin.

    Folders of `path` are first on that of Python. With `ranks`, as many processes run the script as torchrun starts.
    `trains` says that it starts ranks itself, as commands that train are known to. Modules of `imports` are imported
    before, too, by a process that programs with the same ones share.
    """
    server, environment, known, there = _place(path, env, tuple(imports))
    arguments = list(map(str, arguments))
    trains = trains or not {"capture", "demo", "bench-network"}.isdisjoint(arguments)
    with tempfile.TemporaryDirectory() as folder:
        said = _streams(folder)
        options = {"cwd": str(cwd or os.getcwd()), "ranks": ranks, "trains": trains}
        try:
            _ask(server, arguments, environment, [known, there], said, **options)
            code = int(server.stdout.readline())
        except BaseException:  # a limit of time
            _drop(server)
            server.communicate()
            raise
        stdout, stderr = (file.read_text("utf-8") for file in said)
    assert not check or code == 0, stderr[-3000:]
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def _streams(folder):
    """Return the files of what a program says."""
    return [Path(folder, name) for name in ("stdout", "stderr")]


def _ask(
    server, arguments, environment, path, said, *, cwd=None, ranks=0, trains=False, session=False
):
    """Have a process fork a program."""
    request = {
        "arguments": arguments,
        "cwd": cwd or os.getcwd(),
        "env": environment,
        "path": path,
        "said": list(map(str, said)),
        "ranks": ranks,
        "trains": trains,
        "session": session,
    }
    print(json.dumps(request), file=server.stdin, flush=True)


def _drop(server):
    """End a process that has not answered: its answer would be taken for that of the next program."""
    _server.cache_clear()
    os.killpg(server.pid, signal.SIGKILL)


class Program:
    """What `subprocess.Popen` would be of a program in a session of its own, whose ranks are forked, too.

    What it says is kept in a folder. No other program runs with the same settings until it has ended.
    """

    def __init__(self, folder, *arguments):
        self._server, environment, known, there = _place((), ())
        self._said = _streams(folder)
        words = list(map(str, arguments))
        _ask(self._server, words, environment, [known, there], self._said, session=True)
        self.pid = int(self._server.stdout.readline())
        pool = ThreadPoolExecutor(1)
        self._end = pool.submit(self._server.stdout.readline)
        pool.shutdown(wait=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    @property
    def stderr(self):
        return self._said[1].read_text("utf-8")

    def poll(self):
        return int(self._end.result()) if self._end.done() else None

    def wait(self, timeout=60):
        try:
            return int(self._end.result(timeout))
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            _drop(self._server)
            raise

    def kill(self, number=signal.SIGKILL):
        if self.poll() is None:
            os.kill(self.pid, number)


class Kernel:
    """What `jupyter_client` takes for the process of a notebook's kernel: a program, which a thread waits for."""

    pid = -1  # nobody's: what it is sent comes to send_signal()
    stdin = stdout = stderr = None
    _sent = 0

    def __init__(self, command, cwd, env, **_):
        env = env | {"MPLBACKEND": INLINE}
        self._server = _place((), env)[0]
        pool = ThreadPoolExecutor(1)
        options = {"cwd": cwd, "env": env, "trains": True, "check": False}
        self._end = pool.submit(program, *command[1:], **options)
        pool.shutdown(wait=False)

    def poll(self):
        return self.wait() if self._end.done() else None

    def wait(self):
        if self._end.exception() and self._sent:
            return -self._sent
        return self._end.result().returncode

    def send_signal(self, number):
        """End the kernel: the client waits for its own end for seconds only, too few on a busy machine."""
        if number != signal.SIGINT:  # a kernel gets that one before the message that ends it
            self._sent = number
            # with what forked it: the next notebook starts another
            os.killpg(self._server.pid, number)


def _place(path, env, imports=()):
    """Return what forks a program: the process, variables, how many folders of Python's path it knows, and all."""
    environment = os.environ | dict(env)
    there = [*map(str, path), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(there)
    # What is imported before a fork, and what packages bring to it, is of these; the others are added in the fork.
    ours = [p for p in there if Path(p, "gradstats").is_dir() or any(Path(p).glob("*.dist-info"))]
    read = environment | {"PYTHONPATH": os.pathsep.join(ours)}
    server = _server(tuple((name, read.get(name)) for name in READ_ONCE), imports)
    return server, environment, len(ours), there


@functools.cache
def _server(settings, imports):
    """Start the process that forks."""
    process = subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {name: value for name, value in settings if value is not None},
        start_new_session=True,
    )
    atexit.register(process.communicate)  # at the end of its input it ends
    process.stdout.readline()  # it has imported: a limit of time is the program's alone
    return process


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if BARE not in os.environ:
        for name in (*IMPORTED, *sys.argv[1:]):
            import_module(name)
        if os.environ.get("MPLBACKEND") == INLINE:
            import_module("ipykernel.kernelapp")
            import_module("seaborn")
            # 0, as wide as a terminal, where it is imported before there is a kernel
            import_module("pandas").set_option("display.max_columns", 20)
    gc.freeze()  # what is imported is shared, and stays
    ranks = forkserver._forkserver  # ranks of all trainings are forked from one process, too
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["trains"] and ranks._forkserver_pid is None:
            resource_tracker.ensure_running()
            with patch("multiprocessing.util.spawnv_passfds", _forked):
                forkserver.ensure_running()
        pids = {}
        variables = [{}]
        if request["ranks"]:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            variables = [
                {"RANK": r, "LOCAL_RANK": r, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), request["ranks"])
                for r in range(request["ranks"])
            ]
        for own in variables:
            pid = os.fork()
            if not pid:
                if request["session"]:  # with ranks of its own
                    os.setsid()
                    ranks.__init__()
                    multiprocessing.util.spawnv_passfds = _forked
                # the server's child, and none of this process
                elif ranks._forkserver_pid is not None:
                    ranks.ensure_running = lambda: None
                _run(request, {name: str(value) for name, value in own.items()})
            pids[pid] = None
            if request["session"]:
                print(pid, file=answers, flush=True)
        while None in pids.values():
            pid, status = os.wait()
            pids[pid] = os.waitstatus_to_exitcode(status)
            if pids[pid]:  # as torchrun does: the others would wait for it
                for other in (other for other, code in pids.items() if code is None):
                    os.kill(other, signal.SIGTERM)
        print(next(filter(None, pids.values()), 0), file=answers, flush=True)


def _forked(_, arguments, passed):
    """Be what starts Python with a program that follows ``-c``: a fork has imported what that would import again."""
    pid = os.fork()
    if not pid:
        try:
            for number in map(int, os.listdir("/proc/self/fd")):
                if number not in {0, 1, 2, *passed}:
                    with contextlib.suppress(OSError):  # of the folder, which is closed by now
                        os.close(number)
            exec(arguments[-1], {})
        finally:
            os._exit(0)
    return pid


def _run(request, variables):
    """Be a program, in a process of its own, to its end."""
    os.environ.clear()
    os.environ.update(request["env"] | variables)
    code = 1
    try:
        known, there = request["path"]
        sys.path[1 : 1 + known] = there
        os.chdir(request["cwd"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(request["said"], 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
        first, *rest = request["arguments"]
        if first in ("-c", "-"):
            code, *rest = rest
            shown, name = ("-c", "<string>") if first == "-c" else ("", "<stdin>")
            sys.argv, sys.path[0] = [shown, *rest], ""
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            if first == "-":
                main.__file__ = name  # as Python does
            exec(compile(code, name, "exec"), vars(main))
        elif first == "-m":
            name, *rest = rest
            sys.argv, sys.path[0] = ["-m", *rest], os.getcwd()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 1 and end.code != 1:
            print(end.code, file=sys.stderr)
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code == -signal.SIGINT:  # as Python ends that nobody has kept from it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


if __name__ == "__main__":
    _serve()
