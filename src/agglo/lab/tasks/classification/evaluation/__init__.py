"""Accuracy and speed of a classifier, dense and reduced."""
