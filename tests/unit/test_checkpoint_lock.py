"""Two runs and one directory, with real processes."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_resilient.checkpoint import lock
from megatron_resilient.checkpoint.lock import RunLock, collecting, holder
from megatron_resilient.errors import CheckpointError

# Does what it is told line by line, and answers with a line.
PROCESS = """
import subprocess, sys
from pathlib import Path
from megatron_resilient.checkpoint.lock import RunLock, collecting
from megatron_resilient.errors import CheckpointError
held, child = None, None
for line in sys.stdin:
    word, *rest = line.split()
    try:
        if word in ("begin", "join"):
            held = getattr(RunLock, word)(Path(sys.argv[1]), *rest)
        elif word == "child":
            child = subprocess.Popen(["sleep", "600"], close_fds=False)
            print("ok", child.pid, flush=True)
            continue
        elif word == "collect":
            held = collecting(Path(sys.argv[1]))
            assert held.__enter__() is None
        else:
            getattr(held, word)(*rest)
        print("ok", flush=True)
    except CheckpointError as error:
        print("error", error, flush=True)
"""


class Process:
    def __init__(self, directory):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: str) -> str:
        self.send(*words)
        return self.answer()

    def send(self, *words: str) -> None:
        self.popen.stdin.write(" ".join(words) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> str:
        return self.popen.stdout.readline().strip()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.popen.stdin.close()
        self.popen.stdout.close()


@pytest.fixture
def start(tmp_path):
    started: list[Process] = []

    def begin() -> Process:
        started.append(Process(tmp_path))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path, start):
    first = start()
    assert first.ask("begin", "one") == "ok"
    with pytest.raises(CheckpointError) as raised:
        RunLock.begin(tmp_path, "two")
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}: is held by run one (host {os.uname().nodename}")
    assert f"pid {first.popen.pid}, since 2" in text
    assert "\n" not in text
    with pytest.raises(CheckpointError, match="is held by run one"):
        RunLock.join(tmp_path, "two")
    assert holder(tmp_path).run == "one"


@pytest.mark.parametrize("way", ["killed", "released"])
def test_a_run_is_over_when_the_last_of_its_processes_is(tmp_path, start, way):
    processes = [start() for _ in range(3)]
    assert processes[0].ask("begin", "one") == "ok"
    assert [process.ask("join", "one") for process in processes[1:]] == ["ok", "ok"]
    for process in processes:
        with pytest.raises(CheckpointError, match="is held by run one"):
            RunLock.begin(tmp_path, "two")
        assert holder(tmp_path) is not None
        if way == "killed":
            process.popen.send_signal(signal.SIGKILL)
            process.popen.wait()
        else:
            assert process.ask("release") == "ok"
    assert holder(tmp_path) is None
    with RunLock.begin(tmp_path, "two"):
        assert holder(tmp_path).run == "two"


def test_the_same_run_can_begin_again_while_others_of_it_live(tmp_path, start):
    first, second, third = start(), start(), start()
    assert first.ask("begin", "one") == "ok"
    assert first.ask("ready") == "ok"
    assert second.ask("join", "one") == "ok"
    first.kill()
    assert third.ask("begin", "one") == "ok"
    # It is in the middle of training still.
    assert holder(tmp_path).state == lock.RUNNING


def test_nobody_joins_what_nobody_began(tmp_path):
    with pytest.raises(CheckpointError, match=r"lock: cannot be opened"):
        RunLock.join(tmp_path / "nowhere", "one")
    with pytest.raises(CheckpointError, match="run one has not begun there"):
        RunLock.join(tmp_path, "one")
    assert holder(tmp_path) is None


def test_children_do_not_keep_it(tmp_path, start):
    process = start()
    assert process.ask("begin", "one") == "ok"
    word, pid = process.ask("child").split()
    process.kill()
    try:
        assert word == "ok"
        with RunLock.begin(tmp_path, "two"):
            pass
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_a_fork_neither_keeps_it_nor_lets_it_go(tmp_path):
    held = RunLock.begin(tmp_path, "one")
    readable, writable = os.pipe()
    is_there, says_so = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writable)
        os.write(says_so, b"x")
        os.read(readable, 1)  # until the parent closes its end
        os._exit(0)
    os.close(readable)
    os.read(is_there, 1)
    assert holder(tmp_path).run == "one"
    held.release()
    assert holder(tmp_path) is None
    for descriptor in (writable, is_there, says_so):
        os.close(descriptor)
    os.waitpid(child, 0)


def test_the_state_is_that_of_the_run(tmp_path):
    with RunLock.begin(tmp_path, "one") as held:
        before = holder(tmp_path)
        assert before.state == lock.STARTING
        held.ready()
        after = holder(tmp_path)
        assert (after.state, after.since) == (lock.RUNNING, before.since)
    with pytest.raises(CheckpointError, match="the lock was released"):
        held.ready()
    held.release()


def test_a_collector_keeps_runs_out_and_they_wait_for_it(tmp_path, start):
    run, collector = start(), start()
    with RunLock.begin(tmp_path, "zero"), collecting(tmp_path) as who:
        assert who.run == "zero"
    assert collector.ask("collect") == "ok"
    run.send("begin", "one")
    time.sleep(0.3)
    assert run.popen.poll() is None
    collector.kill()
    assert run.answer() == "ok"


def test_who_asks_for_the_holder_disturbs_no_run_that_begins(tmp_path, start):
    asking = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.write(asking, json.dumps(vars(lock.Holder("old", "running", "h", 1, 0.0))).encode())
    fcntl.flock(asking, fcntl.LOCK_EX)
    run = start()
    run.send("begin", "one")
    time.sleep(0.2)
    os.close(asking)
    assert run.answer() == "ok"


def test_many_that_begin_at_once_are_one(tmp_path, start):
    processes = [start() for _ in range(6)]
    for number, process in enumerate(processes):
        process.send("begin", f"run{number}")
    answers = [process.answer() for process in processes]
    assert answers.count("ok") == 1
    winner = answers.index("ok")
    assert holder(tmp_path).run == f"run{winner}"
    for answer in answers:
        assert answer == "ok" or "cannot write there too" in answer


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: its file system has no locks"):
        RunLock.begin(tmp_path, "one")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_run_id_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="run id of 2000 characters"):
        RunLock.begin(tmp_path, "x" * 2000)
    assert holder(tmp_path) is None
