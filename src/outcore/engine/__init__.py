"""The engine of one prepared model: units, calls, weights, gradients, updates."""
