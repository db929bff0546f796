"""Blocks of rows: arranged, packed, and where those of a chunk are at every stage of their way."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.row_chunks import cuts_of, even_cuts, joint_cuts, pieces_of
from megatron_resilient.comm.blocks import Form, arrange, pack, restore, unpack
from megatron_resilient.comm.chunk_layout import ChunkLayout, sender_order

BLOCKS = st.lists(st.integers(0, 4), min_size=1, max_size=7)


@given(BLOCKS, st.randoms(use_true_random=False))
def test_blocks_are_put_in_order_and_back(sizes, random):
    order = random.sample(range(len(sizes)), len(sizes))
    rows = torch.arange(sum(sizes) * 2.0).view(-1, 2)
    there = arrange(rows, sizes, order)
    blocks = rows.split(sizes)
    assert torch.equal(there, torch.cat([blocks[place] for place in order]))
    assert torch.equal(restore(there, sizes, order), rows)


@given(BLOCKS, st.randoms(use_true_random=False))
def test_what_is_packed_comes_out_arranged(sizes, random):
    order = random.sample(range(len(sizes)), len(sizes))
    n = sum(sizes)
    tensors = [
        torch.randn(n, 3).bfloat16(),
        torch.randn(n, dtype=torch.float32),
        torch.randn(n, 2, 2, dtype=torch.float64),
    ]
    forms = [Form.of(tensor) for tensor in tensors]
    packed = pack(tensors)
    assert packed.shape == (n, 6 + 4 + 32)
    for found, tensor in zip(unpack(packed, forms, sizes, order), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, arrange(tensor, sizes, order))
    assert pack(tensors[:1]) is tensors[0]


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2**30),
)
def test_every_row_finds_its_slot_and_its_way_back(ranks, tensor_ranks, slots, degree, seed):
    """Rows carry (sender, slot, place) through all stages, by a simulation of all ranks."""
    random = np.random.default_rng(seed)
    senders = ranks * tensor_ranks
    rows_DS = random.integers(0, 6, (senders, ranks * slots))
    uneven = random.integers(1, 9, 3)
    joint = joint_cuts(even_cuts(degree), cuts_of((uneven / uneven.sum()).tolist()))
    layouts = [ChunkLayout(rows_DS, rank, tensor_ranks, joint) for rank in range(senders)]
    own = [
        torch.tensor(
            [(d, s, i) for s in range(ranks * slots) for i in range(rows_DS[d, s])],
            dtype=torch.int64,
        ).view(-1, 3)
        for d in range(senders)
    ]
    blocks = [rows.split(layout.own_sizes) for rows, layout in zip(own, layouts, strict=True)]
    seen = torch.zeros(0, 3, dtype=torch.int64)
    returned = [[] for _ in range(senders)]
    every_chunk = [[] for _ in range(senders)]
    for pieces in pieces_of(even_cuts(degree), joint):
        chunks = [layout.chunk(pieces) for layout in layouts]
        sent = []
        for d, chunk in enumerate(chunks):
            every_chunk[d].append(chunk)
            rows = torch.cat([blocks[d][place] for place in chunk.sent_order])
            assert [len(blocks[d][place]) for place in chunk.sent_order] == chunk.sent_sizes
            sent.append(rows.split(chunk.counts_RR[d // tensor_ranks].tolist()))
        arrived = {
            (r, t): torch.cat([sent[q * tensor_ranks + t][r] for q in range(ranks)])
            for r in range(ranks)
            for t in range(tensor_ranks)
        }
        for d, chunk in enumerate(chunks):
            r, t = divmod(d, tensor_ranks)
            parts = [arrived[r, other] for other in range(tensor_ranks)]
            assert [len(part) for part in parts] == chunk.gathered_rows
            at_experts = arrange(torch.cat(parts), chunk.block_sizes, chunk.block_order)
            sizes = chunk.slot_rows_nC.ravel().tolist()
            wanted = np.tile(np.arange(slots), len(pieces)) + r * slots
            for slot, rows in zip(wanted, at_experts.split(sizes), strict=True):
                assert (rows[:, 1] == slot).all()
            if t == 0:
                seen = torch.cat([seen, at_experts])
            back = restore(at_experts, chunk.block_sizes, chunk.block_order)
            mine = back.split(chunk.gathered_rows)[t]
            assert torch.equal(mine, arrived[r, t])
            returned[d].append(torch.cat(sent[d]))
    for d in range(senders):
        sizes = [size for chunk in every_chunk[d] for size in chunk.sent_sizes]
        assert torch.equal(
            arrange(torch.cat(returned[d]), sizes, sender_order(every_chunk[d])), own[d]
        )
    assert len(seen) == rows_DS.sum()  # each once, on one expert-parallel rank
    assert len(torch.unique(seen, dim=0)) == len(seen)
