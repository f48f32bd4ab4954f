"""Sharding rules by brute force, both ways, over torch's operator database; the page of operators is made of it."""
