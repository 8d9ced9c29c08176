"""Pictures of groups, sheets of panels, charts."""
