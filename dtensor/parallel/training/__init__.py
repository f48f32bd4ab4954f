"""Parts of a training step besides the model: losses, gradient clipping and scaling, saved activations."""
