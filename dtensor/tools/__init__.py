"""The `dtensor` command line, with the demo and the calibration of links that it runs."""
