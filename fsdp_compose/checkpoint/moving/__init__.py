"""Tensors that go between ranks for a state dict, and the agreement on it."""
