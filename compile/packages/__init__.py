"""Compiled frames as data: taken apart here, put into files, and installed in other processes, which then trace and
compile nothing."""
