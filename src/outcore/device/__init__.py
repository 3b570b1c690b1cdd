"""The device and its lanes, which run operations, order them, time them and check them for races."""
