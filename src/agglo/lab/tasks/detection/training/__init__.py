"""Training detectors, dense or with reduced tokens: settings, recipes, the trainer."""
