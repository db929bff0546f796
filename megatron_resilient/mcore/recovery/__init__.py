"""Training that goes on when nodes fail, leave and join: Megatron's side of it."""
