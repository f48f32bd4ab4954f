"""Checkpoints and safetensors: written and read on any mesh, checked byte by byte, never executed."""
