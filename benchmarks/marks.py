"""Text that a command writes into a page: what the scripts of this folder call it by."""

from agglo.reproduce.pages import replace_between_marks, write_between_marks

__all__ = ["replace_between_marks", "write_between_marks"]
