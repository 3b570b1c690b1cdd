"""The device and its lanes: what runs operations, orders them, times them, and looks for races."""
