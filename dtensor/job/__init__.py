"""The ranks of a job: their process groups and what each ran on them, who waits for whom, and failures, told to all."""
