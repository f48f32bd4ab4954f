"""Changes to modules: replacing their parameters by DTensors and wrapping their forward."""
