"""What a training step does with sharded parameters beside the model: losses, clipping, scaling, saved activations."""
