"""Checkpoints and safetensors files: written and read on any mesh, verified, and never executed."""
