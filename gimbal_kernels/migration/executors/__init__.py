"""Ways to carry bytes between ranks, all under one protocol."""
