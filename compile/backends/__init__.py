"""From AOTAutograd's graphs to code that runs: the backend, where the passes are installed, and the agreement of the
ranks."""
