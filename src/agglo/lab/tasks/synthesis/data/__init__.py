"""What is generated and what it is compared to: prompts, seeds, reference images."""
