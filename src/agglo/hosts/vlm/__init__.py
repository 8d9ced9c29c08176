"""Vision-language models: fewer tokens leave the vision tower, and the prompt has fewer placeholders."""
