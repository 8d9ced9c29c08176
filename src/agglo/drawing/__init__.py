"""Images of groups, sheets of panels, charts."""
