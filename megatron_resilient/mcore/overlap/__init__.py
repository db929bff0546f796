"""Overlap schedules carried out inside Megatron's MoE layer."""
