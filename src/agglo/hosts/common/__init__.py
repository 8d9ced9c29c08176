"""Vision transformers: one file per library, around one loop over blocks."""
