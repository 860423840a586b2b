"""Taps: where a training's gradients are taken from. Each kind of training has one, which tells a recorder."""
