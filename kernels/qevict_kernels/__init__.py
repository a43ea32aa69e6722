"""Attention over full-precision and INT2/INT4-coded KV windows; independent of any engine."""
