"""Stragglers: slow for several windows in a row, compared with the others."""

from megatron_resilient.elastic.messages import Beat
from megatron_resilient.elastic.stragglers import Stragglers
from tests.support.fake_job import LIMITS, FakeJob

SLOW = {"n0": 0.2, "n1": 0.2, "n2": 0.5}
EVEN = dict.fromkeys(SLOW, 0.2)


def test_a_node_is_one_after_so_many_windows_in_a_row():
    stragglers = Stragglers(ratio=2, windows=3)
    found = [stragglers.judge(shares)[0] for shares in (SLOW, SLOW, EVEN, SLOW, SLOW, SLOW, SLOW)]
    assert found == [(), (), (), (), (), ("n2",), ()]
    assert stragglers.nodes == ("n2",)
    assert stragglers.judge(EVEN) == ((), 0.2)
    assert stragglers.nodes == ()


def test_ratios_of_next_to_nothing_say_nothing():
    stragglers = Stragglers(ratio=2, windows=1)
    assert stragglers.judge({"n0": 0.001, "n1": 0.001, "n2": 0.04}) == ((), 0.001)
    assert stragglers.judge({}) == ((), 0.0)


def test_the_membership_reports_it_and_drops_nobody():
    job = FakeJob(3)
    job.run_until(lambda: job.worlds)
    for _ in range(int(31 / LIMITS.heartbeat_interval)):
        for worker in job.alive:
            busy = 0.9 if worker.node == "n1" else 0.1
            for _ in range(9):  # the job's own beats say 0.5
                job._say(worker, Beat(1, worker.progress, busy, {}))
        job.run(LIMITS.heartbeat_interval)
    job.run(15)
    (event,) = job.recorded("straggler")
    assert event.fields["member"] == "n1"
    assert event.fields["busy"] > 2 * event.fields["median_busy"]
    assert max(job.worlds) == 1
