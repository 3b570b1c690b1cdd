"""Bytes on a tier: arenas in host and device memory, files on disk, and the limits of the machine.

The only package that opens files.
"""
