"""All that is known of DeepSpeed: the engine, where ZeRO keeps state, the optimizer and the communication op."""
