"""What ranks wrote, told to rank 0 by files."""

import threading
import time

import pytest

from megatron_resilient.checkpoint.records import take_records, write_record
from megatron_resilient.errors import CheckpointError


def test_rank_0_hears_all_in_their_order_and_leaves_nothing(tmp_path):
    for rank in (2, 0, 1):
        write_record(tmp_path, rank, b"of %d" % rank)
    told = take_records(tmp_path, 3, threading.Event())
    assert told == [b"of 0", b"of 1", b"of 2"]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_may_have_nothing_to_tell(tmp_path):
    write_record(tmp_path, 0, b"")
    assert take_records(tmp_path, 1, threading.Event()) == [b""]


def test_rank_0_waits_for_the_last(tmp_path):
    write_record(tmp_path, 0, b"early")
    late = threading.Timer(0.1, write_record, (tmp_path, 1, b"late"))
    begun = time.monotonic()
    late.start()
    assert take_records(tmp_path, 2, threading.Event()) == [b"early", b"late"]
    assert time.monotonic() - begun >= 0.1


def test_who_waits_for_one_that_never_comes_can_be_told_to_stop(tmp_path):
    write_record(tmp_path, 0, b"here")
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    assert take_records(tmp_path, 2, cancelled) is None


def test_a_folder_that_has_gone_is_named(tmp_path):
    folder = tmp_path / "gone"
    with pytest.raises(CheckpointError, match=r"gone/rank_00003\..*: cannot be written: No such"):
        write_record(folder, 3, b"")


def test_a_record_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "rank_00000.record").mkdir()
    with pytest.raises(CheckpointError, match=r"rank_00000\.record: cannot be read: Is a dir"):
        take_records(tmp_path, 1, threading.Event())
