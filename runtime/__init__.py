"""Thin runtime that closes the loop on vLLM."""
