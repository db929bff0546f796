"""The writer: real processes, which are killed, stopped and refused by the storage."""

import ctypes
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import deserialize

from megatron_resilient.checkpoint.buffers import Buffers
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.checkpoint.writer import (
    FileJob,
    WriteFailed,
    WriteJob,
    WriteProgress,
    Writer,
    Written,
)
from megatron_resilient.errors import CheckpointError

PROGRAM = "megatron_resilient.checkpoint.writer_process"
ROOT = Path(__file__).parents[2]
FOLDER = "data/step_00000001.n"

# The writer's program, but at the n-th call of a function of `os` something happens to it.
WRAPPER = """
import os, signal, sys
from megatron_resilient.checkpoint import writer_process
name, count, action = sys.argv[1], int(sys.argv[2]), sys.argv[3]
original, calls = getattr(os, name), 0
def wrapped(*arguments, **options):
    global calls
    calls += 1
    if calls == count:
        if action == "hang":
            import time
            time.sleep(3600)
        if action == "raise":
            raise ValueError("a mistake")
        if action.startswith("E"):
            import errno
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number))
        os.kill(os.getpid(), getattr(signal, action))
    return original(*arguments, **options)
setattr(os, name, wrapped)
sys.exit(writer_process.main(sys.argv[4:]))
"""
STAGES = [("open", 1), ("write", 1), ("write", 3), ("fsync", 1), ("rename", 1), ("rename", 2)]
STAGES += [("fsync", 3)]  # of the folder


@pytest.fixture
def buffers():
    own = Buffers(1 << 26)
    yield own
    own.close()


@pytest.fixture
def start(buffers):
    """Starts writers, and ends them."""
    started = []

    def begin(*arguments: str, **options):
        command = [sys.executable, "-c", WRAPPER, *arguments] if arguments else None
        writer = Writer(buffers.descriptors, command=command, **options)
        started.append(writer)
        writer.start()
        return writer

    yield begin
    for writer in started:
        writer.close(finish=False)


def fill(buffers, step=1, elements=1000, experts=2):
    """A full buffer with so many experts, and what they hold by their names."""
    stretches = [
        (Stretch(f"expert/1/{e}/0/fc1", kind, 0, elements), dtype)
        for e in range(experts)
        for kind, dtype in (("main", "F32"), ("odd", "U8"))
    ]
    buffer = buffers.begin(step, stretches)
    for number, entry in enumerate(buffer.entries):
        buffer.view(entry)[:] = bytes((number + step + i) % 251 for i in range(entry.bytes))
    buffers.filled(buffer)
    return buffer


