"""One package per task: image classification, detection and synthesis."""
