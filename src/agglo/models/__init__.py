"""Open a model by its name, whatever library it belongs to: weights, inputs, outputs."""
