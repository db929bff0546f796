"""Per-expert checkpoints of a Megatron run: what --save writes and --load reads in that format."""
