"""Everything that depends on DeepSpeed: the engine, ZeRO's state, the optimizer and the communication op."""
