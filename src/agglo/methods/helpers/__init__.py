"""What methods share. No file here is a method: every file beside this directory but `base` and `registry` is one."""
