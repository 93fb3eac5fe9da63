"""Bodies of the installed commands."""
