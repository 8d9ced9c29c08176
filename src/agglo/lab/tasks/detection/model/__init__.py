"""The detector: backbone, pyramid, proposals, boxes and masks."""