def job_of(buffer, root, number=1, folder=FOLDER):
    """One file for each expert, in a folder that exists."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    experts = sorted({entry.stretch.key for entry in buffer.entries})
    files = tuple(
        FileJob(
            f"{folder}/expert{place}.safetensors",
            tuple(entry for entry in buffer.entries if entry.stretch.key == key),
        )
        for place, key in enumerate(experts)
    )
    return WriteJob(number, root, buffer, files)


def finish(writer):
    """The result of the job that is next to end."""
    while True:
        for result in writer.wait():
            if not isinstance(result, WriteProgress):
                return result


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def check_written(result, job):
    """All files are there as they were reported, and the safetensors package reads them."""
    assert isinstance(result, Written), result
    assert result.job == job.job
    assert [file.path for file in result.files] == [file.path for file in job.files]
    for file, asked in zip(result.files, job.files, strict=True):
        content = (job.root / file.path).read_bytes()
        assert len(content) == file.bytes
        assert hashlib.sha256(content).hexdigest() == file.sha256
        tensors = dict(deserialize(content))
        assert len(tensors) == len(asked.entries)
        for entry in asked.entries:
            stretch = entry.stretch
            tensor = tensors[f"{stretch.key}|{stretch.kind}|{stretch.start}"]
            assert bytes(tensor["data"]) == bytes(job.buffer.view(entry))
            assert (tensor["dtype"], tensor["shape"]) == (entry.dtype, [stretch.size])


def until(condition):
    """Waits for what will come; a test that waits for ever is ended by the limit of all tests."""
    while not condition():
        time.sleep(0.01)


def test_files_are_complete_and_as_reported(buffers, start, tmp_path):
    writer = start()
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    check_written(finish(writer), job)
    assert files_below(tmp_path) == [file.path for file in job.files]
    assert not writer.busy


def test_a_file_of_many_chunks_and_a_buffer_that_grew_after_the_start(buffers, start, tmp_path):
    writer = start()
    first = job_of(fill(buffers, elements=10), tmp_path, number=1)
    writer.write(first)
    check_written(finish(writer), first)
    buffers.release(first.buffer)
    buffer = buffers.begin(2, [(Stretch("dense/0.0/0/w", "main", 7, 5_000_007), "F32")])
    assert buffer is first.buffer
    view = buffer.view(buffer.entries[0])
    view[:] = os.urandom(1000) * 20000
    second = job_of(buffer, tmp_path, number=2, folder="data/second")
    writer.write(second)
    check_written(finish(writer), second)


def test_jobs_are_done_in_order_and_closing_finishes_them(buffers, start, tmp_path):
    writer = start()
    jobs = [
        job_of(fill(buffers, step), tmp_path, number=step, folder=f"data/{step}")
        for step in (1, 2, 3)
    ]
    for job in jobs:
        writer.write(job)
    results = writer.close()
    for result, job in zip(results, jobs, strict=True):
        check_written(result, job)
    assert writer.pid is None


def test_a_job_without_files_is_done(buffers, start, tmp_path):
    writer = start()
    writer.write(WriteJob(5, tmp_path, fill(buffers), ()))
    assert finish(writer) == Written(5, (), pytest.approx(0, abs=60))


@pytest.mark.parametrize(("function", "count"), STAGES)
def test_a_worker_killed_at_any_stage_is_reported_and_the_next_job_is_done(
    buffers, start, tmp_path, function, count
):
    writer = start(function, str(count), "SIGKILL")
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    result = finish(writer)
    assert isinstance(result, WriteFailed)
    assert "killed" in result.why
    writer.close()  # the process that came after it has removed what it left
    assert files_below(tmp_path) == []


def test_after_a_killed_worker_the_next_one_works(buffers, start, tmp_path):
    # The third file is the second job's first: the second process gets to three, too.
    writer = start("rename", "2", "SIGKILL")
    first = job_of(fill(buffers, 1), tmp_path, 1, "data/1")
    second = job_of(fill(buffers, 2, experts=1), tmp_path, 2, "data/2")
    writer.write(first)
    writer.write(second)
    assert isinstance(finish(writer), WriteFailed)
    check_written(finish(writer), second)
    assert files_below(tmp_path) == [file.path for file in second.files]


def test_an_idle_worker_that_was_killed_is_replaced(buffers, start, tmp_path):
    writer = start()
    until(lambda: writer.pid)
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: writer.pid is None)
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    check_written(finish(writer), job)


@pytest.mark.parametrize(("function", "count"), [("write", 1), ("fsync", 1), ("rename", 1)])
def test_a_stopped_worker_is_killed_and_reported(buffers, start, tmp_path, function, count):
    writer = start(function, str(count), "SIGSTOP", silence_seconds=2.0)
    until(lambda: writer.pid)
    pid = writer.pid
    writer.write(job_of(fill(buffers), tmp_path))
    result = finish(writer)
    assert isinstance(result, WriteFailed)
    assert "said nothing" in result.why
    assert writer.pid != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    writer.close()
    assert files_below(tmp_path) == []


def test_storage_that_does_not_answer_is_reported_with_the_path(buffers, start, tmp_path):
    writer = start("fsync", "1", "hang", stall_seconds=2.0)
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    result = finish(writer)
    assert isinstance(result, WriteFailed)
    assert "did not answer" in result.why
    assert result.path == str(tmp_path / job.files[0].path)


def test_a_worker_that_raises_says_what_and_goes_on(buffers, start, tmp_path):
    writer = start("rename", "2", "raise")
    until(lambda: writer.pid)
    pid = writer.pid
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    result = finish(writer)
    second = str(tmp_path / job.files[1].path)
    assert result == WriteFailed(1, "ValueError: a mistake", second)
    assert files_below(tmp_path) == []
    writer.write(job)
    check_written(finish(writer), job)
    assert writer.pid == pid


def test_a_program_that_cannot_start_fails_each_job(buffers, start, tmp_path):
    writer = Writer(buffers.descriptors, command=[str(tmp_path / "nothing")])
    writer.start()
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    assert "cannot be started" in finish(writer).why
    for _ in range(5):
        writer.write(job)
    results = writer.close()
    assert len(results) == 5
    assert all("cannot be started" in result.why for result in results)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_in_the_watching_thread_fails_the_jobs(buffers, start, tmp_path, monkeypatch):
    writer = start()
    until(lambda: writer.pid)
    pid = writer.pid

    def fails(*_):
        raise ValueError("a mistake")

    monkeypatch.setattr(writer, "_look", fails)
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    result = finish(writer)
    assert "thread failed: ValueError: a mistake" in result.why
    until(lambda: has_ended(pid))
    with pytest.raises(CheckpointError, match="closed"):
        writer.write(job)


def test_a_program_that_ends_at_once_fails_the_job(buffers, tmp_path):
    writer = Writer(buffers.descriptors, command=[sys.executable, "-c", "raise SystemExit(3)"])
    writer.start()
    writer.write(job_of(fill(buffers), tmp_path))
    assert "exited with 3" in finish(writer).why
    writer.close()


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of its own with one MiB."""
    path = tmp_path / "mounted"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount; the same errors are injected in another test")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_reported_and_left_clean(buffers, start, tmpfs):
    writer = start()
    job = job_of(fill(buffers, elements=150_000, experts=2), tmpfs)  # the first file fits
    writer.write(job)
    result = finish(writer)
    assert isinstance(result, WriteFailed)
    assert "No space left on device" in result.why
    assert "checkpoint gc" in result.why
    assert result.path == str(tmpfs / job.files[1].path)
    assert files_below(tmpfs) == []
    small = job_of(fill(buffers, 2, elements=100), tmpfs, number=2)
    writer.write(small)
    check_written(finish(writer), small)


