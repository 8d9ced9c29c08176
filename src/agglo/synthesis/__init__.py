"""Image synthesis: diffusion models with their tokens merged, and how far their images stay from real ones."""
