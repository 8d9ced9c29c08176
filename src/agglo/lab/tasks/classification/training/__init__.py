"""Fine-tuning with reduced tokens: settings, recipes, the trainer."""