@pytest.mark.parametrize(
    ("function", "name", "advice"),
    [
        ("write", "ENOSPC", "checkpoint gc"),
        ("fsync", "ENOSPC", "checkpoint gc"),
        ("write", "EDQUOT", "checkpoint gc"),
        ("open", "EROFS", "mounted"),
        ("open", "EACCES", "may this user"),
        ("fsync", "EIO", "failing"),
        ("rename", "ESTALE", "has gone"),
    ],
)
def test_what_storage_refuses_is_reported_with_advice_and_left_clean(
    buffers, start, tmp_path, function, name, advice
):
    writer = start(function, "2", name)
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    result = finish(writer)
    number = getattr(errno, name)
    assert isinstance(result, WriteFailed)
    assert result.errno == number
    assert os.strerror(number) in result.why
    assert advice in result.why
    assert files_below(tmp_path) == []
    writer.write(job)
    check_written(finish(writer), job)


def test_a_read_only_disk_is_reported(buffers, start, tmpfs):
    job = job_of(fill(buffers), tmpfs)
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    writer = start()
    writer.write(job)
    result = finish(writer)
    assert "Read-only file system" in result.why
    assert result.path == str(tmpfs / job.files[0].path)


def test_a_vanished_folder_is_reported(buffers, start, tmp_path):
    job = job_of(fill(buffers), tmp_path)
    shutil.rmtree(tmp_path / "data")
    writer = start()
    writer.write(job)
    result = finish(writer)
    assert "its folder has gone" in result.why
    assert result.path == str(tmp_path / job.files[0].path)


def test_a_file_in_place_of_the_folder_is_reported(buffers, start, tmp_path):
    job = job_of(fill(buffers), tmp_path)
    shutil.rmtree(tmp_path / FOLDER)
    (tmp_path / FOLDER).touch()
    writer = start()
    writer.write(job)
    assert "its folder has gone" in finish(writer).why


def test_a_folder_in_the_way_is_reported_and_stays(buffers, start, tmp_path):
    job = job_of(fill(buffers), tmp_path)
    (tmp_path / job.files[1].path).mkdir()
    writer = start()
    writer.write(job)
    assert "in the way" in finish(writer).why
    assert files_below(tmp_path) == []
    assert (tmp_path / job.files[1].path).is_dir()


