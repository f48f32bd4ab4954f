"""What is saved, and when collectives start and are waited for."""
