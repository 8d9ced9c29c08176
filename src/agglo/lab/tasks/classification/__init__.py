"""Image classification: data, evaluation and training."""