def test_the_limit_of_a_files_size_is_reported(buffers, start, tmp_path):
    job = job_of(fill(buffers, elements=10_000), tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        writer = start()
        until(lambda: writer.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.write(job)
    assert "ulimit -f" in finish(writer).why
    assert files_below(tmp_path) == []


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.test_writer import *
buffers = Buffers(1 << 26)
writer = Writer(buffers.descriptors, command=[sys.executable, "-c", WRAPPER, *{arguments!r}])
writer.start()
if {work!r}:
    writer.write(job_of(fill(buffers), Path({target!r})))
while writer.pid is None:
    time.sleep(0.01)
print(writer.pid, flush=True)
time.sleep(3600)
"""


def orphan(tmp_path, arguments, work):
    """Kills a process that has a writer, when a file is half written; returns the writer's pid."""
    code = PARENT.format(root=str(ROOT), arguments=arguments, work=work, target=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    if work:
        until(lambda: files_below(tmp_path))
    parent.kill()
    parent.communicate()
    return pid


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_killed_parent_leaves_no_process_and_no_file(tmp_path, function):
    # The second file is half done, the first one complete.
    pid = orphan(tmp_path, [function, "2", "hang"], work=True)
    until(lambda: has_ended(pid))
    assert files_below(tmp_path) == []


def test_a_killed_parent_leaves_no_idle_process(tmp_path):
    pid = orphan(tmp_path, ["fsync", "99", "hang"], work=False)
    until(lambda: has_ended(pid))


def test_signals_to_all_processes_of_a_job_do_not_end_the_worker(buffers, start, tmp_path):
    writer = start()
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    check_written(finish(writer), job)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(writer.pid, number)
    pid = writer.pid
    again = job_of(fill(buffers, 2), tmp_path, number=2)
    writer.write(again)
    check_written(finish(writer), again)
    assert writer.pid == pid


def test_the_worker_is_in_another_process_group_and_has_only_its_descriptors(buffers, start):
    writer = start()
    until(lambda: writer.pid)
    assert os.getpgid(writer.pid) != os.getpgid(0)
    with (ROOT / "README.md").open() as inherited:
        os.set_inheritable(inherited.fileno(), True)
        own = start()
        until(lambda: own.pid)
        links = [
            os.readlink(f"/proc/{own.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{own.pid}/fd")
        ]
    assert not [link for link in links if link.endswith("README.md")]
    assert sum("memfd:" in link for link in links) == 3


def test_the_worker_needs_neither_torch_nor_numpy():
    code = (
        f"import sys, {PROGRAM}\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_closing_without_finishing_fails_what_is_left_and_removes_it(buffers, start, tmp_path):
    writer = start("fsync", "2", "hang")
    writer.write(job_of(fill(buffers), tmp_path, 1))
    until(lambda: files_below(tmp_path))
    writer.write(job_of(fill(buffers, 2), tmp_path, 2, "data/2"))
    results = writer.close(finish=False)
    assert [(type(result), result.job) for result in results] == [
        (WriteFailed, 1),
        (WriteFailed, 2),
    ]
    assert files_below(tmp_path) == []


def test_progress_is_told_while_a_job_lasts(buffers, start, tmp_path):
    writer = start("fsync", "2", "hang", stall_seconds=3600.0)
    job = job_of(fill(buffers), tmp_path)
    writer.write(job)
    second = str(tmp_path / job.files[1].path)
    until(lambda: (news := writer.poll()) and news[0].doing == "syncing" and news[0].path == second)
    (progress,) = writer.poll()
    assert isinstance(progress, WriteProgress)
    assert progress.files == 1
    assert progress.bytes >= 2 * 5000
    assert writer.busy


def test_a_job_larger_than_a_pipe_is_handed_over_to_a_worker_that_is_slow(buffers, start, tmp_path):
    stretches = [(Stretch("dense/0.0/0/w", "main", i, i + 1), "U8") for i in range(5000)]
    buffer = buffers.begin(1, stretches)
    job = job_of(buffer, tmp_path)
    assert len(json.dumps(job.files[0].entries)) > 1 << 17
    writer = start()
    writer.write(job)
    check_written(finish(writer), job)


def test_prctl_number():
    """PR_GET_PDEATHSIG says what PR_SET_PDEATHSIG set, so the number is the right one."""
    code = (
        "import ctypes, os, signal\n"
        f"import {PROGRAM} as program\n"
        "program._die_with(os.getppid())\n"
        "value = ctypes.c_int()\n"
        "assert ctypes.CDLL(None).prctl(2, ctypes.byref(value), 0, 0, 0) == 0\n"
        "assert value.value == signal.SIGTERM\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert ctypes.sizeof(ctypes.c_int) == 4
