"""Primitives for mixture-of-experts serving: counting, placement, migration."""
