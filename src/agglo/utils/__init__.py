"""Files, timing, tables and progress bars: what the library and the laboratory both need."""
