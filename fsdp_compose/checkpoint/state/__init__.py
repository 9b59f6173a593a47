"""State dicts of models and optimizers: made, planned, loaded."""
