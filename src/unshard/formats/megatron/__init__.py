"""Checkpoints of Megatron-LM, Megatron-Core and what is built on them: one catalog of full tensors for all layouts."""
