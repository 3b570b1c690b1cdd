"""Bytes on a tier: arenas in host and device memory, files on disk, and the limits of the machine.

The disk tier and checkpoints open their files here.
"""
