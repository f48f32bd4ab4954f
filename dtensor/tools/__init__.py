"""The `dtensor` command, the demonstration and the calibration of links."""
