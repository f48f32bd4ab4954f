"""From AOTAutograd's graphs to what runs: the backend, the passes in their places, the agreement of the ranks."""
