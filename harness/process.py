"""A child process that may crash, hang or eat memory, and never takes the parent with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.25
ANSWER_LIMIT = 1 << 20
MARK = "HARNESS_CHILD"  # environment variable by which all that a child starts is found


class ChildTimeout(Exception):
    """No answer within the time limit; the child and its children are dead."""


class ChildCrash(Exception):
    """The child ended, or had to be ended, without an answer."""


class Child:
    """One worker process with a time and memory limit for each request; started when needed.

    Args:
        kind, release: of the device, see `devices.open_device`.
        threads: of torch and BLAS in the child.
        memory_bytes: resident memory of the child and its children together.
    """

    def __init__(self, kind: str, release: str, threads: int = 1, memory_bytes: int = 6 << 30) -> None:
        self.kind, self.release, self.threads, self.memory_bytes = kind, release, threads, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._log: BinaryIO | None = None
        self._log_start = 0
        self._mark = ""

    def _start(self) -> subprocess.Popen[bytes]:
        read_fd, write_fd = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        threads = str(self.threads)
        self._mark = secrets.token_hex(8)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "harness.worker", str(write_fd), self.kind, self.release, threads]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write_fd,),
            start_new_session=True,
            env=environment,
        )
        os.close(write_fd)
        self._answers = read_fd
        return self._process

    def request(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChildTimeout: none within `seconds`.
            ChildCrash: the child ended, answered nonsense or took too much memory.
        """
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._start()
        assert process.stdin is not None and self._log is not None
        self._log_start = self._log.seek(0, os.SEEK_END)
        try:
            process.stdin.write((json.dumps(message) + "\n").encode())
            process.stdin.flush()
        except OSError:
            raise self._crash() from None
        line = self._read(process, time.monotonic() + seconds, seconds)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise ChildCrash("the child's answer was not understood")
        return answer

    def _read(self, process: subprocess.Popen[bytes], deadline: float, seconds: float) -> bytes:
        data = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in data:
                left = deadline - time.monotonic()
                if left <= 0:
                    self.close()
                    raise ChildTimeout(f"no result within {seconds:g} s")
                if selector.select(min(left, POLL_SECONDS)):
                    piece = os.read(self._answers, 1 << 16)
                    if not piece:
                        raise self._crash()
                    data += piece
                    if len(data) > ANSWER_LIMIT:
                        self.close()
                        raise ChildCrash("the child's answer was too long")
                    continue
                if process.poll() is not None:  # a grandchild may hold the pipe open
                    raise self._crash()
                used = _memory(process.pid)
                if used > self.memory_bytes:
                    self.close()
                    raise ChildCrash(f"used {used / 2**30:.1f} GiB of memory, allowed {self.memory_bytes / 2**30:.1f}")
        return data

    def _crash(self) -> ChildCrash:
        """What is known about a child that ended by itself."""
        process = self._process
        code: int | None = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=5)
        if code is None:
            how = "closed its answers"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        text = self.log_tail()
        self.close()
        return ChildCrash(f"the process {how}" + (f": {text}" if text else ""))

    def log_tail(self, lines: int = 6) -> str:
        """The last lines that the child printed during the current request."""
        if self._log is None:
            return ""
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(self._log_start, size - 4000))
            text = self._log.read().decode(errors="replace")
            return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())
        return ""

    def kill(self) -> None:
        """End the child from another thread; a request that waits for it raises ChildCrash."""
        process = self._process
        if process is not None:
            _kill_tree(process, self._mark)

    def close(self) -> None:
        """End the child and all its children; a later request starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            _kill_tree(process, self._mark)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        if self._log is not None:
            self._log.close()
            self._log = None


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _memory(pid: int) -> int:
    """Resident bytes of a process and its children."""
    used = 0
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error):
            used += process.memory_info().rss
    return used


def _marked(mark: str) -> list[psutil.Process]:
    """Processes that were started with this mark, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _kill_tree(process: subprocess.Popen[bytes], mark: str) -> None:
    """SIGKILL to the child and all that it started, in sessions of their own or not.

    All are stopped first: one that sees its child end might start the next one meanwhile.
    """
    stopped: set[psutil.Process] = set()
    while True:
        new = {*_tree(process.pid), *_marked(mark)} - stopped
        for member in new:
            with contextlib.suppress(psutil.Error):
                member.suspend()
        stopped |= new
        if not new:
            break
    for member in stopped:
        with contextlib.suppress(psutil.Error):
            member.kill()
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
