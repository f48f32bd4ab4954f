"""What is done to modules: their parameters are replaced, their forwards wrapped."""
