"""What is saved for the backward, which collectives travel together, and when they start and are waited for."""
