"""Image synthesis: diffusion models with their tokens merged, and the distance of their images to real ones."""
