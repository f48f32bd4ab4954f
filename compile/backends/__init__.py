"""From AOTAutograd's graphs to code that runs: the backend, the passes in their places, and the agreement of the
ranks."""
