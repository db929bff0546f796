"""Nodes die while layers overlap: the run goes on as one that neither overlapped nor lost any."""

import pytest

from tests.support.elastic_pretrain import assert_same_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]


def test_nodes_are_killed_while_layers_overlap(start, reference):
    """Two ranks a node; a node is lost in each pass, and each time the way by nodes is made anew."""
    two_ranks = {"nproc-per-node": 2}
    job = start(
        3,
        two_ranks,
        resilient_fault="kill-node node=1 step=4 phase=forward;"
        "kill-node node=0 step=9 phase=backward",
        resilient_overlap="fixed",
        resilient_overlap_degrees=[2, 3],
        resilient_dispatch="2d",
    ).ok()
    assert_same_run(job, reference(3, two_ranks), ["node2"])
    assert [one["world_size"] for one in job.recoveries] == [4, 2]
