"""Functions that several methods share. Every other file of `methods`, but `base` and `registry`, is a method."""
